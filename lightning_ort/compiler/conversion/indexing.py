"""Reading and writing by index: gather, scatter, slices written to, triangles."""

import functools
import math
from collections.abc import Sequence
from typing import Any

import onnx_ir as ir
import torch
from torch import fx

from lightning_ort.compiler.conversion.graph import (
    GraphBuilder,
    Scalar,
    dtype_of,
    rank_of,
    same_shape,
    shape_of,
    static,
)
from lightning_ort.compiler.conversion.registry import EXPANDED, Unsupported, converts
from lightning_ort.compiler.report import ReasonType

aten = torch.ops.aten

Indices = Sequence[fx.Node | None]


def refusing_negative(ctx: GraphBuilder, index: ir.Value, x: fx.Node, dim: int) -> ir.Value:
    """The index along a dimension of ``x`` with its negative entries out of range.

    ONNX counts them from the end, torch takes them for the errors that they are; now both refuse them.
    """
    axis = dim % rank_of(x)
    size = shape_of(x)[axis]
    if isinstance(size, int):
        beyond = ctx.const(size, torch.int64)
    else:
        beyond = ctx.op("Shape", ctx.value(x), start=axis, end=axis + 1)
    return ctx.op("Where", ctx.op("Less", index, ctx.const(0, torch.int64)), beyond, index)


# reading


def _indexed_dims(x: fx.Node, indices: Indices) -> list[int]:
    """Which dimensions of ``x`` the index tensors are for."""
    dims = [dim for dim, index in enumerate(indices) if index is not None]
    for dim in dims:
        index = indices[dim]
        if dtype_of(index) in (torch.bool, torch.uint8):  # type: ignore[arg-type]
            raise Unsupported("a boolean mask as index: the size of the result depends on the data")
    if not dims:
        raise Unsupported("an index without index tensors")
    return dims


def _front(dims: Sequence[int], rank: int) -> list[int]:
    """The permutation that brings ``dims`` to the front."""
    return [*dims, *(dim for dim in range(rank) if dim not in dims)]


def _inverse(perm: Sequence[int]) -> list[int]:
    return [list(perm).index(dim) for dim in range(len(perm))]


def _index_rows(ctx: GraphBuilder, indices: Sequence[fx.Node]) -> ir.Value:
    """The index tensors, broadcast against each other, as the rows [..., k] that GatherND and ScatterND take."""
    values = [ctx.value(index, torch.int64) for index in indices]
    rank = max(rank_of(index) for index in indices)
    if not all(same_shape(index, indices[0]) for index in indices):
        # the shape that all broadcast to is that of their sum
        total = functools.reduce(lambda a, b: ctx.op("Add", a, b), values)
        values = [ctx.op("Expand", value, ctx.op("Shape", total)) for value in values]
    rows = [ctx.op("Unsqueeze", value, ctx.ints([rank])) for value in values]
    return rows[0] if len(rows) == 1 else ctx.op("Concat", *rows, axis=rank)


@converts(aten.index.Tensor, aten._unsafe_index.Tensor)
def index(ctx: GraphBuilder, node: fx.Node, x: fx.Node, indices: Indices) -> ir.Value:
    """index.Tensor(Tensor self, Tensor?[] indices) -> Tensor"""
    dims, rank = _indexed_dims(x, indices), rank_of(x)
    tensors = [indices[dim] for dim in dims]
    if len(dims) == 1:
        return ctx.op("Gather", ctx.value(x), ctx.value(tensors[0], torch.int64), axis=dims[0])  # type: ignore[arg-type]
    rows = _index_rows(ctx, tensors)  # type: ignore[arg-type]
    result = ctx.op("GatherND", ctx.transpose(ctx.value(x), _front(dims, rank)), rows)
    return ctx.transpose(result, _result_order(dims, rank, rank_of(node) - (rank - len(dims))))


def _result_order(dims: Sequence[int], rank: int, added: int) -> list[int]:
    """The permutation of a result with the ``added`` index dimensions first to where torch has them."""
    first, total = dims[0], rank - len(dims) + added
    if list(dims) != list(range(first, first + len(dims))):
        return list(range(total))  # torch too has them first where the index tensors are apart
    return [*range(added, added + first), *range(added), *range(added + first, total)]


@converts(aten.index_select.default)
def index_select(ctx: GraphBuilder, node: fx.Node, x: fx.Node, dim: int, index: fx.Node) -> ir.Value:
    """index_select(Tensor self, int dim, Tensor index) -> Tensor"""
    if rank_of(x) == 0 or rank_of(index) == 0:
        raise Unsupported("index_select of or by a scalar")
    rows = refusing_negative(ctx, ctx.value(index, torch.int64), x, dim)
    return ctx.op("Gather", ctx.value(x), rows, axis=dim)


@converts(aten.gather.default)
def gather(
    ctx: GraphBuilder, node: fx.Node, x: fx.Node, dim: int, index: fx.Node, *, sparse_grad: bool = False
) -> ir.Value:
    """gather(Tensor self, int dim, Tensor index, *, bool sparse_grad=False) -> Tensor"""
    _check_ranks("gather", x, index)
    places = refusing_negative(ctx, ctx.value(index, torch.int64), x, dim)
    return ctx.op("GatherElements", ctx.value(x), places, axis=dim)


def _refuse_scalars(name: str, *nodes: fx.Node) -> None:
    if any(rank_of(node) == 0 for node in nodes):
        raise Unsupported(f"{name} on a scalar")


def _check_ranks(name: str, x: fx.Node, index: fx.Node) -> None:
    _refuse_scalars(name, x, index)
    if rank_of(x) != rank_of(index):  # torch lets it pass where the index is empty
        raise Unsupported(f"{name} by an index of another rank")


# writing


def _scatter(
    ctx: GraphBuilder, x: fx.Node, dim: int, index: fx.Node, source: ir.Value, reduction: str | None
) -> ir.Value:
    places = refusing_negative(ctx, ctx.value(index, torch.int64), x, dim)
    return ctx.op("ScatterElements", ctx.value(x), places, source, axis=dim, reduction=reduction)


def _source_like_index(ctx: GraphBuilder, source: fx.Node, index: fx.Node, dtype: torch.dtype) -> ir.Value:
    """The part of the source that the index names; torch lets it be larger, ONNX does not."""
    value = ctx.value(source, dtype)
    if same_shape(source, index):
        return value
    rank = rank_of(index)
    return ctx.op("Slice", value, ctx.ints([0] * rank), ctx.shape_tensor(index), ctx.ints(list(range(rank))))


@converts(aten.scatter.src)
def scatter(ctx: GraphBuilder, node: fx.Node, x: fx.Node, dim: int, index: fx.Node, src: fx.Node) -> ir.Value:
    """scatter.src(Tensor self, int dim, Tensor index, Tensor src) -> Tensor"""
    _check_ranks("scatter", x, index)
    return _scatter(ctx, x, dim, index, _source_like_index(ctx, src, index, dtype_of(x)), None)


@converts(aten.scatter.value)
def scatter_value(ctx: GraphBuilder, node: fx.Node, x: fx.Node, dim: int, index: fx.Node, value: Scalar) -> ir.Value:
    """scatter.value(Tensor self, int dim, Tensor index, Scalar value) -> Tensor"""
    _check_ranks("scatter", x, index)
    return _scatter(ctx, x, dim, index, ctx.op("Expand", ctx.value(value, dtype_of(x)), ctx.shape_tensor(index)), None)


@converts(aten.scatter_add.default)
def scatter_add(ctx: GraphBuilder, node: fx.Node, x: fx.Node, dim: int, index: fx.Node, src: fx.Node) -> ir.Value:
    """scatter_add(Tensor self, int dim, Tensor index, Tensor src) -> Tensor"""
    _check_ranks("scatter_add", x, index)
    return _scatter(ctx, x, dim, index, _source_like_index(ctx, src, index, dtype_of(x)), "add")


# how scatter_reduce's reductions are called in ONNX, and what each starts from
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
) -> ir.Value:
    """scatter_reduce.two(Tensor self, int dim, Tensor index, Tensor src, str reduce, *, bool include_self=True) -> Tensor"""  # noqa: E501
    _check_ranks("scatter_reduce", x, index)
    dtype = dtype_of(x)
    if not dtype.is_floating_point:
        raise Unsupported(f"scatter_reduce of {dtype}")
    onnx_reduction, start = _REDUCTIONS[reduce]
    ids = refusing_negative(ctx, ctx.value(index, torch.int64), x, dim)
    base, source = ctx.value(x), _source_like_index(ctx, src, index, dtype)

    def scatter_to(target: ir.Value, updates: ir.Value, reduction: str | None) -> ir.Value:
        return ctx.op("ScatterElements", target, ids, updates, axis=dim, reduction=reduction)

    def everywhere(number: float) -> ir.Value:
        return ctx.op("Expand", ctx.const(number, dtype), ctx.shape_tensor(index))

    if not include_self:
        base = scatter_to(base, everywhere(start), None)
    result = scatter_to(base, source, onnx_reduction)
    if reduce == "mean":
        counts = ctx.op("Expand", ctx.const(1, dtype), ctx.shape_tensor(x))
        if not include_self:
            counts = scatter_to(counts, everywhere(0), None)
        return ctx.op("Div", result, scatter_to(counts, everywhere(1), "add"))
    if reduce in ("amax", "amin"):
        # torch hands a NaN on, onnxruntime 1.19 only where it meets it last
        before, written = (ctx.cast(ctx.op("IsNaN", value), dtype) for value in (base, source))
        poisoned = ctx.cast(scatter_to(before, written, "max"), torch.bool)
        result = ctx.op("Where", poisoned, ctx.const(math.nan, dtype), result)
    return result


@converts(aten.masked_scatter.default)
def masked_scatter(ctx: GraphBuilder, node: fx.Node, x: fx.Node, mask: fx.Node, source: fx.Node) -> ir.Value:
    """masked_scatter(Tensor self, Tensor mask, Tensor source) -> Tensor"""
    if not same_shape(x, node) or any(size == 0 for size in (*shape_of(x), *shape_of(source))):
        raise Unsupported("masked_scatter that broadcasts, or of an empty tensor")
    chosen = ctx.value(mask, torch.bool)
    if not same_shape(mask, x):
        chosen = ctx.op("Expand", chosen, ctx.shape_tensor(x))
    flat = ctx.ints([-1])
    # the n-th chosen place takes the n-th entry of the source; too short a source is an error, as in torch
    counts = ctx.op("CumSum", ctx.cast(ctx.op("Reshape", chosen, flat), torch.int64), ctx.ints(0))
    places = ctx.op("Max", ctx.op("Sub", counts, ctx.ints(1)), ctx.ints(0))
    taken = ctx.op("Gather", ctx.op("Reshape", ctx.value(source), flat), places, axis=0)
    return ctx.op("Where", chosen, ctx.op("Reshape", taken, ctx.shape_tensor(x)), ctx.value(x))


@converts(aten.index_put.default, aten._unsafe_index_put.default)
def index_put(
    ctx: GraphBuilder, node: fx.Node, x: fx.Node, indices: Indices, values: fx.Node, accumulate: bool = False
) -> ir.Value:
    """index_put(Tensor self, Tensor?[] indices, Tensor values, bool accumulate=False) -> Tensor"""
    dims, rank = _indexed_dims(x, indices), rank_of(x)
    tensors = [indices[dim] for dim in dims]
    rows = _index_rows(ctx, tensors)  # type: ignore[arg-type]
    added = max(rank_of(tensor) for tensor in tensors)  # type: ignore[arg-type]
    # ScatterND writes to the first dimensions: bring the indexed ones there, in the values too
    front, back = _front(dims, rank), _result_order(dims, rank, added)
    moved = ctx.transpose(ctx.value(x), front)
    parts = [ctx.op("Shape", rows, end=added), ctx.op("Shape", moved, start=len(dims))]
    shape = ctx.op("Concat", *parts, axis=0)  # of the values with the indexed dimensions first
    updates = ctx.value(values, dtype_of(x))
    if back != list(range(len(back))):
        shape = ctx.op("Gather", shape, ctx.ints(back))
    updates = ctx.transpose(ctx.op("Expand", updates, shape), _inverse(back))
    written = ctx.op("ScatterND", moved, rows, updates, reduction="add" if accumulate else None)
    return ctx.transpose(written, _inverse(front))


@converts(aten.index_add.default)
def index_add(
    ctx: GraphBuilder, node: fx.Node, x: fx.Node, dim: int, index: fx.Node, source: fx.Node, *, alpha: Scalar = 1
) -> ir.Value:
    """index_add(Tensor self, int dim, Tensor index, Tensor source, *, Scalar alpha=1) -> Tensor"""
    _refuse_scalars("index_add", x, index, source)
    dtype = dtype_of(x)
    updates = ctx.value(source, dtype)
    if alpha != 1:
        updates = ctx.op("Mul", updates, ctx.value(alpha, dtype))
    return _write_rows(ctx, ctx.value(x), _rows(ctx, index, x, dim), updates, dim % rank_of(x), rank_of(x), "add")


@converts(aten.index_copy.default)
def index_copy(ctx: GraphBuilder, node: fx.Node, x: fx.Node, dim: int, index: fx.Node, source: fx.Node) -> ir.Value:
    """index_copy(Tensor self, int dim, Tensor index, Tensor source) -> Tensor"""
    # torch's decomposition is an index_put, to which a negative index is none of its errors
    _refuse_scalars("index_copy", x, index, source)
    updates = ctx.value(source, dtype_of(x))
    return _write_rows(ctx, ctx.value(x), _rows(ctx, index, x, dim), updates, dim % rank_of(x), rank_of(x), None)


def _rows(ctx: GraphBuilder, index: fx.Node, x: fx.Node, dim: int) -> ir.Value:
    """The index [k] of entries of a dimension of ``x`` as the rows [k, 1] that ScatterND takes."""
    return ctx.op("Unsqueeze", refusing_negative(ctx, ctx.value(index, torch.int64), x, dim), ctx.ints([1]))


def _write_rows(
    ctx: GraphBuilder, x: ir.Value, rows: ir.Value, updates: ir.Value, axis: int, rank: int, reduction: str | None
) -> ir.Value:
    """Write to the entries of one dimension that ``rows`` [k, 1] lists."""
    perm = _front([axis], rank)
    moved, updates = ctx.transpose(x, perm), ctx.transpose(updates, perm)
    return ctx.transpose(ctx.op("ScatterND", moved, rows, updates, reduction=reduction), _inverse(perm))


@converts(aten.embedding_dense_backward.default, forms=(EXPANDED,))
def embedding_dense_backward(
    ctx: GraphBuilder,
    node: fx.Node,
    grad: fx.Node,
    indices: fx.Node,
    num_weights: Any,
    padding_idx: Any,
    scale_grad_by_freq: bool,
) -> ir.Value:
    """embedding_dense_backward(Tensor grad_output, Tensor indices, SymInt num_weights, SymInt padding_idx, bool scale_grad_by_freq) -> Tensor"""  # noqa: E501
    if isinstance(padding_idx, fx.Node):
        raise Unsupported("a symbolic padding_idx")
    if scale_grad_by_freq:
        raise Unsupported("embedding gradient scaled by frequency")
    shape = shape_of(node)
    if not static(shape):
        raise Unsupported("the gradient of an embedding of symbolic size", ReasonType.DYNAMIC_SHAPE)
    dtype = dtype_of(node)
    ids, grads = ctx.value(indices, torch.int64), ctx.value(grad)  # the forward pass has refused negative ones
    if padding_idx >= 0:
        is_padding = ctx.op("Equal", ids, ctx.const(padding_idx, torch.int64))
        grads = ctx.op("Where", ctx.op("Unsqueeze", is_padding, ctx.ints([-1])), ctx.const(0, dtype), grads)
    zeros = zeros_of(ctx, ctx.ints([int(size) for size in shape]), dtype)
    rows = ctx.op("Unsqueeze", ids, ctx.ints([-1]))
    return ctx.op("ScatterND", zeros, rows, grads, reduction="add")


def zeros_of(ctx: GraphBuilder, shape: ir.Value, dtype: torch.dtype) -> ir.Value:
    """Zeros of a shape that is a 1-D int64 value."""
    return ctx.op("ConstantOfShape", shape, value=ir.tensor(ctx.const([0], dtype).const_value.numpy()))  # type: ignore[union-attr]


# slices


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


def _pad(ctx: GraphBuilder, value: ir.Value, rank: int, axis: int, before: int, after: int) -> ir.Value:
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
) -> ir.Value:
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
) -> ir.Value:
    """select_backward(Tensor grad_output, SymInt[] input_sizes, int dim, SymInt index) -> Tensor"""
    axis = dim % rank_of(node)
    size = shape_of(node)[axis]
    if not isinstance(size, int) or not isinstance(index, int):
        raise Unsupported("writing to an entry of a symbolic size", ReasonType.DYNAMIC_SHAPE)
    position = index % size
    value = ctx.op("Unsqueeze", ctx.value(grad), ctx.ints([axis]))
    return _pad(ctx, value, rank_of(node), axis, position, size - position - 1)


def _replace(ctx: GraphBuilder, x: ir.Value, source: ir.Value, axis: int, size: int, first: int, last: int) -> ir.Value:
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
) -> ir.Value:
    """slice_scatter(Tensor self, Tensor src, int dim=0, SymInt? start=None, SymInt? end=None, SymInt step=1) -> Tensor"""  # noqa: E501
    axis, size, first, last = _static_slice(shape_of(x), dim, start, end, step)
    if step != 1:
        rows = ctx.const([[position] for position in range(first, last, step)], torch.int64)
        return _write_rows(ctx, ctx.value(x), rows, ctx.value(src, dtype_of(x)), axis, rank_of(x), None)
    return _replace(ctx, ctx.value(x), ctx.value(src, dtype_of(x)), axis, size, first, last)


@converts(aten.select_scatter.default)
def select_scatter(ctx: GraphBuilder, node: fx.Node, x: fx.Node, src: fx.Node, dim: int, index: Any) -> ir.Value:
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
def diagonal(ctx: GraphBuilder, node: fx.Node, x: fx.Node, offset: int = 0, dim1: int = 0, dim2: int = 1) -> ir.Value:
    """diagonal(Tensor(a) self, int offset=0, int dim1=0, int dim2=1) -> Tensor(a)"""
    perm, places, size = _diagonal_places(x, offset, dim1, dim2)
    flat = ctx.op("Reshape", ctx.transpose(ctx.value(x), perm), ctx.ints([0] * (len(perm) - 2) + [size]))
    return ctx.op("Gather", flat, ctx.ints(places), axis=-1)


@converts(aten.diagonal_scatter.default)
def diagonal_scatter(
    ctx: GraphBuilder, node: fx.Node, x: fx.Node, src: fx.Node, offset: int = 0, dim1: int = 0, dim2: int = 1
) -> ir.Value:
    """diagonal_scatter(Tensor self, Tensor src, int offset=0, int dim1=0, int dim2=1) -> Tensor"""
    perm, places, size = _diagonal_places(x, offset, dim1, dim2)
    moved = ctx.transpose(ctx.value(x), perm)
    flat = ctx.op("Reshape", moved, ctx.ints([0] * (len(perm) - 2) + [size]))
    rows = ctx.const([[place] for place in places], torch.int64)
    written = _write_rows(ctx, flat, rows, ctx.value(src, dtype_of(x)), len(perm) - 2, len(perm) - 1, None)
    return ctx.transpose(ctx.op("Reshape", written, ctx.op("Shape", moved)), _inverse(perm))


@converts(aten.tril.default)
def tril(ctx: GraphBuilder, node: fx.Node, x: fx.Node, diagonal: Any = 0) -> ir.Value:
    """tril(Tensor self, SymInt diagonal=0) -> Tensor"""
    return ctx.op("Trilu", ctx.value(x), ctx.value(diagonal, torch.int64), upper=0)


@converts(aten.triu.default)
def triu(ctx: GraphBuilder, node: fx.Node, x: fx.Node, diagonal: Any = 0) -> ir.Value:
    """triu(Tensor self, SymInt diagonal=0) -> Tensor"""
    return ctx.op("Trilu", ctx.value(x), ctx.value(diagonal, torch.int64), upper=1)
