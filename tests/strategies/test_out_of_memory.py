"""An engine that runs out of memory while it is tried: the trial goes on without it, and the fit as stock's does."""

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._inductor.compile_fx
from functorch.compile import make_boxed_func
from small_modules import Small, loader
from torch import nn
from torch._dynamo.backends.common import aot_autograd

from lightning_ort import ORTStrategy
from lightning_ort.compiler.executors.ort.binding import BoundSession
from lightning_ort.compiler.reason import ReasonType
from lightning_ort.compiler.running.fallbacks import GuardedGraph

pytestmark = pytest.mark.usefixtures("no_recordings")

ERRORS = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB."),
    MemoryError("std::bad_alloc"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory: you tried to"),
]


class Module(Small):
    """With random numbers, and buffers that a step writes to."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.5), nn.Linear(16, 3))

    def train_dataloader(self) -> Any:
        return loader(8 * 40)


def fit(module: Small, make_trainer: Callable[..., Any], strategy: Any) -> Any:
    torch.manual_seed(0)
    make_trainer(strategy=strategy, max_epochs=1, limit_val_batches=0).fit(module)
    return getattr(strategy, "report", None)


class Inductor:
    """Stands in for inductor: at one of the calls of a pass it runs out of memory, while it holds some."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, where: str, call: int, error: Exception) -> None:
        self.where, self.call, self.error = where, call, error
        self.calls = {"forward": 0, "backward": 0}
        self.held: list[weakref.ref[Any]] = []
        monkeypatch.setattr(torch._inductor.compile_fx, "compile_fx", self.compile)

    def compile(self, gm: Any, inputs: Any, **kwargs: Any) -> Any:
        if self.where == "compile":
            raise self.error
        return aot_autograd(fw_compiler=self.pass_of("forward"), bw_compiler=self.pass_of("backward"))(gm, inputs)

    def pass_of(self, kind: str) -> Any:
        def compiler(gm: Any, inputs: Any) -> Any:
            def run(*args: Any) -> Any:
                self.calls[kind] += 1
                results = gm(*args)
                if (kind, self.calls[kind]) == (self.where, self.call):
                    given = {*map(id, args)}
                    made = (one for one in results if isinstance(one, torch.Tensor) and id(one) not in given)
                    self.held = [*map(weakref.ref, made)]
                    raise self.error
                return results

            return make_boxed_func(run)

        return compiler


@pytest.mark.parametrize(
    ("where", "call", "error"),
    [
        ("forward", 1, ERRORS[0]),
        ("forward", 4, ERRORS[1]),
        ("backward", 1, ERRORS[2]),
        ("backward", 2, ERRORS[0]),
        ("compile", 1, ERRORS[1]),
    ],
)
@pytest.mark.usefixtures("captured_at_once")
def test_inductor(
    where: str,
    call: int,
    error: Exception,
    make_trainer: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    paces: Callable[..., None],
) -> None:
    paces(torch=1.0, ort=1.2, inductor=0.98)  # close, so that it has many turns
    stock, ours = Module(), Module()
    fit(stock, make_trainer, "auto")
    used, alive = Inductor(monkeypatch, where, call, error), list[bool]()
    make_room = GuardedGraph.make_room

    def noted(self: GuardedGraph, error: Exception) -> None:
        make_room(self, error)
        alive.extend(one() is not None for one in used.held)

    monkeypatch.setattr(GuardedGraph, "make_room", noted)
    report = fit(ours, make_trainer, ORTStrategy(config={"engine": "auto", "fallback": "raise"}))
    assert ours.losses == pytest.approx(stock.losses, rel=1e-4)
    for mine, theirs in zip(ours.buffers(), stock.buffers(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)
    (note,) = [note for note in report.notes if note.reason.type is ReasonType.INDUCTOR_FAILED]
    assert str(error).split(":")[0] in note.reason.text
    assert report.steps[0].ms.keys() == {"ort", "torch"}
    if where != "compile":
        assert used.calls[where] == call  # and none after it
        assert alive
        assert not any(alive)


def test_ort(make_trainer: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A region that runs out of memory in a step frees its session before torch repeats it."""
    stock, ours = Module(), Module()
    fit(stock, make_trainer, "auto")
    run, sessions = BoundSession.__call__, list[Any]()

    def once(self: BoundSession, *args: Any) -> Any:
        if not sessions:
            sessions.append(weakref.ref(self))
            raise MemoryError("std::bad_alloc")
        return run(self, *args)

    monkeypatch.setattr(BoundSession, "__call__", once)
    strategy = ORTStrategy(config={"placement": "always", "debug": {"intra_op_threads": 1}})  # no trial of threads
    report = fit(ours, make_trainer, strategy)
    assert ours.losses == pytest.approx(stock.losses, rel=1e-4)
    assert sessions
    assert sessions[0]() is None
    assert any("std::bad_alloc" in str(fallback) for fallback in report.fallbacks)
