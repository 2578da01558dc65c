"""Reading and writing by index: gather, scatter and their kin."""

import functools
import math
import operator
from collections.abc import Sequence

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
