"""Reading and writing by index: gather, scatter and their kin."""

import functools
import math
from collections.abc import Sequence
from typing import Any

import onnx_ir as ir
import torch
from torch import fx

from lightning_ort.compiler.executors.ort.conversion.graph import GraphBuilder, Value
from lightning_ort.compiler.executors.ort.conversion.metadata import (
    Arg,
    Scalar,
    dtype_of,
    rank_of,
    same_shape,
    shape_of,
    static,
)
from lightning_ort.compiler.executors.ort.conversion.registry import EXPANDED, Unsupported, converts
from lightning_ort.compiler.report import ReasonType

aten = torch.ops.aten

Indices = Sequence[fx.Node | None]


def refusing_negative(ctx: GraphBuilder, index: Value, x: fx.Node, dim: int) -> Value:
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


def inverse(perm: Sequence[int]) -> list[int]:
    """The permutation that undoes another."""
    return [list(perm).index(dim) for dim in range(len(perm))]


def _index_rows(ctx: GraphBuilder, indices: Sequence[fx.Node]) -> Value:
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
def index(ctx: GraphBuilder, node: fx.Node, x: fx.Node, indices: Indices) -> Value:
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
def index_select(ctx: GraphBuilder, node: fx.Node, x: fx.Node, dim: int, index: fx.Node) -> Value:
    """index_select(Tensor self, int dim, Tensor index) -> Tensor"""
    if rank_of(x) == 0 or rank_of(index) == 0:
        raise Unsupported("index_select of or by a scalar")
    rows = refusing_negative(ctx, ctx.value(index, torch.int64), x, dim)
    return ctx.op("Gather", ctx.value(x), rows, axis=dim)


@converts(aten.gather.default)
def gather(
    ctx: GraphBuilder, node: fx.Node, x: fx.Node, dim: int, index: fx.Node, *, sparse_grad: bool = False
) -> Value:
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


def _scatter(ctx: GraphBuilder, x: fx.Node, dim: int, index: fx.Node, source: Value, reduction: str | None) -> Value:
    places = refusing_negative(ctx, ctx.value(index, torch.int64), x, dim)
    return ctx.op("ScatterElements", ctx.value(x), places, source, axis=dim, reduction=reduction)


def _source_like_index(ctx: GraphBuilder, source: fx.Node, index: fx.Node, dtype: torch.dtype) -> Value:
    """The part of the source that the index names; torch lets it be larger, ONNX does not."""
    value = ctx.value(source, dtype)
    if same_shape(source, index):
        return value
    rank = rank_of(index)
    return ctx.op("Slice", value, ctx.ints([0] * rank), ctx.shape_tensor(index), ctx.ints(list(range(rank))))


@converts(aten.scatter.src)
def scatter(ctx: GraphBuilder, node: fx.Node, x: fx.Node, dim: int, index: fx.Node, src: fx.Node) -> Value:
    """scatter.src(Tensor self, int dim, Tensor index, Tensor src) -> Tensor"""
    _check_ranks("scatter", x, index)
    return _scatter(ctx, x, dim, index, _source_like_index(ctx, src, index, dtype_of(x)), None)


@converts(aten.scatter.value)
def scatter_value(ctx: GraphBuilder, node: fx.Node, x: fx.Node, dim: int, index: fx.Node, value: Scalar) -> Value:
    """scatter.value(Tensor self, int dim, Tensor index, Scalar value) -> Tensor"""
    _check_ranks("scatter", x, index)
    return _scatter(ctx, x, dim, index, ctx.op("Expand", ctx.value(value, dtype_of(x)), ctx.shape_tensor(index)), None)


@converts(aten.scatter_add.default)
def scatter_add(ctx: GraphBuilder, node: fx.Node, x: fx.Node, dim: int, index: fx.Node, src: fx.Node) -> Value:
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
) -> Value:
    """scatter_reduce.two(Tensor self, int dim, Tensor index, Tensor src, str reduce, *, bool include_self=True) -> Tensor"""  # noqa: E501
    _check_ranks("scatter_reduce", x, index)
    dtype = dtype_of(x)
    if not dtype.is_floating_point:
        raise Unsupported(f"scatter_reduce of {dtype}")
    onnx_reduction, start = _REDUCTIONS[reduce]
    ids = refusing_negative(ctx, ctx.value(index, torch.int64), x, dim)
    base, source = ctx.value(x), _source_like_index(ctx, src, index, dtype)

    def scatter_to(target: Value, updates: Value, reduction: str | None) -> Value:
        return ctx.op("ScatterElements", target, ids, updates, axis=dim, reduction=reduction)

    def everywhere(number: float) -> Value:
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
def masked_scatter(ctx: GraphBuilder, node: fx.Node, x: fx.Node, mask: fx.Node, source: fx.Node) -> Value:
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
) -> Value:
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
    updates = ctx.transpose(ctx.op("Expand", updates, shape), inverse(back))
    written = ctx.op("ScatterND", moved, rows, updates, reduction="add" if accumulate else None)
    return ctx.transpose(written, inverse(front))


@converts(aten.index_add.default)
def index_add(
    ctx: GraphBuilder, node: fx.Node, x: fx.Node, dim: int, index: fx.Node, source: fx.Node, *, alpha: Scalar = 1
) -> Value:
    """index_add(Tensor self, int dim, Tensor index, Tensor source, *, Scalar alpha=1) -> Tensor"""
    _refuse_scalars("index_add", x, index, source)
    dtype = dtype_of(x)
    updates = ctx.value(source, dtype)
    if alpha != 1:
        updates = ctx.op("Mul", updates, ctx.value(alpha, dtype))
    return write_rows(ctx, ctx.value(x), _rows(ctx, index, x, dim), updates, dim % rank_of(x), rank_of(x), "add")


@converts(aten.index_copy.default)
def index_copy(ctx: GraphBuilder, node: fx.Node, x: fx.Node, dim: int, index: fx.Node, source: fx.Node) -> Value:
    """index_copy(Tensor self, int dim, Tensor index, Tensor source) -> Tensor"""
    # torch's decomposition is an index_put, to which a negative index is none of its errors
    _refuse_scalars("index_copy", x, index, source)
    updates = ctx.value(source, dtype_of(x))
    return write_rows(ctx, ctx.value(x), _rows(ctx, index, x, dim), updates, dim % rank_of(x), rank_of(x), None)


@converts(aten.index_fill.int_Scalar, aten.index_fill.int_Tensor)
def index_fill(ctx: GraphBuilder, node: fx.Node, x: fx.Node, dim: int, index: fx.Node, value: Arg) -> Value:
    """index_fill.int_Scalar(Tensor self, int dim, Tensor index, Scalar value) -> Tensor"""
    # a negative index counts from the end here
    _refuse_scalars("index_fill", x)
    dtype, size = dtype_of(x), shape_of(x)[dim]
    if dtype is torch.bool or not isinstance(size, int):
        raise Unsupported("index_fill of booleans, or along a symbolic size")
    rows = ctx.op("Reshape", ctx.value(index, torch.int64), ctx.ints([-1, 1]))
    ones = ctx.op("Expand", ctx.const(1, torch.float32), ctx.op("Shape", rows, end=1))
    written = ctx.op("ScatterND", zeros_of(ctx, ctx.ints([size]), torch.float32), rows, ones)
    places = ctx.op("Unsqueeze", written, ctx.ints(list(range(1, rank_of(x) - dim % rank_of(x)))))
    return ctx.op("Where", ctx.cast(places, torch.bool), ctx.value(value, dtype), ctx.value(x))


def _rows(ctx: GraphBuilder, index: fx.Node, x: fx.Node, dim: int) -> Value:
    """The index [k] of entries of a dimension of ``x`` as the rows [k, 1] that ScatterND takes."""
    return ctx.op("Unsqueeze", refusing_negative(ctx, ctx.value(index, torch.int64), x, dim), ctx.ints([1]))


def write_rows(
    ctx: GraphBuilder, x: Value, rows: Value, updates: Value, axis: int, rank: int, reduction: str | None
) -> Value:
    """Write to the entries of one dimension that ``rows`` [k, 1] lists."""
    perm = _front([axis], rank)
    moved, updates = ctx.transpose(x, perm), ctx.transpose(updates, perm)
    return ctx.transpose(ctx.op("ScatterND", moved, rows, updates, reduction=reduction), inverse(perm))


@converts(aten.embedding_dense_backward.default, variants=(EXPANDED,))
def embedding_dense_backward(
    ctx: GraphBuilder,
    node: fx.Node,
    grad: fx.Node,
    indices: fx.Node,
    num_weights: Any,
    padding_idx: Any,
    scale_grad_by_freq: bool,
) -> Value:
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


def zeros_of(ctx: GraphBuilder, shape: Value, dtype: torch.dtype) -> Value:
    """Zeros of a shape that is a 1-D int64 value."""
    return ctx.op("ConstantOfShape", shape, dtype=dtype, value=ir.tensor(ctx.const([0], dtype).ir.const_value.numpy()))  # type: ignore[union-attr]
