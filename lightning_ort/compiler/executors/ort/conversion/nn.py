"""Matrix products, convolution, embedding, dropout, pooling, and their gradients."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import fx

from lightning_ort.compiler.executors.ort.conversion.elementary import scaled_mask, where
from lightning_ort.compiler.executors.ort.conversion.graph import GraphBuilder, Value
from lightning_ort.compiler.executors.ort.conversion.indexing import refusing_negative
from lightning_ort.compiler.executors.ort.conversion.metadata import (
    Scalar,
    axis_of,
    dtype_of,
    per_dimension,
    rank_of,
    shape_of,
    static_sizes,
)
from lightning_ort.compiler.executors.ort.conversion.reduction import reduce
from lightning_ort.compiler.executors.ort.conversion.registry import Unsupported, converts
from lightning_ort.compiler.executors.ort.conversion.shape import filled
from lightning_ort.compiler.reason import ReasonType

aten = torch.ops.aten


# matrix products; a transposed operand is folded into the product instead of being copied


def _untransposed(ctx: GraphBuilder, x: fx.Node) -> tuple[Value, int | None]:
    """The operand, and 1 if it is the transpose (of the last two dimensions) of the value returned."""
    swaps, rank = False, rank_of(x)
    args: Any = x.args
    if x.target is aten.t.default:
        swaps = rank == 2
    elif x.target is aten.transpose.int:
        swaps = {axis_of(dim, rank) for dim in args[1:3]} == {rank - 2, rank - 1}
    elif x.target is aten.permute.default:
        dims = [axis_of(dim, rank) for dim in args[1]]
        swaps = dims == [*range(rank - 2), rank - 1, rank - 2]
    # a transpose that another region computed is an input of this one
    if swaps and isinstance(source := x.args[0], fx.Node) and source in ctx.values:
        return ctx.values[source], 1
    return ctx.value(x), None


def _check_product(node: fx.Node) -> None:
    if not dtype_of(node).is_floating_point:
        raise Unsupported(f"a matrix product of {dtype_of(node)}")


def _gemm(ctx: GraphBuilder, x: fx.Node, y: fx.Node, bias: Value | None = None, **scale: float) -> Value:
    a, trans_a = _untransposed(ctx, x)
    b, trans_b = _untransposed(ctx, y)
    return a.op("Gemm", b, bias, transA=trans_a, transB=trans_b, **scale)


@converts(aten.mm.default, aten.bmm.default)
def mm(ctx: GraphBuilder, node: fx.Node, x: fx.Node, y: fx.Node) -> Value:
    """mm(Tensor self, Tensor mat2) -> Tensor"""
    if rank_of(node) == 2 or ctx.has_contributed:
        _check_product(node)
    if rank_of(node) == 2:
        return _gemm(ctx, x, y)
    a, trans_a = _untransposed(ctx, x)
    b, trans_b = _untransposed(ctx, y)
    # FusedMatMul is a contributed operator with a CPU kernel for float32 only
    is_fused = ctx.has_contributed and (dtype_of(node) is torch.float32 or node.meta["val"].is_cuda)
    if (trans_a or trans_b) and is_fused:
        return ctx.ms("FusedMatMul", a, b, transA=trans_a or 0, transB=trans_b or 0)
    return ctx.value(x).op("MatMul", ctx.value(y))


@converts(aten.addmm.default)
def addmm(
    ctx: GraphBuilder, node: fx.Node, bias: fx.Node, x: fx.Node, y: fx.Node, *, beta: Scalar = 1, alpha: Scalar = 1
) -> Value:
    """addmm(Tensor self, Tensor mat1, Tensor mat2, *, Scalar beta=1, Scalar alpha=1) -> Tensor"""
    factors = (alpha, beta)
    if any(isinstance(factor, fx.Node) for factor in factors):  # attributes are constants
        return baddbmm(ctx, node, bias, x, y, beta=beta, alpha=alpha)
    if dtype_of(node) is torch.float64 and any(float(np.float32(factor)) != factor for factor in factors):
        return baddbmm(ctx, node, bias, x, y, beta=beta, alpha=alpha)  # attributes are float32
    _check_product(node)
    # with beta=0 torch ignores the bias, even a NaN in it
    names = {"alpha": alpha, "beta": 1 if beta == 0 else beta}
    scale = {name: float(factor) for name, factor in names.items() if factor != 1}
    return _gemm(ctx, x, y, None if beta == 0 else ctx.value(bias), **scale)


@converts(aten.baddbmm.default)
def baddbmm(
    ctx: GraphBuilder, node: fx.Node, bias: fx.Node, x: fx.Node, y: fx.Node, *, beta: Scalar = 1, alpha: Scalar = 1
) -> Value:
    """baddbmm(Tensor self, Tensor batch1, Tensor batch2, *, Scalar beta=1, Scalar alpha=1) -> Tensor"""
    product = mm(ctx, node, x, y)
    if alpha != 1:
        product = product * alpha
    if beta == 0:  # torch ignores the bias
        return product
    return product + (bias if beta == 1 else ctx.value(bias) * beta)


@converts(aten.dot.default)
def dot(ctx: GraphBuilder, node: fx.Node, x: fx.Node, y: fx.Node) -> Value:
    """dot(Tensor self, Tensor tensor) -> Tensor"""
    _check_product(node)
    return ctx.value(x).op("MatMul", ctx.value(y))


@converts(aten.mv.default)
def mv(ctx: GraphBuilder, node: fx.Node, x: fx.Node, vec: fx.Node) -> Value:
    """mv(Tensor self, Tensor vec) -> Tensor"""
    _check_product(node)
    # as a matrix of one column: onnxruntime 1.19 fuses a transpose into a MatMul with a vector and gets it wrong
    a, trans_a = _untransposed(ctx, x)
    return a.op("Gemm", ctx.value(vec).unsqueeze(1), transA=trans_a).squeeze(1)


@converts(aten.linear.default)
def linear(ctx: GraphBuilder, node: fx.Node, x: fx.Node, weight: fx.Node, bias: Any = None) -> Value:
    """linear(Tensor input, Tensor weight, Tensor? bias=None) -> Tensor"""
    _check_product(node)
    addend = None if bias is None else ctx.value(bias)
    if rank_of(x) == 2 and rank_of(weight) == 2:
        return ctx.value(x).op("Gemm", ctx.value(weight), addend, transB=1)
    product = ctx.value(x).op("MatMul", ctx.value(weight).op("Transpose", perm=[1, 0]))
    return product if addend is None else product + addend


# convolution, embedding, dropout


@converts(aten.convolution.default, timed=True)
def convolution(ctx: GraphBuilder, node: fx.Node, x: fx.Node, weight: fx.Node, *args: Any) -> Value:
    """convolution(Tensor input, Tensor weight, Tensor? bias, SymInt[] stride, SymInt[] padding, SymInt[] dilation, bool transposed, SymInt[] output_padding, SymInt groups) -> Tensor"""  # noqa: E501
    bias, stride, padding, dilation, transposed, output_padding, groups = args
    spatial = rank_of(weight) - 2
    if rank_of(x) != spatial + 2 or spatial < 1:
        raise Unsupported("a convolution without batch dimension")
    if dtype_of(node) is torch.bfloat16:
        raise Unsupported("a convolution of bfloat16, which needs opset 22", ReasonType.NO_KERNEL)
    attributes: dict[str, Any] = {
        "kernel_shape": static_sizes(shape_of(weight)[2:], "a kernel"),
        "strides": per_dimension(stride, spatial, "a stride"),
        "pads": per_dimension(padding, spatial, "a padding") * 2,
        "dilations": per_dimension(dilation, spatial, "a dilation"),
        "group": groups,
    }
    if transposed:
        attributes["output_padding"] = per_dimension(output_padding, spatial, "a padding")
        if any(pad >= step for pad, step in zip(attributes["output_padding"], attributes["strides"], strict=True)):
            raise Unsupported("an output_padding not below the stride: onnxruntime 1.19 gets it wrong")
    operands = (ctx.value(weight), None if bias is None else ctx.value(bias))
    return ctx.value(x).op("ConvTranspose" if transposed else "Conv", *operands, **attributes)


@converts(aten.embedding.default)
def embedding(ctx: GraphBuilder, node: fx.Node, weight: fx.Node, indices: fx.Node, *args: Any, **kwargs: Any) -> Value:
    """embedding(Tensor weight, Tensor indices, SymInt padding_idx=-1, bool scale_grad_by_freq, bool sparse) -> Tensor"""  # noqa: E501
    # the last three matter in the backward pass only
    return ctx.value(weight).op("Gather", refusing_negative(ctx, indices, weight, 0), axis=0)


@converts(aten.embedding_dense_backward.default, timed=True)
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
    shape = static_sizes(shape_of(node), "the gradient of an embedding")
    rows, grads = ctx.value(indices, torch.int64), ctx.value(grad)  # the forward pass has refused negative ones
    if padding_idx >= 0:
        grads = where((rows == padding_idx).unsqueeze(-1), 0, grads)
    zeros = filled(ctx, ctx.ints(shape), 0, dtype_of(node))
    return ctx.sum_at(zeros, [rows], grads, 2, shape_of(grad), "the gradient of an embedding")


@converts(aten.native_dropout_backward.default)
def native_dropout_backward(ctx: GraphBuilder, node: fx.Node, grad: fx.Node, mask: fx.Node, scale: float) -> Value:
    """native_dropout_backward(Tensor grad_output, Tensor mask, float scale) -> Tensor"""
    dtype = dtype_of(node)
    return ctx.value(grad, dtype) * scaled_mask(ctx.value(mask), scale, dtype)


@converts(aten.grid_sampler_2d.default)
def grid_sampler_2d(ctx: GraphBuilder, node: fx.Node, x: fx.Node, grid: fx.Node, *args: Any) -> Value:
    """grid_sampler_2d(Tensor input, Tensor grid, int interpolation_mode, int padding_mode, bool align_corners) -> Tensor"""  # noqa: E501
    # GridSample takes 5 to 10 times as long (1.19: 23 ms for 4 x 16 x 128 x 128 where torch takes 3), and reads other
    # places where the grid is NaN or huge
    raise Unsupported("a grid sample: torch's kernel is faster")


# pooling


class _Window(NamedTuple):
    """Kernel size, stride and padding with one entry per spatial dimension."""

    kernel: list[int]
    strides: list[int]
    pads: list[int]


def _check(x: fx.Node, spatial: int) -> None:
    if rank_of(x) != spatial + 2:
        raise Unsupported("pooling without batch dimension")
    if not dtype_of(x).is_floating_point:
        raise Unsupported(f"pooling of {dtype_of(x)}")


def _window(x: fx.Node, spatial: int, kernel_size: Any, stride: Any = (), padding: Any = 0) -> _Window:
    _check(x, spatial)
    kernel = per_dimension(kernel_size, spatial, "a kernel")
    strides = per_dimension(stride, spatial, "a stride") if stride else kernel
    return _Window(kernel, strides, per_dimension(padding, spatial, "a padding"))


def _spatial(shape: Sequence[Any], spatial: int) -> list[int]:
    return static_sizes(shape[-spatial:], "pooling")


def _flat(value: Value, sizes: Sequence[int]) -> Value:
    return value.reshape([0, 0, math.prod(sizes)])


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
    spatial = len(kernel_size)
    window = _window(x, spatial, kernel_size, stride, padding)
    dilations = per_dimension(dilation, spatial, "a dilation")
    sizes, pooled = _spatial(shape_of(x), spatial), _spatial(node.meta["val"][0].shape, spatial)
    # torch and onnxruntime do not agree on which window is the last under ceil_mode: pad for as many as torch has
    after = [
        max((out - 1) * step + stretch * (width - 1) + 1 - size - before, 0)
        for width, step, before, size, stretch, out in zip(*window, sizes, dilations, pooled, strict=True)
    ]
    if any(pad >= width for pad, width in zip(after, window.kernel, strict=True)):
        raise Unsupported("max pooling that is padded by a whole window")
    # onnxruntime 1.19 ignores a NaN, and returns a wrong value and a negative index for a window of -inf. So let it
    # find where the maximum is among numbers that it handles, and read the values there.
    value = ctx.value(x)
    _, indices = ctx.op(
        "MaxPool",
        _ranked(ctx, value, sizes),
        kernel_shape=window.kernel,
        strides=window.strides,
        pads=window.pads + after,
        dilations=dilations,
        outputs=2,
    )
    # ONNX counts over the whole tensor, torch within a plane
    flat = _flat(indices.op("Mod", math.prod(sizes)), pooled)
    result = _flat(value, sizes).op("GatherElements", flat, axis=2)
    return result.reshape([0, 0, *pooled]), flat.reshape([0, 0, *pooled])


def _ranked(ctx: GraphBuilder, value: Value, sizes: Sequence[int]) -> Value:
    """Finite numbers that rank as torch's max pooling ranks the values: a NaN beyond all, the last one first."""
    largest, total = torch.finfo(torch.float64).max, math.prod(sizes)
    # there is room beyond the largest float32 number, and beyond half the largest float64 one
    wide = value * 0.5 if value.dtype is torch.float64 else value.cast(torch.float64)
    bound = ctx.const(0.6 * largest, torch.float64)
    places = ctx.op("Range", 0, total, 1).cast(torch.float64)
    beyond = places * (0.2 * largest / total) + 0.7 * largest
    return where(value.is_nan(), beyond.reshape(sizes), wide.min(bound).max(-bound))


@converts(aten.max_pool2d_with_indices_backward.default, aten.max_pool3d_with_indices_backward.default)
def max_pool_backward(ctx: GraphBuilder, node: fx.Node, grad: fx.Node, x: fx.Node, *args: Any) -> Value:
    """max_pool2d_with_indices_backward(Tensor grad_output, Tensor self, int[2] kernel_size, int[2] stride, int[2] padding, int[2] dilation, bool ceil_mode, Tensor indices) -> Tensor"""  # noqa: E501
    kernel_size, *_, indices = args
    _check(x, len(kernel_size))
    sizes, pooled = (_spatial(shape_of(tensor), len(kernel_size)) for tensor in (x, grad))
    zeros = _flat(ctx.const(0, dtype_of(x)).expand(ctx.shape_tensor(x)), sizes)
    places, grads = _flat(ctx.value(indices), pooled), _flat(ctx.value(grad), pooled)
    return zeros.op("ScatterElements", places, grads, axis=2, reduction="add").reshape([0, 0, *sizes])


# average

_SPATIAL = {aten.avg_pool1d.default: 1, aten.avg_pool2d.default: 2, aten.avg_pool3d.default: 3}


@converts(*_SPATIAL)
def avg_pool(
    ctx: GraphBuilder,
    node: fx.Node,
    x: fx.Node,
    kernel_size: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] | int = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Value:
    """avg_pool2d(Tensor self, int[2] kernel_size, int[2] stride=[], int[2] padding=0, bool ceil_mode=False, bool count_include_pad=True, int? divisor_override=None) -> Tensor"""  # noqa: E501
    window = _window(x, _SPATIAL[node.target], kernel_size, stride, padding)  # type: ignore[index]
    _refuse_partial_windows(x, window, ceil_mode)
    if divisor_override is None:
        return _average(ctx.value(x), window, count_include_pad)
    return _average(ctx.value(x), window, True) * (math.prod(window.kernel) / divisor_override)


def _average(value: Value, window: _Window, count_include_pad: bool) -> Value:
    return value.op(
        "AveragePool",
        kernel_shape=window.kernel,
        strides=window.strides,
        pads=window.pads * 2,
        count_include_pad=int(count_include_pad),
    )


def _refuse_partial_windows(x: fx.Node, window: _Window, ceil_mode: bool) -> None:
    """A window that hangs over the edge is averaged differently by torch and onnxruntime."""
    steps = zip(*window, _spatial(shape_of(x), len(window.kernel)), strict=True) if ceil_mode else ()
    if any((size + 2 * pad - width) % step for width, step, pad, size in steps):
        raise Unsupported("average pooling with ceil_mode where a window is cut off")


@converts(aten.avg_pool2d_backward.default, aten.avg_pool3d_backward.default)
def avg_pool_backward(ctx: GraphBuilder, node: fx.Node, grad: fx.Node, x: fx.Node, *args: Any) -> Value:
    """avg_pool2d_backward(Tensor grad_output, Tensor self, int[2] kernel_size, int[2] stride, int[2] padding, bool ceil_mode, bool count_include_pad, int? divisor_override) -> Tensor"""  # noqa: E501
    kernel_size, stride, padding, ceil_mode, _, divisor_override = args
    window = _window(x, len(kernel_size), kernel_size, stride, padding)
    _refuse_partial_windows(x, window, ceil_mode)
    if window.kernel != window.strides or any(window.pads):
        raise Unsupported("the gradient of average pooling with overlapping or padded windows")
    return _share(ctx, grad, x, window.kernel, divisor_override or math.prod(window.kernel))


def _share(ctx: GraphBuilder, grad: fx.Node, x: fx.Node, kernel: list[int], divisor: int) -> Value:
    """Give each entry of a window its share of the window's gradient."""
    spatial = len(kernel)
    sizes, pooled = (_spatial(shape_of(tensor), spatial) for tensor in (x, grad))
    covered = [out * width for out, width in zip(pooled, kernel, strict=True)]
    shares = ctx.value(grad) * (1 / divisor)
    # repeat every entry along each spatial dimension
    blocks = shares.unsqueeze(*range(3, 3 + 2 * spatial, 2))
    value = blocks.expand([1, 1] + [part for width in kernel for part in (1, width)]).reshape([0, 0, *covered])
    after = [size - length for size, length in zip(sizes, covered, strict=True)]
    if not any(after):
        return value
    return value.op("Pad", [0] * (spatial + 4) + after)  # what no window covers


@converts(aten._adaptive_avg_pool2d.default, aten._adaptive_avg_pool3d.default)
def adaptive_avg_pool(ctx: GraphBuilder, node: fx.Node, x: fx.Node, output_size: Sequence[Any]) -> Value:
    """_adaptive_avg_pool2d(Tensor self, SymInt[2] output_size) -> Tensor"""
    spatial = len(output_size)
    kernel = _adaptive_kernel(x, node, spatial)
    if set(_spatial(shape_of(node), spatial)) == {1}:
        return reduce("ReduceMean", x, ctx.value(x), list(range(-spatial, 0)), keepdim=True)
    return _average(ctx.value(x), _window(x, spatial, kernel), True)


@converts(aten._adaptive_avg_pool2d_backward.default, aten._adaptive_avg_pool3d_backward.default)
def adaptive_avg_pool_backward(ctx: GraphBuilder, node: fx.Node, grad: fx.Node, x: fx.Node) -> Value:
    """_adaptive_avg_pool2d_backward(Tensor grad_output, Tensor self) -> Tensor"""
    spatial = 3 if node.target is aten._adaptive_avg_pool3d_backward.default else 2
    kernel = _adaptive_kernel(x, grad, spatial)
    return _share(ctx, grad, x, kernel, math.prod(kernel))


def _adaptive_kernel(x: fx.Node, pooled: fx.Node, spatial: int) -> list[int]:
    """The windows of adaptive pooling if all have one size."""
    _check(x, spatial)
    sizes = list(zip(_spatial(shape_of(x), spatial), _spatial(shape_of(pooled), spatial), strict=True))
    if any(size % out for size, out in sizes):
        raise Unsupported("adaptive pooling to a size that does not divide the input's")
    return [size // out for size, out in sizes]
