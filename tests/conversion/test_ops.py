"""Every row of the table: forward and backward on ONNX Runtime against eager."""

import functools

import pytest
import torch

from lightning_ort.compiler.executors.ort import kernels
from tests.conversion.harness import TOLERANCES, check, compile_function
from tests.conversion.op_table import TABLE, Op
from tests.conversion.samples import build

CPU = ("CPUExecutionProvider",)


@functools.cache
def gradient_kernels_installed() -> bool:
    try:
        kernels.Kernels("training", CPU)
    except ValueError:
        return False
    return True


def cases() -> list[object]:
    return [
        pytest.param(op, dtype, kernel_set, id=f"{op.name}-{str(dtype).removeprefix('torch.')}-{kernel_set}")
        for op in TABLE
        for dtype in op.dtypes
        for kernel_set in (("auto", "standard") if op.gradient_kernels and dtype is torch.float32 else ("auto",))
    ]


@pytest.mark.parametrize(("op", "dtype", "kernel_set"), cases())
def test_op(op: Op, dtype: torch.dtype, kernel_set: str) -> None:
    check(
        op.fn,
        build(op.inputs, dtype),
        tolerance=op.tolerance.get(dtype, TOLERANCES[dtype]),
        in_torch=op.in_torch.get(dtype, frozenset()),
        kernels=kernel_set,
    )


def test_a_long_cumulative_sum_is_as_exact_as_eagers() -> None:
    x = torch.rand(300_000, generator=torch.Generator().manual_seed(0))
    compiled, report = compile_function(lambda x: (x.cumsum(0),), [x], 1, cache_dir=None)
    torch.testing.assert_close(compiled(x)[0], x.cumsum(0), rtol=1e-6, atol=0)
    assert report.ort_runs == 1
