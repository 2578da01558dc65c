"""Activation functions, softmax among them, and their gradients.

Some gradients consist of pieces, and eager takes one of them for a NaN. Where torch's CPU kernels (2.13) take another
one in their vector loops than for the elements that are left over, all elements have that of the vector loops.
"""

import math
from typing import Any

import torch
from torch import fx

from lightning_ort.compiler.executors.ort.conversion.elementary import exp, expm1, logistic, masked, where
from lightning_ort.compiler.executors.ort.conversion.elementary import softplus as smooth_max
from lightning_ort.compiler.executors.ort.conversion.graph import GraphBuilder, Value
from lightning_ort.compiler.executors.ort.conversion.metadata import Scalar, axis_of, dtype_of, rank_of, work_dtype
from lightning_ort.compiler.executors.ort.conversion.pointwise import clamp, unary
from lightning_ort.compiler.executors.ort.conversion.reduction import reduce
from lightning_ort.compiler.executors.ort.conversion.registry import converts

aten = torch.ops.aten


@converts(aten.threshold_backward.default)
def threshold_backward(ctx: GraphBuilder, node: fx.Node, grad: fx.Node, x: fx.Node, threshold: Scalar) -> Value:
    """threshold_backward(Tensor grad_output, Tensor self, Scalar threshold) -> Tensor"""
    # <= and not >: the gradient of a NaN is passed on, as in torch
    return masked(node, ctx.value(x) <= threshold, ctx.value(grad))


@converts(aten.tanh_backward.default)
def tanh_backward(ctx: GraphBuilder, node: fx.Node, grad: fx.Node, output: fx.Node) -> Value:
    """tanh_backward(Tensor grad_output, Tensor output) -> Tensor"""
    y = ctx.value(output)
    return ctx.value(grad) * (1 - y * y)


unary("sigmoid", logistic)


@converts(aten.sigmoid_backward.default)
def sigmoid_backward(ctx: GraphBuilder, node: fx.Node, grad: fx.Node, output: fx.Node) -> Value:
    """sigmoid_backward(Tensor grad_output, Tensor output) -> Tensor"""
    y = ctx.value(output)
    return ctx.value(grad) * (y * (1 - y))


# gelu


@converts(aten.gelu.default)
def gelu(ctx: GraphBuilder, node: fx.Node, x: fx.Node, *, approximate: str = "none") -> Value:
    """gelu(Tensor self, *, str approximate='none') -> Tensor"""
    value = ctx.value(x)
    if value.dtype is torch.float32 and ctx.has_contributed:
        # FastGelu is the tanh form (contrib ops, CPU and CUDA)
        return ctx.ms("Gelu" if approximate == "none" else "FastGelu", value)
    if approximate == "none":
        inner = (value * math.sqrt(0.5)).op("Erf")
    else:
        cube = value * value * (value * 0.044715)
        inner = ((value + cube) * math.sqrt(2 / math.pi)).op("Tanh")
    return value * 0.5 * (inner + 1)


# not GeluGrad and FastGeluGrad: on 1024 x 1024 float32 they take 3.9 and 20.5 ms, the expansion 1.7 (1.19.2, 2 threads)
@converts(aten.gelu_backward.default, timed=True)
def gelu_backward(ctx: GraphBuilder, node: fx.Node, grad: fx.Node, x: fx.Node, *, approximate: str = "none") -> Value:
    """gelu_backward(Tensor grad_output, Tensor self, *, str approximate='none') -> Tensor"""
    slope = _gelu_slope if approximate == "none" else _gelu_tanh_slope
    return ctx.value(grad) * slope(ctx.value(x))


def _gelu_slope(x: Value) -> Value:
    """Phi(x) + x * phi(x), with the normal distribution's cumulative function and density."""
    cumulative = (x * math.sqrt(0.5)).op("Erf") * 0.5 + 0.5
    density = exp(x * x * -0.5) * (1 / math.sqrt(2 * math.pi))
    return cumulative + x * density


def _gelu_tanh_slope(x: Value) -> Value:
    """With t = tanh(k (x + c x^3)): (1 + t) / 2 + x (1 - t^2) k (1 + 3 c x^2) / 2."""
    k, c = math.sqrt(2 / math.pi), 0.044715
    square = x * x
    t = (x * (square * (k * c) + k)).op("Tanh")
    return (t + 1) * 0.5 + (1 - t * t) * (x * (square * (1.5 * k * c) + k / 2))


# silu, leaky relu, elu, softplus


unary("silu", lambda x: x / (exp(-x) + 1))


@converts(aten.silu_backward.default, timed=True)
def silu_backward(ctx: GraphBuilder, node: fx.Node, grad: fx.Node, x: fx.Node) -> Value:
    """silu_backward(Tensor grad_output, Tensor self) -> Tensor"""
    value = ctx.value(x)
    gate = logistic(value)
    return ctx.value(grad) * (gate * (value * (1 - gate) + 1))


@converts(aten.leaky_relu.default)
def leaky_relu(ctx: GraphBuilder, node: fx.Node, x: fx.Node, negative_slope: Scalar = 0.01) -> Value:
    """leaky_relu(Tensor self, Scalar negative_slope=0.01) -> Tensor"""
    value = ctx.value(x)
    if value.dtype is torch.float64 or isinstance(negative_slope, fx.Node):  # ONNX attributes are float32 constants
        return where(value > 0, value, value * negative_slope)
    return value.op("LeakyRelu", alpha=float(negative_slope))


@converts(aten.leaky_relu_backward.default)
def leaky_relu_backward(
    ctx: GraphBuilder, node: fx.Node, grad: fx.Node, x: fx.Node, negative_slope: Scalar, self_is_result: bool
) -> Value:
    """leaky_relu_backward(Tensor grad_output, Tensor self, Scalar negative_slope, bool self_is_result) -> Tensor"""
    return ctx.value(grad) * where(ctx.value(x) > 0, 1, negative_slope, dtype_of(node))


@converts(aten.elu.default)
def elu(
    ctx: GraphBuilder, node: fx.Node, x: fx.Node, alpha: Scalar = 1, scale: Scalar = 1, input_scale: Scalar = 1
) -> Value:
    """elu(Tensor self, Scalar alpha=1, Scalar scale=1, Scalar input_scale=1) -> Tensor"""
    # not Elu, which loses the digits of a small x (onnxruntime 1.19)
    value = ctx.value(x)
    left = expm1(_scaled(value.min(0), input_scale))
    return _scaled(value.max(0) + _scaled(left, alpha), scale)


def _scaled(value: Value, factor: Scalar) -> Value:
    return value if factor == 1 else value * factor


@converts(aten.elu_backward.default)
def elu_backward(ctx: GraphBuilder, node: fx.Node, grad: fx.Node, *args: Any) -> Value:
    """elu_backward(Tensor grad_output, Scalar alpha, Scalar scale, Scalar input_scale, bool is_result, Tensor self_or_result) -> Tensor"""  # noqa: E501
    alpha, scale, input_scale, is_result, self_or_result = args
    value = ctx.value(self_or_result)
    if is_result:
        left = (value + ctx.product(value.dtype, alpha, scale)) * input_scale
    else:
        left = exp(_scaled(value, input_scale)) * ctx.product(value.dtype, input_scale, alpha, scale)
    return ctx.value(grad) * where(value > 0, scale, left, value.dtype)


@converts(aten.softplus.default)
def softplus(ctx: GraphBuilder, node: fx.Node, x: fx.Node, beta: Scalar = 1, threshold: Scalar = 20) -> Value:
    """softplus(Tensor self, Scalar beta=1, Scalar threshold=20) -> Tensor"""
    value = ctx.value(x)
    scaled = _scaled(value, beta)
    smooth = smooth_max(scaled)
    return where(scaled > threshold, value, smooth if beta == 1 else smooth / beta)


@converts(aten.softplus_backward.default)
def softplus_backward(
    ctx: GraphBuilder, node: fx.Node, grad: fx.Node, x: fx.Node, beta: Scalar, threshold: Scalar
) -> Value:
    """softplus_backward(Tensor grad_output, Tensor self, Scalar beta, Scalar threshold) -> Tensor"""
    scaled = _scaled(ctx.value(x), beta)
    return ctx.value(grad) * where(scaled > threshold, 1, logistic(scaled))


# hard ones


@converts(aten.hardtanh.default)
def hardtanh(ctx: GraphBuilder, node: fx.Node, x: fx.Node, min_val: Scalar = -1, max_val: Scalar = 1) -> Value:
    """hardtanh(Tensor self, Scalar min_val=-1, Scalar max_val=1) -> Tensor"""
    return clamp(ctx, node, x, min_val, max_val)


@converts(aten.hardtanh_backward.default)
def hardtanh_backward(
    ctx: GraphBuilder, node: fx.Node, grad: fx.Node, x: fx.Node, min_val: Scalar, max_val: Scalar
) -> Value:
    """hardtanh_backward(Tensor grad_output, Tensor self, Scalar min_val, Scalar max_val) -> Tensor"""
    value = ctx.value(x)
    inside = (value > min_val) & (value < max_val)
    return masked(node, ~inside, ctx.value(grad))


def _hardsigmoid(x: Value) -> Value:
    if x.dtype is torch.float64:  # ONNX attributes are float32
        return _clip((x + 3) / 6, 1)
    return x.op("HardSigmoid", alpha=1 / 6, beta=0.5)


def _clip(value: Value, high: float) -> Value:
    return value.op("Clip", value.ctx.const(0, value.dtype), value.ctx.const(high, value.dtype))


unary("hardsigmoid", _hardsigmoid)
unary("hardswish", lambda x: x * _clip(x + 3, 6) / 6 if x.dtype is torch.float64 else x * _hardsigmoid(x))


@converts(aten.hardsigmoid_backward.default)
def hardsigmoid_backward(ctx: GraphBuilder, node: fx.Node, grad: fx.Node, x: fx.Node) -> Value:
    """hardsigmoid_backward(Tensor grad_output, Tensor self) -> Tensor"""
    value = ctx.value(x)
    share = ctx.value(grad) * torch.tensor(1 / 6).item()  # torch's sixth is a float32 in float64 too
    return where((value > -3) & (value < 3), share, 0)


@converts(aten.hardswish_backward.default)
def hardswish_backward(ctx: GraphBuilder, node: fx.Node, grad: fx.Node, x: fx.Node) -> Value:
    """hardswish_backward(Tensor grad_output, Tensor self) -> Tensor"""
    value, grads = ctx.value(x), ctx.value(grad)
    right = where(value >= 3, grads, grads * (value * (1 / 3) + 0.5))
    return where(value <= -3, 0, right)


# these two for their gradients, which differ from those of torch's decompositions at a NaN


@converts(aten.hardshrink.default)
def hardshrink(ctx: GraphBuilder, node: fx.Node, x: fx.Node, lambd: Scalar = 0.5) -> Value:
    """hardshrink(Tensor self, Scalar lambd=0.5) -> Tensor"""
    value = ctx.value(x)
    return where(abs(value) <= lambd, 0, value)


@converts(aten.softshrink.default)
def softshrink(ctx: GraphBuilder, node: fx.Node, x: fx.Node, lambd: Scalar = 0.5) -> Value:
    """softshrink(Tensor self, Scalar lambd=0.5) -> Tensor"""
    # x - min(max(x, -lambd), lambd); 0 in the middle, and inf - lambd = inf
    value = ctx.value(x)
    high = ctx.value(lambd, value.dtype)
    return value - value.max(-high).min(high)


@converts(aten.hardshrink_backward.default, aten.softshrink_backward.default)
def shrink_backward(ctx: GraphBuilder, node: fx.Node, grad: fx.Node, x: fx.Node, lambd: Scalar) -> Value:
    """softshrink_backward(Tensor grad_output, Tensor self, Scalar lambd) -> Tensor"""
    value = ctx.value(x)
    high = ctx.value(lambd, value.dtype)
    low = -high
    outside = (value < low) | (value > high)
    return masked(node, ~outside, ctx.value(grad))


# softmax and its logarithm


@converts(aten._softmax.default, aten._log_softmax.default)
def softmax(ctx: GraphBuilder, node: fx.Node, x: fx.Node, dim: int, half_to_float: bool) -> Value:
    """_softmax(Tensor self, int dim, bool half_to_float) -> Tensor"""
    value, rank, is_log = ctx.value(x, dtype_of(node)), rank_of(x), node.target is aten._log_softmax.default
    if _has_kernel(value, rank, dim):
        if rank == 0:  # ONNX has no axis of a scalar
            value, dim = value.unsqueeze(0), 0
        result = value.op("LogSoftmax" if is_log else "Softmax", axis=dim)
        return result if rank else result.squeeze(0)
    below = value - reduce("ReduceMax", x, value, dim, keepdim=True)
    powers = exp(below)
    total = reduce("ReduceSum", x, powers, dim, keepdim=True)
    return below - total.op("Log") if is_log else powers / total


def _has_kernel(value: Value, rank: int, dim: int) -> bool:
    """Whether a kernel is right and fast; on a CPU (1.19) those for other dimensions than the last transpose twice.

    Those for float64 return numbers for a row with a NaN or an infinity, where torch has NaN.
    """
    if not value.ctx.on_cpu or value.dtype not in (torch.float32, torch.float64):
        return True
    return value.dtype is torch.float32 and (rank == 0 or axis_of(dim, rank) == rank - 1)


def _in_float32(ctx: GraphBuilder, grad: fx.Node, output: fx.Node) -> tuple[Value, Value]:
    """The result and its gradient as torch's kernels compute with them: half types in float32."""
    dtype = work_dtype(output)
    return ctx.value(output, dtype), ctx.value(grad, dtype)


@converts(aten._softmax_backward_data.default, timed=True)
def softmax_backward(ctx: GraphBuilder, node: fx.Node, grad: fx.Node, output: fx.Node, dim: int, *args: Any) -> Value:
    """_softmax_backward_data(Tensor grad_output, Tensor output, int dim, ScalarType input_dtype) -> Tensor"""
    y, grads = _in_float32(ctx, grad, output)
    kernel, rank = "SoftmaxGrad_13", rank_of(output)
    if dtype_of(output) is torch.float32 and rank and _has_kernel(y, rank, dim) and ctx.kernels.has_training(kernel):
        result = ctx.ms(kernel, grads, y, axis=dim)
    else:
        result = (grads - reduce("ReduceSum", output, grads * y, dim, keepdim=True)) * y
    return result.cast(dtype_of(node))


# not LogSoftmaxGrad_13: on 1024 x 4000 float32 it takes 25 ms, the expansion 4 (1.19.2, 2 threads)
@converts(aten._log_softmax_backward_data.default, timed=True)
def log_softmax_backward(
    ctx: GraphBuilder, node: fx.Node, grad: fx.Node, output: fx.Node, dim: int, *args: Any
) -> Value:
    """_log_softmax_backward_data(Tensor grad_output, Tensor output, int dim, ScalarType input_dtype) -> Tensor"""
    y, grads = _in_float32(ctx, grad, output)
    return (grads - exp(y) * reduce("ReduceSum", output, grads, dim, keepdim=True)).cast(dtype_of(node))
