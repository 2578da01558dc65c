"""Integer arithmetic at the limits of each dtype. Where it traps, the process would end."""

from collections.abc import Callable

import pytest
import torch

from tests.conversion.harness import compile_function

DTYPES = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)
DIVISORS = (1, -1, 2, -2, 3, -3, 7, -7, 127, 1000003)


def limits(dtype: torch.dtype) -> torch.Tensor:
    info = torch.iinfo(dtype)
    wanted = (info.min, info.min + 1, info.max, info.max - 1, 0, 1, -1, 2, 5, -5, 7, 100, 2**53 + 1, -(2**60) - 7)
    return torch.tensor(sorted({min(max(value, info.min), info.max) for value in wanted}), dtype=dtype)


def _divisions() -> dict[str, Callable[[torch.Tensor], torch.Tensor]]:
    table: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {}
    for y in DIVISORS:
        table[f"// {y}"] = lambda x, y=y: x // y
        table[f"% {y}"] = lambda x, y=y: x % y
        table[f"fmod {y}"] = lambda x, y=y: torch.fmod(x, y)
        if y != -1:  # of the smallest integer, eager itself ends the process
            table[f"truncated / {y}"] = lambda x, y=y: torch.div(x, y, rounding_mode="trunc")
        table[f"< {y}"] = lambda x, y=y: x < y
        table[f"== {y}"] = lambda x, y=y: x == y
    return table


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
def test_division_and_comparison(dtype: torch.dtype) -> None:
    table, x = _divisions(), limits(dtype)
    compiled, report = compile_function(
        lambda x: tuple(function(x) for function in table.values()), [x], len(table), fallback="raise", cache_dir=None
    )
    for (name, function), got in zip(table.items(), compiled(x), strict=True):
        assert torch.equal(got, function(x)), name
        assert got.dtype == function(x).dtype
    assert report.ort_runs == 1
    assert report.graphs[0].num_ort_nodes == report.graphs[0].num_nodes


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_smallest_integer_truncated_by_minus_one(dtype: torch.dtype) -> None:
    # it has no positive counterpart; eager ends the process here
    x = torch.tensor([torch.iinfo(dtype).min, 5, -5], dtype=dtype)
    compiled, report = compile_function(
        lambda x: (torch.div(x, -1, rounding_mode="trunc"),), [x], 1, fallback="raise", cache_dir=None
    )
    assert compiled(x)[0].tolist() == [torch.iinfo(dtype).min, -5, 5]
    assert report.ort_runs == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_casts_of_numbers_without_a_counterpart(dtype: torch.dtype) -> None:
    x = torch.tensor([float("nan"), float("inf"), -float("inf"), 1e30, -1e30, 3.0], dtype=dtype)
    compiled, report = compile_function(lambda x: (x.long(), x.int()), [x], 2, fallback="raise", cache_dir=None)
    assert [result[-1].item() for result in compiled(x)] == [3, 3]  # what becomes of the others, C++ leaves open
    assert report.ort_runs == 1


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.int64])
def test_dropout_gradient_of_integers(dtype: torch.dtype) -> None:
    grad, mask = torch.tensor([0, 1, 1]).to(dtype), torch.tensor([True, False, True])
    compiled, report = compile_function(
        lambda grad, mask: (torch.ops.aten.native_dropout_backward(grad, mask, 2.0),),
        [grad, mask],
        1,
        fallback="raise",
        cache_dir=None,
    )
    (got,) = compiled(grad, mask)
    assert got.dtype is torch.float32
    assert got.tolist() == [0.0, 0.0, 2.0]
    assert report.ort_runs == 1
