"""Pooling and its gradient."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from lightning_ort.compiler.executors.ort.conversion.graph import GraphBuilder, Value
from lightning_ort.compiler.executors.ort.conversion.metadata import dtype_of, rank_of, shape_of
from lightning_ort.compiler.executors.ort.conversion.nn import spread, static_sizes
from lightning_ort.compiler.executors.ort.conversion.reduction import reduce
from lightning_ort.compiler.executors.ort.conversion.registry import Unsupported, converts

aten = torch.ops.aten


def _window(
    x: fx.Node, spatial: int, kernel_size: Sequence[int], stride: Sequence[int], padding: Sequence[int] | int
) -> tuple[list[int], list[int], list[int]]:
    """Kernel, stride and padding with one entry per spatial dimension."""
    if rank_of(x) != spatial + 2:
        raise Unsupported("pooling without batch dimension")
    kernel = spread(kernel_size, spatial, "a kernel")
    paddings = [padding] if isinstance(padding, int) else padding
    return kernel, spread(stride, spatial, "a stride") if stride else kernel, spread(paddings, spatial, "a padding")


def _spatial(node: fx.Node, spatial: int) -> list[int]:
    return static_sizes(shape_of(node)[-spatial:], "pooling")


def _flat(ctx: GraphBuilder, value: Value, sizes: Sequence[int]) -> Value:
    """Reshape [N, C, spatial...] to [N, C, all of it]."""
    return ctx.op("Reshape", value, ctx.ints([0, 0, math.prod(sizes)]))


# maximum


@converts(aten.max_pool2d_with_indices.default, aten.max_pool3d_with_indices.default)
def max_pool_with_indices(
    ctx: GraphBuilder,
    node: fx.Node,
    x: fx.Node,
    kernel_size: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] | int = 0,
    dilation: Sequence[int] | int = 1,
    ceil_mode: bool = False,
) -> tuple[Value, Value]:
    """max_pool2d_with_indices(Tensor self, int[2] kernel_size, int[2] stride=[], int[2] padding=0, int[2] dilation=1, bool ceil_mode=False) -> (Tensor, Tensor)"""  # noqa: E501
    dtype, spatial = dtype_of(x), len(kernel_size)
    kernel, strides, pads = _window(x, spatial, kernel_size, stride, padding)
    dilations = spread([dilation] if isinstance(dilation, int) else dilation, spatial, "a dilation")
    sizes, pooled_sizes = _spatial(x, spatial), static_sizes(node.meta["val"][0].shape[-spatial:], "pooling")
    # torch and onnxruntime do not agree on which window is the last under ceil_mode: pad for as many as torch has
    after = [
        max((out - 1) * step + stretch * (width - 1) + 1 - size - before, 0)
        for out, step, stretch, width, size, before in zip(
            pooled_sizes, strides, dilations, kernel, sizes, pads, strict=True
        )
    ]
    if not dtype.is_floating_point or any(pad >= width for pad, width in zip(after, kernel, strict=True)):
        raise Unsupported("max pooling of integers, or padded by a whole window")
    # onnxruntime 1.19 ignores a NaN, and returns a wrong value and a negative index for a window of -inf. So let it
    # find where the maximum is among numbers that it handles, and read the values there.
    value = ctx.value(x)
    _, indices = ctx.op(
        "MaxPool",
        _ranked(ctx, value, dtype, sizes),
        kernel_shape=kernel,
        strides=strides,
        pads=pads + after,
        dilations=dilations,
        outputs=2,
    )
    # ONNX counts over the whole tensor, torch within a plane
    flat = _flat(ctx, ctx.op("Mod", indices, ctx.ints(math.prod(sizes))), pooled_sizes)
    result = ctx.op("GatherElements", _flat(ctx, value, sizes), flat, axis=2)
    shape = ctx.ints([0, 0, *pooled_sizes])
    return ctx.op("Reshape", result, shape), ctx.op("Reshape", flat, shape)


def _ranked(ctx: GraphBuilder, value: Value, dtype: torch.dtype, sizes: Sequence[int]) -> Value:
    """Finite numbers that rank as torch's max pooling ranks the values: a NaN beyond all, the last one first."""
    work, largest = torch.float64, torch.finfo(torch.float64).max
    # there is room beyond the largest float32 number, and beyond half the largest float64 one
    wide = ctx.op("Mul", value, ctx.const(0.5, work)) if dtype is work else ctx.cast(value, work)
    bound = ctx.const(0.6 * largest, work)
    finite = ctx.op("Max", ctx.op("Min", wide, bound), ctx.op("Neg", bound))
    total = math.prod(sizes)
    places = ctx.cast(ctx.op("Range", ctx.ints(0), ctx.ints(total), ctx.ints(1)), work)
    beyond = ctx.op(
        "Add", ctx.op("Mul", places, ctx.const(0.2 * largest / total, work)), ctx.const(0.7 * largest, work)
    )
    return ctx.op("Where", ctx.op("IsNaN", value), ctx.op("Reshape", beyond, ctx.ints(sizes)), finite)


@converts(aten.max_pool2d_with_indices_backward.default, aten.max_pool3d_with_indices_backward.default)
def max_pool_backward(
    ctx: GraphBuilder,
    node: fx.Node,
    grad: fx.Node,
    x: fx.Node,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    ceil_mode: bool,
    indices: fx.Node,
) -> Value:
    """max_pool2d_with_indices_backward(Tensor grad_output, Tensor self, int[2] kernel_size, int[2] stride, int[2] padding, int[2] dilation, bool ceil_mode, Tensor indices) -> Tensor"""  # noqa: E501
    _window(x, len(kernel_size), kernel_size, stride, padding)
    sizes, pooled = _spatial(x, len(kernel_size)), _spatial(grad, len(kernel_size))
    flat = ctx.ints([0, 0, math.prod(sizes)])
    zeros = ctx.op("Reshape", ctx.op("Expand", ctx.const(0, dtype_of(x)), ctx.shape_tensor(x)), flat)
    result = ctx.op(
        "ScatterElements",
        zeros,
        _flat(ctx, ctx.value(indices), pooled),
        _flat(ctx, ctx.value(grad), pooled),
        axis=2,
        reduction="add",
    )
    return ctx.op("Reshape", result, ctx.ints([0, 0, *sizes]))


# average


def _average(
    ctx: GraphBuilder,
    x: fx.Node,
    spatial: int,
    kernel_size: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] | int = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Value:
    kernel, strides, pads = _window(x, spatial, kernel_size, stride, padding)
    _refuse_partial_windows(x, spatial, kernel, strides, pads, ceil_mode)
    result = ctx.op(
        "AveragePool",
        ctx.value(x),
        kernel_shape=kernel,
        strides=strides,
        pads=pads + pads,
        count_include_pad=int(count_include_pad or divisor_override is not None),
    )
    if divisor_override is None:
        return result
    return ctx.op("Mul", result, ctx.const(math.prod(kernel) / divisor_override, dtype_of(x)))


def _refuse_partial_windows(
    x: fx.Node, spatial: int, kernel: Sequence[int], strides: Sequence[int], pads: Sequence[int], ceil_mode: bool
) -> None:
    """A window that hangs over the edge is averaged differently by torch and onnxruntime."""
    steps = zip(_spatial(x, spatial), kernel, strides, pads, strict=True) if ceil_mode else ()
    if any((size + 2 * pad - width) % step for size, width, step, pad in steps):
        raise Unsupported("average pooling with ceil_mode where a window is cut off")


@converts(aten.avg_pool1d.default)
def avg_pool1d(ctx: GraphBuilder, node: fx.Node, x: fx.Node, *args: Any, **kwargs: Any) -> Value:
    """avg_pool1d(Tensor self, int[1] kernel_size, int[1] stride=[], int[1] padding=0, bool ceil_mode=False, bool count_include_pad=True) -> Tensor"""  # noqa: E501
    return _average(ctx, x, 1, *args, **kwargs)


@converts(aten.avg_pool2d.default)
def avg_pool2d(ctx: GraphBuilder, node: fx.Node, x: fx.Node, *args: Any, **kwargs: Any) -> Value:
    """avg_pool2d(Tensor self, int[2] kernel_size, int[2] stride=[], int[2] padding=0, bool ceil_mode=False, bool count_include_pad=True, int? divisor_override=None) -> Tensor"""  # noqa: E501
    return _average(ctx, x, 2, *args, **kwargs)


@converts(aten.avg_pool3d.default)
def avg_pool3d(ctx: GraphBuilder, node: fx.Node, x: fx.Node, *args: Any, **kwargs: Any) -> Value:
    """avg_pool3d(Tensor self, int[3] kernel_size, int[3] stride=[], int[3] padding=0, bool ceil_mode=False, bool count_include_pad=True, int? divisor_override=None) -> Tensor"""  # noqa: E501
    return _average(ctx, x, 3, *args, **kwargs)


@converts(aten.avg_pool2d_backward.default, aten.avg_pool3d_backward.default)
def avg_pool_backward(
    ctx: GraphBuilder,
    node: fx.Node,
    grad: fx.Node,
    x: fx.Node,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    ceil_mode: bool,
    count_include_pad: bool,
    divisor_override: int | None,
) -> Value:
    """avg_pool2d_backward(Tensor grad_output, Tensor self, int[2] kernel_size, int[2] stride, int[2] padding, bool ceil_mode, bool count_include_pad, int? divisor_override) -> Tensor"""  # noqa: E501
    spatial = len(kernel_size)
    kernel, strides, pads = _window(x, spatial, kernel_size, stride, padding)
    _refuse_partial_windows(x, spatial, kernel, strides, pads, ceil_mode)
    if kernel != strides or any(pads):
        raise Unsupported("the gradient of average pooling with overlapping or padded windows")
    return _share(ctx, grad, x, kernel, divisor_override or math.prod(kernel))


def _share(ctx: GraphBuilder, grad: fx.Node, x: fx.Node, kernel: Sequence[int], divisor: int) -> Value:
    """Give each entry of a window its share of the window's gradient."""
    pooled, sizes = _spatial(grad, len(kernel)), _spatial(x, len(kernel))
    shares = ctx.op("Mul", ctx.value(grad), ctx.const(1 / divisor, dtype_of(grad)))
    value = _enlarge(ctx, shares, pooled, kernel)
    after = [size - out * width for size, out, width in zip(sizes, pooled, kernel, strict=True)]
    if not any(after):
        return value
    # what no window covers
    return ctx.op("Pad", value, ctx.ints([0] * (len(kernel) + 2) + [0, 0] + after))


def _enlarge(ctx: GraphBuilder, value: Value, sizes: Sequence[int], factors: Sequence[int]) -> Value:
    """Repeat every entry of [N, C, spatial...] along each spatial dimension."""
    spatial = len(sizes)
    value = ctx.op("Unsqueeze", value, ctx.ints([3 + 2 * dim for dim in range(spatial)]))
    blocks = [1, 1] + [part for factor in factors for part in (1, factor)]
    larger = [size * factor for size, factor in zip(sizes, factors, strict=True)]
    return ctx.op("Reshape", ctx.op("Expand", value, ctx.ints(blocks)), ctx.ints([0, 0, *larger]))


@converts(aten._adaptive_avg_pool2d.default, aten._adaptive_avg_pool3d.default)
def adaptive_avg_pool(ctx: GraphBuilder, node: fx.Node, x: fx.Node, output_size: Sequence[Any]) -> Value:
    """_adaptive_avg_pool2d(Tensor self, SymInt[2] output_size) -> Tensor"""
    spatial = len(output_size)
    kernel = _adaptive_kernel(x, node, spatial)
    if set(_spatial(node, spatial)) == {1}:
        return reduce(ctx, "ReduceMean", x, ctx.value(x), list(range(-spatial, 0)), keepdim=True)
    return _average(ctx, x, spatial, kernel)


@converts(aten._adaptive_avg_pool2d_backward.default, aten._adaptive_avg_pool3d_backward.default)
def adaptive_avg_pool_backward(ctx: GraphBuilder, node: fx.Node, grad: fx.Node, x: fx.Node) -> Value:
    """_adaptive_avg_pool2d_backward(Tensor grad_output, Tensor self) -> Tensor"""
    spatial = 3 if node.target is aten._adaptive_avg_pool3d_backward.default else 2
    kernel = _adaptive_kernel(x, grad, spatial)
    return _share(ctx, grad, x, kernel, math.prod(kernel))


def _adaptive_kernel(x: fx.Node, pooled: fx.Node, spatial: int) -> list[int]:
    """The windows of adaptive pooling where all are of one size."""
    if rank_of(x) != spatial + 2:
        raise Unsupported("pooling without batch dimension")
    sizes = list(zip(_spatial(x, spatial), _spatial(pooled, spatial), strict=True))
    if any(size % out for size, out in sizes):
        raise Unsupported("adaptive pooling to a size that does not divide the input's")
    return [size // out for size, out in sizes]
