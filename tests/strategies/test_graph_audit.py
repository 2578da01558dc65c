"""A compiled graph that differs from eager is found in its first run."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._inductor.compile_fx
from functorch.compile import make_boxed_func
from small_modules import Small, loader
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd

from lightning_ort import ORTStrategy
from lightning_ort.compiler.executors import inductor
from lightning_ort.compiler.reason import ReasonType

pytestmark = pytest.mark.usefixtures("no_recordings")


class Module(Small):
    """With random numbers, and buffers that a step writes to."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.5), nn.Linear(16, 3))

    def train_dataloader(self) -> Any:
        return loader(8 * 40)


class Compiler:
    """Stands in for inductor: from a call of a pass on, one of its tensors is wrong."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, where: str = "", call: int = 1, factor: float = 0.5) -> None:
        self.where, self.call = where, call
        self.spoil: Callable[[Tensor], Tensor] | None = None  # all gradients; else the first one
        self.factor = factor
        self.calls = {"forward": 0, "backward": 0}
        monkeypatch.setattr(torch._inductor.compile_fx, "compile_fx", self.compile)

    def compile(self, gm: Any, inputs: Any, **kwargs: Any) -> Any:
        passes = {name: self.pass_of(name) for name in self.calls}
        return aot_autograd(fw_compiler=passes["forward"], bw_compiler=passes["backward"])(gm, inputs)

    def pass_of(self, kind: str) -> Any:
        def compiler(gm: Any, inputs: Any) -> Any:
            def run(*args: Any) -> Any:
                self.calls[kind] += 1
                results = list(gm(*args))
                if kind != self.where or self.calls[kind] < self.call:
                    return results
                if self.spoil is not None:
                    results = [one if one is None else self.spoil(one) for one in results]
                else:
                    index = next(i for i, one in enumerate(results) if one is not None and one.is_floating_point())
                    results[index] = results[index] * self.factor
                return results

            return make_boxed_func(run)

        return compiler


def fit(module: Small, make_trainer: Callable[..., Any], strategy: Any) -> Any:
    torch.manual_seed(0)
    make_trainer(strategy=strategy, max_epochs=1, limit_val_batches=0).fit(module)
    return getattr(strategy, "report", None)


@pytest.mark.parametrize(("where", "call"), [("forward", 1), ("backward", 1), ("backward", 3)])
@pytest.mark.usefixtures("captured_at_once")
def test_a_wrong_graph_is_found_before_anything_is_made_of_it(
    where: str, call: int, make_trainer: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, paces: Callable[..., None]
) -> None:
    paces(torch=1.0, ort=1.2, inductor=0.5)
    stock, ours = Module(), Module()
    fit(stock, make_trainer, "auto")
    compiler = Compiler(monkeypatch, where, call)
    report = fit(ours, make_trainer, ORTStrategy(config={"engine": "auto"}))
    assert ours.losses == pytest.approx(stock.losses, rel=1e-5)
    for mine, theirs in zip(ours.buffers(), stock.buffers(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)
    assert compiler.calls[where] == call  # and none after it
    (fallback,) = report.fallbacks
    assert fallback.reason.type is ReasonType.MISMATCH
    assert ("what is written to self.net.1." if where == "forward" else "the gradient of ") in fallback.reason.text
    assert "differs from eager's by 50%" in fallback.reason.text
    assert report.run.audits > 0


class Modulated(Small):
    """Two layer norms in a chain, modulated by parts of one parameter (pytorch #193061)."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(8, 16)
        self.norm = nn.LayerNorm(16, elementwise_affine=False)
        self.table = nn.Parameter(torch.randn(4, 16) / 4)

    def forward(self, x: Tensor) -> Tensor:
        shift, scale, more_shift, more_scale = self.table.chunk(4)
        x = self.norm(self.net(x)) * (1 + scale) + shift
        return (self.norm(x) * (1 + more_scale) + more_shift)[:, :3]

    def train_dataloader(self) -> Any:
        return loader(8 * 40)


@pytest.mark.usefixtures("captured_at_once")
def test_a_part_of_a_gradient_that_is_never_written_is_found(
    make_trainer: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, paces: Callable[..., None]
) -> None:
    paces(torch=1.0, ort=1.2, inductor=0.5)
    stock, ours = Modulated(), Modulated()
    fit(stock, make_trainer, "auto")
    compiler = Compiler(monkeypatch, "backward")
    compiler.spoil = lambda one: one.index_fill(0, torch.tensor([1]), 0.0) if one.shape == (4, 16) else one
    report = fit(ours, make_trainer, ORTStrategy(config={"engine": "auto"}))
    (fallback,) = report.fallbacks
    assert fallback.reason.type is ReasonType.MISMATCH
    assert "the gradient of self.table differs" in fallback.reason.text
    assert compiler.calls["backward"] == 1
    assert ours.losses == pytest.approx(stock.losses, rel=1e-5)


@pytest.mark.usefixtures("captured_at_once")
def test_a_graph_that_torch_has_kept_is_compared_too(
    make_trainer: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, paces: Callable[..., None]
) -> None:
    """Nothing is traced then, so that less is known of it."""
    paces(torch=1.0, ort=1.2, inductor=0.5)
    stock, ours = Module(), Module()
    fit(stock, make_trainer, "auto")
    compiler = Compiler(monkeypatch, "backward")
    monkeypatch.setattr(inductor, "traced_graph_facts", lambda: None)
    report = fit(ours, make_trainer, ORTStrategy(config={"engine": "auto"}))
    assert compiler.calls["backward"] == 1
    assert report.fallbacks[0].reason.type is ReasonType.MISMATCH
    assert ours.losses == pytest.approx(stock.losses, rel=1e-5)


@pytest.mark.parametrize("config", [{}, {"audit": "off"}, {"dropout_masks": "fast"}], ids=str)
@pytest.mark.usefixtures("captured_at_once")
def test_roundings_are_no_difference(
    config: Any, make_trainer: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, paces: Callable[..., None]
) -> None:
    paces(torch=1.0, ort=1.2, inductor=0.5)
    compiler = Compiler(monkeypatch, "backward", factor=1 + 1e-5)
    report = fit(Module(), make_trainer, ORTStrategy(config={"engine": "auto", **config}))
    assert compiler.calls["backward"] > 10
    assert not report.fallbacks
    if not config:
        assert report.run.audits  # graphs of ONNX Runtime among them
        assert report.run.audit_seconds > 0
        assert 1e-6 < report.run.audit_difference < 1e-3
    found = [note.reason.text for note in report.notes if note.reason.type is ReasonType.NOT_AUDITED]
    assert any("draws other masks" in text for text in found) == ("dropout_masks" in config)


@pytest.mark.usefixtures("captured_at_once")
def test_there_is_not_enough_memory_to_compare(
    make_trainer: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, paces: Callable[..., None]
) -> None:
    from lightning_ort.compiler.running import graph_check

    def fails(*args: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(graph_check, "unexplained", fails)
    paces(torch=1.0, ort=1.2, inductor=0.5)
    stock, ours = Module(), Module()
    fit(stock, make_trainer, "auto")
    compiler = Compiler(monkeypatch)
    report = fit(ours, make_trainer, ORTStrategy(config={"engine": "auto"}))
    assert compiler.calls["backward"] > 10
    assert any("not enough memory" in note.reason.text for note in report.notes)
    assert ours.losses == pytest.approx(stock.losses, rel=1e-5)
