"""Negative log likelihood and its gradient.

The other losses arrive as arithmetic: torch's own decompositions of them are what one would write here.
"""

import torch
from torch import fx

from lightning_ort.compiler.executors.ort.conversion import elementary
from lightning_ort.compiler.executors.ort.conversion.graph import GraphBuilder, Value
from lightning_ort.compiler.executors.ort.conversion.indexing import refusing_negative
from lightning_ort.compiler.executors.ort.conversion.metadata import dtype_of, rank_of
from lightning_ort.compiler.executors.ort.conversion.reduction import count, reduce
from lightning_ort.compiler.executors.ort.conversion.registry import EXPANDED, converts

aten = torch.ops.aten

NONE, MEAN, SUM = 0, 1, 2  # at::Reduction


def _class_axis(x: fx.Node) -> int:
    return 0 if rank_of(x) == 1 else 1


def _targets(ctx: GraphBuilder, x: fx.Node, target: fx.Node, ignore_index: int) -> tuple[Value, Value]:
    """Where a target counts, and the targets with 0 where they do not."""
    labels = ctx.value(target, torch.int64)
    ignored = ctx.op("Equal", labels, ctx.value(ignore_index, torch.int64))
    labels = refusing_negative(ctx, labels, x, _class_axis(x))
    return ctx.op("Not", ignored), ctx.op("Where", ignored, ctx.const(0, torch.int64), labels)


def _weights(ctx: GraphBuilder, counts: Value, labels: Value, weight: fx.Node | None, dtype: torch.dtype) -> Value:
    """The weight of each target: that of its class, 0 where it is ignored."""
    if weight is None:
        return ctx.cast(counts, dtype)
    return ctx.op("Where", counts, ctx.op("Gather", ctx.value(weight, dtype), labels), ctx.const(0, dtype))


@converts(aten.binary_cross_entropy.default)
def binary_cross_entropy(
    ctx: GraphBuilder, node: fx.Node, x: fx.Node, target: fx.Node, weight: fx.Node | None = None, reduction: int = MEAN
) -> Value:
    """binary_cross_entropy(Tensor self, Tensor target, Tensor? weight=None, int reduction=Mean) -> Tensor"""
    # torch's decomposition does not refuse what is no probability
    dtype, value, labels = dtype_of(x), ctx.value(x), ctx.value(target)
    lowest, one = ctx.const(-100, dtype), ctx.const(1, dtype)
    missed = ctx.op("Max", elementary.log1p(ctx.op("Neg", value)), lowest)
    hit = ctx.op("Max", elementary.log(value), lowest)
    losses = ctx.op("Sub", ctx.op("Mul", ctx.op("Sub", labels, one), missed), ctx.op("Mul", labels, hit))
    at_least, at_most = ctx.op("GreaterOrEqual", value, ctx.const(0, dtype)), ctx.op("LessOrEqual", value, one)
    losses = _refusing(ctx, losses, ctx.op("Not", ctx.op("And", at_least, at_most)), dtype)
    if weight is not None:
        losses = ctx.op("Mul", losses, ctx.value(weight))
    return losses if reduction == NONE else reduce(ctx, "ReduceMean" if reduction == MEAN else "ReduceSum", x, losses)


@converts(aten.binary_cross_entropy_backward.default)
def binary_cross_entropy_backward(
    ctx: GraphBuilder,
    node: fx.Node,
    grad: fx.Node,
    x: fx.Node,
    target: fx.Node,
    weight: fx.Node | None = None,
    reduction: int = MEAN,
) -> Value:
    """binary_cross_entropy_backward(Tensor grad_output, Tensor self, Tensor target, Tensor? weight=None, int reduction=Mean) -> Tensor"""  # noqa: E501
    dtype, value = dtype_of(x), ctx.value(x)
    variance = ctx.op("Mul", value, ctx.op("Sub", ctx.const(1, dtype), value))
    # torch's smallest variance is a float32 in float64 too
    variance = ctx.op("Max", variance, ctx.const(torch.tensor(1e-12).item(), dtype))
    slope = ctx.op("Div", ctx.op("Sub", value, ctx.value(target)), variance)
    if weight is not None:
        slope = ctx.op("Mul", slope, ctx.value(weight))
    if reduction == MEAN:
        slope = ctx.op("Div", slope, count(ctx, x, None, dtype))
    return ctx.op("Mul", slope, ctx.value(grad))


def _refusing(ctx: GraphBuilder, value: Value, wrong: Value, dtype: torch.dtype) -> Value:
    """The value, of which no run gets if anything is wrong; torch then raises what it has to say."""
    place = ctx.op("ReduceMax", ctx.cast(wrong, torch.int64), keepdims=0)
    return ctx.op("Add", value, ctx.op("Gather", ctx.const([0], dtype), place))


@converts(aten.nll_loss_forward.default, aten.nll_loss2d_forward.default)
def nll_loss_forward(
    ctx: GraphBuilder,
    node: fx.Node,
    x: fx.Node,
    target: fx.Node,
    weight: fx.Node | None,
    reduction: int,
    ignore_index: int,
) -> tuple[Value, Value]:
    """nll_loss_forward(Tensor self, Tensor target, Tensor? weight, int reduction, SymInt ignore_index) -> (Tensor, Tensor)"""  # noqa: E501
    # not NegativeLogLikelihoodLoss: it does not return the total weight
    dtype, axis = dtype_of(x), _class_axis(x)
    counts, labels = _targets(ctx, x, target, ignore_index)
    weights = _weights(ctx, counts, labels, weight, dtype)
    dim = ctx.ints([axis])
    picked = ctx.op("GatherElements", ctx.value(x), ctx.op("Unsqueeze", labels, dim), axis=axis)
    losses = ctx.op("Mul", ctx.op("Neg", ctx.op("Squeeze", picked, dim)), weights)
    # an ignored entry counts as 0 even if it is infinite
    losses = ctx.op("Where", counts, losses, ctx.const(0, dtype))
    if reduction == NONE:
        return losses, ctx.const(0, dtype)
    loss, total = (reduce(ctx, "ReduceSum", target, value) for value in (losses, weights))
    return (ctx.op("Div", loss, total) if reduction == MEAN else loss), total


def target_gradients(
    ctx: GraphBuilder,
    grad: fx.Node,
    x: fx.Node,
    target: fx.Node,
    weight: fx.Node | None,
    reduction: int,
    ignore_index: int,
    total_weight: fx.Node,
) -> tuple[Value, Value]:
    """The gradient of each target's entry of ``x``, and the targets; both with a class dimension of 1."""
    dtype, dim = dtype_of(x), ctx.ints([_class_axis(x)])
    counts, labels = _targets(ctx, x, target, ignore_index)
    scale = ctx.op("Neg", ctx.value(grad, dtype))
    if reduction == MEAN:
        scale = ctx.op("Div", scale, ctx.value(total_weight, dtype))
    scaled = ctx.op("Mul", _weights(ctx, counts, labels, weight, dtype), scale)
    # with every target ignored the total weight is 0, and torch's gradient 0, not NaN
    scaled = ctx.op("Where", counts, scaled, ctx.const(0, dtype))
    return ctx.op("Unsqueeze", scaled, dim), ctx.op("Unsqueeze", labels, dim)


@converts(aten.nll_loss_backward.default, aten.nll_loss2d_backward.default, variants=(EXPANDED,))
def nll_loss_backward(
    ctx: GraphBuilder,
    node: fx.Node,
    grad: fx.Node,
    x: fx.Node,
    target: fx.Node,
    weight: fx.Node | None,
    reduction: int,
    ignore_index: int,
    total_weight: fx.Node,
) -> Value:
    """nll_loss_backward(Tensor grad_output, Tensor self, Tensor target, Tensor? weight, int reduction, SymInt ignore_index, Tensor total_weight) -> Tensor"""  # noqa: E501
    gradients, labels = target_gradients(ctx, grad, x, target, weight, reduction, ignore_index, total_weight)
    zeros = ctx.op("Expand", ctx.const(0, dtype_of(x)), ctx.shape_tensor(x))
    return ctx.op("ScatterElements", zeros, labels, gradients, axis=_class_axis(x))
