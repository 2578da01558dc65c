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
    as_list,
    axis_of,
    dtype_of,
    rank_of,
    same_shape,
    shape_of,
    static,
    static_sizes,
)
from lightning_ort.compiler.executors.ort.conversion.registry import CONVERTERS, Unsupported, converts
from lightning_ort.compiler.graphs.nodes import IN_ORDER
from lightning_ort.compiler.reason import ReasonType

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
    return ctx.value(x).transpose(range(rank_of(x))[::-1])


@converts(aten.transpose.int)
def transpose(ctx: GraphBuilder, node: fx.Node, x: fx.Node, dim0: int, dim1: int) -> Value:
    """transpose.int(Tensor(a) self, int dim0, int dim1) -> Tensor(a)"""
    perm = list(range(rank_of(x)))
    if perm:
        perm[dim0], perm[dim1] = perm[dim1], perm[dim0]
    return ctx.value(x).transpose(perm)


@converts(aten.permute.default)
def permute(ctx: GraphBuilder, node: fx.Node, x: fx.Node, dims: Sequence[int]) -> Value:
    """permute(Tensor(a) self, int[] dims) -> Tensor(a)"""
    return ctx.value(x).transpose([axis_of(dim, rank_of(x)) for dim in dims])


@converts(aten.unsqueeze.default)
def unsqueeze(ctx: GraphBuilder, node: fx.Node, x: fx.Node, dim: int) -> Value:
    """unsqueeze(Tensor(a) self, int dim) -> Tensor(a)"""
    return ctx.value(x).unsqueeze(dim)


@converts(aten.squeeze.dim, aten.squeeze.dims)
def squeeze(ctx: GraphBuilder, node: fx.Node, x: fx.Node, dim: int | Sequence[int]) -> Value:
    """squeeze.dims(Tensor(a) self, int[] dim) -> Tensor(a)"""
    sizes = shape_of(x)
    dims = [axis_of(d, len(sizes)) for d in as_list(dim)] if sizes else []
    ones = [d for d in dims if isinstance(sizes[d], int) and sizes[d] == 1]
    return ctx.value(x).squeeze(*ones) if ones else ctx.value(x)


@converts(aten.expand.default)
def expand(ctx: GraphBuilder, node: fx.Node, x: fx.Node, size: Sequence[Size], *, implicit: bool = False) -> Value:
    """expand(Tensor(a) self, SymInt[] size, *, bool implicit=False) -> Tensor(a)"""
    if same_shape(x, node):
        return ctx.value(x)
    # ONNX Expand broadcasts both ways: 1 keeps the input's size, as -1 does in torch
    return ctx.value(x).expand(ctx.sizes([1 if isinstance(s, int) and s == -1 else s for s in size]))


@converts(aten.repeat.default)
def repeat(ctx: GraphBuilder, node: fx.Node, x: fx.Node, repeats: Sequence[Size]) -> Value:
    """repeat(Tensor self, SymInt[] repeats) -> Tensor"""
    if not repeats:  # of a scalar
        return ctx.value(x)
    extra = range(len(repeats) - rank_of(x))
    value = ctx.value(x).unsqueeze(*extra) if extra else ctx.value(x)
    return value.op("Tile", ctx.sizes(repeats))


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
    first, last = ctx.sizes([0 if start is None else start]), ctx.sizes([2**63 - 1 if end is None else end])
    return ctx.value(x).op("Slice", first, last, [dim], [step])


@converts(aten.select.int)
def select(ctx: GraphBuilder, node: fx.Node, x: fx.Node, dim: int, index: Size) -> Value:
    """select.int(Tensor(a) self, int dim, SymInt index) -> Tensor(a)"""
    return ctx.value(x).op("Gather", ctx.value(index, torch.int64), axis=dim)


@converts(aten.cat.default, takes_empty=True)
def cat(ctx: GraphBuilder, node: fx.Node, tensors: Sequence[fx.Node], dim: int = 0) -> Value:
    """cat(Tensor[] tensors, int dim=0) -> Tensor"""
    # torch lets an empty 1-D tensor of any rank take part
    full = [x for x in tensors if rank_of(x) != 1 or not static(shape_of(x)) or shape_of(x)[0]] or tensors[:1]
    return ctx.op("Concat", *(ctx.value(x, dtype_of(node)) for x in full), axis=dim)


@converts(aten.stack.default)
def stack(ctx: GraphBuilder, node: fx.Node, tensors: Sequence[fx.Node], dim: int = 0) -> Value:
    """stack(Tensor[] tensors, int dim=0) -> Tensor"""
    axis = axis_of(dim, rank_of(node))
    return ctx.op("Concat", *(ctx.value(x, dtype_of(node)).unsqueeze(axis) for x in tensors), axis=axis)


@converts(aten.split_with_sizes.default)
def split_with_sizes(
    ctx: GraphBuilder, node: fx.Node, x: fx.Node, split_sizes: Sequence[Size], dim: int = 0
) -> tuple[Value, ...]:
    """split_with_sizes(Tensor(a -> *) self, SymInt[] split_sizes, int dim=0) -> Tensor(a)[]"""
    return _parts(ctx, x, ctx.sizes(split_sizes), dim, len(split_sizes))


@converts(aten.split.Tensor)
def split(ctx: GraphBuilder, node: fx.Node, x: fx.Node, split_size: Size, dim: int = 0) -> tuple[Value, ...]:
    """split.Tensor(Tensor(a -> *) self, SymInt split_size, int dim=0) -> Tensor(a)[]"""
    sizes, dim = [part.shape[dim] for part in node.meta["val"]], axis_of(dim, rank_of(x))
    count = len(sizes)
    if static(sizes):
        return _parts(ctx, x, ctx.sizes(sizes), dim, count)
    first = ctx.sizes([split_size])
    last = ctx.value(x).op("Shape", start=dim, end=dim + 1) - first * (count - 1)
    return _parts(ctx, x, ctx.op("Concat", *[first] * (count - 1), last, axis=0), dim, count)


def _parts(ctx: GraphBuilder, x: fx.Node, sizes: Value, dim: int, count: int) -> tuple[Value, ...]:
    results = ctx.op("Split", x, sizes, axis=dim, outputs=count)
    return results if isinstance(results, tuple) else (results,)


@converts(aten.unbind.int)
def unbind(ctx: GraphBuilder, node: fx.Node, x: fx.Node, dim: int = 0) -> tuple[Value, ...]:
    """unbind.int(Tensor(a -> *) self, int dim=0) -> Tensor(a)[]"""
    return tuple(ctx.op("Gather", x, index, axis=dim) for index in range(len(node.meta["val"])))


@converts(aten.flip.default)
def flip(ctx: GraphBuilder, node: fx.Node, x: fx.Node, dims: Sequence[int]) -> Value:
    """flip(Tensor self, int[] dims) -> Tensor"""
    if not dims or rank_of(x) == 0:
        return ctx.value(x)
    backwards = [-1] * len(dims)
    return ctx.value(x).op("Slice", backwards, [-(2**63) + 1] * len(dims), list(dims), backwards)


@converts(aten.constant_pad_nd.default)
def constant_pad_nd(ctx: GraphBuilder, node: fx.Node, x: fx.Node, pad: Sequence[Size], value: Any = 0) -> Value:
    """constant_pad_nd(Tensor self, SymInt[] pad, Scalar value=0) -> Tensor"""
    sizes = static_sizes(pad, "padding")  # pairs of before and after, from the last dimension on
    others = [0] * (rank_of(x) - len(sizes) // 2)
    before, after = [*others, *sizes[-2::-2]], [*others, *sizes[::-2]]
    whole = ctx.value(x)
    # negative ones by Slice: where nothing is left in between, Pad reads what is not there (onnxruntime 1.19)
    if cut := [axis for axis, pads in enumerate(zip(before, after, strict=True)) if min(pads) < 0]:
        starts = [max(-before[axis], 0) for axis in cut]
        ends = [after[axis] if after[axis] < 0 else 2**63 - 1 for axis in cut]
        whole = whole.op("Slice", starts, ends, cut)
    pads = [max(pad, 0) for pad in (*before, *after)]
    return whole.op("Pad", pads, ctx.value(value, dtype_of(x))) if any(pads) or not cut else whole


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
    positions = _positions(ctx, x, _steps(x, size, stride, storage_offset), storage_offset)
    if positions is None:
        return ctx.reshape_like(ctx.value(x), node, [])
    return ctx.value(x).reshape([-1]).op("Gather", positions, axis=0)


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
    """as_strided_scatter(Tensor self, Tensor src, SymInt[] size, SymInt[] stride, SymInt? storage_offset=None) -> Tensor"""  # noqa: E501
    steps = _steps(x, size, stride, storage_offset)
    positions = _positions(ctx, x, steps, storage_offset)
    if positions is None:
        return ctx.reshape_like(ctx.value(src), node, [])
    reach = 0
    for step, length in sorted((step, length) for length, step in steps if length != 1):
        if step <= reach:
            raise Unsupported("as_strided_scatter to one place twice")
        reach += (length - 1) * step
    flat = (value.reshape([-1]) for value in (ctx.value(x), positions, ctx.value(src)))
    return ctx.reshape_like(ctx.op("ScatterElements", *flat), node, [])


def _steps(x: fx.Node, size: Sequence[Any], stride: Sequence[Any], offset: Any) -> list[tuple[int, int]]:
    """The length and the step in memory of every dimension that as_strided reads."""
    if not static([*shape_of(x), *size, *stride, offset or 0]) or 0 in (*shape_of(x), *size):
        raise Unsupported("as_strided of symbolic or no size", ReasonType.DYNAMIC_SHAPE)
    return list(zip(size, stride, strict=True))


def _positions(ctx: GraphBuilder, x: fx.Node, steps: list[tuple[int, int]], offset: Any) -> Value | None:
    """Where in a tensor's memory the elements are that as_strided reads; ``None`` if they are all of it, in order."""
    val, offset = x.meta["val"], offset or 0
    last = offset + sum((length - 1) * step for length, step in steps)
    # it reads the memory behind x, which is known here only where x is all of it
    if not val.is_contiguous() or val.storage_offset() != 0 or last >= val.numel():
        raise Unsupported("as_strided that reads beyond a contiguous tensor")
    contiguous, elements = True, 1
    for length, step in reversed(steps):
        contiguous &= length == 1 or step == elements
        elements *= length
    if contiguous and elements == val.numel():
        return None
    index = ctx.ints(offset)
    for dim, (length, step) in enumerate(steps):
        positions = ctx.op("Range", 0, length, 1) * step
        index = index + positions.reshape([-1] + [1] * (len(steps) - 1 - dim))
    return index


# tensors made from sizes


def filled(ctx: GraphBuilder, shape: Value, number: Any, dtype: torch.dtype) -> Value:
    """A tensor of one number; its shape is a 1-D int64 value."""
    if isinstance(number, fx.Node):
        return ctx.value(number, dtype).expand(shape)
    if dtype is torch.bfloat16:  # from opset 20 on
        return filled(ctx, shape, number, torch.float32).cast(dtype)
    array = ctx.const([number], dtype).ir.const_value.numpy()  # type: ignore[union-attr]
    return shape.op("ConstantOfShape", dtype=dtype, value=ir.tensor(array, dtype=DTYPES[dtype]))


@converts(aten.full.default, aten._efficientzerotensor.default)
def full(ctx: GraphBuilder, node: fx.Node, size: Sequence[Size], fill_value: Any = 0, **kwargs: Any) -> Value:
    """full(SymInt[] size, Scalar fill_value, *, dtype?, layout?, device?, pin_memory?) -> Tensor"""
    if not size and not isinstance(fill_value, fx.Node):
        return ctx.const(fill_value, dtype_of(node))
    return filled(ctx, ctx.sizes(size), fill_value, dtype_of(node))


@converts(aten.full_like.default)
def full_like(ctx: GraphBuilder, node: fx.Node, x: fx.Node, fill_value: Any, **kwargs: Any) -> Value:
    """full_like(Tensor self, Scalar fill_value, *, dtype?, layout?, device?, pin_memory?, memory_format?) -> Tensor"""
    return filled(ctx, ctx.shape_tensor(x), fill_value, dtype_of(node))


@converts(aten.scalar_tensor.default)
def scalar_tensor(ctx: GraphBuilder, node: fx.Node, s: Any, **kwargs: Any) -> Value:
    """scalar_tensor(Scalar s, *, dtype?, layout?, device?, pin_memory?) -> Tensor"""
    return ctx.value(s, dtype_of(node))


@converts(aten.arange.start_step, aten.arange.start, aten.arange.default)
def arange(ctx: GraphBuilder, node: fx.Node, *bounds: Any, **kwargs: Any) -> Value:
    """arange.start_step(Scalar start, Scalar end, Scalar step=1, *, dtype?, layout?, device?, pin_memory?) -> Tensor"""
    start, end, step = {1: (0, *bounds, 1), 2: (*bounds, 1), 3: bounds}[len(bounds)]
    dtype, (size,) = dtype_of(node), shape_of(node)
    if not dtype.is_floating_point:
        if any(isinstance(bound, float) for bound in bounds):
            raise Unsupported("an integer arange with fractional bounds")
        return ctx.op("Range", *(ctx.value(bound, torch.int64) for bound in (start, end, step))).cast(dtype)
    # torch multiplies a count by the step where Range adds up steps and drifts
    if isinstance(size, int):
        count = ctx.ints(size)
    elif start == 0 and step == 1:
        count = ctx.value(end, torch.int64)
    else:
        raise Unsupported(f"arange of {dtype} of symbolic size", ReasonType.DYNAMIC_SHAPE)
    # in float64, as in torch: numbers near 0 would have the errors of the largest ones
    numbers = ctx.op("Range", 0, count, 1).cast(torch.float64 if ctx.on_cpu else dtype)
    if step != 1:
        numbers = numbers * step
    return (numbers if start == 0 else numbers + start).cast(dtype)
