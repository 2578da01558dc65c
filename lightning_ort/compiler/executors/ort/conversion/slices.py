"""Slices and diagonals that are written to, triangles, and windows."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from lightning_ort.compiler.executors.ort.conversion.graph import GraphBuilder, Value
from lightning_ort.compiler.executors.ort.conversion.indexing import inverse, write_rows, zeros_of
from lightning_ort.compiler.executors.ort.conversion.metadata import dtype_of, rank_of, shape_of, static
from lightning_ort.compiler.executors.ort.conversion.registry import Unsupported, converts
from lightning_ort.compiler.report import ReasonType

aten = torch.ops.aten


def _clamp_bound(bound: Any, size: int, default: int) -> int:
    """A slice bound as torch reads it: from the end if negative, then within the dimension."""
    if bound is None:
        return default
    return min(max(bound + size if bound < 0 else bound, 0), size)


def _static_slice(sizes: Sequence[Any], dim: int, start: Any, end: Any, step: Any) -> tuple[int, int, int, int]:
    """The dimension as a positive number, its size, and the bounds of the slice."""
    axis = dim % len(sizes)
    if not static([sizes[axis], step, *(bound for bound in (start, end) if bound is not None)]):
        raise Unsupported("writing to a slice of symbolic size", ReasonType.DYNAMIC_SHAPE)
    size = sizes[axis]
    first = _clamp_bound(start, size, 0)
    return axis, size, first, max(_clamp_bound(end, size, size), first)


def _pad(ctx: GraphBuilder, value: Value, rank: int, axis: int, before: int, after: int) -> Value:
    """Add zeros along one dimension."""
    if before == 0 and after == 0:
        return value
    # all dimensions, not the `axes` input: onnxruntime's transpose optimizer (1.19) permutes the pads as if they were
    # all there ("indices element out of data bounds"); without a value it pads with zeros
    pads = [0] * (2 * rank)
    pads[axis], pads[rank + axis] = before, after
    return ctx.op("Pad", value, ctx.ints(pads))


@converts(aten.slice_backward.default)
def slice_backward(
    ctx: GraphBuilder,
    node: fx.Node,
    grad: fx.Node,
    input_sizes: Sequence[Any],
    dim: int,
    start: Any,
    end: Any,
    step: Any,
) -> Value:
    """slice_backward(Tensor grad_output, SymInt[] input_sizes, int dim, SymInt start, SymInt end, SymInt step) -> Tensor"""  # noqa: E501
    axis, size, first, _ = _static_slice(shape_of(node), dim, start, end, step)
    value, rank = ctx.value(grad), rank_of(grad)
    length = shape_of(grad)[axis]
    if step != 1:  # zeros between the entries, by padding a dimension of 1 behind each
        value = _pad(ctx, ctx.op("Unsqueeze", value, ctx.ints([axis + 1])), rank + 1, axis + 1, 0, step - 1)
        if not static(shape_of(grad)):
            raise Unsupported("writing to a slice of symbolic size", ReasonType.DYNAMIC_SHAPE)
        spread = list(shape_of(grad))
        spread[axis] = length * step
        value = ctx.op("Reshape", value, ctx.ints(spread))  # type: ignore[arg-type]
        length = min(length * step, size - first)
        value = ctx.op("Slice", value, ctx.ints([0]), ctx.ints([length]), ctx.ints([axis]))
    if not isinstance(length, int):
        raise Unsupported("writing to a slice of symbolic size", ReasonType.DYNAMIC_SHAPE)
    return _pad(ctx, value, rank, axis, first, size - first - length)


@converts(aten.select_backward.default)
def select_backward(
    ctx: GraphBuilder, node: fx.Node, grad: fx.Node, input_sizes: Sequence[Any], dim: int, index: Any
) -> Value:
    """select_backward(Tensor grad_output, SymInt[] input_sizes, int dim, SymInt index) -> Tensor"""
    axis = dim % rank_of(node)
    size = shape_of(node)[axis]
    if not isinstance(size, int) or not isinstance(index, int):
        raise Unsupported("writing to an entry of a symbolic size", ReasonType.DYNAMIC_SHAPE)
    position = index % size
    value = ctx.op("Unsqueeze", ctx.value(grad), ctx.ints([axis]))
    return _pad(ctx, value, rank_of(node), axis, position, size - position - 1)


def _replace(ctx: GraphBuilder, x: Value, source: Value, axis: int, size: int, first: int, last: int) -> Value:
    """``x`` with what lies between two positions of a dimension replaced."""
    parts = [source]
    if first > 0:
        parts.insert(0, ctx.op("Slice", x, ctx.ints([0]), ctx.ints([first]), ctx.ints([axis])))
    if last < size:
        parts.append(ctx.op("Slice", x, ctx.ints([last]), ctx.ints([size]), ctx.ints([axis])))
    return source if len(parts) == 1 else ctx.op("Concat", *parts, axis=axis)


@converts(aten.slice_scatter.default)
def slice_scatter(
    ctx: GraphBuilder,
    node: fx.Node,
    x: fx.Node,
    src: fx.Node,
    dim: int = 0,
    start: Any = None,
    end: Any = None,
    step: Any = 1,
) -> Value:
    """slice_scatter(Tensor self, Tensor src, int dim=0, SymInt? start=None, SymInt? end=None, SymInt step=1) -> Tensor"""  # noqa: E501
    axis, size, first, last = _static_slice(shape_of(x), dim, start, end, step)
    if step != 1:
        rows = ctx.const([[position] for position in range(first, last, step)], torch.int64)
        return write_rows(ctx, ctx.value(x), rows, ctx.value(src, dtype_of(x)), axis, rank_of(x), None)
    return _replace(ctx, ctx.value(x), ctx.value(src, dtype_of(x)), axis, size, first, last)


@converts(aten.select_scatter.default)
def select_scatter(ctx: GraphBuilder, node: fx.Node, x: fx.Node, src: fx.Node, dim: int, index: Any) -> Value:
    """select_scatter(Tensor self, Tensor src, int dim, SymInt index) -> Tensor"""
    axis = dim % rank_of(x)
    size = shape_of(x)[axis]
    if not isinstance(size, int) or not isinstance(index, int):
        raise Unsupported("writing to an entry of a symbolic size", ReasonType.DYNAMIC_SHAPE)
    position = index % size
    source = ctx.op("Unsqueeze", ctx.value(src, dtype_of(x)), ctx.ints([axis]))
    return _replace(ctx, ctx.value(x), source, axis, size, position, position + 1)


# diagonals and triangles


def _diagonal_places(x: fx.Node, offset: int, dim1: int, dim2: int) -> tuple[list[int], list[int], int]:
    """The permutation that brings both dimensions to the end, where the diagonal is in their product, and its size."""
    rank = rank_of(x)
    axes = [dim1 % rank, dim2 % rank]
    height, width = (shape_of(x)[axis] for axis in axes)
    if not isinstance(height, int) or not isinstance(width, int):
        raise Unsupported("a diagonal of symbolic size", ReasonType.DYNAMIC_SHAPE)
    places = [row * width + row + offset for row in range(height) if 0 <= row + offset < width]
    if not places:
        raise Unsupported("a diagonal outside of its matrix")
    return [*(dim for dim in range(rank) if dim not in axes), *axes], places, height * width


@converts(aten.diagonal.default)
def diagonal(ctx: GraphBuilder, node: fx.Node, x: fx.Node, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Value:
    """diagonal(Tensor(a) self, int offset=0, int dim1=0, int dim2=1) -> Tensor(a)"""
    perm, places, size = _diagonal_places(x, offset, dim1, dim2)
    flat = ctx.op("Reshape", ctx.transpose(ctx.value(x), perm), ctx.ints([0] * (len(perm) - 2) + [size]))
    return ctx.op("Gather", flat, ctx.ints(places), axis=-1)


@converts(aten.diagonal_scatter.default)
def diagonal_scatter(
    ctx: GraphBuilder, node: fx.Node, x: fx.Node, src: fx.Node, offset: int = 0, dim1: int = 0, dim2: int = 1
) -> Value:
    """diagonal_scatter(Tensor self, Tensor src, int offset=0, int dim1=0, int dim2=1) -> Tensor"""
    perm, places, size = _diagonal_places(x, offset, dim1, dim2)
    moved = ctx.transpose(ctx.value(x), perm)
    flat = ctx.op("Reshape", moved, ctx.ints([0] * (len(perm) - 2) + [size]))
    rows = ctx.const([[place] for place in places], torch.int64)
    written = write_rows(ctx, flat, rows, ctx.value(src, dtype_of(x)), len(perm) - 2, len(perm) - 1, None)
    return ctx.transpose(ctx.op("Reshape", written, ctx.op("Shape", moved)), inverse(perm))


@converts(aten.tril.default)
def tril(ctx: GraphBuilder, node: fx.Node, x: fx.Node, diagonal: Any = 0) -> Value:
    """tril(Tensor self, SymInt diagonal=0) -> Tensor"""
    return ctx.op("Trilu", ctx.value(x), ctx.value(diagonal, torch.int64), upper=0)


@converts(aten.triu.default)
def triu(ctx: GraphBuilder, node: fx.Node, x: fx.Node, diagonal: Any = 0) -> Value:
    """triu(Tensor self, SymInt diagonal=0) -> Tensor"""
    return ctx.op("Trilu", ctx.value(x), ctx.value(diagonal, torch.int64), upper=1)


# windows


def _windows(size: Any, width: int, step: int) -> list[list[int]]:
    """The positions of each window along a dimension."""
    if not isinstance(size, int):
        raise Unsupported("windows over a symbolic size", ReasonType.DYNAMIC_SHAPE)
    return [list(range(first, first + width)) for first in range(0, size - width + 1, step)]


@converts(aten.unfold.default)
def unfold(ctx: GraphBuilder, node: fx.Node, x: fx.Node, dimension: int, size: int, step: int) -> Value:
    """unfold(Tensor(a) self, int dimension, int size, int step) -> Tensor(a)"""
    if rank_of(x) == 0:
        raise Unsupported("windows over a scalar")
    axis, rank = dimension % rank_of(x), rank_of(x)
    places = ctx.const(_windows(shape_of(x)[axis], size, step), torch.int64)
    gathered = ctx.op("Gather", ctx.value(x), places, axis=axis)  # the windows' entries right behind the windows
    return ctx.transpose(gathered, [dim for dim in range(rank + 1) if dim != axis + 1] + [axis + 1])


@converts(aten.unfold_backward.default)
def unfold_backward(
    ctx: GraphBuilder, node: fx.Node, grad: fx.Node, input_sizes: Sequence[Any], dim: int, size: int, step: int
) -> Value:
    """unfold_backward(Tensor grad_in, SymInt[] input_sizes, int dim, int size, int step) -> Tensor"""
    sizes, rank = shape_of(node), rank_of(node)
    if not static(sizes) or rank == 0:
        raise Unsupported("the gradient of windows over a symbolic size", ReasonType.DYNAMIC_SHAPE)
    axis = dim % rank
    front = [axis, *(other for other in range(rank) if other != axis)]
    rows = ctx.const([[[place] for place in window] for window in _windows(sizes[axis], size, step)], torch.int64)
    zeros = zeros_of(ctx, ctx.ints([int(sizes[other]) for other in front]), dtype_of(node))
    # from [..., windows, ..., entries] to [windows, entries, ...]
    updates = ctx.transpose(ctx.value(grad), [axis, rank, *front[1:]])
    return ctx.transpose(ctx.op("ScatterND", zeros, rows, updates, reduction="add"), inverse(front))
