"""Choice between numbers, and between a gradient and 0, and sums of rows: exact, without slow kernels if possible."""

from collections.abc import Callable
from pathlib import Path

import onnx
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.conversion.harness import compile_function

SPECIAL = [0.0, -0.0, 1e-45, -1e-45, 1.0, -1.0, 3e38, float("inf"), float("-inf"), float("nan")]


def run(fn: Callable[..., Tensor], folder: Path, *inputs: Tensor) -> tuple[list[Tensor], list[str]]:
    """Return result and gradients on ONNX Runtime, and the operators of its models."""
    leaves = [x.detach().clone().requires_grad_(x.is_floating_point()) for x in inputs]
    compiled, report = compile_function(lambda *args: (fn(*args),), leaves, 1, save_onnx_dir=folder, fallback="raise")
    (out,) = compiled(*leaves)
    found = [out.detach()]
    if out.requires_grad:
        found += gradients(out, leaves)
    assert report.ort_runs == len(report.graphs) > 0
    return found, [node.op_type for path in folder.glob("*.onnx") for node in onnx.load(path).graph.node]


def eager(fn: Callable[..., Tensor], *inputs: Tensor) -> list[Tensor]:
    leaves = [x.detach().clone().requires_grad_(x.is_floating_point()) for x in inputs]
    out = fn(*leaves)
    return [out.detach(), *(gradients(out, leaves) if out.requires_grad else [])]


def gradients(out: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    return list(torch.autograd.grad(out, [x for x in leaves if x.requires_grad], torch.ones_like(out)))


def assert_equal(got: list[Tensor], expected: list[Tensor], rtol: float = 0.0) -> None:
    for ours, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=rtol, atol=rtol, equal_nan=True)


@pytest.mark.parametrize("activation", [F.relu, F.relu6, F.hardtanh, F.softshrink])
def test_gradient_from_a_product_is_masked_by_a_product(activation: Callable[[Tensor], Tensor], tmp_path: Path) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(9, 33), torch.randn(33, 5)
    fn = lambda x, weight: activation(3 * x) @ weight  # noqa: E731
    found, ops = run(fn, tmp_path, x, weight)
    assert_equal(found, eager(fn, x, weight), rtol=1e-5)
    assert "Where" not in ops


@pytest.mark.parametrize("after", [torch.sqrt, torch.log, lambda y: y**-0.5])
def test_a_nan_that_nothing_else_has_is_masked(after: Callable[[Tensor], Tensor], tmp_path: Path) -> None:
    x = torch.tensor([-1.0, 0.0, 4.0, float("nan")])
    fn = lambda x: torch.where(x > 0, after(x.relu()), 0.0)  # noqa: E731
    found, _ = run(fn, tmp_path, x)
    assert_equal(found, eager(fn, x), rtol=1e-6)
    assert found[1][:2].tolist() == [0, 0]


def test_a_nan_before_a_relu_is_passed_on_in_its_gradient(tmp_path: Path) -> None:
    x, weight = torch.tensor([[float("nan"), -1.0, 1.0]]), torch.ones(3, 2)
    fn = lambda x, weight: x.relu() @ weight  # noqa: E731
    found, ops = run(fn, tmp_path, x, weight)
    assert_equal(found, eager(fn, x, weight))
    assert found[1].tolist() == [[2, 0, 2]]
    assert "Where" not in ops


@pytest.mark.parametrize("slope", [0.01, 0.2, 1 / 3, 0.99, 1.0, 2.5, -0.3, 0.0, 1e-30, 1e30, 3e38])
def test_one_of_two_numbers_is_exact(slope: float, tmp_path: Path) -> None:
    torch.manual_seed(0)
    x = torch.cat([torch.randn(50), torch.tensor(SPECIAL)])
    fn = lambda x: F.leaky_relu(x, slope)  # noqa: E731
    found, _ = run(fn, tmp_path, x)
    assert_equal(found[1:], eager(fn, x)[1:])


def test_sign(tmp_path: Path) -> None:
    x = torch.tensor(SPECIAL)
    found, ops = run(torch.sign, tmp_path, x)
    assert_equal(found[:1], eager(torch.sign, x)[:1])
    assert "Sign" not in ops


@pytest.mark.parametrize(
    ("shape", "dims"), [((7, 3), 0), ((5, 2, 3), (0, 1)), ((5, 2, 3), 0), ((1, 4), 0), ((6, 1), 0)]
)
@pytest.mark.parametrize("keepdim", [False, True])
def test_rows_are_added_up_by_a_product(shape: tuple[int, ...], dims: object, keepdim: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    x = torch.randn(shape)
    fn = lambda x: (2 * x).sum(dims, keepdim=keepdim)  # noqa: E731
    found, ops = run(fn, tmp_path, x)
    assert_equal(found, eager(fn, x), rtol=1e-6)
    assert found[0].shape == fn(x).shape
    assert "MatMul" in ops
    assert "ReduceSum" not in ops


def test_not_finite_rows_are_added_up_as_in_eager(tmp_path: Path) -> None:
    x = torch.tensor([[1.0, float("inf"), float("inf"), float("nan")], [2.0, 1.0, float("-inf"), 0.0]])
    fn = lambda x: (2 * x).sum(0)  # noqa: E731
    found, _ = run(fn, tmp_path, x)
    assert_equal(found, eager(fn, x))
