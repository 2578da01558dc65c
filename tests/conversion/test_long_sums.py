"""Sums of many elements, which onnxruntime adds up one after the other."""

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_ort import ORTConfig
from lightning_ort.compiler.backend import ORTBackend
from lightning_ort.compiler.report import ReasonType


def mean_of_squares(x: Tensor) -> Tensor:
    return (x * x).mean()


def compiled(function: Any, x: Tensor, **config: Any) -> tuple[Tensor, ORTBackend]:
    backend = ORTBackend(ORTConfig(placement="always", **config))
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
