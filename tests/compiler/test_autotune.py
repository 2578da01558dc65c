"""Ops that can be run in several ways: each variant is right, timing chooses, and the choice is kept."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ort_settings import config_of
from torch import Tensor

from lightning_ort.compiler.backend import ORTBackend
from lightning_ort.compiler.executors.ort.conversion.graph import variants_of
from lightning_ort.compiler.executors.ort.conversion.registry import EXPANDED, VARIANTS
from lightning_ort.compiler.executors.ort.kernels import Kernels
from lightning_ort.compiler.placement import timing
from lightning_ort.compiler.reason import ReasonType
from lightning_ort.compiler.regions.region import TORCH
from lightning_ort.compiler.request import CompileRequest
from lightning_ort.config import ORTConfig

aten = torch.ops.aten
KERNELS = Kernels("auto", ("CPUExecutionProvider",))
# large enough to be timed, and each row over the whole range
X = torch.linspace(-30, 30, 512 * 256)[torch.randperm(512 * 256)].reshape(512, 256)

FUNCTIONS: dict[Any, Callable[[Tensor], Tensor]] = {
    aten.gelu_backward.default: F.gelu,
    aten.silu_backward.default: F.silu,
    aten._softmax_backward_data.default: lambda x: F.softmax(x, -1).square(),
    aten._log_softmax_backward_data.default: lambda x: F.log_softmax(x, -1).square(),
    aten.native_layer_norm.default: lambda x: F.layer_norm(x * 3, (256,)),
    aten.native_layer_norm_backward.default: lambda x: F.layer_norm(x, (256,)).square(),
}


def prefer(monkeypatch: pytest.MonkeyPatch, variant: str) -> list[dict[str, float]]:
    """Have every race won by a variant, or by torch; return the results that were given out."""
    races: list[dict[str, float]] = []

    def race(candidates: dict[Any, Any], args: Any, before: Any = None, **others: Any) -> dict[Any, float]:
        for call in candidates.values():
            call(*args)
        times = {name: 1.0 if name == variant else 10.0 for name in candidates}
        if TORCH in candidates and before is None:  # of a whole region
            times = {name: 10.0 if name == "torch" else 1.0 for name in candidates}
        else:
            races.append(times)
        return times

    monkeypatch.setattr(timing, "race", race)
    return races


def gradient(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    (function(x * 2) * torch.linspace(0, 1, 256, dtype=x.dtype)).sum().backward()
    assert x.grad is not None
    return x.grad


CASES = [
    pytest.param(op, variant, id=f"{op.name()}-{variant}")
    for op in FUNCTIONS
    for variant in (*variants_of(torch.fx.Graph().call_function(op), KERNELS), TORCH)
    if variant != "FastGeluGrad"  # of the tanh form
]


@pytest.mark.parametrize(("op", "variant"), CASES)
def test_each_variant_is_right(op: Any, variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    prefer(monkeypatch, variant)
    backend = ORTBackend(ORTConfig(cache_dir=None, debug={"min_region_nodes": 1}))
    got = gradient(torch.compile(FUNCTIONS[op], backend=backend), X)
    assert backend.report.ort_runs > 0
    assert not backend.report.fallbacks
    expected = gradient(FUNCTIONS[op], X.double())
    torch.testing.assert_close(got.double(), expected, rtol=1e-4, atol=2e-5)
    if variant == TORCH:
        reasons = [
            r for graph in backend.report.graphs for region in graph.regions for r in region.node_reasons.values()
        ]
        assert any(r.type is ReasonType.SLOWER and str(op) in r.text for r in reasons)


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_gelu_kernels(approximate: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    kernel = "GeluGrad" if approximate == "none" else "FastGeluGrad"
    if not KERNELS.has_training(kernel):
        pytest.skip("needs onnxruntime's training kernels")
    prefer(monkeypatch, kernel)

    def function(x: Tensor) -> Tensor:
        return F.gelu(x, approximate=approximate)

    backend = ORTBackend(ORTConfig(cache_dir=None, debug={"min_region_nodes": 1, "save_onnx_dir": str(tmp_path)}))
    got = gradient(torch.compile(function, backend=backend), X)
    torch.testing.assert_close(got.double(), gradient(function, X.double()), rtol=1e-4, atol=2e-5)
    assert any(kernel.encode() in path.read_bytes() for path in tmp_path.glob("backward*.onnx"))


def test_a_choice_is_made_once_and_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    races = prefer(monkeypatch, EXPANDED)

    def function(x: Tensor) -> Tensor:
        return F.gelu(F.gelu(x @ x.mT @ x) @ x.mT @ x)

    for _ in range(2):
        torch._dynamo.reset()
        gradient(torch.compile(function, backend=ORTBackend(ORTConfig(cache_dir=str(tmp_path)))), X)
    assert len(races) == 1  # of two equal ops in two runs
    assert len(list(tmp_path.glob("op-*.json"))) == 1


@pytest.mark.parametrize("config", [{"placement": "always"}, {}])
def test_nothing_is_timed_where_timing_does_not_decide(config: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    races = prefer(monkeypatch, EXPANDED)
    torch.use_deterministic_algorithms(not config)
    backend = ORTBackend(config_of(**{"cache_dir": None, **config}))
    gradient(torch.compile(lambda x: F.gelu(x @ x.mT @ x), backend=backend), X)
    assert backend.report.ort_runs > 0
    assert races == []


def test_small_ops_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    races = prefer(monkeypatch, EXPANDED)
    gradient(torch.compile(lambda x: F.gelu(x @ x.mT @ x), backend=ORTBackend({"cache_dir": None})), X[:64])
    assert races == []


def test_the_processes_of_a_run_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    races = prefer(monkeypatch, EXPANDED)
    request = CompileRequest(
        agree=lambda key, measured: {**measured, "torch": 0.1} if EXPANDED in measured else measured
    )
    backend = ORTBackend({"cache_dir": None}, lambda: request)
    gradient(torch.compile(lambda x: F.gelu(x @ x.mT @ x), backend=backend), X)
    assert len(races) == 1
    ops = {region.executor: region.ops for region in backend.report.graphs[1].regions}
    assert str(aten.gelu_backward.default) in ops["torch"]


@pytest.mark.parametrize("broken", [EXPANDED, TORCH])
def test_what_fails_when_it_is_timed_is_left_out(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    races = prefer(monkeypatch, broken)
    original = timing.warm_up

    def fail(*args: Any) -> None:
        raise RuntimeError("injected")

    def warm_up(candidates: dict[Any, Any], args: Any, on_failure: Any) -> dict[Any, Any]:
        calls = {name: fail if name == broken else call for name, call in candidates.items()}
        return original(calls, args, on_failure)

    monkeypatch.setattr(timing, "warm_up", warm_up)

    backend = ORTBackend({"cache_dir": None, "debug": {"min_region_nodes": 1}})
    got = gradient(torch.compile(F.gelu, backend=backend), X)
    torch.testing.assert_close(got.double(), gradient(F.gelu, X.double()), rtol=1e-4, atol=2e-5)
    assert backend.report.ort_runs > 0
    assert not backend.report.fallbacks
    assert races[0]
    assert broken not in races[0]


def test_variants_are_kernels_that_are_known() -> None:
    for listed in VARIANTS.values():
        for variant in listed:
            assert variant == EXPANDED or isinstance(KERNELS.has_training(variant), bool)  # KeyError: nobody knows it
