"""Slices and diagonals that are written to, triangles, and windows."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from lightning_ort.compiler.executors.ort.conversion.graph import GraphBuilder, Value
from lightning_ort.compiler.executors.ort.conversion.indexing import write_rows
from lightning_ort.compiler.executors.ort.conversion.metadata import (
    axis_of,
    dtype_of,
    front,
    inverse,
    rank_of,
    refuse_scalars,
    shape_of,
    static,
    static_axis,
    static_sizes,
)
from lightning_ort.compiler.executors.ort.conversion.registry import Unsupported, converts
from lightning_ort.compiler.executors.ort.conversion.shape import filled

aten = torch.ops.aten

WRITTEN = "writing to a slice"


def _is_known(*arguments: Any) -> bool:
    return static([each for each in arguments if each is not None])


def _slice(x: fx.Node, dim: int, start: Any, end: Any, step: Any) -> tuple[int, int, int, int]:
    """The dimension as a positive number, its size, and the bounds of the slice as torch reads them."""
    axis, size = static_axis(x, dim, WRITTEN)
    bounds = [0 if start is None else start, size if end is None else end]
    # from the end if negative, then within the dimension
    *bounds, _ = static_sizes([*bounds, step], WRITTEN)
    first, last = (min(max(bound + size if bound < 0 else bound, 0), size) for bound in bounds)
    return axis, size, first, max(last, first)


def _entry(x: fx.Node, dim: int, index: Any) -> tuple[int, int, int]:
    """The dimension as a positive number, its size, and the index as a positive number."""
    axis, size = static_axis(x, dim, "writing to an entry")
    return axis, size, static_sizes([index], "writing to an entry")[0] % size


def _pad(value: Value, rank: int, axis: int, before: int, after: int) -> Value:
    """Add zeros along one dimension."""
    if before == 0 and after == 0:
        return value
    # all dimensions, not the `axes` input: onnxruntime's transpose optimizer (1.19) permutes the pads as if they were
    # all there ("indices element out of data bounds"); without a value it pads with zeros
    pads = [0] * (2 * rank)
    pads[axis], pads[rank + axis] = before, after
    return value.op("Pad", pads)


@converts(aten.slice_backward.default)
def slice_backward(
    ctx: GraphBuilder, node: fx.Node, grad: fx.Node, input_sizes: Any, dim: int, start: Any, end: Any, step: Any
) -> Value:
    """slice_backward(Tensor grad_output, SymInt[] input_sizes, int dim, SymInt start, SymInt end, SymInt step) -> Tensor"""  # noqa: E501
    value, rank, axis = ctx.value(grad), rank_of(grad), axis_of(dim, rank_of(node))
    whole = () if step == 1 else shape_of(grad)
    if not _is_known(shape_of(node)[axis], shape_of(grad)[axis], start, end, step, *whole):
        zeros = ctx.const(0, dtype_of(node)).expand(ctx.sizes(input_sizes))
        return ctx.write_slice(zeros, rank, axis, value.cast(dtype_of(node)), start, step)
    axis, size, first, _ = _slice(node, dim, start, end, step)
    _, length = static_axis(grad, axis, WRITTEN)
    if step != 1:  # zeros between the entries, by padding a dimension of 1 behind each
        spread = static_sizes(shape_of(grad), WRITTEN)
        spread[axis] = length * step
        length = min(length * step, size - first)
        value = _pad(value.unsqueeze(axis + 1), rank + 1, axis + 1, 0, step - 1)
        value = value.reshape(spread).op("Slice", [0], [length], [axis])
    return _pad(value, rank, axis, first, size - first - length)


@converts(aten.select_backward.default)
def select_backward(
    ctx: GraphBuilder, node: fx.Node, grad: fx.Node, input_sizes: Sequence[Any], dim: int, index: Any
) -> Value:
    """select_backward(Tensor grad_output, SymInt[] input_sizes, int dim, SymInt index) -> Tensor"""
    axis, rank = axis_of(dim, rank_of(node)), rank_of(node)
    value = ctx.value(grad).unsqueeze(axis)
    if not _is_known(shape_of(node)[axis], index):
        zeros = ctx.const(0, dtype_of(node)).expand(ctx.sizes(input_sizes))
        return ctx.write_slice(zeros, rank, axis, value.cast(dtype_of(node)), index)
    _, size, position = _entry(node, dim, index)
    return _pad(value, rank, axis, position, size - position - 1)


def _replace(x: Value, source: Value, axis: int, size: int, first: int, last: int) -> Value:
    """``x`` with the entries from ``first`` to ``last`` of a dimension replaced."""
    before = [x.op("Slice", [0], [first], [axis])] if first > 0 else []
    after = [x.op("Slice", [last], [size], [axis])] if last < size else []
    return x.ctx.op("Concat", *before, source, *after, axis=axis) if before or after else source


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
    value, source, axis = ctx.value(x), ctx.value(src, dtype_of(x)), axis_of(dim, rank_of(x))
    if not _is_known(shape_of(x)[axis], start, end, step):
        return ctx.write_slice(value, rank_of(x), axis, source, start, step)
    _, size, first, last = _slice(x, dim, start, end, step)
    if step == 1:
        return _replace(value, source, axis, size, first, last)
    rows = ctx.const([[position] for position in range(first, last, step)], torch.int64)
    return write_rows(value, rows, source, axis, rank_of(x))


@converts(aten.select_scatter.default)
def select_scatter(ctx: GraphBuilder, node: fx.Node, x: fx.Node, src: fx.Node, dim: int, index: Any) -> Value:
    """select_scatter(Tensor self, Tensor src, int dim, SymInt index) -> Tensor"""
    axis = axis_of(dim, rank_of(x))
    value, source = ctx.value(x), ctx.value(src, dtype_of(x)).unsqueeze(axis)
    if not _is_known(shape_of(x)[axis], index):
        return ctx.write_slice(value, rank_of(x), axis, source, index)
    _, size, position = _entry(x, dim, index)
    return _replace(value, source, axis, size, position, position + 1)


# diagonals and triangles


def _diagonal_places(x: fx.Node, offset: int, dim1: int, dim2: int) -> tuple[list[int], list[int], list[int]]:
    """How to bring both dimensions to the end, the shape with the two as one, and the places of the diagonal in it."""
    (row_axis, height), (column_axis, width) = (static_axis(x, dim, "a diagonal") for dim in (dim1, dim2))
    places = [row * width + row + offset for row in range(height) if 0 <= row + offset < width]
    if not places:
        raise Unsupported("a diagonal outside of its matrix")
    others = [dim for dim in range(rank_of(x)) if dim not in (row_axis, column_axis)]
    return [*others, row_axis, column_axis], [0] * len(others) + [height * width], places


@converts(aten.diagonal.default)
def diagonal(ctx: GraphBuilder, node: fx.Node, x: fx.Node, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Value:
    """diagonal(Tensor(a) self, int offset=0, int dim1=0, int dim2=1) -> Tensor(a)"""
    perm, flat, places = _diagonal_places(x, offset, dim1, dim2)
    return ctx.value(x).transpose(perm).reshape(flat).op("Gather", places, axis=-1)


@converts(aten.diagonal_scatter.default)
def diagonal_scatter(
    ctx: GraphBuilder, node: fx.Node, x: fx.Node, src: fx.Node, offset: int = 0, dim1: int = 0, dim2: int = 1
) -> Value:
    """diagonal_scatter(Tensor self, Tensor src, int offset=0, int dim1=0, int dim2=1) -> Tensor"""
    perm, flat, places = _diagonal_places(x, offset, dim1, dim2)
    moved, rows = ctx.value(x).transpose(perm), ctx.const([[place] for place in places], torch.int64)
    written = write_rows(moved.reshape(flat), rows, ctx.value(src, dtype_of(x)), len(flat) - 1, len(flat))
    return written.reshape(moved.op("Shape")).transpose(inverse(perm))


@converts(aten.tril.default, aten.triu.default)
def tril(ctx: GraphBuilder, node: fx.Node, x: fx.Node, diagonal: Any = 0) -> Value:
    """tril(Tensor self, SymInt diagonal=0) -> Tensor"""
    return ctx.value(x).op("Trilu", ctx.value(diagonal, torch.int64), upper=int(node.target is aten.triu.default))


# windows


_MAX_PLACES = 1 << 20  # in a list in the model


def _windows(x: fx.Node, dim: int, width: int, step: int) -> tuple[int, list[list[int]]]:
    """The dimension as a positive number, and the positions of each window along it."""
    refuse_scalars("windows", x)
    axis, size = static_axis(x, dim, "windows")
    if max(0, size - width + step) // step * width > _MAX_PLACES:
        raise Unsupported("many windows, which are a view in torch")
    return axis, [list(range(first, first + width)) for first in range(0, size - width + 1, step)]


@converts(aten.unfold.default)
def unfold(ctx: GraphBuilder, node: fx.Node, x: fx.Node, dimension: int, size: int, step: int) -> Value:
    """unfold(Tensor(a) self, int dimension, int size, int step) -> Tensor(a)"""
    axis, windows = _windows(x, dimension, size, step)
    gathered = ctx.value(x).op("Gather", windows, axis=axis)  # the windows' entries right behind the windows
    return gathered.transpose([dim for dim in range(rank_of(x) + 1) if dim != axis + 1] + [axis + 1])


@converts(aten.unfold_backward.default)
def unfold_backward(
    ctx: GraphBuilder, node: fx.Node, grad: fx.Node, input_sizes: Sequence[Any], dim: int, size: int, step: int
) -> Value:
    """unfold_backward(Tensor grad_in, SymInt[] input_sizes, int dim, int size, int step) -> Tensor"""
    axis, windows = _windows(node, dim, size, step)
    rank, places = rank_of(node), ctx.const(windows, torch.int64)
    perm = front([axis], rank)
    # from [..., windows, ..., entries] to [windows, entries, ...]
    updates = ctx.value(grad).transpose([axis, rank, *perm[1:]])
    zeros = filled(ctx, ctx.sizes([input_sizes[dim] for dim in perm]), 0, dtype_of(node))
    if step < size:
        found = ctx.sum_at(zeros, [places], updates, rank, shape_of(grad), "the gradient of overlapping windows")
    else:
        found = zeros.op("ScatterND", ctx.rows([places]), updates)
    return found.transpose(inverse(perm))
