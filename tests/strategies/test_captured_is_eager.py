"""What a captured step does with Python's objects, NumPy, autocast, views and gradients of its own is what eager does.

Each row is a step, what happens before it, and what it leaves behind; captured, all is as under the stock strategy.
"""

import abc
import collections
import contextlib
import functools
import json
import math
import random
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from processes import START
from small_modules import Small
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_ort import CompileReport, ORTDDPStrategy, ORTStrategy


class Plain:
    """An object of the user's."""

    kind = 1.0

    def __init__(self) -> None:
        self.value = 1.0

    def __len__(self) -> int:
        return 2

    def gain(self) -> float:
        return self.value

    @classmethod
    def of_class(cls) -> float:
        return cls.kind


class Derived(Plain):
    """Inherits all."""


ORIGINAL = {name: vars(Plain)[name] for name in ("gain", "of_class", "__len__", "kind")}
GLOBAL = Plain()


class Step(LightningModule):
    """Trains on six batches with one row's step."""

    def __init__(self, row: "Row", folder: Path) -> None:
        super().__init__()
        self.row, self._folder = row, folder
        self.net, self.a, self.b = (nn.Linear(4, 1) for _ in range(3))
        self.p, self.q = Plain(), Plain()
        self.current: Any = self.p
        self.seen: list[Any] = []
        if row.setup is not None:
            row.setup(self)

    def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
        if self.row.before is not None:
            self.row.before(self, batch_idx)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.row.step(self, self.net(batch).square().mean(), batch, batch_idx)

    def on_train_batch_end(self, outputs: Any, batch: Tensor, batch_idx: int) -> None:
        state = None if self.row.state is None else self.row.state(self)
        self.seen.append(
            (float(outputs["loss"]), [p.grad.clone() for p in self.net.parameters() if p.grad is not None], state)
        )

    def on_train_end(self) -> None:  # processes end with the run
        torch.save(self.seen, self._folder / f"{self.global_rank}.pt")

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-3)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(torch.randn(24, 4, generator=torch.Generator().manual_seed(1)), batch_size=4)


class Row:
    """One row of the table."""

    def __init__(
        self,
        step: Callable[[Any, Tensor, Tensor, int], Tensor],
        before: Callable[[Any, int], Any] | None = None,
        setup: Callable[[Any], Any] | None = None,
        state: Callable[[Any], Any] | None = None,
        **trainer: Any,
    ) -> None:
        self.step, self.before, self.setup, self.state, self.trainer = step, before, setup, state, trainer


def alternate(m: Any, i: int) -> None:
    m.current = (m.q, m.p)[i % 2]


def alternate_modules(m: Any, i: int) -> None:
    m.current = (m.b, m.a)[i % 2]


def weighted(test: Callable[[Any], Any]) -> Callable[[Any, Tensor, Tensor, int], Tensor]:
    """A step whose loss is three times as large if a test holds."""
    return lambda m, loss, x, i: loss * (3.0 if test(m) else 1.0)


def patched(name: str, new: Any, owner: type = Plain) -> Callable[[Any, int], None]:
    """Replace an attribute of a class from the fourth batch on."""

    def before(m: Any, i: int) -> None:
        if i == 3:
            setattr(owner, name, new)

    return before


def swap(m: Any, i: int) -> None:
    m.group = [m.a if i % 2 else m.b]


def write_current(m: Any, loss: Tensor, x: Tensor, i: int) -> Tensor:
    m.current.value = 3.0 + i
    return loss * m.p.value


def append_current(m: Any, loss: Tensor, x: Tensor, i: int) -> Tensor:
    m.lists[i % 2].append(float(i))
    return loss * sum(m.first)


def before_lists(m: Any, i: int) -> None:
    m.first = [1.0]
    m.lists = [m.first, [1.0]]


def gradient_of_a(m: Any) -> Tensor:
    return m.a.weight.grad.clone()


def tie(m: Any, i: int) -> None:
    if i == 3:
        m.b.weight = m.a.weight


IDENTITY = {
    "tied": Row(lambda m, loss, x, i: loss + m.a(x).square().mean() + m.b(x).exp().mean(), tie, state=gradient_of_a),
    "is": Row(weighted(lambda m: m.current is m.p), alternate),
    "is not": Row(weighted(lambda m: m.current is not m.p), alternate),
    "==": Row(weighted(lambda m: m.current == m.p), alternate),
    "!=": Row(weighted(lambda m: m.current != m.p), alternate),
    "in a tuple": Row(weighted(lambda m: m.current in (m.p,)), alternate),
    "in a set": Row(weighted(lambda m: m.current in m.group), alternate, lambda m: setattr(m, "group", {m.p})),
    "modules": Row(weighted(lambda m: m.current is m.a), alternate_modules, lambda m: setattr(m, "current", m.a)),
    "modules in a list": Row(weighted(lambda m: m.a in m.group), swap, lambda m: swap(m, 0)),
    "a global": Row(weighted(lambda m: m.current is GLOBAL), lambda m, i: setattr(m, "current", (m.q, GLOBAL)[i % 2])),
    "new objects": Row(
        weighted(lambda m: m.current is m.p), lambda m, i: (setattr(m, "current", Plain()), i % 3 or alternate(m, 1))
    ),
    "dictionaries": Row(
        weighted(lambda m: m.current is m.first),
        lambda m, i: setattr(m, "current", (m.first, m.second)[i % 2]),
        lambda m: vars(m).update(first={"a": 1}, second={"a": 1}, current={"a": 1}),
    ),
    "an object written to": Row(write_current, alternate, state=lambda m: [m.p.value, m.q.value]),
    "a list written to": Row(append_current, before_lists, state=lambda m: m.lists),
    "bound methods": Row(
        weighted(lambda m: m.current == m.p.gain), lambda m, i: setattr(m, "current", (m.q, m.p)[i % 2].gain)
    ),
}

CLASSES = {
    "a method": Row(lambda m, loss, x, i: loss * m.p.gain(), patched("gain", lambda self: 5.0)),
    "a class method": Row(
        lambda m, loss, x, i: loss * m.p.of_class(), patched("of_class", classmethod(lambda cls: 5.0))
    ),
    "a length": Row(lambda m, loss, x, i: loss * len(m.p), patched("__len__", lambda self: 5)),
    "a value": Row(lambda m, loss, x, i: loss * m.p.kind, patched("kind", 5.0)),
    "an override": Row(
        lambda m, loss, x, i: loss * m.current.gain(),
        patched("gain", lambda self: 5.0, Derived),
        lambda m: setattr(m, "current", Derived()),
    ),
    "torch's forward": Row(
        lambda m, loss, x, i: loss + m.a(x).mean(),
        patched("forward", lambda self, x: 2 * F.linear(x, self.weight), nn.Linear),
    ),
}


def counted(m: Any, loss: Tensor, x: Tensor, i: int) -> Tensor:
    type(m.p).kind += 1
    return loss * m.p.kind


def switched(m: Any, loss: Tensor, x: Tensor, i: int) -> Tensor:
    Plain.kind = 1.0 + i % 2
    loss = loss * m.current.of_class()
    Plain.kind = 1.0
    return loss


def register(m: Any, i: int) -> None:
    if i == 0:  # another one in each run
        m.kind = abc.ABCMeta("Abstract", (), {})
    if i == 3:
        m.kind.register(Plain)


class Freed:
    """Tells when it is freed."""

    def __init__(self, told: list[int]) -> None:
        self.told = told

    def __del__(self) -> None:
        self.told.append(1)


def freed(m: Any, loss: Tensor, x: Tensor, i: int) -> Tensor:
    m.kept = Freed(m.told)
    return loss * (1 + len(m.told))


CLASSES |= {
    "a counter": Row(counted),
    "a switch": Row(switched, setup=lambda m: setattr(m, "current", Derived())),
    "registered": Row(weighted(lambda m: isinstance(m.p, m.kind)), register),
    "a subclass": Row(weighted(lambda m: issubclass(type(m.p), m.kind)), register),
    "made with __del__": Row(freed, setup=lambda m: setattr(m, "told", []), state=lambda m: m.told),
}


@functools.lru_cache
def projection(n: int) -> Tensor:
    return torch.randn(n)


@functools.cache
def registry(key: int) -> list[int]:
    return []


@functools.cache
def constant(n: int) -> int:
    return n + int(torch.randint(100, ()))


def cached(step: Callable[[Any, Tensor, Tensor, int], Tensor]) -> Row:
    """A step that calls functions with a cache."""
    return Row(step, None, lambda m: [one.cache_clear() for one in (projection, registry, constant)], lambda m: draw())


def draw() -> Any:
    state = torch.get_rng_state()
    return torch.rand(()).item(), torch.set_rng_state(state)


def remember(m: Any, loss: Tensor, x: Tensor, i: int) -> Tensor:
    registry(i % 2).append(i)
    return loss * (1 + len(registry(i % 2)))


def values(x: Tensor) -> Any:
    factor = yield x * 1
    yield x * factor


def generator(m: Any, loss: Tensor, x: Tensor, i: int) -> Tensor:
    sequence = values(loss)
    first = next(sequence)
    torch._dynamo.graph_break()
    return first + sequence.send(3)


def replace_module(m: Any, i: int) -> None:
    if i in (0, 3):
        sys.modules["settings_of_user"] = module = types.ModuleType("settings_of_user")
        module.factor = 1.0 + i  # type: ignore[attr-defined]


def imports(m: Any, loss: Tensor, x: Tensor, i: int) -> Tensor:
    import settings_of_user  # type: ignore[import-not-found]

    return loss * settings_of_user.factor


def hide(m: Any, i: int) -> None:
    globals().pop("abs", None)
    if i >= 3:
        globals()["abs"] = lambda value: 3.0


def root(m: Any, loss: Tensor, x: Tensor, i: int) -> Tensor:
    try:
        return loss * torch.linalg.cholesky(torch.eye(2) * (-1 if i == 3 else i + 1) + 0 * x[:2, :2]).sum()
    except RuntimeError:
        m.p.value += 1
        return loss


def root_suppressed(m: Any, loss: Tensor, x: Tensor, i: int) -> Tensor:
    factor: Any = 2.0
    with contextlib.suppress(Exception):
        factor = torch.linalg.cholesky(torch.eye(2) * (-1 if i == 3 else i + 1) + 0 * x[:2, :2]).sum()
    return loss * factor


class Swallows:
    """Catches what linear algebra raises."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, *rest: Any) -> bool:
        return kind is not None and issubclass(kind, RuntimeError)


def root_swallowed(m: Any, loss: Tensor, x: Tensor, i: int) -> Tensor:
    factor: Any = 2.0
    with Swallows():
        factor = torch.linalg.cholesky(torch.eye(2) * (-1 if i == 3 else i + 1) + 0 * x[:2, :2]).sum()
    return loss * factor


def beside(m: Any, loss: Tensor, x: Tensor, i: int) -> Tensor:
    mask = torch.full_like(x, float(i != 2))
    m.kept = (m.net(x) * mask + m.a(x)).sum() / mask.sum()
    torch._dynamo.graph_break()
    return loss + m.a(x).square().mean()


def variable_of_caller(name: str) -> Any:
    return sys._getframe(1).f_locals[name]


def reads_caller(m: Any, loss: Tensor, x: Tensor, i: int) -> Tensor:
    factor = 1 + i  # noqa: F841
    torch._dynamo.graph_break()
    return loss * variable_of_caller("factor")


def logs_badly(m: Any, loss: Tensor, x: Tensor, i: int) -> Tensor:
    for arguments in ({"on_step": False, "on_epoch": False}, {"step": True}):
        try:
            m.log("number", 1.0, **arguments)
        except (MisconfigurationException, TypeError):
            m.p.value += 1
    return loss


PYTHON = {
    "a refused log": Row(logs_badly, state=lambda m: m.p.value),
    "a variable of a caller": Row(reads_caller),
    "a cached tensor": cached(lambda m, loss, x, i: loss * projection(3).sum()),
    "a cached list": cached(remember),
    "a cached number": cached(lambda m, loss, x, i: loss * constant(3)),
    "a generator": Row(generator),
    "an import": Row(imports, replace_module),
    "a hidden builtin": Row(lambda m, loss, x, i: loss * abs(-2), hide),
    "the sign of zero": Row(
        lambda m, loss, x, i: loss * math.copysign(2.0, m.zero), lambda m, i: setattr(m, "zero", -0.0 if i > 2 else 0.0)
    ),
    "a caught error": Row(root, state=lambda m: m.p.value),
    "a suppressed error": Row(root_suppressed),
    "a swallowed error": Row(root_swallowed),
    "a tensor of a size": Row(lambda m, loss, x, i: loss * torch.Tensor(x.size()).zero_().numel()),
    "NaN beside the loss": Row(beside),
}


def deque_step(change: Callable[[Any, int], Any]) -> Row:
    """A step that changes a full deque and reads it."""

    def step(m: Any, loss: Tensor, x: Tensor, i: int) -> Tensor:
        change(m.window, i)
        return loss * (1 + sum(m.window) + 3 * len(m.window) + m.window[0])

    return Row(
        step, None, lambda m: setattr(m, "window", collections.deque([1, 2, 3], maxlen=3)), lambda m: list(m.window)
    )


def tensor_window(m: Any, loss: Tensor, x: Tensor, i: int) -> Tensor:
    m.window.append(loss.detach())
    return loss / (1 + torch.stack(list(m.window)).mean())


def container_step(change: Callable[[Any, int], Any]) -> Row:
    """A step that changes containers of an object that the module has."""

    def setup(m: Any) -> None:
        m.p.d = {"b": 2, "a": 1}
        m.p.o = collections.OrderedDict([("x", 1), ("y", 2), ("z", 3)])
        m.p.s, m.p.l, m.p.c = {1, 2, 3}, [3, 1, 2], collections.Counter("abca")

    def step(m: Any, loss: Tensor, x: Tensor, i: int) -> Tensor:
        change(m.p, i)
        return loss * (1 + len(m.p.d) + len(m.p.s) + next(iter(m.p.o.values())) + m.p.l[0])

    return Row(step, None, setup, lambda m: [*map(ord, repr([m.p.d, m.p.o, sorted(m.p.s), m.p.l, m.p.c]))])


def subtract(p: Any, i: int) -> None:
    p.s -= {2}
    p.s |= {i + 10}


CONTAINERS = {
    "append": deque_step(lambda w, i: w.append(i)),
    "appendleft": deque_step(lambda w, i: w.appendleft(i)),
    "extend": deque_step(lambda w, i: w.extend([i, i + 1])),
    "extendleft": deque_step(lambda w, i: w.extendleft([i, i + 1])),
    "a copy": deque_step(lambda w, i: (c := w.copy(), c.append(7), w.append(len(c) + sum(c)))),
    "tensors": Row(
        tensor_window, None, lambda m: setattr(m, "window", collections.deque(maxlen=2)), lambda m: list(m.window)
    ),
    "move_to_end": container_step(lambda p, i: p.o.move_to_end("xyz"[i % 3])),
    "set -=": container_step(subtract),
    "pop and set": container_step(lambda p, i: p.d.update(a=p.d.pop("a") + i)),
    "sort by a key": container_step(lambda p, i: (p.l.append(i), p.l.sort(key=lambda v: -v))),
    "popitem": container_step(lambda p, i: (p.d.update([p.d.popitem()]), p.d.update({str(i): i}))),
    "a set's pop": container_step(lambda p, i: p.s.add(p.s.pop() + 10)),
    "a counter": container_step(lambda p, i: (p.c.update("ab"), p.c.subtract("c"))),
}


def drawn(m: Any, loss: Tensor, x: Tensor, i: int) -> Tensor:
    return loss * (m.source.random() + m.source.gauss(0, 1))


NUMPY = {
    "a quantile": Row(lambda m, loss, x, i: loss * float(np.quantile(np.array([0.5, 1.5, 4.0]) + i, 0.3))),
    "a dtype": Row(lambda m, loss, x, i: loss * np.prod(np.array([100, 27], dtype=np.int8)).itemsize),
    "a type": Row(weighted(lambda m: isinstance(np.mean(np.ones(3)), float))),
    "a quotient": Row(lambda m, loss, x, i: loss * float(np.array([7, -7])[i % 2] // 2)),
    "a mean of float32": Row(lambda m, loss, x, i: loss * (x.numpy().mean().nbytes + float(x.numpy().std()))),
    "an argument sort": Row(lambda m, loss, x, i: loss * float(np.argsort(np.array([2, 1, 2, 1]), kind="stable")[1])),
    "a scale": Row(lambda m, loss, x, i: loss / np.sqrt(m.net.in_features)),
    "random": Row(lambda m, loss, x, i: loss * np.random.rand(), state=lambda m: float(np.random.rand())),
    "a generator": Row(drawn, None, lambda m: setattr(m, "source", random.Random(3)), lambda m: m.source.random()),
}


def float32_block(m: Any, loss: Tensor, x: Tensor, i: int) -> Tensor:
    h = m.net(x)
    with torch.autocast("cpu", enabled=False):
        return (h.float() * F.linear(x, m.a.weight)).square().mean()


def is_rounded(m: Any) -> bool:
    gradient = m.a.weight.grad
    return torch.equal(gradient, gradient.bfloat16().float())


def buffer(m: Any) -> None:
    m.register_buffer("bank", torch.arange(16.0).view(4, 4) / 10)
    m.recent = m.bank[2:]


def offset_view(m: Any, loss: Tensor, x: Tensor, i: int) -> Tensor:
    m.bank[i % 4] = x.detach().mean(0)
    m.last = m.recent[1]
    torch._dynamo.graph_break()
    return loss * (1 + m.last.sum())


def flat_view(m: Any, loss: Tensor, x: Tensor, i: int) -> Tensor:
    m.bank.add_(1)
    m.last = m.recent.view(-1)
    return loss


class Shrinks(torch.autograd.Function):
    """Its backward function is not linear."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.function = function
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return ctx.function(gradient), None


def own_backward(function: Callable[[Tensor], Tensor]) -> Row:
    """A step whose gradient a function changes, accumulated over two batches."""

    def step(m: Any, loss: Tensor, x: Tensor, i: int) -> Tensor:
        return Shrinks.apply(m.net(x), function).square().mean()

    return Row(step, accumulate_grad_batches=2)


TENSORS = {
    "autocast off": Row(float32_block, state=is_rounded, precision="bf16-mixed"),
    "a view with an offset": Row(offset_view, None, buffer, lambda m: [m.last.tolist(), m.bank.tolist()]),
    "a flat view": Row(flat_view, None, buffer, lambda m: [m.last.tolist(), m.bank.tolist()]),
    "shrinks": own_backward(functools.partial(F.softshrink, lambd=5e-3)),
    "normalizes": own_backward(lambda g: F.normalize(g, dim=0)),
    "special function": own_backward(lambda g: torch.special.i0e(g * 5) * g),
    "scales": own_backward(lambda g: g * 2),
}
ROWS = {
    f"{kind}: {name}": row
    for kind, rows in (
        ("identity", IDENTITY), ("classes", CLASSES), ("containers", CONTAINERS), ("numpy", NUMPY),
        ("tensors", TENSORS), ("python", PYTHON),
    )
    for name, row in rows.items()
}  # fmt: skip


@pytest.fixture(autouse=True)
def restored_classes() -> Any:
    linear = nn.Linear.forward
    yield
    globals().pop("abs", None)
    sys.modules.pop("settings_of_user", None)
    nn.Linear.forward = linear  # type: ignore[method-assign]


def run(row: Row, strategy: Any, folder: Path, devices: int = 1) -> list[Any]:
    """Train under a strategy, from a fresh start; return what each process has seen."""
    for name, value in ORIGINAL.items():
        setattr(Plain, name, value)
    if "gain" in vars(Derived):
        del Derived.gain
    nn.Linear.forward = LINEAR  # type: ignore[method-assign]
    torch._dynamo.reset()
    seed_everything(0, verbose=False)
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    arguments = {"accelerator": "cpu", "devices": devices, "max_epochs": 1, **quiet, **row.trainer}
    Trainer(strategy=strategy, **arguments).fit(Step(row, folder))
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(devices)]


LINEAR = nn.Linear.forward


@pytest.mark.parametrize("name", ROWS)
def test_captured_is_eager(name: str, tmp_path: Path) -> None:
    stock = run(ROWS[name], "auto", tmp_path)
    strategy = ORTStrategy(config={"placement": "always", "start": "now", "cache_dir": None})
    captured = run(ROWS[name], strategy, tmp_path)
    torch.testing.assert_close(captured, stock, rtol=1e-4, atol=1e-6)
    assert strategy.report.graphs or strategy.report.notes


@pytest.mark.slow
@pytest.mark.parametrize("name", ROWS)
def test_captured_is_eager_in_two_processes(name: str, tmp_path: Path) -> None:
    arguments = {"start_method": START, "find_unused_parameters": True}
    stock = run(ROWS[name], DDPStrategy(**arguments), tmp_path, devices=2)
    config = {"placement": "always", "start": "now", "cache_dir": None, "report": str(tmp_path / "report.json")}
    captured = run(ROWS[name], ORTDDPStrategy(config=config, **arguments), tmp_path, devices=2)
    torch.testing.assert_close(captured, stock, rtol=1e-4, atol=1e-6)
    report = CompileReport.from_dict(json.loads((tmp_path / "report.json").read_text()))
    assert report.graphs or report.notes


class Watched(Small):
    """What ``wandb.watch`` puts on a module: hooks of all gradients, of the whole and of layers, with counters."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []
        for name, parameter in self.named_parameters():
            parameter.register_hook(functools.partial(self._note, name, [0]))
        self.register_forward_hook(functools.partial(self._note_weights, [0]))

    def _note(self, name: str, count: list[int], gradient: Tensor) -> None:
        count[0] += 1
        if count[0] % 3 == 0:
            self.seen.append((name, gradient.abs().sum().item()))

    def _note_weights(self, count: list[int], *_: Any) -> None:
        count[0] += 1
        if count[0] % 3 == 0:
            self.seen += [(name, parameter.sum().item()) for name, parameter in self.named_parameters()]


def test_hooks_of_several_gradients_keep_their_order(make_trainer: Callable[..., Any]) -> None:
    seen = []
    for strategy in ("auto", ORTStrategy(config={"placement": "always", "cache_dir": None})):
        module = Watched()
        make_trainer(strategy=strategy, max_epochs=4).fit(module)
        seen.append(module.seen)
    assert [name for name, _ in seen[0]] == [name for name, _ in seen[1]]
    assert [value for _, value in seen[0]] == pytest.approx([value for _, value in seen[1]], rel=1e-4)
    assert strategy.report.ort_runs > 0  # of validation
    assert len(strategy.report.graphs) < 5
