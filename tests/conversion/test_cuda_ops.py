"""The table of operations on a GPU, without one: every converter has kernels, and results of the shapes that torch has.

The models go through ONNX's checker, which infers the shapes of their results.
"""

from typing import Any

import pytest
import torch

from lightning_ort.compiler.reason import ReasonType
from tests.compiler.fake_cuda import CudaBackend, FakeCuda
from tests.conversion.harness import as_graph
from tests.conversion.op_table import TABLE, Op
from tests.conversion.samples import build

# these need memory that fake tensors lack
LACK_MEMORY = {"like", "index_put", "index_copy"}
# without a CUDA kernel in any dtype, and in one
NO_KERNEL = {
    f"aten.{name}.default"
    for name in ("tan", "asin", "acos", "atan", "sinh", "cosh", "asinh", "acosh", "atanh", "atan2")
}
OF_BFLOAT16 = {f"aten.{name}.default" for name in ("convolution", "max_pool2d_with_indices", "max_pool3d_with_indices")}


def compiled(op: Op, dtype: torch.dtype) -> CudaBackend | None:
    inputs = build(op.inputs, dtype)

    def fn(*args: Any) -> tuple[Any, ...]:
        result = op.fn(*args)
        return tuple(result) if isinstance(result, (tuple, list)) else (result,)

    try:
        count = len(fn(*inputs))
    except RuntimeError:  # torch has no kernel of this dtype on the CPU
        return None
    backend = CudaBackend(min_region_nodes=1)
    backend(as_graph(fn, len(inputs), count), inputs)
    return backend


@pytest.mark.parametrize(
    "dtype",
    [
        pytest.param(torch.float32, marks=pytest.mark.slow),
        pytest.param(torch.float16, marks=pytest.mark.slow),
        torch.bfloat16,
    ],
    ids=str,
)
def test_every_operation(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    FakeCuda(monkeypatch)
    failures, without, done = [], set(), 0
    for op in TABLE:
        if op.name in LACK_MEMORY or (backend := compiled(op, dtype)) is None:
            continue
        done += 1
        failures += [f"{op.name}: {fallback}" for fallback in backend.report.fallbacks]
        regions = [region for graph in backend.report.graphs for region in graph.regions]
        reasons = [(name, reason) for region in regions for name, reason in region.node_reasons.items()]
        without |= {name for name, reason in reasons if reason.type is ReasonType.NO_KERNEL}
    assert not failures
    assert without <= NO_KERNEL | (OF_BFLOAT16 if dtype is torch.bfloat16 else set())
    assert done > 0.95 * len(TABLE)
