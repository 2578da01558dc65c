"""Activation functions; their gradients are in :mod:`gradients`."""

import math

import torch
from torch import fx

from lightning_ort.compiler.executors.ort.conversion import elementary
from lightning_ort.compiler.executors.ort.conversion.elementary import logistic
from lightning_ort.compiler.executors.ort.conversion.graph import GraphBuilder, Value
from lightning_ort.compiler.executors.ort.conversion.metadata import Scalar, dtype_of
from lightning_ort.compiler.executors.ort.conversion.pointwise import clamp
from lightning_ort.compiler.executors.ort.conversion.registry import converts

aten = torch.ops.aten


@converts(aten.gelu.default)
def gelu(ctx: GraphBuilder, node: fx.Node, x: fx.Node, approximate: str = "none") -> Value:
    """gelu(Tensor self, *, str approximate='none') -> Tensor"""
    if dtype_of(x) is not torch.float32:
        return _gelu_expanded(ctx, x, approximate)
    # FastGelu is the tanh form (contrib ops, CPU and CUDA)
    return ctx.ms("Gelu" if approximate == "none" else "FastGelu", ctx.value(x))


def _gelu_expanded(ctx: GraphBuilder, x: fx.Node, approximate: str) -> Value:
    dtype, value = dtype_of(x), ctx.value(x)
    if approximate == "none":
        inner = ctx.op("Erf", ctx.op("Mul", value, ctx.const(math.sqrt(0.5), dtype)))
    else:
        cube = ctx.op("Mul", ctx.op("Mul", value, value), ctx.op("Mul", value, ctx.const(0.044715, dtype)))
        scaled = ctx.op("Mul", ctx.op("Add", value, cube), ctx.const(math.sqrt(2 / math.pi), dtype))
        inner = ctx.op("Tanh", scaled)
    half = ctx.op("Mul", value, ctx.const(0.5, dtype))
    return ctx.op("Mul", half, ctx.op("Add", inner, ctx.const(1, dtype)))


@converts(aten.sigmoid.default)
def sigmoid(ctx: GraphBuilder, node: fx.Node, x: fx.Node) -> Value:
    """sigmoid(Tensor self) -> Tensor"""
    dtype = dtype_of(node)
    return logistic(ctx.value(x, dtype))


@converts(aten.silu.default)
def silu(ctx: GraphBuilder, node: fx.Node, x: fx.Node) -> Value:
    """silu(Tensor self) -> Tensor"""
    value = ctx.value(x)
    return ctx.op("Mul", value, logistic(value))


@converts(aten.leaky_relu.default)
def leaky_relu(ctx: GraphBuilder, node: fx.Node, x: fx.Node, negative_slope: Scalar = 0.01) -> Value:
    """leaky_relu(Tensor self, Scalar negative_slope=0.01) -> Tensor"""
    dtype, value = dtype_of(x), ctx.value(x)
    if dtype is torch.float64 or isinstance(negative_slope, fx.Node):  # ONNX attributes are float32 constants
        positive = ctx.op("Greater", value, ctx.const(0, dtype))
        return ctx.op("Where", positive, value, ctx.op("Mul", value, ctx.value(negative_slope, dtype)))
    return ctx.op("LeakyRelu", value, alpha=float(negative_slope))


@converts(aten.elu.default)
def elu(
    ctx: GraphBuilder, node: fx.Node, x: fx.Node, alpha: Scalar = 1, scale: Scalar = 1, input_scale: Scalar = 1
) -> Value:
    """elu(Tensor self, Scalar alpha=1, Scalar scale=1, Scalar input_scale=1) -> Tensor"""
    dtype, value = dtype_of(x), ctx.value(x)
    # not Elu, which loses the digits of a small x (onnxruntime 1.19)
    zero = ctx.const(0, dtype)
    right, left = ctx.op("Max", value, zero), ctx.op("Min", value, zero)
    if input_scale != 1:
        left = ctx.op("Mul", left, ctx.value(input_scale, dtype))
    left = elementary.expm1(left)
    if alpha != 1:
        left = ctx.op("Mul", left, ctx.value(alpha, dtype))
    result = ctx.op("Add", right, left)
    return result if scale == 1 else ctx.op("Mul", result, ctx.value(scale, dtype))


@converts(aten.softplus.default)
def softplus(ctx: GraphBuilder, node: fx.Node, x: fx.Node, beta: Scalar = 1, threshold: Scalar = 20) -> Value:
    """softplus(Tensor self, Scalar beta=1, Scalar threshold=20) -> Tensor"""
    dtype, value = dtype_of(x), ctx.value(x)
    scaled = value if beta == 1 else ctx.op("Mul", value, ctx.value(beta, dtype))
    smooth = elementary.softplus(scaled)
    if beta != 1:
        smooth = ctx.op("Div", smooth, ctx.value(beta, dtype))
    return ctx.op("Where", ctx.op("Greater", scaled, ctx.value(threshold, dtype)), value, smooth)


@converts(aten.hardtanh.default)
def hardtanh(ctx: GraphBuilder, node: fx.Node, x: fx.Node, min_val: Scalar = -1, max_val: Scalar = 1) -> Value:
    """hardtanh(Tensor self, Scalar min_val=-1, Scalar max_val=1) -> Tensor"""
    return clamp(ctx, node, x, min_val, max_val)


@converts(aten.hardsigmoid.default)
def hardsigmoid(ctx: GraphBuilder, node: fx.Node, x: fx.Node) -> Value:
    """hardsigmoid(Tensor self) -> Tensor"""
    dtype, value = dtype_of(x), ctx.value(x)
    if dtype is torch.float64:  # ONNX attributes are float32
        line = ctx.op("Div", ctx.op("Add", value, ctx.const(3, dtype)), ctx.const(6, dtype))
        return ctx.op("Clip", line, ctx.const(0, dtype), ctx.const(1, dtype))
    return ctx.op("HardSigmoid", value, alpha=1 / 6, beta=0.5)


@converts(aten.hardswish.default)
def hardswish(ctx: GraphBuilder, node: fx.Node, x: fx.Node) -> Value:
    """hardswish(Tensor self) -> Tensor"""
    dtype, value = dtype_of(x), ctx.value(x)
    if dtype is torch.float64:  # ONNX attributes are float32
        gate = ctx.op("Clip", ctx.op("Add", value, ctx.const(3, dtype)), ctx.const(0, dtype), ctx.const(6, dtype))
        return ctx.op("Div", ctx.op("Mul", value, gate), ctx.const(6, dtype))
    return ctx.op("Mul", value, hardsigmoid(ctx, node, x))


# these two for their gradients, which are not those of torch's decompositions at a NaN


@converts(aten.hardshrink.default)
def hardshrink(ctx: GraphBuilder, node: fx.Node, x: fx.Node, lambd: Scalar = 0.5) -> Value:
    """hardshrink(Tensor self, Scalar lambd=0.5) -> Tensor"""
    dtype, value = dtype_of(x), ctx.value(x)
    is_small = ctx.op("LessOrEqual", ctx.op("Abs", value), ctx.value(lambd, dtype))
    return ctx.op("Where", is_small, ctx.const(0, dtype), value)


@converts(aten.softshrink.default)
def softshrink(ctx: GraphBuilder, node: fx.Node, x: fx.Node, lambd: Scalar = 0.5) -> Value:
    """softshrink(Tensor self, Scalar lambd=0.5) -> Tensor"""
    dtype, value = dtype_of(x), ctx.value(x)
    # x - min(max(x, -lambd), lambd); 0 in the middle, and inf - lambd = inf
    high = ctx.value(lambd, dtype)
    return ctx.op("Sub", value, ctx.op("Min", ctx.op("Max", value, ctx.op("Neg", high)), high))
