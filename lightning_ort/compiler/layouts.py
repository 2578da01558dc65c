"""Memory layouts of strided tensors: in which order their dimensions lie in memory."""

from collections.abc import Sequence
from typing import Any

import torch
from torch._prims_common import is_contiguous_or_false


def int_hint(size: Any) -> int:
    """A size as a number: of a symbolic one, that which it had when the graph was traced."""
    return size if isinstance(size, int) else int(size.node.hint)


def memory_order(x: torch.Tensor) -> list[int]:
    """The dimensions of a dense tensor from the slowest to the fastest."""
    if is_contiguous_or_false(x):
        return list(range(x.dim()))
    steps = [(int_hint(stride), int_hint(size)) for stride, size in zip(x.stride(), x.shape, strict=True)]
    return sorted(range(x.dim()), key=steps.__getitem__, reverse=True)


def in_order(x: torch.Tensor, order: list[int]) -> torch.Tensor:
    """The tensor, dense in memory with its dimensions in this order; itself where it is.

    Args:
        x: Any strided tensor.
        order: Its dimensions from the slowest to the fastest.

    """
    inverse = sorted(range(len(order)), key=order.__getitem__)
    return x.permute(order).contiguous().permute(inverse)


def traced_order(traced: Any) -> list[int] | None:
    """The order of a traced tensor's dimensions in memory; ``None`` if it is not known, or has gaps or overlaps."""
    if not isinstance(traced, torch.Tensor) or traced.layout is not torch.strided:
        return None
    try:
        order = memory_order(traced)
        dense = _is_dense(list(map(int_hint, traced.shape)), list(map(int_hint, traced.stride())), order)
    except TypeError:  # a size that depends on data has no hint
        return None
    return order if dense else None


def is_in_order(x: torch.Tensor, order: Sequence[int]) -> bool:
    """Whether a tensor is dense with its dimensions in this order, or of another kind or rank."""
    return x.layout is not torch.strided or x.dim() != len(order) or _is_dense(x.shape, x.stride(), order)


def _is_dense(sizes: Sequence[int], strides: Sequence[int], order: Sequence[int]) -> bool:
    """Whether dimensions follow each other in memory in this order; where one lies that has one element is open."""
    step = 1
    for dim in reversed(order):
        if sizes[dim] != 1:
            if strides[dim] != step:
                return False
            step *= sizes[dim]
    return True


# the same as an op, for graphs: ONNX Runtime knows one layout alone, and takes it for a view
_LIBRARY = torch.library.Library("lightning_ort", "FRAGMENT")
_LIBRARY.define("in_order(Tensor x, int[] order) -> Tensor")
_LIBRARY.impl("in_order", in_order, "CompositeExplicitAutograd")
IN_ORDER = torch.ops.lightning_ort.in_order.default
