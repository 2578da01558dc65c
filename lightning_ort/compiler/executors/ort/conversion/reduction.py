"""Reductions: sum, mean, extrema, variance, norms, cumulative sums, and sorting."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from lightning_ort.compiler.executors.ort.conversion import elementary
from lightning_ort.compiler.executors.ort.conversion.graph import GraphBuilder, Value
from lightning_ort.compiler.executors.ort.conversion.metadata import Arg, Scalar, dtype_of, rank_of, shape_of, static
from lightning_ort.compiler.executors.ort.conversion.registry import Unsupported, converts

aten = torch.ops.aten

Dims = int | Sequence[int] | None


def reduce(
    ctx: GraphBuilder, onnx_op: str, x: fx.Node, value: Value, dims: Dims = None, keepdim: bool = False
) -> Value:
    """Reduce ``value``, which has the shape of ``x``, along ``dims``; ``None`` or ``[]`` means all."""
    if any(size == 0 for size in shape_of(x) if isinstance(size, int)):
        # the neutral element of an empty reduction came to ONNX with opset 20
        raise Unsupported("a reduction of an empty tensor")
    if rank_of(x) == 0:  # torch takes dim 0 and -1 of a scalar, ONNX has no axis there
        return ctx.op(onnx_op, value, keepdims=0)
    axes = [dims] if isinstance(dims, int) else list(dims or [])
    return ctx.op(onnx_op, value, ctx.ints(axes) if axes else None, keepdims=int(keepdim))


def count(ctx: GraphBuilder, x: fx.Node, dims: Dims, dtype: torch.dtype) -> Value:
    """How many elements one result of a reduction is made of, as a scalar."""
    rank = rank_of(x)
    chosen = [dims] if isinstance(dims, int) else list(dims or range(rank))
    sizes = [shape_of(x)[dim] for dim in chosen] if rank else []
    if static(sizes):
        return ctx.const(math.prod(sizes), dtype)
    picked = ctx.op("Gather", ctx.op("Shape", ctx.value(x)), ctx.ints([dim % rank for dim in chosen]))
    return ctx.cast(ctx.op("ReduceProd", picked, keepdims=0), dtype)


# sum, mean, product


@converts(aten.sum.default, aten.sum.dim_IntList)
def sum_(
    ctx: GraphBuilder, node: fx.Node, x: fx.Node, dim: Dims = None, keepdim: bool = False, *, dtype: Any = None
) -> Value:
    """sum.dim_IntList(Tensor self, int[1]? dim, bool keepdim=False, *, ScalarType? dtype=None) -> Tensor"""
    # dtype_of(node) is int64 for bool and the short integers, as torch promotes them
    return reduce(ctx, "ReduceSum", x, ctx.value(x, dtype_of(node)), dim, keepdim)


@converts(aten.mean.default, aten.mean.dim)
def mean(
    ctx: GraphBuilder, node: fx.Node, x: fx.Node, dim: Dims = None, keepdim: bool = False, *, dtype: Any = None
) -> Value:
    """mean.dim(Tensor self, int[1]? dim, bool keepdim=False, *, ScalarType? dtype=None) -> Tensor"""
    return reduce(ctx, "ReduceMean", x, ctx.value(x, dtype_of(node)), dim, keepdim)


@converts(aten.prod.default, aten.prod.dim_int)
def prod(
    ctx: GraphBuilder, node: fx.Node, x: fx.Node, dim: Dims = None, keepdim: bool = False, *, dtype: Any = None
) -> Value:
    """prod.dim_int(Tensor self, int dim, bool keepdim=False, *, ScalarType? dtype=None) -> Tensor"""
    return reduce(ctx, "ReduceProd", x, ctx.value(x, dtype_of(node)), dim, keepdim)


@converts(aten.cumsum.default)
def cumsum(ctx: GraphBuilder, node: fx.Node, x: fx.Node, dim: int, *, dtype: Any = None) -> Value:
    """cumsum(Tensor self, int dim, *, ScalarType? dtype=None) -> Tensor"""
    value = ctx.value(x, dtype_of(node))
    return ctx.op("CumSum", value, ctx.ints(dim)) if rank_of(x) else value


@converts(aten.any.default, aten.any.dim, aten.any.dims)
def any_(ctx: GraphBuilder, node: fx.Node, x: fx.Node, dim: Dims = None, keepdim: bool = False) -> Value:
    """any.dims(Tensor self, int[]? dim=None, bool keepdim=False) -> Tensor"""
    return _any(ctx, x, ctx.value(x, torch.bool), dim, keepdim)


def _any(ctx: GraphBuilder, x: fx.Node, flags: Value, dim: Dims, keepdim: bool) -> Value:
    # no bool reductions in opset 18
    return ctx.cast(reduce(ctx, "ReduceMax", x, ctx.cast(flags, torch.int32), dim, keepdim), torch.bool)


@converts(aten.all.default, aten.all.dim, aten.all.dims)
def all_(ctx: GraphBuilder, node: fx.Node, x: fx.Node, dim: Dims = None, keepdim: bool = False) -> Value:
    """all.dims(Tensor self, int[]? dim=None, bool keepdim=False) -> Tensor"""
    flags = ctx.cast(ctx.value(x, torch.bool), torch.int32)
    return ctx.cast(reduce(ctx, "ReduceMin", x, flags, dim, keepdim), torch.bool)


# extrema


def extremum(
    ctx: GraphBuilder,
    onnx_op: str,
    x: fx.Node,
    value: Value,
    dtype: torch.dtype,
    dims: Dims = None,
    keepdim: bool = False,
) -> Value:
    """ReduceMax or ReduceMin of ``value``, which has the shape of ``x`` and is of ``dtype``."""
    result = reduce(ctx, onnx_op, x, value, dims, keepdim)
    if not dtype.is_floating_point:
        return result
    # torch hands a NaN on, onnxruntime 1.19 only where it meets it first
    poisoned = _any(ctx, x, ctx.op("IsNaN", value), dims, keepdim)
    return ctx.op("Where", poisoned, ctx.const(math.nan, dtype), result)


def _extremum(onnx_op: str) -> Callable[..., Value]:
    def convert(ctx: GraphBuilder, node: fx.Node, x: fx.Node, dim: Dims = None, keepdim: bool = False) -> Value:
        return extremum(ctx, onnx_op, x, ctx.value(x), dtype_of(x), dim, keepdim)

    convert.__doc__ = "amax(Tensor self, int[1] dim=[], bool keepdim=False) -> Tensor"
    convert.__qualname__ = f"extremum_{onnx_op.lower()}"
    return convert


converts(aten.amax.default, aten.max.default)(_extremum("ReduceMax"))
converts(aten.amin.default, aten.min.default)(_extremum("ReduceMin"))


def _arg_extremum(ctx: GraphBuilder, onnx_op: str, x: fx.Node, dim: int | None = None, keepdim: bool = False) -> Value:
    if any(size == 0 for size in shape_of(x) if isinstance(size, int)):
        raise Unsupported("a reduction of an empty tensor")
    value = ctx.value(x)
    if rank_of(x) == 0:
        return ctx.const(0, torch.int64)
    if dim is None:
        index = _arg_along(ctx, onnx_op, x, ctx.op("Reshape", value, ctx.ints([-1])), 0, keepdim=False)
        return ctx.op("Reshape", index, ctx.ints([1] * rank_of(x))) if keepdim else index
    return _arg_along(ctx, onnx_op, x, value, dim, keepdim)


def _arg_along(ctx: GraphBuilder, onnx_op: str, x: fx.Node, value: Value, axis: int, keepdim: bool) -> Value:
    index = ctx.op(onnx_op, value, axis=axis, keepdims=int(keepdim))
    if not dtype_of(x).is_floating_point:
        return index
    # of a row with a NaN torch returns the first NaN's index, onnxruntime 1.19 and 1.31 that of a number
    is_nan = ctx.cast(ctx.op("IsNaN", value), torch.int32)
    first = ctx.op("ArgMax", is_nan, axis=axis, keepdims=int(keepdim))
    poisoned = ctx.cast(ctx.op("ReduceMax", is_nan, ctx.ints([axis]), keepdims=int(keepdim)), torch.bool)
    return ctx.op("Where", poisoned, first, index)


@converts(aten.argmax.default)
def argmax(ctx: GraphBuilder, node: fx.Node, x: fx.Node, dim: int | None = None, keepdim: bool = False) -> Value:
    """argmax(Tensor self, int? dim=None, bool keepdim=False) -> Tensor"""
    return _arg_extremum(ctx, "ArgMax", x, dim, keepdim)


@converts(aten.argmin.default)
def argmin(ctx: GraphBuilder, node: fx.Node, x: fx.Node, dim: int | None = None, keepdim: bool = False) -> Value:
    """argmin(Tensor self, int? dim=None, bool keepdim=False) -> Tensor"""
    return _arg_extremum(ctx, "ArgMin", x, dim, keepdim)


@converts(aten.max.dim)
def max_dim(ctx: GraphBuilder, node: fx.Node, x: fx.Node, dim: int, keepdim: bool = False) -> tuple[Value, Value]:
    """max.dim(Tensor self, int dim, bool keepdim=False) -> (Tensor values, Tensor indices)"""
    values = extremum(ctx, "ReduceMax", x, ctx.value(x), dtype_of(x), dim, keepdim)
    return values, _arg_extremum(ctx, "ArgMax", x, dim, keepdim)


@converts(aten.min.dim)
def min_dim(ctx: GraphBuilder, node: fx.Node, x: fx.Node, dim: int, keepdim: bool = False) -> tuple[Value, Value]:
    """min.dim(Tensor self, int dim, bool keepdim=False) -> (Tensor values, Tensor indices)"""
    values = extremum(ctx, "ReduceMin", x, ctx.value(x), dtype_of(x), dim, keepdim)
    return values, _arg_extremum(ctx, "ArgMin", x, dim, keepdim)


# sorting


def _top(ctx: GraphBuilder, x: fx.Node, k: Value, **attributes: Any) -> tuple[Value, Value]:
    """The first ``k`` values and their indices; among equals the lower index comes first."""
    value, dtype = ctx.value(x), dtype_of(x)
    if not dtype.is_floating_point:
        return ctx.op("TopK", value, k, outputs=2, **attributes)
    # to torch a NaN is greater than infinity, to onnxruntime (1.19, 1.31) it is nowhere. So infinity becomes a number
    # beyond all others, and NaN infinity; in float64 that number is the largest there is.
    largest = 1e300 if dtype is torch.float32 else torch.finfo(torch.float64).max
    wide = ctx.op("Min", ctx.value(x, torch.float64), ctx.const(largest, torch.float64))
    keys = ctx.op("Where", ctx.op("IsNaN", value), ctx.const(math.inf, torch.float64), wide)
    _, indices = ctx.op("TopK", keys, k, outputs=2, **attributes)
    return ctx.op("GatherElements", value, indices, axis=attributes["axis"]), indices


@converts(aten.topk.default)
def topk(
    ctx: GraphBuilder, node: fx.Node, x: fx.Node, k: Any, dim: int = -1, largest: bool = True, sorted: bool = True
) -> tuple[Value, Value]:
    """topk(Tensor self, SymInt k, int dim=-1, bool largest=True, bool sorted=True) -> (Tensor, Tensor)"""
    if rank_of(x) == 0:
        raise Unsupported("topk of a scalar")
    return _top(ctx, x, ctx.sizes([k]), axis=dim, largest=int(largest), sorted=int(sorted))


@converts(aten.sort.default)
def sort(ctx: GraphBuilder, node: fx.Node, x: fx.Node, dim: int = -1, descending: bool = False) -> tuple[Value, Value]:
    """sort(Tensor self, int dim=-1, bool descending=False) -> (Tensor values, Tensor indices)"""
    if rank_of(x) == 0:
        raise Unsupported("sort of a scalar")
    k = ctx.op("Reshape", count(ctx, x, dim, torch.int64), ctx.ints([1]))
    return _top(ctx, x, k, axis=dim, largest=int(descending), sorted=1)


@converts(aten.sort.stable)
def sort_stable(
    ctx: GraphBuilder, node: fx.Node, x: fx.Node, *, stable: bool | None, dim: int = -1, descending: bool = False
) -> tuple[Value, Value]:
    """sort.stable(Tensor self, *, bool? stable, int dim=-1, bool descending=False) -> (Tensor, Tensor)"""
    return sort(ctx, node, x, dim, descending)


# variance


def _moments(
    ctx: GraphBuilder, x: fx.Node, dims: Dims, correction: Arg | None, dtype: torch.dtype
) -> tuple[Value, Value, torch.dtype]:
    """Variance and mean, in two passes and with the reduced dimensions kept, and the dtype that they are in."""
    # torch's CPU kernel sums up float32 in float64, so that squares neither overflow nor vanish
    work = torch.float64 if dtype is torch.float32 and ctx.on_cpu else dtype
    degrees = ctx.value(1 if correction is None else correction, work)
    size = count(ctx, x, dims, work)
    if size.const_value is not None and degrees.const_value is not None:
        elements, removed = (float(value.const_value.numpy()) for value in (size, degrees))  # type: ignore[union-attr]
        if elements <= removed:
            raise Unsupported(f"a variance of {elements:g} elements with correction={removed:g}")
    value = ctx.value(x, work)
    average = reduce(ctx, "ReduceMean", x, value, dims, keepdim=True)
    centered = ctx.op("Sub", value, average)
    squares = reduce(ctx, "ReduceSum", x, ctx.op("Mul", centered, centered), dims, keepdim=True)
    # never below 0: of too few elements the variance is infinite or NaN, as in torch
    freedom = ctx.op("Max", ctx.op("Sub", size, degrees), ctx.const(0, work))
    return ctx.op("Div", squares, freedom), average, work


def _without(ctx: GraphBuilder, value: Value, x: fx.Node, dims: Dims, keepdim: bool) -> Value:
    """Drop the reduced dimensions unless they are to be kept."""
    if keepdim or rank_of(x) == 0:
        return value
    axes = [dims] if isinstance(dims, int) else list(dims or [])
    return ctx.op("Squeeze", value, ctx.ints(axes) if axes else None)


def _rounded(ctx: GraphBuilder, value: Value, work: torch.dtype, dtype: torch.dtype) -> Value:
    return value if work == dtype else ctx.cast(value, dtype)


@converts(aten.var.correction)
def var(
    ctx: GraphBuilder,
    node: fx.Node,
    x: fx.Node,
    dim: Dims = None,
    *,
    correction: Arg | None = None,
    keepdim: bool = False,
) -> Value:
    """var.correction(Tensor self, int[1]? dim=None, *, Scalar? correction=None, bool keepdim=False) -> Tensor"""
    variance, _, work = _moments(ctx, x, dim, correction, dtype_of(node))
    return _rounded(ctx, _without(ctx, variance, x, dim, keepdim), work, dtype_of(node))


@converts(aten.std.correction)
def std(
    ctx: GraphBuilder,
    node: fx.Node,
    x: fx.Node,
    dim: Dims = None,
    *,
    correction: Arg | None = None,
    keepdim: bool = False,
) -> Value:
    """std.correction(Tensor self, int[1]? dim=None, *, Scalar? correction=None, bool keepdim=False) -> Tensor"""
    variance, _, work = _moments(ctx, x, dim, correction, dtype_of(node))
    root = elementary.sqrt(_without(ctx, variance, x, dim, keepdim))
    return _rounded(ctx, root, work, dtype_of(node))


@converts(aten.var_mean.correction)
def var_mean(
    ctx: GraphBuilder,
    node: fx.Node,
    x: fx.Node,
    dim: Dims = None,
    *,
    correction: Arg | None = None,
    keepdim: bool = False,
) -> tuple[Value, ...]:
    """var_mean.correction(Tensor self, int[1]? dim, *, Scalar? correction, bool keepdim) -> (Tensor, Tensor)"""
    dtype = dtype_of(x)
    *both, work = _moments(ctx, x, dim, correction, dtype)
    return tuple(_rounded(ctx, _without(ctx, value, x, dim, keepdim), work, dtype) for value in both)


# norms


@converts(aten.logsumexp.default)
def logsumexp(ctx: GraphBuilder, node: fx.Node, x: fx.Node, dim: Dims, keepdim: bool = False) -> Value:
    """logsumexp(Tensor self, int[1] dim, bool keepdim=False) -> Tensor"""
    # not ReduceLogSumExp: over all dimensions it makes NaN of infinities (onnxruntime 1.19), and takes ten times longer
    dtype = dtype_of(node)
    value = ctx.value(x, dtype)
    largest = reduce(ctx, "ReduceMax", x, value, dim, keepdim=True)
    largest = ctx.op("Where", ctx.op("IsInf", largest), ctx.const(0, dtype), largest)
    powers = elementary.exp(ctx.op("Sub", value, largest))
    result = ctx.op("Log", reduce(ctx, "ReduceSum", x, powers, dim, keepdim=True))
    return _without(ctx, ctx.op("Add", result, largest), x, dim, keepdim)


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
    result = dtype_of(node)
    value = ctx.value(x, result)
    chosen = [dim] if isinstance(dim, int) else list(dim or range(rank_of(x)))
    if ord != 0 and all(isinstance(size := shape_of(x)[axis], int) and size == 1 for axis in chosen if rank_of(x)):
        return _without(ctx, ctx.op("Abs", value), x, dim, keepdim)  # so torch, whatever its square is
    if ord == 2 and result is torch.float64:  # ReduceL2 computes in float32 (1.19)
        return ctx.op("Sqrt", reduce(ctx, "ReduceSum", x, ctx.op("Mul", value, value), dim, keepdim))
    if ord in (1, 2):
        return reduce(ctx, f"ReduceL{int(ord)}", x, value, dim, keepdim)
    if ord == 0:
        nonzero = ctx.cast(ctx.cast(value, torch.bool), result)
        return reduce(ctx, "ReduceSum", x, nonzero, dim, keepdim)
    size = ctx.op("Abs", value)
    if math.isinf(ord):
        return extremum(ctx, "ReduceMax" if ord > 0 else "ReduceMin", x, size, result, dim, keepdim)
    total = reduce(ctx, "ReduceSum", x, ctx.op("Pow", size, ctx.const(ord, result)), dim, keepdim)
    return ctx.op("Pow", total, ctx.const(1 / ord, result))
