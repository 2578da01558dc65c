"""Negative log likelihood and its gradient.

The other losses arrive as arithmetic: torch's own decompositions of them are what one would write here.
"""

import onnx_ir as ir
import torch
from torch import fx

from lightning_ort.compiler.conversion.graph import GraphBuilder, dtype_of, rank_of, shape_of
from lightning_ort.compiler.conversion.indexing import refusing_negative
from lightning_ort.compiler.conversion.reduction import reduce
from lightning_ort.compiler.conversion.registry import EXPANDED, converts

aten = torch.ops.aten

NONE, MEAN, SUM = 0, 1, 2  # at::Reduction


def _class_axis(x: fx.Node) -> int:
    return 0 if rank_of(x) == 1 else 1


def _targets(ctx: GraphBuilder, x: fx.Node, target: fx.Node, ignore_index: int) -> tuple[ir.Value, ir.Value]:
    """Where a target counts, and the targets with 0 where they do not."""
    labels = ctx.value(target, torch.int64)
    ignored = ctx.op("Equal", labels, ctx.value(ignore_index, torch.int64))
    labels = refusing_negative(ctx, labels, x, _class_axis(x))
    return ctx.op("Not", ignored), ctx.op("Where", ignored, ctx.const(0, torch.int64), labels)


def _weights(
    ctx: GraphBuilder, counts: ir.Value, labels: ir.Value, weight: fx.Node | None, dtype: torch.dtype
) -> ir.Value:
    """The weight of each target: that of its class, 0 where it is ignored."""
    if weight is None:
        return ctx.cast(counts, dtype)
    return ctx.op("Where", counts, ctx.op("Gather", ctx.value(weight, dtype), labels), ctx.const(0, dtype))


@converts(aten.nll_loss_forward.default, aten.nll_loss2d_forward.default)
def nll_loss_forward(
    ctx: GraphBuilder,
    node: fx.Node,
    x: fx.Node,
    target: fx.Node,
    weight: fx.Node | None,
    reduction: int,
    ignore_index: int,
) -> tuple[ir.Value, ir.Value]:
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
) -> tuple[ir.Value, ir.Value]:
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


@converts(aten.nll_loss_backward.default, aten.nll_loss2d_backward.default, forms=(EXPANDED,))
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
) -> ir.Value:
    """nll_loss_backward(Tensor grad_output, Tensor self, Tensor target, Tensor? weight, int reduction, SymInt ignore_index, Tensor total_weight) -> Tensor"""  # noqa: E501
    gradients, labels = target_gradients(ctx, grad, x, target, weight, reduction, ignore_index, total_weight)
    zeros = ctx.op("Expand", ctx.const(0, dtype_of(x)), ctx.shape_tensor(x))
    return ctx.op("ScatterElements", zeros, labels, gradients, axis=_class_axis(x))
