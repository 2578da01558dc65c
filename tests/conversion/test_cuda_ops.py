"""The table of operations on a GPU, without one: every converter has kernels, and results of the shapes that torch has.

The models go through ONNX's checker, which infers the shapes of their results.
"""

import itertools
from collections.abc import Iterator, Sequence
from contextlib import suppress
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


TOGETHER = 16  # operations in a graph: tracing one takes longer than all that follows


def results_of(op: Op, args: Sequence[Any]) -> tuple[Any, ...]:
    result = op.fn(*args)
    return tuple(result) if isinstance(result, (tuple, list)) else (result,)


def with_inputs(dtype: torch.dtype) -> Iterator[tuple[Op, list[Any], int]]:
    """Operations, their inputs and the number of their results, where torch has kernels of this dtype on the CPU."""
    for op in TABLE:
        if op.name not in LACK_MEMORY:
            with suppress(RuntimeError):
                inputs = build(op.inputs, dtype)
                yield op, inputs, len(results_of(op, inputs))


def compiled(group: Sequence[tuple[Op, list[Any], int]]) -> CudaBackend:
    def fn(*args: Any) -> tuple[Any, ...]:
        left = iter(args)
        return tuple(x for op, inputs, _ in group for x in results_of(op, [*itertools.islice(left, len(inputs))]))

    together = [value for _, inputs, _ in group for value in inputs]
    backend = CudaBackend(min_region_nodes=1)
    backend(as_graph(fn, len(together), sum(count for *_, count in group)), together)
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
    failures, without, found = [], set(), list(with_inputs(dtype))
    for start in range(0, len(found), TOGETHER):
        group = found[start : start + TOGETHER]
        backend = compiled(group)
        failures += [f"{[op.name for op, *_ in group]}: {fallback}" for fallback in backend.report.fallbacks]
        regions = [region for graph in backend.report.graphs for region in graph.regions]
        reasons = [(name, reason) for region in regions for name, reason in region.node_reasons.items()]
        without |= {name for name, reason in reasons if reason.type is ReasonType.NO_KERNEL}
    assert not failures
    assert without <= NO_KERNEL | (OF_BFLOAT16 if dtype is torch.bfloat16 else set())
    assert len(found) > 0.95 * len(TABLE)
