"""Large ops that are timed alone: both ways are right, timing chooses, and the times are kept."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ort_settings import config_of
from torch import Tensor

from lightning_ort.compiler.backend import ORTBackend
from lightning_ort.compiler.machine import openmp
from lightning_ort.compiler.placement import timing
from lightning_ort.compiler.reason import ReasonType
from lightning_ort.compiler.regions.region import TORCH
from lightning_ort.compiler.request import CompileRequest
from lightning_ort.config import ORTConfig

aten = torch.ops.aten
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


def prefer(monkeypatch: pytest.MonkeyPatch, winner: str) -> list[dict[str, float]]:
    """Have every race of a single op won by ``"ort"`` or ``"torch"``, and of a region by ort; return the former."""
    races: list[dict[str, float]] = []

    def race(candidates: dict[Any, Any], args: Any, before: Any, check_budget: Any) -> dict[Any, float]:
        for call in candidates.values():
            call(*args)
        alone = before is openmp.pause_openmp
        times = {name: 1.0 if (name == TORCH) == (alone and winner == TORCH) else 10.0 for name in candidates}
        if alone:
            races.append(times)
        return times

    monkeypatch.setattr(timing, "race", race)
    return races


def gradient(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    (function(x * 2) * torch.linspace(0, 1, 256, dtype=x.dtype)).sum().backward()
    assert x.grad is not None
    return x.grad


@pytest.mark.parametrize("op", FUNCTIONS, ids=str)
@pytest.mark.parametrize("kernels", ["auto", "standard"])
@pytest.mark.parametrize("winner", ["ort", TORCH])
def test_an_op_that_is_timed_alone(op: Any, kernels: str, winner: str, monkeypatch: pytest.MonkeyPatch) -> None:
    prefer(monkeypatch, winner)
    backend = ORTBackend(ORTConfig(cache_dir=None, debug={"min_region_nodes": 1, "kernels": kernels}))
    got = gradient(torch.compile(FUNCTIONS[op], backend=backend), X)
    assert backend.report.ort_runs > 0
    assert not backend.report.fallbacks
    expected = gradient(FUNCTIONS[op], X.double())
    torch.testing.assert_close(got.double(), expected, rtol=1e-4, atol=2e-5)
    if winner == TORCH:
        reasons = [
            r for graph in backend.report.graphs for region in graph.regions for r in region.node_reasons.values()
        ]
        assert any(r.type is ReasonType.SLOWER and str(op) in r.text for r in reasons)


def test_a_choice_is_made_once_and_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    races = prefer(monkeypatch, "ort")

    def function(x: Tensor) -> Tensor:
        return F.gelu(F.gelu(x @ x.mT @ x) @ x.mT @ x)

    for _ in range(2):
        torch._dynamo.reset()
        gradient(torch.compile(function, backend=ORTBackend(ORTConfig(cache_dir=str(tmp_path)))), X)
    assert len(races) == 1  # of two equal ops in two runs


@pytest.mark.parametrize("config", [{"placement": "always"}, {}])
def test_nothing_is_timed_where_timing_does_not_decide(config: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    races = prefer(monkeypatch, "ort")
    torch.use_deterministic_algorithms(not config)
    backend = ORTBackend(config_of(**{"cache_dir": None, **config}))
    gradient(torch.compile(lambda x: F.gelu(x @ x.mT @ x), backend=backend), X)
    assert backend.report.ort_runs > 0
    assert races == []


def test_small_ops_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    races = prefer(monkeypatch, "ort")
    gradient(torch.compile(lambda x: F.gelu(x @ x.mT @ x), backend=ORTBackend({"cache_dir": None})), X[:64])
    assert races == []


def test_the_processes_of_a_run_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    races = prefer(monkeypatch, "ort")
    told: list[str] = []

    def agree(key: str, measured: dict[str, Any]) -> dict[str, Any]:
        told.append(key)
        published = {"ms": {"ort": 10.0, "torch": 0.1}, "threads": measured["threads"]}
        return published if len(told) == 2 else measured  # the region of the forward pass comes first

    request = CompileRequest(agree=agree)
    backend = ORTBackend({"cache_dir": None}, lambda: request)
    gradient(torch.compile(lambda x: F.gelu(x @ x.mT @ x), backend=backend), X)
    assert len(races) == 1
    ops = {region.executor: region.ops for region in backend.report.graphs[1].regions}
    assert str(aten.gelu_backward.default) in ops["torch"]


@pytest.mark.parametrize("broken", ["ort", TORCH])
def test_what_fails_when_it_is_timed_is_left_out(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    prefer(monkeypatch, "ort")
    original, warmed = timing.warm_up, list[Any]()

    def fail(*args: Any) -> None:
        raise RuntimeError("injected")

    def warm_up(candidates: dict[Any, Any], args: Any, on_failure: Any) -> dict[Any, Any]:
        warmed.append(candidates)
        is_alone = len(warmed) == 2  # between the regions of the forward and the backward pass
        fails = {name for name in candidates if is_alone and (name == TORCH) == (broken == TORCH)}
        calls = {name: fail if name in fails else call for name, call in candidates.items()}
        return original(calls, args, on_failure)

    monkeypatch.setattr(timing, "warm_up", warm_up)

    backend = ORTBackend({"cache_dir": None, "debug": {"min_region_nodes": 1}})
    got = gradient(torch.compile(F.gelu, backend=backend), X)
    torch.testing.assert_close(got.double(), gradient(F.gelu, X.double()), rtol=1e-4, atol=2e-5)
    assert backend.report.ort_runs > 0
    assert not backend.report.fallbacks
    assert len(warmed) == 3
