"""Memory layouts of strided tensors: the order of their dimensions in memory."""

from collections.abc import Sequence
from typing import Any

import torch

from lightning_ort.compat.torch import hint_of, is_contiguous_or_false


def int_hint(size: Any) -> int:
    """A size as a number; for a symbolic size, the one that was seen when the graph was traced."""
    return size if isinstance(size, int) else int(hint_of(size))


def memory_order(x: torch.Tensor) -> list[int]:
    """The dimensions of a dense tensor, slowest first."""
    if is_contiguous_or_false(x):
        return list(range(x.dim()))
    steps = [(int_hint(stride), int_hint(size)) for stride, size in zip(x.stride(), x.shape, strict=True)]
    return sorted(range(x.dim()), key=steps.__getitem__, reverse=True)


def in_order(x: torch.Tensor, order: list[int]) -> torch.Tensor:
    """A strided tensor made dense with its dimensions in this order, slowest first; itself if it already is."""
    inverse = sorted(range(len(order)), key=order.__getitem__)
    return x.permute(order).contiguous().permute(inverse)


def traced_order(traced: Any) -> list[int] | None:
    """The order of a traced tensor's dimensions in memory; ``None`` if unknown, or if it has gaps or overlaps."""
    if not isinstance(traced, torch.Tensor) or traced.layout is not torch.strided:
        return None
    try:
        order = memory_order(traced)
        dense = _is_dense(list(map(int_hint, traced.shape)), list(map(int_hint, traced.stride())), order)
    except TypeError:  # a size that depends on data has no hint
        return None
    return order if dense else None


def is_in_order(x: torch.Tensor, order: Sequence[int]) -> bool:
    """Whether a tensor is dense with its dimensions in this order, or has another layout or rank."""
    return x.layout is not torch.strided or x.dim() != len(order) or _is_dense(x.shape, x.stride(), order)


def was_in_order(traced: torch.Tensor, order: Sequence[int]) -> bool:
    """The same of a traced tensor, whose sizes may be symbolic."""
    return _is_dense(list(map(int_hint, traced.shape)), list(map(int_hint, traced.stride())), order)


def _is_dense(sizes: Sequence[int], strides: Sequence[int], order: Sequence[int]) -> bool:
    """Whether dimensions follow each other in memory in this order; those of size 1 may be anywhere."""
    step = 1
    for dim in reversed(order):
        if sizes[dim] != 1:
            if strides[dim] != step:
                return False
            step *= sizes[dim]
    return True


# the same as an op, for graphs; to ONNX Runtime, which has only one layout, it is a view
_LIBRARY = torch.library.Library("lightning_ort", "FRAGMENT")
_LIBRARY.define("in_order(Tensor x, int[] order) -> Tensor")
_LIBRARY.impl("in_order", in_order, "CompositeExplicitAutograd")
IN_ORDER = torch.ops.lightning_ort.in_order.default
