"""Reading and writing by index: gather, scatter and their kin; slices that are written to, diagonals, triangles."""

import functools
import math
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from lightning_ort.compiler.executors.ort.conversion.elementary import where
from lightning_ort.compiler.executors.ort.conversion.graph import GraphBuilder, Value
from lightning_ort.compiler.executors.ort.conversion.metadata import (
    Arg,
    Scalar,
    axis_of,
    dtype_of,
    front,
    inverse,
    rank_of,
    refuse_scalars,
    same_shape,
    shape_of,
    static,
    static_axis,
)
from lightning_ort.compiler.executors.ort.conversion.registry import Unsupported, converts
from lightning_ort.compiler.executors.ort.conversion.shape import filled

aten = torch.ops.aten

Indices = Sequence[fx.Node | None]


def refusing_negative(ctx: GraphBuilder, index: fx.Node | Value, x: fx.Node, dim: int) -> Value:
    """The index along a dimension of ``x`` with its negative entries out of range.

    ONNX counts them from the end. To torch they are errors; with this both refuse them. Not on a GPU, whose kernels
    would read and write out of range.
    """
    places, axis = ctx.value(index, torch.int64), axis_of(dim, rank_of(x))
    if not ctx.on_cpu:
        return places
    size = shape_of(x)[axis]
    # a scalar, so that the index of one row stays one
    beyond = ctx.ints(size) if isinstance(size, int) else ctx.value(x).op("Shape", start=axis, end=axis + 1).squeeze(0)
    return where(places < 0, beyond, places)


# reading


def index_tensors(x: fx.Node, indices: Indices) -> tuple[list[int], list[fx.Node]]:
    """The dimensions of ``x`` that are indexed, and the index tensors."""
    given = [(dim, index) for dim, index in enumerate(indices) if index is not None]
    if not given:
        raise Unsupported("an index without index tensors")
    if any(dtype_of(index) in (torch.bool, torch.uint8) for _, index in given):
        raise Unsupported("a boolean mask as index: the size of the result depends on the data")
    return [dim for dim, _ in given], [index for _, index in given]


def _broadcast(ctx: GraphBuilder, indices: Sequence[fx.Node]) -> list[Value]:
    """The index tensors, broadcast against each other."""
    values = [ctx.value(index, torch.int64) for index in indices]
    if not all(same_shape(index, indices[0]) for index in indices):
        # the shape that all broadcast to is that of their sum
        total = functools.reduce(operator.add, values)
        values = [value.expand(total.op("Shape")) for value in values]
    return values


@converts(aten.index.Tensor, aten._unsafe_index.Tensor)
def index(ctx: GraphBuilder, node: fx.Node, x: fx.Node, indices: Indices) -> Value:
    """index.Tensor(Tensor self, Tensor?[] indices) -> Tensor"""
    (dims, tensors), rank = index_tensors(x, indices), rank_of(x)
    if len(dims) == 1:
        return ctx.value(x).op("Gather", ctx.value(tensors[0], torch.int64), axis=dims[0])
    rows = ctx.rows(_broadcast(ctx, tensors))
    result = ctx.value(x).transpose(front(dims, rank)).op("GatherND", rows)
    return result.transpose(result_order(dims, rank, rank_of(node) - (rank - len(dims))))


def result_order(dims: Sequence[int], rank: int, added: int) -> list[int]:
    """The permutation of a result with the ``added`` index dimensions first to where torch has them."""
    first, total = dims[0], rank - len(dims) + added
    if list(dims) != list(range(first, first + len(dims))):
        return list(range(total))  # torch has them first too where the index tensors are apart
    return [*range(added, added + first), *range(added), *range(added + first, total)]


@converts(aten.index_select.default)
def index_select(ctx: GraphBuilder, node: fx.Node, x: fx.Node, dim: int, index: fx.Node) -> Value:
    """index_select(Tensor self, int dim, Tensor index) -> Tensor"""
    refuse_scalars("index_select", x, index)
    return ctx.value(x).op("Gather", refusing_negative(ctx, index, x, dim), axis=dim)


@converts(aten.gather.default)
def gather(
    ctx: GraphBuilder, node: fx.Node, x: fx.Node, dim: int, index: fx.Node, *, sparse_grad: bool = False
) -> Value:
    """gather(Tensor self, int dim, Tensor index, *, bool sparse_grad=False) -> Tensor"""
    return ctx.value(x).op("GatherElements", _places(ctx, "gather", x, dim, index), axis=dim)


def _places(ctx: GraphBuilder, name: str, x: fx.Node, dim: int, index: fx.Node) -> Value:
    """An index with as many dimensions as ``x``."""
    refuse_scalars(name, x, index)
    if rank_of(x) != rank_of(index):  # torch lets it pass where the index is empty
        raise Unsupported(f"{name} by an index of another rank")
    return refusing_negative(ctx, index, x, dim)


# writing


def _source_like_index(ctx: GraphBuilder, source: fx.Node, index: fx.Node, dtype: torch.dtype) -> Value:
    """The part of the source that the index names; torch lets it be larger, ONNX does not."""
    value, rank = ctx.value(source, dtype), rank_of(index)
    if same_shape(source, index):
        return value
    return value.op("Slice", [0] * rank, ctx.shape_tensor(index), list(range(rank)))


@converts(aten.scatter.src, aten.scatter_add.default)
def scatter(ctx: GraphBuilder, node: fx.Node, x: fx.Node, dim: int, index: fx.Node, src: fx.Node) -> Value:
    """scatter.src(Tensor self, int dim, Tensor index, Tensor src) -> Tensor"""
    places, source = _places(ctx, "scatter", x, dim, index), _source_like_index(ctx, src, index, dtype_of(x))
    reduction = "add" if node.target is aten.scatter_add.default else None
    return ctx.value(x).op("ScatterElements", places, source, axis=dim, reduction=reduction)


@converts(aten.scatter.value)
def scatter_value(ctx: GraphBuilder, node: fx.Node, x: fx.Node, dim: int, index: fx.Node, value: Scalar) -> Value:
    """scatter.value(Tensor self, int dim, Tensor index, Scalar value) -> Tensor"""
    places, source = _places(ctx, "scatter", x, dim, index), ctx.value(value, dtype_of(x))
    return ctx.value(x).op("ScatterElements", places, source.expand(ctx.shape_tensor(index)), axis=dim)


# how ONNX calls scatter_reduce's reductions, and the number that each starts from
_REDUCTIONS: dict[str, tuple[str, float]] = {
    "sum": ("add", 0),
    "mean": ("add", 0),
    "prod": ("mul", 1),
    "amax": ("max", -math.inf),
    "amin": ("min", math.inf),
}


@converts(aten.scatter_reduce.two)
def scatter_reduce(
    ctx: GraphBuilder,
    node: fx.Node,
    x: fx.Node,
    dim: int,
    index: fx.Node,
    src: fx.Node,
    reduce: str,
    *,
    include_self: bool = True,
) -> Value:
    """scatter_reduce.two(Tensor self, int dim, Tensor index, Tensor src, str reduce, *, bool include_self=True) -> Tensor"""  # noqa: E501
    base, dtype = ctx.value(x), dtype_of(x)
    if not dtype.is_floating_point:
        raise Unsupported(f"scatter_reduce of {dtype}")
    onnx_reduction, start = _REDUCTIONS[reduce]
    places, source = _places(ctx, "scatter_reduce", x, dim, index), _source_like_index(ctx, src, index, dtype)

    def scatter_to(target: Value, updates: Value, reduction: str | None) -> Value:
        return target.op("ScatterElements", places, updates, axis=dim, reduction=reduction)

    def everywhere(number: float) -> Value:
        return ctx.const(number, dtype).expand(ctx.shape_tensor(index))

    if not include_self:
        base = scatter_to(base, everywhere(start), None)
    result = scatter_to(base, source, onnx_reduction)
    if reduce == "mean":
        counts = ctx.const(1, dtype).expand(ctx.shape_tensor(x))
        if not include_self:
            counts = scatter_to(counts, everywhere(0), None)
        return result / scatter_to(counts, everywhere(1), "add")
    if reduce in ("amax", "amin"):
        # torch propagates a NaN, onnxruntime 1.19 only if it comes last
        has_nan = scatter_to(base.is_nan().cast(dtype), source.is_nan().cast(dtype), "max").cast(torch.bool)
        result = where(has_nan, math.nan, result)
    return result


@converts(aten.masked_scatter.default)
def masked_scatter(ctx: GraphBuilder, node: fx.Node, x: fx.Node, mask: fx.Node, source: fx.Node) -> Value:
    """masked_scatter(Tensor self, Tensor mask, Tensor source) -> Tensor"""
    if not same_shape(x, node):
        raise Unsupported("masked_scatter that broadcasts")
    chosen = ctx.value(mask, torch.bool)
    if not same_shape(mask, x):
        chosen = chosen.expand(ctx.shape_tensor(x))
    # the n-th chosen place takes the n-th entry of the source; too short a source is an error, as in torch
    counts = chosen.reshape([-1]).cast(torch.int64).op("CumSum", 0)
    taken = ctx.value(source).reshape([-1]).op("Gather", (counts - 1).max(0), axis=0)
    return where(chosen, taken.reshape(ctx.shape_tensor(x)), ctx.value(x))


@converts(aten.index_put.default, aten._unsafe_index_put.default)
def index_put(
    ctx: GraphBuilder, node: fx.Node, x: fx.Node, indices: Indices, values: fx.Node, accumulate: bool = False
) -> Value:
    """index_put(Tensor self, Tensor?[] indices, Tensor values, bool accumulate=False) -> Tensor"""
    mask = indices[0] if len(indices) == 1 else None
    if mask is not None and dtype_of(mask) in (torch.bool, torch.uint8) and not accumulate and rank_of(values) == 0:
        chosen, beside = ctx.value(mask, torch.bool), range(rank_of(mask), rank_of(x))
        return where(chosen.unsqueeze(*beside) if beside else chosen, ctx.value(values, dtype_of(x)), ctx.value(x))
    (dims, tensors), rank = index_tensors(x, indices), rank_of(x)
    places = _broadcast(ctx, tensors)
    added = max(rank_of(tensor) for tensor in tensors)
    # ScatterND writes to the first dimensions: bring the indexed ones there, in the values too
    perm, back = front(dims, rank), result_order(dims, rank, added)
    moved = ctx.value(x).transpose(perm)
    # the shape of the values with the indexed dimensions first
    shape = ctx.op("Concat", places[0].op("Shape"), moved.op("Shape", start=len(dims)), axis=0)
    if back != list(range(len(back))):
        shape = shape.op("Gather", back)
    updates = ctx.value(values, dtype_of(x)).expand(shape).transpose(inverse(back))
    if accumulate:
        summands = [*torch.broadcast_shapes(*map(shape_of, tensors)), *(shape_of(x)[dim] for dim in perm[len(dims) :])]
        written = ctx.sum_at(moved, places, updates, rank, summands, "index_put that adds up")
    else:
        written = moved.op("ScatterND", ctx.rows(places), updates)
    return written.transpose(inverse(perm))


@converts(aten.index_add.default, aten.index_copy.default)
def index_add(
    ctx: GraphBuilder, node: fx.Node, x: fx.Node, dim: int, index: fx.Node, source: fx.Node, *, alpha: Scalar = 1
) -> Value:
    """index_add(Tensor self, int dim, Tensor index, Tensor source, *, Scalar alpha=1) -> Tensor"""
    # torch's decomposition of index_copy is an index_put, to which a negative index is no error
    refuse_scalars(str(node.target), x, index, source)
    updates = ctx.value(source, dtype_of(x))
    if alpha != 1:
        updates = updates * alpha
    rows, rank = refusing_negative(ctx, index, x, dim), rank_of(x)
    axis = axis_of(dim, rank)
    if node.target is not aten.index_add.default:
        return write_rows(ctx.value(x), rows.unsqueeze(1), updates, axis, rank)
    perm = front([axis], rank)
    moved = ctx.value(x).transpose(perm)
    return ctx.sum_at(moved, [rows], updates.transpose(perm), rank, shape_of(source), "index_add").transpose(
        inverse(perm)
    )


def write_rows(x: Value, rows: Value, updates: Value, axis: int, rank: int) -> Value:
    """Write to the entries of one dimension that ``rows`` [k, 1] lists."""
    perm = front([axis], rank)
    return x.transpose(perm).op("ScatterND", rows, updates.transpose(perm)).transpose(inverse(perm))


@converts(aten.index_fill.int_Scalar, aten.index_fill.int_Tensor)
def index_fill(ctx: GraphBuilder, node: fx.Node, x: fx.Node, dim: int, index: fx.Node, value: Arg) -> Value:
    """index_fill.int_Scalar(Tensor self, int dim, Tensor index, Scalar value) -> Tensor"""
    # a negative index counts from the end here
    refuse_scalars("index_fill", x)
    dtype, size = dtype_of(x), shape_of(x)[dim]
    if dtype is torch.bool or not isinstance(size, int):
        raise Unsupported("index_fill of booleans, or along a symbolic size")
    rows = ctx.value(index, torch.int64).reshape([-1, 1])
    ones = ctx.const(1, torch.float32).expand(rows.op("Shape", end=1))
    written = filled(ctx, ctx.ints([size]), 0, torch.float32).op("ScatterND", rows, ones)
    chosen = written.unsqueeze(*range(1, rank_of(x) - axis_of(dim, rank_of(x)))).cast(torch.bool)
    return where(chosen, value, ctx.value(x))


# slices that are written to


def _is_known(*arguments: Any) -> bool:
    return static([each for each in arguments if each is not None])


def _first(size: Any, start: Any) -> int:
    """Where a slice of a dimension begins, as torch reads it: from the end if negative, then within the dimension."""
    start = start or 0
    return min(max(start + size if start < 0 else start, 0), size)


def _pad(value: Value, rank: int, axis: int, before: int, after: int) -> Value:
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
    return _among_zeros(ctx, node, ctx.value(grad), shape_of(grad), axis_of(dim, rank_of(node)), start, step)


@converts(aten.select_backward.default)
def select_backward(
    ctx: GraphBuilder, node: fx.Node, grad: fx.Node, input_sizes: Sequence[Any], dim: int, index: Any
) -> Value:
    """select_backward(Tensor grad_output, SymInt[] input_sizes, int dim, SymInt index) -> Tensor"""
    axis, sizes = axis_of(dim, rank_of(node)), shape_of(grad)
    return _among_zeros(ctx, node, ctx.value(grad).unsqueeze(axis), [*sizes[:axis], 1, *sizes[axis:]], axis, index)


def _among_zeros(
    ctx: GraphBuilder, node: fx.Node, value: Value, sizes: Sequence[Any], axis: int, start: Any, step: Any = 1
) -> Value:
    """A slice of these sizes in a tensor of zeros, the result of ``node``, whose second argument is its shape."""
    rank, size, length = len(sizes), shape_of(node)[axis], sizes[axis]
    if not _is_known(size, start, step, *([length] if step == 1 else sizes)):
        zeros = ctx.const(0, dtype_of(node)).expand(ctx.sizes(node.args[1]))  # type: ignore[arg-type]
        return ctx.write_slice(zeros, rank, axis, value.cast(dtype_of(node)), start, step)
    first = _first(size, start)
    if step != 1:  # zeros between the entries, by padding a dimension of 1 behind each
        spread = [*sizes[:axis], length * step, *sizes[axis + 1 :]]
        length = min(length * step, size - first)
        value = _pad(value.unsqueeze(axis + 1), rank + 1, axis + 1, 0, step - 1)
        value = value.reshape(spread).op("Slice", [0], [length], [axis])
    return _pad(value, rank, axis, first, size - first - length)


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
    axis = axis_of(dim, rank_of(x))
    return _replaced(ctx, x, ctx.value(src, dtype_of(x)), shape_of(src)[axis], axis, start, step)


@converts(aten.select_scatter.default)
def select_scatter(ctx: GraphBuilder, node: fx.Node, x: fx.Node, src: fx.Node, dim: int, index: Any) -> Value:
    """select_scatter(Tensor self, Tensor src, int dim, SymInt index) -> Tensor"""
    axis = axis_of(dim, rank_of(x))
    return _replaced(ctx, x, ctx.value(src, dtype_of(x)).unsqueeze(axis), 1, axis, index)


def _replaced(ctx: GraphBuilder, x: fx.Node, source: Value, length: Any, axis: int, start: Any, step: Any = 1) -> Value:
    """A tensor with ``length`` entries of a dimension replaced."""
    value, size = ctx.value(x), shape_of(x)[axis]
    if not _is_known(size, length, start, step):
        return ctx.write_slice(value, rank_of(x), axis, source, start, step)
    first = _first(size, start)
    if step != 1:
        rows = ctx.const([[first + number * step] for number in range(length)], torch.int64)
        return write_rows(value, rows, source, axis, rank_of(x))
    before = [value.op("Slice", [0], [first], [axis])] if first > 0 else []
    after = [value.op("Slice", [first + length], [size], [axis])] if first + length < size else []
    return ctx.op("Concat", *before, source, *after, axis=axis) if before or after else source


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
