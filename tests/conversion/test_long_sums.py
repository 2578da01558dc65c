"""Sums of many elements, which onnxruntime adds up one after the other."""

from typing import Any

import pytest
import torch
from ort_settings import config_of
from torch import Tensor

from lightning_ort.compiler.backend import ORTBackend
from lightning_ort.compiler.reason import ReasonType


def mean_of_squares(x: Tensor) -> Tensor:
    return (x * x).mean()


def compiled(function: Any, x: Tensor, **config: Any) -> tuple[Tensor, ORTBackend]:
    backend = ORTBackend(config_of(**{"placement": "always", **config}))
    return torch.compile(function, backend=backend, dynamic=config.get("dynamic"))(x), backend


@pytest.mark.parametrize("keepdim", [False, True])
@pytest.mark.parametrize(
    ("shape", "dims"),
    [
        ((3_000_000,), 0),
        ((64, 3, 128, 128), (0, 1, 2, 3)),
        ((150, 100, 200), (-1, -2, -3)),
        ((100_000, 8), 0),
        ((500, 400, 3), (0, 1)),
    ],
    ids=str,
)
@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_they_are_as_accurate_as_in_eager(reduction: str, shape: Any, dims: Any, keepdim: bool) -> None:
    """One addition after the other in float32 is off by 1e-5 to 5e-4 here."""

    def reduce_squares(x: Tensor) -> Tensor:
        return getattr(x * x, reduction)(dims, keepdim=keepdim)

    x = torch.rand(shape, generator=torch.Generator().manual_seed(0))
    got, backend = compiled(reduce_squares, x)
    expected = reduce_squares(x.double())
    assert backend.report.ort_runs == 1
    assert backend.report.ort_node_fraction == 1
    assert got.shape == expected.shape
    torch.testing.assert_close(got.double(), expected, rtol=2e-6, atol=0)


def test_symbolic_sizes() -> None:
    x = torch.rand(3000, 1000, generator=torch.Generator().manual_seed(0))
    got, backend = compiled(mean_of_squares, x, dynamic=True)
    assert backend.report.ort_runs == 1
    torch.testing.assert_close(got.double(), mean_of_squares(x.double()), rtol=2e-6, atol=0)


def test_a_number_without_divisors_is_added_up_in_torch() -> None:
    x = torch.rand(1_000_003, generator=torch.Generator().manual_seed(0))
    got, backend = compiled(lambda x: mean_of_squares(x + 1), x)
    torch.testing.assert_close(got.double(), mean_of_squares(x.double() + 1), rtol=1e-6, atol=0)
    assert backend.report.ort_runs == 1
    reasons = [reason for region in backend.report.graphs[0].regions for reason in region.node_reasons.values()]
    assert [reason.type for reason in reasons] == [ReasonType.UNSUPPORTED_ARGUMENTS]


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize(
    ("shape", "dims"),
    [((200_000, 8), 0), ((4_000_000,), 0), ((4, 600, 3, 500), (1, 3)), ((700, 2, 800), (0, 2))],
    ids=str,
)
def test_sums_of_any_dimensions_and_symbolic_sizes(shape: Any, dims: Any, dynamic: bool | None) -> None:
    """One addition after the other in float32 is off by 1e-5."""

    def total(x: Tensor) -> Tensor:
        return (x * x).sum(dims)

    x = torch.rand(shape, generator=torch.Generator().manual_seed(0))
    got, backend = compiled(total, x, dynamic=dynamic)
    assert backend.report.ort_runs == 1
    torch.testing.assert_close(got.double(), total(x.double()), rtol=2e-6, atol=0)


@pytest.mark.parametrize("order", [1, 2])
def test_norms_of_long_rows(order: int) -> None:
    def norm(x: Tensor) -> Tensor:
        return torch.linalg.vector_norm(x * 2, order, dim=1)

    x = torch.rand(2, 3_000_000, generator=torch.Generator().manual_seed(0))
    got, backend = compiled(norm, x)
    assert backend.report.ort_runs == 1
    torch.testing.assert_close(got.double(), norm(x.double()), rtol=1e-4, atol=0)  # eager is off by 3e-5


def test_a_range_of_floats_is_as_near_as_in_eager() -> None:
    def numbers(x: Tensor) -> Tensor:
        return torch.arange(-1000.0, 1000.0, 0.001) * x

    got, backend = compiled(numbers, torch.ones(()))
    assert backend.report.ort_runs == 1
    torch.testing.assert_close(got, numbers(torch.ones(())), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("pads", [(0, 1, 0, 1), (3, 3, 3, 3)])
def test_padding_before_an_average_pool_counts(pads: Any) -> None:
    """onnxruntime merges the two into a pool that does not count it, or fails."""

    def pool(x: Tensor) -> Tensor:
        return torch.nn.functional.avg_pool2d(torch.nn.functional.pad(x, pads), 2, 1, count_include_pad=False)

    x = torch.randn(1, 2, 6, 6)
    got, backend = compiled(pool, x)
    assert backend.report.ort_runs == 1
    assert not backend.report.fallbacks
    torch.testing.assert_close(got, pool(x))


def test_many_windows_stay_a_view() -> None:
    def means(x: Tensor) -> Tensor:
        return (x * 2).unfold(-1, 336, 1).mean(-1)

    x = torch.randn(1, 5000)
    got, backend = compiled(means, x, min_region_nodes=1)
    torch.testing.assert_close(got, means(x), rtol=1e-4, atol=1e-5)
    assert backend.report.ort_runs > 0
    (reason,) = {
        region.node_reasons["aten.unfold.default"].text
        for graph in backend.report.graphs
        for region in graph.regions
        if "aten.unfold.default" in region.node_reasons
    }
    assert "many windows" in reason
