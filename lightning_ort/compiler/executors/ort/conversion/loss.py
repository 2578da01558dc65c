"""Loss functions and their gradients.

Those that are missing arrive as arithmetic: torch's own decompositions of them are what one would write here.
"""

from typing import Any

import torch
from torch import fx

from lightning_ort.compiler.executors.ort.conversion.elementary import exp, log, log1p, where
from lightning_ort.compiler.executors.ort.conversion.graph import GraphBuilder, Value
from lightning_ort.compiler.executors.ort.conversion.indexing import refusing_negative
from lightning_ort.compiler.executors.ort.conversion.metadata import dtype_of, rank_of
from lightning_ort.compiler.executors.ort.conversion.reduction import count, reduce
from lightning_ort.compiler.executors.ort.conversion.registry import converts

aten = torch.ops.aten

NONE, MEAN, SUM = 0, 1, 2  # at::Reduction


def _mean_of(x: fx.Node, value: Value, reduction: int) -> Value:
    """The share of each element where the loss is their mean."""
    return value / count(value.ctx, x, None, value.dtype) if reduction == MEAN else value


# binary cross entropy


@converts(aten.binary_cross_entropy.default)
def binary_cross_entropy(
    ctx: GraphBuilder, node: fx.Node, x: fx.Node, target: fx.Node, weight: fx.Node | None = None, reduction: int = MEAN
) -> Value:
    """binary_cross_entropy(Tensor self, Tensor target, Tensor? weight=None, int reduction=Mean) -> Tensor"""
    # torch's decomposition does not refuse what is no probability
    value, labels = ctx.value(x), ctx.value(target)
    missed, hit = log1p(-value).max(-100), log(value).max(-100)
    losses = (labels - 1) * missed - labels * hit
    allowed = (value >= 0) & (value <= 1) & (labels >= 0) & (labels <= 1)
    losses = _refusing(losses, ~allowed)
    if weight is not None:
        losses = losses * weight
    return losses if reduction == NONE else reduce("ReduceMean" if reduction == MEAN else "ReduceSum", x, losses)


def _refusing(value: Value, wrong: Value) -> Value:
    """The value; if anything is wrong the run fails, and torch raises its own error."""
    place = wrong.cast(torch.int64).op("ReduceMax", keepdims=0)
    return value + value.ctx.const([0], value.dtype).op("Gather", place)


@converts(aten.binary_cross_entropy_backward.default)
def binary_cross_entropy_backward(
    ctx: GraphBuilder,
    node: fx.Node,
    grad: fx.Node,
    x: fx.Node,
    target: fx.Node,
    weight: Any = None,
    reduction: int = MEAN,
) -> Value:
    """binary_cross_entropy_backward(Tensor grad_output, Tensor self, Tensor target, Tensor? weight=None, int reduction=Mean) -> Tensor"""  # noqa: E501
    value = ctx.value(x)
    variance = (value * (1 - value)).max(torch.tensor(1e-12).item())  # torch's bound is a float32 in float64 too
    slope = (value - target) / variance
    if weight is not None:
        slope = slope * weight
    return _mean_of(x, slope, reduction) * grad


# negative log likelihood


def _class_axis(x: fx.Node) -> int:
    return 0 if rank_of(x) == 1 else 1


def _targets(ctx: GraphBuilder, x: fx.Node, target: fx.Node, ignore_index: int) -> tuple[Value, Value]:
    """Where a target is ignored, and the targets with 0 there."""
    labels = ctx.value(target, torch.int64)
    ignored = labels == ignore_index
    return ignored, where(ignored, 0, refusing_negative(ctx, labels, x, _class_axis(x)))


def _weighted(value: Value, labels: Value, weight: fx.Node | None) -> Value:
    return value if weight is None else value * value.ctx.value(weight, value.dtype).op("Gather", labels)


@converts(aten.nll_loss_forward.default, aten.nll_loss2d_forward.default)
def nll_loss_forward(
    ctx: GraphBuilder, node: fx.Node, x: fx.Node, target: fx.Node, weight: Any, reduction: int, ignore_index: int
) -> tuple[Value, Value]:
    """nll_loss_forward(Tensor self, Tensor target, Tensor? weight, int reduction, SymInt ignore_index) -> (Tensor, Tensor)"""  # noqa: E501
    # not NegativeLogLikelihoodLoss: it does not return the total weight
    value, axis = ctx.value(x), _class_axis(x)
    ignored, labels = _targets(ctx, x, target, ignore_index)
    picked = value.op("GatherElements", labels.unsqueeze(axis), axis=axis)
    # an ignored entry counts as 0 even if it is infinite
    losses = where(ignored, 0, _weighted(-picked.squeeze(axis), labels, weight))
    one = ctx.const(1, value.dtype)
    weights = where(ignored, 0.0, 1.0 if weight is None else _weighted(one, labels, weight), value.dtype)
    if reduction == NONE:
        return losses, ctx.const(0, value.dtype)
    loss, total = (reduce("ReduceSum", target, value) for value in (losses, weights))
    return (loss / total if reduction == MEAN else loss), total


@converts(aten.nll_loss_backward.default, aten.nll_loss2d_backward.default, timed=True)
def nll_loss_backward(
    ctx: GraphBuilder, node: fx.Node, grad: fx.Node, x: fx.Node, target: fx.Node, *args: Any
) -> Value:
    """nll_loss_backward(Tensor grad_output, Tensor self, Tensor target, Tensor? weight, int reduction, SymInt ignore_index, Tensor total_weight) -> Tensor"""  # noqa: E501
    weight, reduction, ignore_index, total_weight = args
    dtype, axis = dtype_of(x), _class_axis(x)
    ignored, labels = _targets(ctx, x, target, ignore_index)
    scale = -ctx.value(grad, dtype)
    if reduction == MEAN:
        scale = scale / total_weight
    # with every target ignored the total weight is 0, and torch's gradient 0, not NaN
    scaled = where(ignored, 0, _weighted(scale, labels, weight))
    zeros = ctx.const(0, dtype).expand(ctx.shape_tensor(x))
    return zeros.op("ScatterElements", labels.unsqueeze(axis), scaled.unsqueeze(axis), axis=axis)


# gradients of losses that torch decomposes


@converts(aten.smooth_l1_loss_backward.default)
def smooth_l1_loss_backward(
    ctx: GraphBuilder, node: fx.Node, grad: fx.Node, x: fx.Node, target: fx.Node, reduction: int, beta: float
) -> Value:
    """smooth_l1_loss_backward(Tensor grad_output, Tensor self, Tensor target, int reduction, float beta) -> Tensor"""
    difference = ctx.value(x, dtype_of(node)) - target
    width = ctx.value(beta, dtype_of(node))
    right = where(difference >= width, 1, difference / width)
    return _mean_of(x, where(difference <= -width, -1, right), reduction) * grad


@converts(aten.soft_margin_loss_backward.default)
def soft_margin_loss_backward(
    ctx: GraphBuilder, node: fx.Node, grad: fx.Node, x: fx.Node, target: fx.Node, reduction: int
) -> Value:
    """soft_margin_loss_backward(Tensor grad_output, Tensor self, Tensor target, int reduction) -> Tensor"""
    # torch's decomposition subtracts 1 from a sigmoid, which loses a small slope
    labels = -ctx.value(target, dtype_of(node))
    odds = exp(labels * x)
    return _mean_of(x, labels * (odds / (odds + 1)), reduction) * grad
