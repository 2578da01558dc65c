"""Reductions: sum, mean, extrema, variance, norms, cumulative sums, and sorting."""

import functools
import math
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from lightning_ort.compiler.executors.ort.conversion import elementary
from lightning_ort.compiler.executors.ort.conversion.elementary import where
from lightning_ort.compiler.executors.ort.conversion.graph import GraphBuilder, Value
from lightning_ort.compiler.executors.ort.conversion.metadata import (
    Arg,
    Dims,
    Scalar,
    as_list,
    axis_of,
    dtype_of,
    rank_of,
    refuse_scalars,
    shape_of,
    static,
    work_dtype,
)
from lightning_ort.compiler.executors.ort.conversion.registry import Unsupported, converts

aten = torch.ops.aten

_OPERATORS = {
    aten.sum: "ReduceSum",
    aten.mean: "ReduceMean",
    aten.prod: "ReduceProd",
    aten.amax: "ReduceMax",
    aten.max: "ReduceMax",
    aten.amin: "ReduceMin",
    aten.min: "ReduceMin",
    aten.any: "ReduceMax",
    aten.all: "ReduceMin",
    aten.argmax: "ArgMax",
    aten.argmin: "ArgMin",
}


def _operator(node: fx.Node) -> str:
    return _OPERATORS[node.target.overloadpacket]  # type: ignore[union-attr]


def reduce(onnx_op: str, x: fx.Node, value: Value, dims: Dims = None, keepdim: bool = False) -> Value:
    """Reduce ``value``, which has the shape of ``x``, along ``dims``; ``None`` or ``[]`` means all."""
    return reduce_shaped(onnx_op, shape_of(x), value, dims, keepdim)


def reduce_shaped(onnx_op: str, shape: Sequence[Any], value: Value, dims: Dims = None, keepdim: bool = False) -> Value:
    """Reduce ``value``, which has another shape than any node: this one; it must not be empty."""
    if not shape:  # torch takes dim 0 and -1 of a scalar, ONNX has no axis there
        return value.op(onnx_op, keepdims=0)
    axes = sorted(axis_of(dim, len(shape)) for dim in as_list(dims)) or list(range(len(shape)))
    if onnx_op in ("ReduceSum", "ReduceMean") and value.dtype.is_floating_point:
        if (result := _reduce_in_groups(onnx_op, shape, value, axes, keepdim)) is not None:
            return result
        if onnx_op == "ReduceSum" and (total := _sum_rows(shape, value, axes, keepdim)) is not None:
            return total
    return value.op(onnx_op, as_list(dims) or None, keepdims=int(keepdim))


# onnxruntime adds up in float32, one after the other: the mean of 10,000,000 squares was off by 5e-4, that of 100,000
# rows by 2e-5 (1.19). Torch adds up pairs, and then pairs of sums.
_MAX_SUMMANDS = 1 << 14


def _reduce_in_float64(onnx_op: str, value: Value, axes: Sequence[int], keepdim: bool) -> Value | None:
    if value.dtype is not torch.float32 or not value.ctx.on_cpu:
        return None
    return value.cast(torch.float64).op(onnx_op, list(axes), keepdims=int(keepdim)).cast(torch.float32)


def _reduce_in_groups(
    onnx_op: str, shape: Sequence[Any], value: Value, axes: Sequence[int], keepdim: bool
) -> Value | None:
    """Reduce the first dimensions, or all, in groups where they may be long; otherwise return ``None``."""
    if axes != list(range(len(axes))):
        last = list(range(len(shape) - len(axes), len(shape)))
        few = static(shape) and math.prod(shape[axis] for axis in axes) <= _MAX_SUMMANDS
        # of rows: onnxruntime adds up in groups itself
        return None if axes == last or few else _reduce_in_float64(onnx_op, value, axes, keepdim)
    if not static(shape):
        if len(axes) < len(shape) or len(axes) == 1:
            return _reduce_in_float64(onnx_op, value, axes, keepdim)
        return value.op(onnx_op, axes[1:], keepdims=int(keepdim)).op(onnx_op, [0], keepdims=int(keepdim))
    count, kept = math.prod(shape[: len(axes)]), list(shape[len(axes) :])
    if count <= _MAX_SUMMANDS:
        return None
    while count > _MAX_SUMMANDS:
        size = next((size for size in range(1 << 12, 31, -1) if count % size == 0), None)
        if size is None:
            raise Unsupported(f"the sum of {count} elements, a number without divisors to add them up in groups")
        count //= size
        value = value.reshape([count, size, *kept]).op(onnx_op, [1], keepdims=0)
    return value.op(onnx_op, [0], keepdims=0).reshape([1] * len(axes) + kept if keepdim else kept)


def _sum_rows(shape: Sequence[Any], value: Value, axes: Sequence[int], keepdim: bool) -> Value | None:
    """Add up the first dimensions of float32 as a product with ones, in a sixth of the time of ReduceSum (1.19)."""
    rank, kept = len(axes), list(shape[len(axes) :])
    if axes != list(range(rank)) or not kept or not static(shape) or not value.ctx.on_cpu:
        return None
    if value.dtype is not torch.float32:
        return None
    rows = math.prod(shape[:rank])
    matrix = value if rank == len(kept) == 1 else value.reshape([rows, math.prod(kept)])
    total = value.ctx.const([1.0] * rows, torch.float32).op("MatMul", matrix)
    return total if len(kept) == 1 and not keepdim else total.reshape([1] * rank + kept if keepdim else kept)


def count(ctx: GraphBuilder, x: fx.Node, dims: Dims, dtype: torch.dtype) -> Value:
    """The number of elements that are reduced to one, as a scalar."""
    rank = rank_of(x)
    axes = [axis_of(dim, rank) for dim in as_list(dims) or range(rank)] if rank else []
    sizes = [shape_of(x)[axis] for axis in axes]
    if static(sizes):
        return ctx.const(math.prod(sizes), dtype)
    shape = ctx.value(x).op("Shape")
    if ctx.on_cpu:
        return shape.op("Gather", axes).op("ReduceProd", keepdims=0).cast(dtype)
    product = functools.reduce(operator.mul, (shape.op("Gather", axis) for axis in axes))  # ReduceProd lacks int64
    return product.cast(dtype)


def _drop(value: Value, x: fx.Node, dims: Dims, keepdim: bool) -> Value:
    return value if keepdim or rank_of(x) == 0 else value.op("Squeeze", as_list(dims) or None)


# sum, mean, product


@converts(
    aten.sum.dim_IntList, aten.sum.default, aten.mean.dim, aten.mean.default, aten.prod.dim_int, aten.prod.default
)
def sum_(
    ctx: GraphBuilder, node: fx.Node, x: fx.Node, dim: Dims = None, keepdim: bool = False, *, dtype: Any = None
) -> Value:
    """sum.dim_IntList(Tensor self, int[1]? dim, bool keepdim=False, *, ScalarType? dtype=None) -> Tensor"""
    # dtype_of(node) is int64 for bool and the short integers, as torch promotes them
    return reduce(_operator(node), x, ctx.value(x, dtype_of(node)), dim, keepdim)


@converts(aten.cumsum.default)
def cumsum(ctx: GraphBuilder, node: fx.Node, x: fx.Node, dim: int, *, dtype: Any = None) -> Value:
    """cumsum(Tensor self, int dim, *, ScalarType? dtype=None) -> Tensor"""
    value = ctx.value(x, dtype_of(node))
    if not rank_of(x):
        return value
    if ctx.on_cpu and value.dtype is torch.float32:  # torch's kernel adds up in float64
        return value.cast(torch.float64).op("CumSum", dim).cast(torch.float32)
    return value.op("CumSum", dim)


@converts(aten.any.dims, aten.any.dim, aten.any.default, aten.all.dims, aten.all.dim, aten.all.default)
def any_(ctx: GraphBuilder, node: fx.Node, x: fx.Node, dim: Dims = None, keepdim: bool = False) -> Value:
    """any.dims(Tensor self, int[]? dim=None, bool keepdim=False) -> Tensor"""
    if dim is not None and not as_list(dim):  # unlike other reductions, these take no dimensions for none
        return ctx.value(x, torch.bool)
    return _reduce_flags(_operator(node), x, ctx.value(x, torch.bool), dim, keepdim)


def _reduce_flags(onnx_op: str, x: fx.Node, flags: Value, dim: Dims, keepdim: bool) -> Value:
    # no bool reductions in opset 18
    return reduce(onnx_op, x, flags.cast(torch.int32), dim, keepdim).cast(torch.bool)


# extrema


def _extremum(onnx_op: str, x: fx.Node, value: Value, dims: Dims = None, keepdim: bool = False) -> Value:
    """ReduceMax or ReduceMin of ``value``, which has the shape of ``x``."""
    if value.dtype is torch.bool:
        return _reduce_flags(onnx_op, x, value, dims, keepdim)
    result = reduce(onnx_op, x, value, dims, keepdim)
    if not value.dtype.is_floating_point:
        return result
    # torch propagates a NaN, onnxruntime 1.19 only if it comes first
    has_nan = _reduce_flags("ReduceMax", x, value.is_nan(), dims, keepdim)
    return where(has_nan, math.nan, result)


@converts(aten.amax.default, aten.max.default, aten.amin.default, aten.min.default)
def amax(ctx: GraphBuilder, node: fx.Node, x: fx.Node, dim: Dims = None, keepdim: bool = False) -> Value:
    """amax(Tensor self, int[1] dim=[], bool keepdim=False) -> Tensor"""
    return _extremum(_operator(node), x, ctx.value(x), dim, keepdim)


def _arg_extremum(ctx: GraphBuilder, onnx_op: str, x: fx.Node, dim: int | None = None, keepdim: bool = False) -> Value:
    value, rank = ctx.value(x), rank_of(x)
    if rank == 0:
        return ctx.const(0, torch.int64)
    if dim is None:
        index = _arg_along(onnx_op, value.reshape([-1]), 0, keepdim=False)
        return index.reshape([1] * rank) if keepdim else index
    return _arg_along(onnx_op, value, dim, keepdim)


def _arg_along(onnx_op: str, value: Value, axis: int, keepdim: bool) -> Value:
    if value.dtype is torch.bool:
        value = value.cast(torch.int32)
    index = value.op(onnx_op, axis=axis, keepdims=int(keepdim))
    if not value.dtype.is_floating_point:
        return index
    # for a row with a NaN torch returns the first NaN's index, onnxruntime 1.19 and 1.31 that of a number
    is_nan = value.is_nan().cast(torch.int32 if value.ctx.on_cpu else torch.float32)  # no CUDA kernel for int32 (1.31)
    first = is_nan.op("ArgMax", axis=axis, keepdims=int(keepdim))
    has_nan = is_nan.op("ReduceMax", [axis], keepdims=int(keepdim)).cast(torch.bool)
    return where(has_nan, first, index)


@converts(aten.argmax.default, aten.argmin.default)
def argmax(ctx: GraphBuilder, node: fx.Node, x: fx.Node, dim: int | None = None, keepdim: bool = False) -> Value:
    """argmax(Tensor self, int? dim=None, bool keepdim=False) -> Tensor"""
    return _arg_extremum(ctx, _operator(node), x, dim, keepdim)


@converts(aten.max.dim, aten.min.dim)
def max_dim(ctx: GraphBuilder, node: fx.Node, x: fx.Node, dim: int, keepdim: bool = False) -> tuple[Value, Value]:
    """max.dim(Tensor self, int dim, bool keepdim=False) -> (Tensor values, Tensor indices)"""
    values = _extremum(_operator(node), x, ctx.value(x), dim, keepdim)
    return values, _arg_extremum(ctx, _operator(node).replace("Reduce", "Arg"), x, dim, keepdim)


# sorting


def _top(ctx: GraphBuilder, x: fx.Node, k: Value, **attributes: Any) -> tuple[Value, Value]:
    """The first ``k`` values and their indices; among equals the lower index comes first."""
    value = ctx.value(x)
    if not value.dtype.is_floating_point:
        return ctx.op("TopK", value, k, outputs=2, **attributes)
    # to torch a NaN is greater than infinity; onnxruntime (1.19, 1.31) gives it no fixed place, and on a GPU it fills
    # rows up with the smallest or largest number, which it takes before an infinity. So both become numbers beyond
    # all others; in float64, which has none, infinity becomes the largest and NaN infinity
    keys = ctx.value(x, torch.float64)
    if value.dtype is not torch.float64:
        keys = where(value.is_nan(), 1e301, keys.min(1e300).max(-1e300))
    elif ctx.on_cpu:
        keys = where(value.is_nan(), math.inf, keys.min(torch.finfo(torch.float64).max))
    else:
        raise Unsupported("an order of float64, in which a NaN and infinities have no place on a GPU")
    _, indices = ctx.op("TopK", keys, k, outputs=2, **attributes)
    return value.op("GatherElements", indices, axis=attributes["axis"]), indices


@converts(aten.topk.default)
def topk(
    ctx: GraphBuilder, node: fx.Node, x: fx.Node, k: Any, dim: int = -1, largest: bool = True, sorted: bool = True
) -> tuple[Value, Value]:
    """topk(Tensor self, SymInt k, int dim=-1, bool largest=True, bool sorted=True) -> (Tensor, Tensor)"""
    refuse_scalars("topk", x)
    return _top(ctx, x, ctx.sizes([k]), axis=dim, largest=int(largest), sorted=int(sorted))


@converts(aten.sort.default, aten.sort.stable)
def sort(
    ctx: GraphBuilder, node: fx.Node, x: fx.Node, dim: int = -1, descending: bool = False, *, stable: Any = None
) -> tuple[Value, Value]:
    """sort.stable(Tensor self, *, bool? stable, int dim=-1, bool descending=False) -> (Tensor, Tensor)"""
    refuse_scalars("sort", x)
    size = count(ctx, x, dim, torch.int64).reshape([1])
    return _top(ctx, x, size, axis=dim, largest=int(descending), sorted=1)


# variance


def _moments(ctx: GraphBuilder, x: fx.Node, dims: Dims, correction: Arg | None) -> tuple[Value, Value]:
    """Variance and mean, in two passes and with the reduced dimensions kept."""
    # torch's CPU kernel sums up float32 in float64, so that squares neither overflow nor vanish
    work = torch.float64 if dtype_of(x) is torch.float32 and ctx.on_cpu else work_dtype(x)
    degrees = ctx.value(1 if correction is None else correction, work)
    size = count(ctx, x, dims, work)
    if size.ir.const_value is not None and degrees.ir.const_value is not None:
        elements, removed = (float(value.ir.const_value.numpy()) for value in (size, degrees))  # type: ignore[union-attr]
        if elements <= removed:
            raise Unsupported(f"a variance of {elements:g} elements with correction={removed:g}")
    value = ctx.value(x, work)
    average = reduce("ReduceMean", x, value, dims, keepdim=True)
    centered = value - average
    squares = reduce("ReduceSum", x, centered * centered, dims, keepdim=True)
    # never below 0: of too few elements the variance is infinite or NaN, as in torch
    return squares / (size - degrees).max(0), average


@converts(aten.var.correction, aten.std.correction, aten.var_mean.correction)
def var(
    ctx: GraphBuilder,
    node: fx.Node,
    x: fx.Node,
    dim: Dims = None,
    *,
    correction: Arg | None = None,
    keepdim: bool = False,
) -> Any:
    """var.correction(Tensor self, int[1]? dim=None, *, Scalar? correction=None, bool keepdim=False) -> Tensor"""
    moments = _moments(ctx, x, dim, correction)
    variance, average = (_drop(value, x, dim, keepdim) for value in moments)
    if node.target is aten.var_mean.correction:
        return variance.cast(dtype_of(x)), average.cast(dtype_of(x))
    if node.target is aten.std.correction:
        variance = elementary.sqrt(variance)
    return variance.cast(dtype_of(x))


# norms


@converts(aten.logsumexp.default)
def logsumexp(ctx: GraphBuilder, node: fx.Node, x: fx.Node, dim: Dims, keepdim: bool = False) -> Value:
    """logsumexp(Tensor self, int[1] dim, bool keepdim=False) -> Tensor"""
    if rank_of(x) and not as_list(dim):
        raise Unsupported("logsumexp over no dimensions, which torch refuses")
    # not ReduceLogSumExp: over all dimensions it makes NaN of infinities (onnxruntime 1.19), and takes ten times longer
    value = ctx.value(x, dtype_of(node))
    largest = reduce("ReduceMax", x, value, dim, keepdim=True)
    largest = where(largest.op("IsInf"), 0, largest)
    total = reduce("ReduceSum", x, elementary.exp(value - largest), dim, keepdim=True)
    return _drop(total.op("Log") + largest, x, dim, keepdim)


@converts(aten.linalg_vector_norm.default)
def vector_norm(
    ctx: GraphBuilder,
    node: fx.Node,
    x: fx.Node,
    ord: Scalar = 2,
    dim: Dims = None,
    keepdim: bool = False,
    *,
    dtype: Any = None,
) -> Value:
    """linalg_vector_norm(Tensor self, Scalar ord=2, int[1]? dim=None, bool keepdim=False, *, dtype?) -> Tensor"""
    if isinstance(ord, fx.Node):
        raise Unsupported("a norm of a symbolic order")
    value = ctx.value(x, dtype_of(node))

    def total(onnx_op: str, terms: Value) -> Value:
        return reduce(onnx_op, x, terms, dim, keepdim)

    axes = as_list(dim) or range(rank_of(x))
    if ord != 0 and all(isinstance(size := shape_of(x)[axis], int) and size == 1 for axis in axes if rank_of(x)):
        return _drop(abs(value), x, dim, keepdim)  # as in torch, whatever its square is
    if ord == 2 and value.dtype is torch.float64:  # ReduceL2 computes in float32 (1.19)
        return total("ReduceSum", value * value).op("Sqrt")
    # not ReduceL1 and ReduceL2, which add long rows up one after the other (1.19)
    if ord == 1:
        return total("ReduceSum", abs(value))
    if ord == 2:
        return elementary.sqrt(total("ReduceSum", value * value))
    if ord == 0:
        return total("ReduceSum", value.cast(torch.bool).cast(value.dtype))
    if math.isinf(ord):
        return _extremum("ReduceMax" if ord > 0 else "ReduceMin", x, abs(value), dim, keepdim)
    return total("ReduceSum", abs(value) ** ord) ** (1 / ord)
