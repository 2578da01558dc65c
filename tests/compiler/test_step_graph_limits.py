"""What a step as one graph must not do: cast by the caller's autocast, scale what is not linear, keep a batch."""

import copy
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ort_settings import config_of
from torch import Tensor, fx, nn
from torch._subclasses import FakeTensorMode

from lightning_ort import ORTConfig
from lightning_ort.compiler.backend import ORTBackend
from lightning_ort.compiler.cache.cache import Cache
from lightning_ort.compiler.placement import placer, timing
from lightning_ort.compiler.request import CompileRequest
from lightning_ort.compiler.running.fallbacks import PassMonitor

OPTIONS: dict[str, Any] = {"placement": "always", "cache_dir": None, "debug": {"step_graph": "joint"}}
MISFITS: list[str] = []
REQUEST = CompileRequest(split=MISFITS.append)


def compiled_of(step: Any, **options: Any) -> tuple[Any, ORTBackend]:
    backend = ORTBackend(config_of(**{**OPTIONS, **options}), lambda: REQUEST)
    return torch.compile(step, backend=backend), backend


def assert_one_graph(backend: ORTBackend, expected: bool = True) -> None:
    assert backend.report.ort_runs > 0
    assert any(graph.name.startswith("step") for graph in backend.report.graphs) == expected
    assert not backend.report.fallbacks


def test_casts_are_those_of_the_trace() -> None:
    """Lightning runs a step within autocast; what a block in float32 computes stays in float32."""
    torch.manual_seed(0)
    eager = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    module, x = copy.deepcopy(eager), torch.randn(6, 8)

    def step(module: nn.Module, x: Tensor) -> Tensor:
        y = module(x)
        with torch.autocast("cpu", enabled=False):
            return ((y.float() @ y.float().t()).softmax(-1) @ y.float()).square().mean()

    compiled, backend = compiled_of(step, torch_ops=("aten.mm", "aten.addmm"))  # which autocast would cast
    for _ in range(3):
        for each, run in ((eager, step), (module, compiled)):
            with torch.autocast("cpu", torch.bfloat16):
                loss = run(each, x)
            assert loss.dtype is torch.float32
            loss.backward()
    assert_one_graph(backend)
    for mine, theirs in zip(module.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=0.05, atol=1e-3)


def test_a_step_is_done_again_under_its_own_autocast() -> None:
    eager = nn.Linear(8, 4)
    module, x = copy.deepcopy(eager), torch.randn(6, 8)

    def step(module: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
        logits = module(x)
        return logits.float().square().mean(), logits

    MISFITS.clear()
    compiled, backend = compiled_of(step)
    for each, run in ((eager, step), (module, compiled)):
        with torch.autocast("cpu", torch.bfloat16):
            loss, logits = run(each, x)
        (loss + logits.float().sum()).backward()  # outside, as Lightning does it
    assert_one_graph(backend)
    assert MISFITS == ["a result beside its loss is differentiated"]
    for mine, theirs in zip(module.parameters(), eager.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad)  # type: ignore[arg-type]


class Clipped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.clamp(-0.01, 0.01)


class Squared(Clipped):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * grad


class Penalized(Clipped):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2 + 0.1 * torch.ones_like(grad).sign()


class StraightThrough(Clipped):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return F.hardtanh(grad, -0.01, 0.01)


class Doubled(Clipped):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2 + grad


class Filled(Clipped):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.masked_fill(torch.arange(grad.shape[1]) == 1, 0.05)


class BySign(Clipped):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return torch.where(torch.signbit(grad), grad, grad * 2)


class ByOrder(Clipped):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.gather(1, grad.argsort(1))


class Appended(Clipped):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return torch.cat([grad[:, :2], torch.full_like(grad[:, 2:], 0.05)], 1)


class Masked(Clipped):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        kept = grad.masked_fill(torch.arange(grad.shape[1]) == 1, 0.0)
        return torch.cat([kept[:, :2], torch.zeros_like(grad[:, 2:])], 1)


def hooked(x: Tensor) -> Tensor:
    doubled = x * 2
    doubled.register_hook(lambda grad: grad.clamp(-0.01, 0.01))
    return doubled + x


def of_torch(x: Tensor) -> Tensor:
    """Torch's own, with gradients that are long chains of operations."""
    return F.normalize(x.cumprod(1) + x.logcumsumexp(0), dim=1) + x.sort(1).values.cummax(0).values


OWN = (Clipped, Squared, Penalized, StraightThrough, Doubled, Filled, BySign, ByOrder, Appended, Masked)


@pytest.mark.parametrize("function", [of_torch, hooked, *(each.apply for each in OWN)])
def test_gradients_that_may_not_be_linear_have_a_pass_of_their_own(function: Any) -> None:
    torch.manual_seed(0)
    eager = nn.Linear(8, 4)
    module = copy.deepcopy(eager)

    def step(module: nn.Module, x: Tensor) -> Tensor:
        return F.gelu(function(module(x))).square().mean()

    compiled, backend = compiled_of(step)
    for factor in (1.0, 0.25, 8.0, 8.0):
        x = torch.randn(6, 8)
        for each, run in ((eager, step), (module, compiled)):
            (run(each, x) * factor).backward()
        for mine, theirs in zip(module.parameters(), eager.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-4, atol=1e-6)
    assert_one_graph(backend, function is of_torch)


def with_logits(module: nn.Module, x: Any) -> Any:
    logits = module(x)
    return logits.square().mean(), logits


def test_a_loss_that_is_kept_keeps_no_batch() -> None:
    module = nn.Sequential(nn.Linear(8, 4), nn.Dropout(0.5))
    compiled, backend = compiled_of(with_logits)
    kept, batches, others = [], [], []
    for _ in range(4):
        x = torch.randn(6, 8)
        batches.append(weakref.ref(x))
        loss, other = compiled(module, x)
        others.append(weakref.ref(other))
        loss.backward()
        kept.append(loss)  # such as `self.losses.append(loss)`
    del x, other
    assert_one_graph(backend)
    assert [batch() for batch in batches[:-1]] == [None] * 3
    assert [other() for other in others] == [None] * 4


def test_a_second_backward_pass_needs_retain_graph() -> None:
    module = nn.Linear(8, 4)
    compiled, backend = compiled_of(with_logits)
    loss, logits = compiled(module, torch.randn(6, 8))
    loss.backward()
    with pytest.raises(RuntimeError, match="retain_graph=True"):
        logits.sum().backward()
    assert_one_graph(backend)


def test_a_failed_pass_keeps_no_tensors() -> None:
    """As after an error for lack of memory, which a batch size finder catches."""
    monitor, seen = PassMonitor(1), []

    def fail(args: list[Any]) -> Any:
        activation = torch.ones(3)
        seen.append(weakref.ref(activation))
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory") as caught:
        monitor.watch(fail)([])
    error = caught.value
    assert monitor.saw(error)
    assert not monitor.saw(error)  # once
    with pytest.raises(RuntimeError):
        monitor.watch(fail)([])
    del error, caught
    assert seen[-1]() is None


def test_a_race_of_one_or_none() -> None:
    (ms,) = timing.race({"torch": lambda: None}, []).values()
    assert ms >= 0
    assert timing.race({}, []) == {}


def test_one_graph_on_two_devices_stays_in_torch() -> None:
    graph = fx.Graph()
    with FakeTensorMode():
        for index in range(2):
            graph.placeholder(f"x{index}").meta["val"] = torch.empty(3, device=f"cuda:{index}")
    graph.output(None)
    gm = fx.GraphModule({}, graph)
    assert placer._accelerators(gm) == {"cuda:0", "cuda:1"}


def test_kept_times_are_of_one_precision_and_build(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = Cache(ORTConfig())
    name = cache.name("graph", ())
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        assert cache.name("graph", ()) != name
    finally:
        torch.set_float32_matmul_precision(before)
    assert cache.name("graph", ()) == name


@pytest.mark.parametrize("step_graph", ["joint", "split"])
@pytest.mark.parametrize(
    "norm", [nn.BatchNorm2d(4), nn.GroupNorm(2, 4), nn.LayerNorm([4, 6, 6])], ids=lambda n: type(n).__name__
)
def test_statistics_of_norms_in_half_types(norm: nn.Module, step_graph: str) -> None:
    """Their dtype is that of the weights, and not, as torch's fake kernels say, that of the input."""
    torch.manual_seed(0)
    eager = nn.Sequential(nn.Conv2d(3, 4, 3), copy.deepcopy(norm), nn.ReLU())
    module, x = copy.deepcopy(eager), torch.randn(5, 3, 8, 8)
    compiled, backend = compiled_of(
        lambda module, x: module(x).float().square().mean(), step_graph=step_graph, min_region_nodes=1
    )
    for each, run in ((eager, None), (module, compiled)):
        with torch.autocast("cpu", torch.bfloat16):
            loss = each(x).float().square().mean() if run is None else run(each, x)
        loss.backward()
    assert_one_graph(backend, step_graph == "joint")
    for mine, theirs in zip(module.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=0.05, atol=2e-3)
    for mine, theirs in zip(module.buffers(), eager.buffers(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-2, atol=1e-3)


def test_what_was_changed_before_another_result_is_differentiated_is_an_error() -> None:
    module = nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 4))
    compiled, backend = compiled_of(with_logits)
    for _ in range(2):
        loss, logits = compiled(module, torch.randn(6, 8))
        with torch.no_grad():
            module[1].weight.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            (loss + logits.square().sum()).backward()
    assert_one_graph(backend)
