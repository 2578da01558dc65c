"""Views and layout: reshape, permute, slice, concatenate, expand, and tensors made from sizes."""

import operator
from collections.abc import Sequence
from typing import Any

import onnx_ir as ir
import torch
from torch import fx

from lightning_ort.compiler.executors.ort.conversion.graph import GraphBuilder, Value
from lightning_ort.compiler.executors.ort.conversion.metadata import (
    DTYPES,
    dtype_of,
    rank_of,
    same_shape,
    shape_of,
    static,
)
from lightning_ort.compiler.executors.ort.conversion.registry import CONVERTERS, Unsupported, converts
from lightning_ort.compiler.layouts import IN_ORDER
from lightning_ort.compiler.report import ReasonType

aten = torch.ops.aten

Size = int | fx.Node


def getitem(ctx: GraphBuilder, node: fx.Node, source: fx.Node, index: int) -> Value:
    """operator.getitem: one of several results"""
    return ctx.values[source][index]


# not an ATen overload, so not through `converts`
CONVERTERS[operator.getitem] = getitem  # type: ignore[index]


@converts(aten.view.default, aten._unsafe_view.default, aten.reshape.default)
def view(ctx: GraphBuilder, node: fx.Node, x: fx.Node, size: Sequence[Size]) -> Value:
    """view(Tensor(a) self, SymInt[] size) -> Tensor(a)"""
    return ctx.reshape_like(ctx.value(x), node, size)


@converts(IN_ORDER)
def in_order(ctx: GraphBuilder, node: fx.Node, x: fx.Node, order: Sequence[int]) -> Value:
    """lightning_ort::in_order(Tensor x, int[] order) -> Tensor"""
    return ctx.value(x)


@converts(aten.t.default)
def t(ctx: GraphBuilder, node: fx.Node, x: fx.Node) -> Value:
    """t(Tensor(a) self) -> Tensor(a)"""
    return ctx.value(x) if rank_of(x) < 2 else ctx.op("Transpose", ctx.value(x), perm=[1, 0])


@converts(aten.transpose.int)
def transpose(ctx: GraphBuilder, node: fx.Node, x: fx.Node, dim0: int, dim1: int) -> Value:
    """transpose.int(Tensor(a) self, int dim0, int dim1) -> Tensor(a)"""
    perm = list(range(rank_of(x)))
    if not perm:
        return ctx.value(x)
    perm[dim0], perm[dim1] = perm[dim1], perm[dim0]
    return ctx.transpose(ctx.value(x), perm)


@converts(aten.permute.default)
def permute(ctx: GraphBuilder, node: fx.Node, x: fx.Node, dims: Sequence[int]) -> Value:
    """permute(Tensor(a) self, int[] dims) -> Tensor(a)"""
    rank = rank_of(x)
    return ctx.transpose(ctx.value(x), [dim % rank for dim in dims])


@converts(aten.unsqueeze.default)
def unsqueeze(ctx: GraphBuilder, node: fx.Node, x: fx.Node, dim: int) -> Value:
    """unsqueeze(Tensor(a) self, int dim) -> Tensor(a)"""
    return ctx.op("Unsqueeze", ctx.value(x), ctx.ints([dim]))


@converts(aten.squeeze.dim, aten.squeeze.dims)
def squeeze(ctx: GraphBuilder, node: fx.Node, x: fx.Node, dim: int | Sequence[int]) -> Value:
    """squeeze.dims(Tensor(a) self, int[] dim) -> Tensor(a)"""
    sizes = shape_of(x)
    dims = [d % max(len(sizes), 1) for d in ([dim] if isinstance(dim, int) else dim)]
    ones = [d for d in dims if sizes and isinstance(sizes[d], int) and sizes[d] == 1]
    return ctx.op("Squeeze", ctx.value(x), ctx.ints(ones)) if ones else ctx.value(x)


@converts(aten.expand.default)
def expand(ctx: GraphBuilder, node: fx.Node, x: fx.Node, size: Sequence[Size], *, implicit: bool = False) -> Value:
    """expand(Tensor(a) self, SymInt[] size, *, bool implicit=False) -> Tensor(a)"""
    if same_shape(x, node):
        return ctx.value(x)
    # ONNX Expand broadcasts both ways: 1 keeps the input's size, as -1 does in torch
    sizes = [1 if isinstance(s, int) and s == -1 else s for s in size]
    return ctx.op("Expand", ctx.value(x), ctx.sizes(sizes))


@converts(aten.repeat.default)
def repeat(ctx: GraphBuilder, node: fx.Node, x: fx.Node, repeats: Sequence[Size]) -> Value:
    """repeat(Tensor self, SymInt[] repeats) -> Tensor"""
    value = ctx.value(x)
    if not repeats:  # of a scalar
        return value
    extra = len(repeats) - rank_of(x)
    if extra:
        value = ctx.op("Unsqueeze", value, ctx.ints(list(range(extra))))
    return ctx.op("Tile", value, ctx.sizes(repeats))


@converts(aten.slice.Tensor)
def slice_(
    ctx: GraphBuilder,
    node: fx.Node,
    x: fx.Node,
    dim: int = 0,
    start: Size | None = None,
    end: Size | None = None,
    step: int = 1,
) -> Value:
    """slice.Tensor(Tensor(a) self, int dim=0, SymInt? start=None, SymInt? end=None, SymInt step=1) -> Tensor(a)"""
    if same_shape(x, node):
        return ctx.value(x)
    bounds = [ctx.sizes([0 if start is None else start]), ctx.sizes([2**63 - 1 if end is None else end])]
    return ctx.op("Slice", ctx.value(x), *bounds, ctx.ints([dim]), ctx.ints([step]))


@converts(aten.select.int)
def select(ctx: GraphBuilder, node: fx.Node, x: fx.Node, dim: int, index: Size) -> Value:
    """select.int(Tensor(a) self, int dim, SymInt index) -> Tensor(a)"""
    return ctx.op("Gather", ctx.value(x), ctx.value(index, torch.int64), axis=dim)


@converts(aten.cat.default)
def cat(ctx: GraphBuilder, node: fx.Node, tensors: Sequence[fx.Node], dim: int = 0) -> Value:
    """cat(Tensor[] tensors, int dim=0) -> Tensor"""
    dtype = dtype_of(node)
    # torch lets an empty 1-D tensor of any rank take part
    full = [x for x in tensors if rank_of(x) != 1 or not static(shape_of(x)) or shape_of(x)[0]] or list(tensors)[:1]
    return ctx.op("Concat", *(ctx.value(x, dtype) for x in full), axis=dim)


@converts(aten.stack.default)
def stack(ctx: GraphBuilder, node: fx.Node, tensors: Sequence[fx.Node], dim: int = 0) -> Value:
    """stack(Tensor[] tensors, int dim=0) -> Tensor"""
    dtype = dtype_of(node)
    axis = dim % rank_of(node)
    return ctx.op("Concat", *(ctx.op("Unsqueeze", ctx.value(x, dtype), ctx.ints([axis])) for x in tensors), axis=axis)


@converts(aten.split_with_sizes.default)
def split_with_sizes(
    ctx: GraphBuilder, node: fx.Node, x: fx.Node, split_sizes: Sequence[Size], dim: int = 0
) -> tuple[Value, ...]:
    """split_with_sizes(Tensor(a -> *) self, SymInt[] split_sizes, int dim=0) -> Tensor(a)[]"""
    results = ctx.op("Split", ctx.value(x), ctx.sizes(split_sizes), axis=dim, outputs=len(split_sizes))
    return results if isinstance(results, tuple) else (results,)


@converts(aten.split.Tensor)
def split(ctx: GraphBuilder, node: fx.Node, x: fx.Node, split_size: Size, dim: int = 0) -> tuple[Value, ...]:
    """split.Tensor(Tensor(a -> *) self, SymInt split_size, int dim=0) -> Tensor(a)[]"""
    sizes = [part.shape[dim] for part in node.meta["val"]]
    if not static(sizes):
        raise Unsupported("split along a symbolic size")
    return split_with_sizes(ctx, node, x, sizes, dim)


@converts(aten.unbind.int)
def unbind(ctx: GraphBuilder, node: fx.Node, x: fx.Node, dim: int = 0) -> tuple[Value, ...]:
    """unbind.int(Tensor(a -> *) self, int dim=0) -> Tensor(a)[]"""
    count = len(node.meta["val"])
    return tuple(ctx.op("Gather", ctx.value(x), ctx.ints(index), axis=dim) for index in range(count))


@converts(aten.flip.default)
def flip(ctx: GraphBuilder, node: fx.Node, x: fx.Node, dims: Sequence[int]) -> Value:
    """flip(Tensor self, int[] dims) -> Tensor"""
    if not dims or rank_of(x) == 0:
        return ctx.value(x)
    if 0 in shape_of(x):
        raise Unsupported("a flip of an empty tensor")
    count = len(dims)
    last, first = ctx.ints([-1] * count), ctx.ints([-(2**63) + 1] * count)
    return ctx.op("Slice", ctx.value(x), last, first, ctx.ints(list(dims)), ctx.ints([-1] * count))


@converts(aten.constant_pad_nd.default)
def constant_pad_nd(ctx: GraphBuilder, node: fx.Node, x: fx.Node, pad: Sequence[Size], value: Any = 0) -> Value:
    """constant_pad_nd(Tensor self, SymInt[] pad, Scalar value=0) -> Tensor"""
    if not static(pad):
        raise Unsupported("padding by a symbolic size")
    rank = rank_of(x)
    before, after = [0] * rank, [0] * rank
    for index in range(len(pad) // 2):  # torch lists pairs from the last dimension
        before[rank - 1 - index], after[rank - 1 - index] = pad[2 * index], pad[2 * index + 1]  # type: ignore
    return ctx.op("Pad", ctx.value(x), ctx.ints(before + after), ctx.value(value, dtype_of(x)))


@converts(aten.as_strided.default)
def as_strided(
    ctx: GraphBuilder,
    node: fx.Node,
    x: fx.Node,
    size: Sequence[Size],
    stride: Sequence[Size],
    storage_offset: Size | None = None,
) -> Value:
    """as_strided(Tensor(a) self, SymInt[] size, SymInt[] stride, SymInt? storage_offset=None) -> Tensor(a)"""
    positions = _positions(ctx, x, size, stride, storage_offset or 0)
    if positions is None:
        return ctx.reshape_like(ctx.value(x), node, [])
    return ctx.op("Gather", ctx.op("Reshape", ctx.value(x), ctx.ints([-1])), positions, axis=0)


@converts(aten.as_strided_scatter.default)
def as_strided_scatter(
    ctx: GraphBuilder,
    node: fx.Node,
    x: fx.Node,
    src: fx.Node,
    size: Sequence[Size],
    stride: Sequence[Size],
    storage_offset: Size | None = None,
) -> Value:
    """as_strided_scatter(Tensor self, Tensor src, SymInt[] size, SymInt[] stride, SymInt? offset=None) -> Tensor"""
    positions = _positions(ctx, x, size, stride, storage_offset or 0)
    if positions is None:
        return ctx.reshape_like(ctx.value(src), node, [])
    steps = [(int(step), int(length)) for step, length in zip(stride, size, strict=True)]  # type: ignore[arg-type]
    reach = 0
    for step, length in sorted(pair for pair in steps if pair[1] != 1):
        if step <= reach:
            raise Unsupported("as_strided_scatter to one place twice")
        reach += (length - 1) * step
    flat = [ctx.op("Reshape", value, ctx.ints([-1])) for value in (ctx.value(x), positions, ctx.value(src))]
    return ctx.reshape_like(ctx.op("ScatterElements", *flat), node, [])


def _positions(
    ctx: GraphBuilder, x: fx.Node, size: Sequence[Size], stride: Sequence[Size], offset: Size
) -> Value | None:
    """Where in a tensor's memory the elements are that as_strided reads; ``None`` if they are all of it, in order."""
    val = x.meta["val"]
    if not static([*shape_of(x), *size, *stride, offset]) or 0 in (*shape_of(x), *size):
        raise Unsupported("as_strided of symbolic or no size", ReasonType.DYNAMIC_SHAPE)
    steps = [(int(length), int(step)) for length, step in zip(size, stride, strict=True)]  # type: ignore[arg-type]
    last = int(offset) + sum((length - 1) * step for length, step in steps)  # type: ignore[arg-type]
    # it reads the memory behind x, which is known here only where x is all of it
    if not val.is_contiguous() or val.storage_offset() != 0 or last >= val.numel():
        raise Unsupported("as_strided that reads beyond a contiguous tensor")
    contiguous, elements = True, 1
    for length, step in reversed(steps):
        contiguous &= length == 1 or step == elements
        elements *= length
    if contiguous and elements == val.numel():
        return None
    index = ctx.ints(int(offset))  # type: ignore[arg-type]
    for dim, (length, step) in enumerate(steps):
        positions = ctx.op("Mul", ctx.op("Range", ctx.ints(0), ctx.ints(length), ctx.ints(1)), ctx.ints(step))
        index = ctx.op("Add", index, ctx.op("Reshape", positions, ctx.ints([-1] + [1] * (len(steps) - 1 - dim))))
    return index


# tensors made from sizes


@converts(aten.full.default)
def full(ctx: GraphBuilder, node: fx.Node, size: Sequence[Size], fill_value: Any, **kwargs: Any) -> Value:
    """full(SymInt[] size, Scalar fill_value, *, dtype?, layout?, device?, pin_memory?) -> Tensor"""
    dtype = dtype_of(node)
    if isinstance(fill_value, fx.Node):
        return ctx.op("Expand", ctx.value(fill_value, dtype), ctx.sizes(size))
    if static(size) and not size:
        return ctx.const(fill_value, dtype)
    array = ir.tensor(ctx.const([fill_value], dtype).ir.const_value.numpy(), dtype=DTYPES[dtype])  # type: ignore[union-attr]
    return ctx.op("ConstantOfShape", ctx.sizes(size), dtype=dtype, value=array)


@converts(aten.full_like.default)
def full_like(ctx: GraphBuilder, node: fx.Node, x: fx.Node, fill_value: Any, **kwargs: Any) -> Value:
    """full_like(Tensor self, Scalar fill_value, *, dtype?, layout?, device?, ...) -> Tensor"""
    if isinstance(fill_value, fx.Node):
        return ctx.op("Expand", ctx.value(fill_value, dtype_of(node)), ctx.shape_tensor(x))
    array = ir.tensor(ctx.const([fill_value], dtype_of(node)).ir.const_value.numpy(), dtype=DTYPES[dtype_of(node)])  # type: ignore[union-attr]
    return ctx.op("ConstantOfShape", ctx.shape_tensor(x), dtype=dtype_of(node), value=array)


@converts(aten._efficientzerotensor.default)
def zero_tensor(ctx: GraphBuilder, node: fx.Node, size: Sequence[Size], **kwargs: Any) -> Value:
    """_efficientzerotensor(SymInt[] size, *, dtype?, layout?, device?, pin_memory?) -> Tensor"""
    return full(ctx, node, size, 0)


@converts(aten.scalar_tensor.default)
def scalar_tensor(ctx: GraphBuilder, node: fx.Node, s: Any, **kwargs: Any) -> Value:
    """scalar_tensor(Scalar s, *, dtype?, layout?, device?, pin_memory?) -> Tensor"""
    return ctx.value(s, dtype_of(node))


@converts(aten.arange.start_step)
def arange(ctx: GraphBuilder, node: fx.Node, start: Any, end: Any, step: Any = 1, **kwargs: Any) -> Value:
    """arange.start_step(Scalar start, Scalar end, Scalar step=1, *, dtype?, layout?, device?, pin_memory?) -> Tensor"""
    dtype, (size,) = dtype_of(node), shape_of(node)
    if not dtype.is_floating_point:
        if any(isinstance(arg, float) for arg in (start, end, step)):
            raise Unsupported("an integer arange with fractional bounds")
        numbers = ctx.op("Range", *(ctx.value(arg, torch.int64) for arg in (start, end, step)))
        return numbers if dtype is torch.int64 else ctx.cast(numbers, dtype)
    # torch multiplies a count by the step where Range adds up steps and drifts
    if isinstance(size, int):
        count = ctx.ints(size)
    elif start == 0 and step == 1:
        count = ctx.value(end, torch.int64)
    else:
        raise Unsupported(f"arange of {dtype} of symbolic size", ReasonType.DYNAMIC_SHAPE)
    numbers = ctx.cast(ctx.op("Range", ctx.ints(0), count, ctx.ints(1)), dtype)
    if step != 1:
        numbers = ctx.op("Mul", numbers, ctx.value(step, dtype))
    return numbers if start == 0 else ctx.op("Add", numbers, ctx.value(start, dtype))


@converts(aten.arange.start)
def arange_start(ctx: GraphBuilder, node: fx.Node, start: Any, end: Any, **kwargs: Any) -> Value:
    """arange.start(Scalar start, Scalar end, *, dtype?, layout?, device?, pin_memory?) -> Tensor"""
    return arange(ctx, node, start, end)


@converts(aten.arange.default)
def arange_end(ctx: GraphBuilder, node: fx.Node, end: Any, **kwargs: Any) -> Value:
    """arange(Scalar end, *, dtype?, layout?, device?, pin_memory?) -> Tensor"""
    return arange(ctx, node, 0, end)
