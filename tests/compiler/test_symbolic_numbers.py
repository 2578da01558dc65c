"""Sizes that are symbolic as numbers in a graph, and sizes that turn out to be 0."""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from lightning_ort.compiler.backend import ORTBackend
from lightning_ort.compiler.placement import timing
from lightning_ort.compiler.regions.region import Timing
from lightning_ort.config import ORTConfig

WEIGHT, BIAS = torch.randn(4, 4), torch.randn(4)


def _labels(x: torch.Tensor) -> torch.Tensor:
    return torch.zeros(x.shape[0], dtype=torch.long)


SCALARS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "quotient": lambda x: x / x.shape[0],
    "product": lambda x: x * (x.shape[0] * 0.5),
    "clamp": lambda x: x.clamp(-x.shape[0] / 20, x.shape[0] / 20),
    "clamp_max": lambda x: (x * 20).clamp(max=x.shape[0]),
    "addmm": lambda x: torch.addmm(BIAS, x, WEIGHT, beta=x.shape[0], alpha=x.shape[0] * 0.1),
    "alpha": lambda x: torch.add(x, x, alpha=x.shape[0]),
    "elu": lambda x: F.elu(x, x.shape[0] / 3),
    "leaky_relu": lambda x: F.leaky_relu(x, x.shape[0] / 10),
    "softplus": lambda x: F.softplus(x, x.shape[0]),
    "hardtanh": lambda x: F.hardtanh(x, -x.shape[0] / 20, x.shape[0] / 20),
    "hardshrink": lambda x: F.hardshrink(x, x.shape[0] / 20),
    "softshrink": lambda x: F.softshrink(x, x.shape[0] / 20),
    "masked_fill": lambda x: x.masked_fill(x < 0, x.shape[0] / 3),
    "full": lambda x: x + torch.full((4,), x.shape[0] / 2) + torch.full_like(x, x.shape[0]),
    "ignore_index": lambda x: F.cross_entropy(x, _labels(x), ignore_index=x.shape[0]),
    "correction": lambda x: x.exp().var(0, correction=x.shape[0] - 3),
    "smooth_l1": lambda x: F.smooth_l1_loss(x, x * 0, beta=x.shape[0] / 4),
    "scatter": lambda x: (x * 2).scatter(1, _labels(x)[:, None], x.shape[0] / 3),
    "pad": lambda x: F.pad(x * 2, (1, 1), value=x.shape[0] / 3),
    "floor_divide": lambda x: x * (torch.arange(4) // x.shape[0] + torch.arange(20, 24) % x.shape[0]),
    "power": lambda x: x.abs() ** (x.shape[0] / 2.0),
}


def _compiled(function: Callable[..., torch.Tensor], **options: bool) -> tuple[Callable[..., torch.Tensor], ORTBackend]:
    backend = ORTBackend(ORTConfig(placement="always", cache_dir=None, fallback="raise", debug={"min_region_nodes": 1}))
    return torch.compile(function, backend=backend, **options), backend


def _gradient(function: Callable[..., torch.Tensor], x: torch.Tensor, *args: object) -> tuple[torch.Tensor, ...]:
    leaf = x.clone().requires_grad_()
    result = function(leaf, *args)
    result.sum().backward()
    assert leaf.grad is not None
    return result.detach(), leaf.grad


@pytest.mark.parametrize("name", SCALARS)
def test_size_as_scalar(name: str) -> None:
    compiled, backend = _compiled(SCALARS[name], dynamic=True)
    for rows in (7, 9, 5):
        x = torch.randn(rows, 4)
        torch.testing.assert_close(_gradient(compiled, x), _gradient(SCALARS[name], x))
    assert backend.report.ort_runs >= 3
    for graph in backend.report.graphs:
        assert graph.num_ort_nodes == graph.num_nodes


@pytest.mark.parametrize("rows", [7, 9, 3, 2])
def test_variance_of_too_few(rows: int) -> None:
    def spread(x: torch.Tensor) -> torch.Tensor:
        return x.exp().var(0, correction=3)

    compiled, backend = _compiled(spread, dynamic=True)
    x = torch.arange(rows * 2.0).view(rows, 2).mul(0.1)
    for shape in ((7, 2), (9, 2)):  # one graph for all sizes
        _gradient(compiled, torch.ones(shape))
    with pytest.warns(UserWarning, match="degrees of freedom") if rows < 4 else contextlib.nullcontext():
        expected = _gradient(spread, x)
    torch.testing.assert_close(_gradient(compiled, x), expected, equal_nan=True)
    assert backend.report.ort_runs >= 4


@pytest.mark.parametrize("scale", [1.7, 0.5])
def test_a_size_times_a_float(scale: float) -> None:
    def resize(x: torch.Tensor) -> torch.Tensor:
        return F.interpolate(x.relu(), scale_factor=scale) + 1

    compiled, backend = _compiled(resize, dynamic=True)
    for width in (4, 6, 9):
        x = torch.randn(2, 3, 5, width)
        torch.testing.assert_close(compiled(x), resize(x))
    assert backend.report.ort_runs == 3


EMPTIED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "softmax": lambda x: x[2:].softmax(0).sum(1),
    "softmax_last": lambda x: x[2:].softmax(1).sum(1),
    "log_softmax": lambda x: x[2:].log_softmax(1),
    "layer_norm": lambda x: F.layer_norm(x[2:], (5,)),
    "logsumexp": lambda x: (x[2:] + 1).logsumexp(0),
    "cumsum": lambda x: (x[2:] * 2).cumsum(0),
    "gelu": lambda x: F.gelu(x[2:]),
    "cross_entropy": lambda x: F.cross_entropy(x[2:], x[2:].argmax(1), reduction="sum"),
}


@pytest.mark.parametrize("kernels", ["auto", pytest.param("standard", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", EMPTIED)
def test_size_becomes_0(name: str, kernels: str) -> None:
    backend = ORTBackend(
        ORTConfig(placement="always", cache_dir=None, debug={"min_region_nodes": 1, "kernels": kernels})
    )
    compiled = torch.compile(EMPTIED[name], backend=backend, dynamic=True)
    for rows in (7, 9, 2):
        x = torch.randn(rows, 5)
        torch.testing.assert_close(_gradient(compiled, x), _gradient(EMPTIED[name], x))
    assert backend.report.ort_runs >= 4
    assert backend.report.fallbacks == []


@torch._dynamo.config.patch(capture_scalar_outputs=True)
def test_size_becomes_0_in_a_graph_that_takes_it() -> None:
    def first(x: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
        number = count.item()
        torch._check(number >= 0)
        torch._check(number <= x.shape[0])
        return (x.narrow(0, 0, number) * 2).softmax(0).sum(1)

    backend = ORTBackend(ORTConfig(placement="always", cache_dir=None, debug={"min_region_nodes": 1}))
    compiled = torch.compile(first, backend=backend)
    x = torch.randn(7, 5)
    for number, runs in ((3, 2), (5, 2), (0, 0), (4, 2)):
        before = backend.report.ort_runs
        got, gradient = _gradient(compiled, x, torch.tensor(number))
        expected, expected_gradient = _gradient(first, x, torch.tensor(number))
        torch.testing.assert_close(got, expected)
        torch.testing.assert_close(gradient, expected_gradient)
        assert backend.report.ort_runs - before == runs


def _count(x: torch.Tensor) -> int:
    number = (x.detach().sum(1) > -100).sum().item() - 1
    torch._check(number >= 0)
    torch._check(number <= x.shape[0])
    return number


TAKEN: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "a float": lambda x: x.softmax(1).clamp(max=x.detach().abs().mean().item() / 4).square().sum(1),
    "an integer": lambda x: (x.softmax(1) / (_count(x) + 1)).square().sum(1),
    "a size": lambda x: (x.narrow(0, 0, _count(x)) * 2).softmax(1).square().sum(1),
    "a size of a matrix product": lambda x: (x.narrow(0, 0, _count(x)) @ x.T).softmax(1).square().sum(1),
}


@torch._dynamo.config.patch(capture_scalar_outputs=True)
@pytest.mark.parametrize("placement", ["always", "measured"])
@pytest.mark.parametrize("name", TAKEN)
def test_number_depends_on_data(name: str, placement: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """No region that takes it can be timed, neither against torch nor with as many threads as torch has."""
    timed: list[Any] = []

    def race(calls: Mapping[int, Any], args: Sequence[Any]) -> Timing:
        for call in calls.values():
            call(*args)
        timed.append(args)
        return Timing({"ort": 1.0, "torch": 2.0}, next(iter(calls)))

    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(timing, "measure", lambda _, calls, in_torch, args, *others: race(calls, args))

    def step(x: torch.Tensor) -> torch.Tensor:
        return TAKEN[name](x.tanh().exp() + x)

    backend = ORTBackend(ORTConfig(placement=placement, cache_dir=None, debug={"min_region_nodes": 1}))
    compiled = torch.compile(step, backend=backend)
    for rows in (7, 5, 6):
        x = torch.randn(rows, 5)
        for got, expected in zip(_gradient(compiled, x), _gradient(step, x), strict=True):
            torch.testing.assert_close(got, expected)
    report = backend.report
    assert report.ort_runs > 0
    assert report.fallbacks == []
    regions = [region for graph in report.graphs for region in graph.regions]
    untimed = [reason.text for region in regions for reason in region.node_reasons.values()]
    assert any("depends on data" in text for text in untimed) == (placement == "measured")
    assert timed  # the rest
