"""Backward ops of activations and losses that are made of pieces, with the piece that eager takes for a NaN.

torch's CPU kernels (2.13) take another one in their vector loops than for the elements that are left over.
"""

import functools
import math

import numpy as np
import torch
from torch import fx

from lightning_ort.compiler.executors.ort.conversion import elementary
from lightning_ort.compiler.executors.ort.conversion.graph import GraphBuilder, Value
from lightning_ort.compiler.executors.ort.conversion.metadata import Scalar, dtype_of, shape_of, static
from lightning_ort.compiler.executors.ort.conversion.reduction import count
from lightning_ort.compiler.executors.ort.conversion.registry import converts

aten = torch.ops.aten

MEAN = 1  # at::Reduction

# a tensor of more elements counts as one without any left over
_FEW = 4096


@functools.cache
def _vector_bytes() -> int:
    return 64 if torch.backends.cpu.get_cpu_capability() == "AVX512" else 32


def _closed(ctx: GraphBuilder, node: fx.Node, is_closed: Value, is_open: Value, vectors_at_once: int = 1) -> Value:
    """Where the closed piece counts, given both as comparisons that a NaN fails: vector loops ask whether it is open.

    Args:
        ctx: The graph.
        node: The backward op.
        is_closed: Where it is closed.
        is_open: Where it is open.
        vectors_at_once: How many vectors torch's kernel works on at once.

    """
    sizes = shape_of(node)
    total = int(math.prod(sizes)) if static(sizes) else _FEW + 1
    step = vectors_at_once * _vector_bytes() // dtype_of(node).itemsize
    whole = total if total > _FEW else total - total % step
    if not ctx.on_cpu or whole == 0:
        return is_closed
    not_open = ctx.op("Not", is_open)
    if whole == total:
        return not_open
    in_vectors = ctx.const((np.arange(total) < whole).reshape([int(size) for size in sizes]), torch.bool)
    return ctx.op("Or", is_closed, ctx.op("And", not_open, in_vectors))


@converts(aten.elu_backward.default)
def elu_backward(
    ctx: GraphBuilder,
    node: fx.Node,
    grad: fx.Node,
    alpha: Scalar,
    scale: Scalar,
    input_scale: Scalar,
    is_result: bool,
    self_or_result: fx.Node,
) -> Value:
    """elu_backward(Tensor grad_output, Scalar alpha, Scalar scale, Scalar input_scale, bool is_result, Tensor self_or_result) -> Tensor"""  # noqa: E501
    dtype, value = dtype_of(node), ctx.value(self_or_result)
    if is_result:
        lifted = ctx.op("Add", value, ctx.product(dtype, alpha, scale))
        left = ctx.op("Mul", lifted, ctx.value(input_scale, dtype))
    else:
        inner = value if input_scale == 1 else ctx.op("Mul", value, ctx.value(input_scale, dtype))
        left = ctx.op("Mul", elementary.exp(inner), ctx.product(dtype, input_scale, alpha, scale))
    zero = ctx.const(0, dtype)
    is_left = _closed(ctx, node, ctx.op("LessOrEqual", value, zero), ctx.op("Greater", value, zero), 2)
    return ctx.op("Mul", ctx.value(grad), ctx.op("Where", is_left, left, ctx.value(scale, dtype)))


@converts(aten.hardswish_backward.default)
def hardswish_backward(ctx: GraphBuilder, node: fx.Node, grad: fx.Node, x: fx.Node) -> Value:
    """hardswish_backward(Tensor grad_output, Tensor self) -> Tensor"""
    dtype, value, grads = dtype_of(node), ctx.value(x), ctx.value(grad)
    line = ctx.op("Add", ctx.op("Mul", value, ctx.const(1 / 3, dtype)), ctx.const(0.5, dtype))
    three = ctx.const(3, dtype)
    on_line = _closed(ctx, node, ctx.op("Less", value, three), ctx.op("GreaterOrEqual", value, three), 2)
    right = ctx.op("Where", on_line, ctx.op("Mul", grads, line), grads)
    return ctx.op("Where", ctx.op("LessOrEqual", value, ctx.const(-3, dtype)), ctx.const(0, dtype), right)


@converts(aten.hardsigmoid_backward.default)
def hardsigmoid_backward(ctx: GraphBuilder, node: fx.Node, grad: fx.Node, x: fx.Node) -> Value:
    """hardsigmoid_backward(Tensor grad_output, Tensor self) -> Tensor"""
    dtype, value = dtype_of(x), ctx.value(x)
    # torch's sixth is a float32 in float64 too
    share = ctx.op("Mul", ctx.value(grad), ctx.const(torch.tensor(1 / 6).item(), dtype))
    above, below = ctx.op("Greater", value, ctx.const(-3, dtype)), ctx.op("Less", value, ctx.const(3, dtype))
    return ctx.op("Where", ctx.op("And", above, below), share, ctx.const(0, dtype))


@converts(aten.hardtanh_backward.default)
def hardtanh_backward(
    ctx: GraphBuilder, node: fx.Node, grad: fx.Node, x: fx.Node, min_val: Scalar, max_val: Scalar
) -> Value:
    """hardtanh_backward(Tensor grad_output, Tensor self, Scalar min_val, Scalar max_val) -> Tensor"""
    dtype, value = dtype_of(x), ctx.value(x)
    low, high = ctx.value(min_val, dtype), ctx.value(max_val, dtype)
    outside = ctx.op("Or", ctx.op("LessOrEqual", value, low), ctx.op("GreaterOrEqual", value, high))
    inside = ctx.op("And", ctx.op("Greater", value, low), ctx.op("Less", value, high))
    return ctx.op("Where", _closed(ctx, node, outside, inside), ctx.const(0, dtype), ctx.value(grad))


@converts(aten.hardshrink_backward.default, aten.softshrink_backward.default)
def shrink_backward(ctx: GraphBuilder, node: fx.Node, grad: fx.Node, x: fx.Node, lambd: Scalar) -> Value:
    """softshrink_backward(Tensor grad_output, Tensor self, Scalar lambd) -> Tensor"""
    dtype, value = dtype_of(x), ctx.value(x)
    high = ctx.value(lambd, dtype)
    low = ctx.op("Neg", high)
    inside = ctx.op("And", ctx.op("GreaterOrEqual", value, low), ctx.op("LessOrEqual", value, high))
    outside = ctx.op("Or", ctx.op("Less", value, low), ctx.op("Greater", value, high))
    return ctx.op("Where", _closed(ctx, node, inside, outside), ctx.const(0, dtype), ctx.value(grad))


def _mean_of(ctx: GraphBuilder, x: fx.Node, value: Value, reduction: int) -> Value:
    """The share of each element where the loss is their mean."""
    return ctx.op("Div", value, count(ctx, x, None, dtype_of(x))) if reduction == MEAN else value


@converts(aten.smooth_l1_loss_backward.default)
def smooth_l1_loss_backward(
    ctx: GraphBuilder, node: fx.Node, grad: fx.Node, x: fx.Node, target: fx.Node, reduction: int, beta: float
) -> Value:
    """smooth_l1_loss_backward(Tensor grad_output, Tensor self, Tensor target, int reduction, float beta) -> Tensor"""
    dtype = dtype_of(node)
    difference = ctx.op("Sub", ctx.value(x, dtype), ctx.value(target, dtype))
    width, one = ctx.value(beta, dtype), ctx.const(1, dtype)
    right = ctx.op("Where", ctx.op("GreaterOrEqual", difference, width), one, ctx.op("Div", difference, width))
    is_left = ctx.op("LessOrEqual", difference, ctx.op("Neg", width))
    slope = ctx.op("Where", is_left, ctx.const(-1, dtype), right)
    return ctx.op("Mul", _mean_of(ctx, x, slope, reduction), ctx.value(grad, dtype))


@converts(aten.soft_margin_loss_backward.default)
def soft_margin_loss_backward(
    ctx: GraphBuilder, node: fx.Node, grad: fx.Node, x: fx.Node, target: fx.Node, reduction: int
) -> Value:
    """soft_margin_loss_backward(Tensor grad_output, Tensor self, Tensor target, int reduction) -> Tensor"""
    # torch's decomposition takes 1 from a sigmoid, which leaves nothing of a small slope
    dtype = dtype_of(node)
    labels = ctx.op("Neg", ctx.value(target, dtype))
    odds = elementary.exp(ctx.op("Mul", labels, ctx.value(x, dtype)))
    slope = ctx.op("Mul", labels, ctx.op("Div", odds, ctx.op("Add", odds, ctx.const(1, dtype))))
    return ctx.op("Mul", _mean_of(ctx, x, slope, reduction), ctx.value(grad, dtype))
