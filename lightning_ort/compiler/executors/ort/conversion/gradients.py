"""Backward ops of activations, softmax, normalization, dropout and pooling.

Where onnxruntime-training has a gradient kernel, it is one of the forms; everything else is written out in ONNX.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from lightning_ort.compiler.executors.ort.conversion import elementary
from lightning_ort.compiler.executors.ort.conversion.checks import refuse_empty, static_sizes
from lightning_ort.compiler.executors.ort.conversion.elementary import logistic
from lightning_ort.compiler.executors.ort.conversion.graph import GraphBuilder, Value
from lightning_ort.compiler.executors.ort.conversion.metadata import Scalar, dtype_of, rank_of, shape_of
from lightning_ort.compiler.executors.ort.conversion.nn import (
    channel_axes,
    grouped,
    per_channel,
    work_dtype,
)
from lightning_ort.compiler.executors.ort.conversion.reduction import count, reduce
from lightning_ort.compiler.executors.ort.conversion.registry import EXPANDED, Unsupported, converts

aten = torch.ops.aten

Gradients = tuple[Value | None, ...]


def _one_minus(ctx: GraphBuilder, value: Value, dtype: torch.dtype) -> Value:
    return ctx.op("Sub", ctx.const(1, dtype), value)


# activations


@converts(aten.threshold_backward.default)
def threshold_backward(ctx: GraphBuilder, node: fx.Node, grad: fx.Node, x: fx.Node, threshold: Scalar) -> Value:
    """threshold_backward(Tensor grad_output, Tensor self, Scalar threshold) -> Tensor"""
    dtype = dtype_of(node)
    # LessOrEqual and not Greater: the gradient of a NaN is passed on, as in torch
    closed = ctx.op("LessOrEqual", ctx.value(x), ctx.value(threshold, dtype_of(x)))
    return ctx.op("Where", closed, ctx.const(0, dtype), ctx.value(grad))


@converts(aten.tanh_backward.default)
def tanh_backward(ctx: GraphBuilder, node: fx.Node, grad: fx.Node, output: fx.Node) -> Value:
    """tanh_backward(Tensor grad_output, Tensor output) -> Tensor"""
    y = ctx.value(output)
    return ctx.op("Mul", ctx.value(grad), _one_minus(ctx, ctx.op("Mul", y, y), dtype_of(output)))


@converts(aten.sigmoid_backward.default)
def sigmoid_backward(ctx: GraphBuilder, node: fx.Node, grad: fx.Node, output: fx.Node) -> Value:
    """sigmoid_backward(Tensor grad_output, Tensor output) -> Tensor"""
    y = ctx.value(output)
    return ctx.op("Mul", ctx.value(grad), ctx.op("Mul", y, _one_minus(ctx, y, dtype_of(output))))


# on 1024 x 1024 float32 GeluGrad and FastGeluGrad take 3.9 and 20.5 ms, the expansion 1.7 (1.19.2, 2 threads)
@converts(aten.gelu_backward.default, variants=(EXPANDED, "GeluGrad", "FastGeluGrad"))
def gelu_backward(ctx: GraphBuilder, node: fx.Node, grad: fx.Node, x: fx.Node, *, approximate: str = "none") -> Value:
    """gelu_backward(Tensor grad_output, Tensor self, *, str approximate='none') -> Tensor"""
    kernel, slope = ("GeluGrad", _gelu_slope) if approximate == "none" else ("FastGeluGrad", _gelu_tanh_slope)
    if dtype_of(node) is torch.float32 and ctx.variant(node) == kernel:
        return ctx.ms(kernel, ctx.value(grad), ctx.value(x))
    return ctx.op("Mul", ctx.value(grad), slope(ctx, ctx.value(x), dtype_of(x)))


def _gelu_slope(ctx: GraphBuilder, x: Value, dtype: torch.dtype) -> Value:
    """Phi(x) + x * phi(x), with the normal distribution's cumulative function and density."""
    half = ctx.const(0.5, dtype)
    erf = ctx.op("Erf", ctx.op("Mul", x, ctx.const(math.sqrt(0.5), dtype)))
    cumulative = ctx.op("Add", ctx.op("Mul", erf, half), half)
    exponent = ctx.op("Mul", ctx.op("Mul", x, x), ctx.const(-0.5, dtype))
    density = ctx.op("Mul", elementary.exp(exponent), ctx.const(1 / math.sqrt(2 * math.pi), dtype))
    return ctx.op("Add", cumulative, ctx.op("Mul", x, density))


def _gelu_tanh_slope(ctx: GraphBuilder, x: Value, dtype: torch.dtype) -> Value:
    """With t = tanh(k (x + c x^3)): (1 + t) / 2 + x (1 - t^2) k (1 + 3 c x^2) / 2."""
    k, c = math.sqrt(2 / math.pi), 0.044715
    one, half = ctx.const(1, dtype), ctx.const(0.5, dtype)
    square = ctx.op("Mul", x, x)
    inner = ctx.op("Mul", x, ctx.op("Add", ctx.op("Mul", square, ctx.const(k * c, dtype)), ctx.const(k, dtype)))
    t = ctx.op("Tanh", inner)
    gate = ctx.op("Mul", ctx.op("Add", t, one), half)
    inner_slope = ctx.op("Add", ctx.op("Mul", square, ctx.const(1.5 * k * c, dtype)), ctx.const(k / 2, dtype))
    bend = ctx.op("Mul", ctx.op("Sub", one, ctx.op("Mul", t, t)), ctx.op("Mul", x, inner_slope))
    return ctx.op("Add", gate, bend)


@converts(aten.silu_backward.default, variants=(EXPANDED,))
def silu_backward(ctx: GraphBuilder, node: fx.Node, grad: fx.Node, x: fx.Node) -> Value:
    """silu_backward(Tensor grad_output, Tensor self) -> Tensor"""
    dtype, value = dtype_of(x), ctx.value(x)
    gate = logistic(value)
    bend = ctx.op("Add", ctx.op("Mul", value, _one_minus(ctx, gate, dtype)), ctx.const(1, dtype))
    return ctx.op("Mul", ctx.value(grad), ctx.op("Mul", gate, bend))


@converts(aten.leaky_relu_backward.default)
def leaky_relu_backward(
    ctx: GraphBuilder, node: fx.Node, grad: fx.Node, x: fx.Node, negative_slope: Scalar, self_is_result: bool
) -> Value:
    """leaky_relu_backward(Tensor grad_output, Tensor self, Scalar negative_slope, bool self_is_result) -> Tensor"""
    dtype = dtype_of(node)
    is_open = ctx.op("Greater", ctx.value(x), ctx.const(0, dtype_of(x)))
    slope = ctx.op("Where", is_open, ctx.const(1, dtype), ctx.value(negative_slope, dtype))
    return ctx.op("Mul", ctx.value(grad), slope)


@converts(aten.softplus_backward.default)
def softplus_backward(
    ctx: GraphBuilder, node: fx.Node, grad: fx.Node, x: fx.Node, beta: Scalar, threshold: Scalar
) -> Value:
    """softplus_backward(Tensor grad_output, Tensor self, Scalar beta, Scalar threshold) -> Tensor"""
    dtype, value = dtype_of(node), ctx.value(x)
    scaled = value if beta == 1 else ctx.op("Mul", value, ctx.value(beta, dtype))
    is_linear = ctx.op("Greater", scaled, ctx.value(threshold, dtype))
    slope = ctx.op("Where", is_linear, ctx.const(1, dtype), logistic(scaled))
    return ctx.op("Mul", ctx.value(grad), slope)


@converts(aten.native_dropout_backward.default)
def native_dropout_backward(ctx: GraphBuilder, node: fx.Node, grad: fx.Node, mask: fx.Node, scale: float) -> Value:
    """native_dropout_backward(Tensor grad_output, Tensor mask, float scale) -> Tensor"""
    return ctx.op("Mul", ctx.value(grad), ctx.scaled_mask(mask, scale, dtype_of(node)))


# softmax


@converts(aten._softmax_backward_data.default, variants=("SoftmaxGrad_13", EXPANDED))
def softmax_backward(
    ctx: GraphBuilder, node: fx.Node, grad: fx.Node, output: fx.Node, dim: int, input_dtype: torch.dtype
) -> Value:
    """_softmax_backward_data(Tensor grad_output, Tensor output, int dim, ScalarType input_dtype) -> Tensor"""
    refuse_empty(output, "the gradient of a softmax")
    dtype = dtype_of(output)
    grads, y = ctx.value(grad, dtype), ctx.value(output)
    if dtype is torch.float32 and rank_of(output) and ctx.variant(node) == "SoftmaxGrad_13":
        result = ctx.ms("SoftmaxGrad_13", grads, y, axis=dim)
    else:
        total = reduce(ctx, "ReduceSum", output, ctx.op("Mul", grads, y), dim, keepdim=True)
        result = ctx.op("Mul", ctx.op("Sub", grads, total), y)
    return result if dtype_of(node) == dtype else ctx.cast(result, dtype_of(node))


# on 1024 x 4000 float32 LogSoftmaxGrad_13 takes 25 ms, the expansion 4 (1.19.2, 2 threads)
@converts(aten._log_softmax_backward_data.default, variants=(EXPANDED, "LogSoftmaxGrad_13"))
def log_softmax_backward(
    ctx: GraphBuilder, node: fx.Node, grad: fx.Node, output: fx.Node, dim: int, input_dtype: torch.dtype
) -> Value:
    """_log_softmax_backward_data(Tensor grad_output, Tensor output, int dim, ScalarType input_dtype) -> Tensor"""
    refuse_empty(output, "the gradient of a softmax")
    dtype = dtype_of(output)
    grads, y = ctx.value(grad, dtype), ctx.value(output)
    if dtype is torch.float32 and rank_of(output) and ctx.variant(node) == "LogSoftmaxGrad_13":
        result = ctx.ms("LogSoftmaxGrad_13", grads, y, axis=dim)
    else:
        total = reduce(ctx, "ReduceSum", output, grads, dim, keepdim=True)
        result = ctx.op("Sub", grads, ctx.op("Mul", elementary.exp(y), total))
    return result if dtype_of(node) == dtype else ctx.cast(result, dtype_of(node))


# normalization


def _masked(values: Sequence[Any], output_mask: Sequence[bool]) -> Gradients:
    """Call for the gradients that are wanted; ``None`` for the others."""
    return tuple(make() if wanted else None for make, wanted in zip(values, output_mask, strict=True))


def _scale(ctx: GraphBuilder, weight: fx.Node | None, normalized_shape: Sequence[Any], dtype: torch.dtype) -> Value:
    """The scale of a layer norm; ones where the layer has none."""
    if weight is not None:
        return ctx.value(weight, dtype)
    sizes = static_sizes(normalized_shape, "a layer norm without weight")
    return ctx.const(torch.ones(sizes).tolist(), dtype)


@converts(aten.native_layer_norm_backward.default, variants=("LayerNormalizationGrad", EXPANDED))
def layer_norm_backward(
    ctx: GraphBuilder,
    node: fx.Node,
    grad: fx.Node,
    x: fx.Node,
    normalized_shape: Sequence[Any],
    mean: fx.Node,
    rstd: fx.Node,
    weight: fx.Node | None,
    bias: fx.Node | None,
    output_mask: Sequence[bool],
) -> Gradients:
    """native_layer_norm_backward(Tensor grad_out, Tensor input, SymInt[] normalized_shape, Tensor mean, Tensor rstd, Tensor? weight, Tensor? bias, bool[3] output_mask) -> (Tensor, Tensor, Tensor)"""  # noqa: E501
    if 0 in shape_of(x):
        raise Unsupported("a layer norm of an empty tensor")
    # the kernel of onnxruntime 1.19 refuses rows of one element
    fits = dtype_of(x) is torch.float32 and any(size != 1 for size in normalized_shape)
    if fits and ctx.variant(node) == "LayerNormalizationGrad":
        scale = _scale(ctx, weight, normalized_shape, torch.float32)
        inputs = [ctx.value(arg) for arg in (mean, rstd)]
        gradients = ctx.ms(
            "LayerNormalizationGrad",
            ctx.value(grad),
            ctx.value(x),
            scale,
            *inputs,
            axis=-len(normalized_shape),
            outputs=3,
        )
        return tuple(value if wanted else None for value, wanted in zip(gradients, output_mask, strict=True))
    work = work_dtype(dtype_of(x))
    centered = ctx.op("Sub", ctx.value(x, work), ctx.value(mean, work))
    return _last_dims_backward(
        ctx, grad, x, len(normalized_shape), centered, ctx.value(rstd, work), weight, output_mask, subtract_mean=True
    )


@converts(aten._fused_rms_norm_backward.default, variants=(EXPANDED,))
def fused_rms_norm_backward(
    ctx: GraphBuilder,
    node: fx.Node,
    grad: fx.Node,
    x: fx.Node,
    normalized_shape: Sequence[int],
    rstd: fx.Node,
    weight: fx.Node | None,
    output_mask: Sequence[bool],
) -> Gradients:
    """_fused_rms_norm_backward(Tensor grad_out, Tensor input, int[] normalized_shape, Tensor rstd, Tensor? weight, bool[2] output_mask) -> (Tensor, Tensor)"""  # noqa: E501
    work = work_dtype(dtype_of(x))
    mask = (output_mask[0], output_mask[1] and weight is not None, False)
    return _last_dims_backward(
        ctx,
        grad,
        x,
        len(normalized_shape),
        ctx.value(x, work),
        ctx.value(rstd, work),
        weight,
        mask,
        subtract_mean=False,
    )[:2]


def _last_dims_backward(
    ctx: GraphBuilder,
    grad: fx.Node,
    x: fx.Node,
    num_dims: int,
    centered: Value,
    rstd: Value,
    weight: fx.Node | None,
    output_mask: Sequence[bool],
    *,
    subtract_mean: bool,
) -> Gradients:
    """Gradients of a norm over the last dimensions: of the input, the weight and the bias."""
    dtype, work = dtype_of(x), work_dtype(dtype_of(x))
    grads = ctx.value(grad, work)
    normal = ctx.op("Mul", centered, rstd)
    axes, outer = list(range(-num_dims, 0)), list(range(rank_of(x) - num_dims))

    def input_gradient() -> Value:
        inner = grads if weight is None else ctx.op("Mul", grads, ctx.value(weight, work))
        along = reduce(ctx, "ReduceMean", x, ctx.op("Mul", inner, normal), axes, keepdim=True)
        result = ctx.op("Sub", inner, ctx.op("Mul", normal, along))
        if subtract_mean:
            result = ctx.op("Sub", result, reduce(ctx, "ReduceMean", x, inner, axes, keepdim=True))
        return _as(ctx, ctx.op("Mul", result, rstd), work, dtype)

    def outer_sum(value: Value) -> Value:
        return _as(ctx, reduce(ctx, "ReduceSum", x, value, outer) if outer else value, work, dtype)

    makers = (input_gradient, lambda: outer_sum(ctx.op("Mul", grads, normal)), lambda: outer_sum(grads))
    return _masked(makers, output_mask)


def _as(ctx: GraphBuilder, value: Value, work: torch.dtype, dtype: torch.dtype) -> Value:
    return value if work == dtype else ctx.cast(value, dtype)


@converts(aten._weight_norm_interface_backward.default)
def weight_norm_backward(
    ctx: GraphBuilder, node: fx.Node, grad: fx.Node, v: fx.Node, g: fx.Node, norms: fx.Node, dim: int
) -> Gradients:
    """_weight_norm_interface_backward(Tensor grad_w, Tensor saved_v, Tensor saved_g, Tensor saved_norms, int dim) -> (Tensor, Tensor)"""  # noqa: E501
    weight, norm = ctx.value(v), ctx.value(norms)
    others = [index for index in range(rank_of(v)) if index != dim % rank_of(v)]
    direction = ctx.op("Div", weight, norm)
    along = reduce(ctx, "ReduceSum", v, ctx.op("Mul", ctx.value(grad), direction), others, keepdim=True)
    across = ctx.op("Sub", ctx.value(grad), ctx.op("Mul", direction, along))
    return ctx.op("Mul", across, ctx.op("Div", ctx.value(g), norm)), along


@converts(aten.native_group_norm_backward.default, variants=(EXPANDED,))
def group_norm_backward(
    ctx: GraphBuilder,
    node: fx.Node,
    grad: fx.Node,
    x: fx.Node,
    mean: fx.Node,
    rstd: fx.Node,
    weight: fx.Node | None,
    N: Any,
    C: Any,
    HxW: Any,
    group: int,
    output_mask: Sequence[bool],
) -> Gradients:
    """native_group_norm_backward(Tensor grad_out, Tensor input, Tensor mean, Tensor rstd, Tensor? weight, SymInt N, SymInt C, SymInt HxW, int group, bool[3] output_mask) -> (Tensor, Tensor, Tensor)"""  # noqa: E501
    dtype, work = dtype_of(x), work_dtype(dtype_of(x))
    grads, last = ctx.value(grad, work), ctx.ints([2])
    spread = ctx.op("Unsqueeze", ctx.value(rstd, work), last)
    centered = ctx.op(
        "Sub", grouped(ctx, ctx.value(x, work), x, group), ctx.op("Unsqueeze", ctx.value(mean, work), last)
    )
    normal = ctx.op("Mul", centered, spread)

    def input_gradient() -> Value:
        inner = grads if weight is None else ctx.op("Mul", grads, per_channel(ctx, ctx.value(weight, work), x))
        inner = grouped(ctx, inner, x, group)
        along = reduce(ctx, "ReduceMean", x, ctx.op("Mul", inner, normal), 2, keepdim=True)
        average = reduce(ctx, "ReduceMean", x, inner, 2, keepdim=True)
        result = ctx.op("Sub", ctx.op("Sub", inner, average), ctx.op("Mul", normal, along))
        return _as(ctx, ctx.op("Reshape", ctx.op("Mul", result, spread), ctx.shape_tensor(x)), work, dtype)

    def weight_gradient() -> Value:
        product = ctx.op("Mul", grads, ctx.op("Reshape", normal, ctx.shape_tensor(x)))
        return _as(ctx, reduce(ctx, "ReduceSum", x, product, channel_axes(x)), work, dtype)

    def bias_gradient() -> Value:
        return _as(ctx, reduce(ctx, "ReduceSum", x, grads, channel_axes(x)), work, dtype)

    return _masked((input_gradient, weight_gradient, bias_gradient), output_mask)


@converts(aten.native_batch_norm_backward.default, variants=(EXPANDED,))
def batch_norm_backward(
    ctx: GraphBuilder,
    node: fx.Node,
    grad: fx.Node,
    x: fx.Node,
    weight: fx.Node | None,
    running_mean: fx.Node | None,
    running_var: fx.Node | None,
    save_mean: fx.Node | None,
    save_invstd: fx.Node | None,
    train: bool,
    eps: float,
    output_mask: Sequence[bool],
) -> Gradients:
    """native_batch_norm_backward(Tensor grad_out, Tensor input, Tensor? weight, Tensor? running_mean, Tensor? running_var, Tensor? save_mean, Tensor? save_invstd, bool train, float eps, bool[3] output_mask) -> (Tensor, Tensor, Tensor)"""  # noqa: E501
    dtype, work = dtype_of(x), work_dtype(dtype_of(x))
    if train and save_mean is not None and save_invstd is not None:
        mean, rstd = ctx.value(save_mean, work), ctx.value(save_invstd, work)
    elif not train and running_mean is not None and running_var is not None:
        mean = ctx.value(running_mean, work)
        lifted = ctx.op("Add", ctx.value(running_var, work), ctx.const(eps, work))
        rstd = elementary.rsqrt(lifted)
    else:
        raise Unsupported("the gradient of a batch norm without statistics")
    grads, axes = ctx.value(grad, work), channel_axes(x)
    centered = ctx.op("Sub", ctx.value(x, work), per_channel(ctx, mean, x))
    total = reduce(ctx, "ReduceSum", x, grads, axes)
    along = ctx.op("Mul", reduce(ctx, "ReduceSum", x, ctx.op("Mul", grads, centered), axes), rstd)

    def input_gradient() -> Value:
        scale = rstd if weight is None else ctx.op("Mul", rstd, ctx.value(weight, work))
        result = grads
        if train:  # the statistics depend on the input too
            size = count(ctx, x, axes, work)
            average = per_channel(ctx, ctx.op("Div", total, size), x)
            slope = per_channel(ctx, ctx.op("Div", ctx.op("Mul", along, rstd), size), x)
            result = ctx.op("Sub", ctx.op("Sub", grads, average), ctx.op("Mul", centered, slope))
        return _as(ctx, ctx.op("Mul", result, per_channel(ctx, scale, x)), work, dtype)

    def of_parameter(value: Value) -> Value:
        return _as(ctx, value, work, dtype if weight is None else dtype_of(weight))

    return _masked((input_gradient, lambda: of_parameter(along), lambda: of_parameter(total)), output_mask)
