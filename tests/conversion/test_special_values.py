"""Every function at every special number, forward and backward, in vectors and out of them."""

import pytest
import torch

from tests.conversion.harness import compile_function
from tests.conversion.special_values import BINARY, ROWS, TWO_GRADIENTS, UNARY, Sweep, in_torch, numbers, rows, windows

F32, F64 = torch.float32, torch.float64
SIZES = (1, 3, 4, 7, 8, 16, 17, 64)
# onnxruntime 1.19 has no float64 kernels for these
_NO_F64 = "acos acosh asin asinh atan atanh cos cosh erf sinh tan atan2 gelu gelu_backward"
NO_F64 = {*_NO_F64.split()}
# PyTorch's, whose parts differ at NaN
WHOLE = {"multi_margin_loss", "multilabel_margin_loss_forward"}
WHOLE |= {"multi_margin_loss_backward", "multilabel_margin_loss_backward"}
# they take numbers near each other from one another, so that rounding shows
ROUNDED = ("tanh", "tanhshrink", "gelu", "expm1", "power_2.5")
ROUNDED_ROWS = (
    "softmax",
    "softmax_first",
    "log_softmax",
    "logsumexp",
    "cross_entropy",
    "sum",
    "mean",
    "std",
    "rms_norm",
)
ROUNDED_ROWS += ("norm_1", "norm_2", "norm_3", "logsumexp_all")


def _cases(sizes: tuple[int, ...], quick: set[tuple[torch.dtype, str, int]]) -> list[object]:
    return [
        pytest.param(
            *(dtype, kernels, size),
            id=f"{str(dtype).removeprefix('torch.')}-{kernels}-{size}",
            marks=() if (dtype, kernels, size) in quick else pytest.mark.slow,
        )
        for dtype in (F32, F64)
        for kernels in ("auto", "standard")
        for size in sizes
    ]


def _check(sweep: Sweep, found: list[str], dtype: torch.dtype) -> None:
    assert not found, "\n".join(found)
    assert sweep.report.ort_runs > 0
    assert in_torch(sweep.report) <= WHOLE | (NO_F64 if dtype is F64 else set())


@pytest.mark.parametrize(
    ("dtype", "kernels", "size"), _cases(SIZES, {(F32, "auto", 1), (F32, "auto", 17), (F64, "auto", 17)})
)
def test_unary(dtype: torch.dtype, kernels: str, size: int) -> None:
    sweep = Sweep(UNARY, [torch.ones(size, dtype=dtype)], ROUNDED, kernels=kernels, fallback="warn")
    found = [line for values in windows(numbers(dtype), size) for line in sweep.differences([values])]
    _check(sweep, found, dtype)


@pytest.mark.parametrize(("dtype", "kernels", "size"), _cases((4, 64, 999), {(F32, "auto", 999)}))
def test_binary(dtype: torch.dtype, kernels: str, size: int) -> None:
    values = numbers(dtype)
    pairs = torch.cartesian_prod(values, values)
    pairs = torch.cat([pairs, pairs[:size]])[: -(-len(pairs) // size) * size]
    sweep = Sweep(BINARY, [torch.ones(size, dtype=dtype)] * 2, ("logaddexp",), kernels=kernels, fallback="warn")
    found = [line for part in pairs.view(-1, size, 2) for line in sweep.differences(list(part.t().contiguous()))]
    _check(sweep, found, dtype)


@pytest.mark.parametrize(("dtype", "kernels", "width"), _cases((1, 2, 5, 16, 33), {(F32, "auto", 5), (F64, "auto", 5)}))
def test_rows(dtype: torch.dtype, kernels: str, width: int) -> None:
    values = rows(dtype, width)
    if dtype is F64:  # max pooling ranks halves, and half of the smallest number is 0
        values = values[(values.abs() != 5e-324).all(1)]
    # float64 has no wider dtype to sum up squares in
    functions = {name: fn for name, fn in ROWS.items() if dtype is F32 or name != "std"}
    sweep = Sweep(functions, [values], ROUNDED_ROWS, kernels=kernels, fallback="warn")
    _check(sweep, sweep.differences([values]), dtype)


@pytest.mark.parametrize("dtype", [F32, F64])
@pytest.mark.parametrize("name", sorted(TWO_GRADIENTS))
def test_the_gradient_of_nan_is_that_of_torchs_vectors(name: str, dtype: torch.dtype) -> None:
    function = UNARY[name]
    vectors = torch.full((64,), float("nan"), dtype=dtype, requires_grad=True)
    (in_vectors,) = torch.autograd.grad(function(vectors).sum(), vectors)
    for size in (4, 20, 72):
        x = torch.full((size,), float("nan"), dtype=dtype, requires_grad=True)
        compiled, report = compile_function(lambda x: (function(x),), [x], 1, cache_dir=None)
        (gradient,) = torch.autograd.grad(compiled(x)[0].sum(), x)
        torch.testing.assert_close(gradient, in_vectors[:1].expand(size), rtol=0, atol=0, equal_nan=True)
        assert report.ort_runs > 0
