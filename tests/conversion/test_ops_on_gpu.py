"""The op table on a GPU, in float32 and half types, whose right results differ: as near to float64 as eager's."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from lightning_ort.compiler.regions.reproducer_script import largest_difference
from tests.conversion.changing_sizes import changes, compile_for
from tests.conversion.harness import Run, as_tuple, compile_function, copies, run
from tests.conversion.op_table import TABLE, Op
from tests.conversion.samples import build
from tests.conversion.test_changing_sizes import WITH_SIZES

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
pytestmark = pytest.mark.gpu


def distance(got: torch.Tensor, exact: torch.Tensor) -> float:
    return largest_difference(got.detach().cpu().double(), exact.detach().cpu().double(), least=1e-2)


def assert_as_exact(ours: Run, eager: Run, exact: Run, dtype: torch.dtype) -> None:
    """Assert that a call is not much farther from float64 than eager is in its dtype."""
    floor = 1e-5 if dtype is torch.float32 else 2 * torch.finfo(dtype).eps
    for what in ("outputs", "gradients", "inputs"):
        for got, alike, want in zip(getattr(ours, what), getattr(eager, what), getattr(exact, what), strict=True):
            if not isinstance(alike, torch.Tensor):
                assert got == alike
                continue
            assert (got.shape, got.dtype, got.device) == (alike.shape, alike.dtype, alike.device)
            if alike.is_floating_point():
                assert distance(got, want) <= 2 * distance(alike, want) + floor, what
            else:
                assert torch.equal(got, alike), what


def inputs_of(op: Op, dtype: torch.dtype) -> list[Any]:
    return [
        x.detach().cuda().requires_grad_(x.requires_grad) if isinstance(x, torch.Tensor) else x
        for x in build(op.inputs, dtype)
    ]


def on_gpu(op: Op) -> Any:
    """The function of a row, whose own tensors are on the GPU too."""

    def call(*args: Any) -> tuple[Any, ...]:
        with torch.device("cuda"):
            return as_tuple(op.fn)(*args)

    return call


def reference(call: Any, inputs: Sequence[Any]) -> tuple[Run, Run]:
    """What eager gives, and what it gives in float64."""
    try:
        return run(call, copies(inputs)), run(call, copies(inputs, torch.float64))
    except RuntimeError as error:
        pytest.skip(f"not in eager: {error}")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("op", TABLE, ids=lambda op: op.name)
def test_is_as_exact_as_eager(op: Op, dtype: torch.dtype) -> None:
    call, inputs = on_gpu(op), inputs_of(op, dtype)
    eager, exact = reference(call, inputs)
    given = copies(inputs)
    compiled, report = compile_function(call, given, len(eager.outputs))
    assert_as_exact(run(compiled, given), eager, exact, dtype)
    assert not report.fallbacks


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("op", WITH_SIZES, ids=lambda op: op.name)
def test_sizes_that_change(op: Op, dtype: torch.dtype) -> None:
    for sizes in list(changes(op.fn, inputs_of(op, dtype), few=False))[:1]:
        torch._dynamo.reset()
        compiled, backend = compile_for(as_tuple(op.fn), sizes.first)
        for inputs in sizes.inputs:
            assert_as_exact(run(compiled, copies(inputs)), *reference(as_tuple(op.fn), inputs), dtype)
        assert not backend.report.fallbacks
