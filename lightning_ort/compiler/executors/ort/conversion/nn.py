"""Layers: softmax, normalization, convolution, embedding."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from lightning_ort.compiler.executors.ort.conversion import elementary
from lightning_ort.compiler.executors.ort.conversion.checks import Dims, per_dimension, refuse_empty, static_sizes
from lightning_ort.compiler.executors.ort.conversion.graph import GraphBuilder, Value, where
from lightning_ort.compiler.executors.ort.conversion.indexing import refusing_negative
from lightning_ort.compiler.executors.ort.conversion.metadata import dtype_of, rank_of, shape_of, static
from lightning_ort.compiler.executors.ort.conversion.reduction import count, reduce
from lightning_ort.compiler.executors.ort.conversion.registry import EXPANDED, Unsupported, converts
from lightning_ort.compiler.executors.ort.conversion.shape import filled

aten = torch.ops.aten

MaybeNode = fx.Node | None


def work_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which torch keeps the statistics of values of ``dtype``."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def per_channel(ctx: GraphBuilder, value: Value, x: fx.Node) -> Value:
    """A vector of one entry per channel, shaped to broadcast against ``x`` of [N, C, ...]."""
    return value.unsqueeze(*range(1, rank_of(x) - 1)) if rank_of(x) > 2 else value


# softmax


@converts(aten._softmax.default)
def softmax(ctx: GraphBuilder, node: fx.Node, x: fx.Node, dim: int, half_to_float: bool) -> Value:
    """_softmax(Tensor self, int dim, bool half_to_float) -> Tensor"""
    refuse_empty(x, "a softmax")
    value = ctx.value(x, dtype_of(node))
    if value.dtype is not torch.float64 or not ctx.on_cpu:
        return _along(value, "Softmax", x, dim)
    powers = elementary.exp(_below_largest(ctx, value, x, dim))
    return powers / reduce(ctx, "ReduceSum", x, powers, dim, keepdim=True)


@converts(aten._log_softmax.default)
def log_softmax(ctx: GraphBuilder, node: fx.Node, x: fx.Node, dim: int, half_to_float: bool) -> Value:
    """_log_softmax(Tensor self, int dim, bool half_to_float) -> Tensor"""
    refuse_empty(x, "a softmax")
    value = ctx.value(x, dtype_of(node))
    if value.dtype is not torch.float64 or not ctx.on_cpu:
        return _along(value, "LogSoftmax", x, dim)
    below = _below_largest(ctx, value, x, dim)
    return below - reduce(ctx, "ReduceSum", x, elementary.exp(below), dim, keepdim=True).op("Log")


def _below_largest(ctx: GraphBuilder, value: Value, x: fx.Node, dim: int) -> Value:
    # onnxruntime's kernels for float64 (1.19) return numbers for a row with a NaN or an infinity, where torch has NaN
    return value - reduce(ctx, "ReduceMax", x, value, dim, keepdim=True)


def _along(value: Value, op_type: str, x: fx.Node, dim: int) -> Value:
    if rank_of(x):
        return value.op(op_type, axis=dim)
    return value.unsqueeze(0).op(op_type, axis=0).squeeze(0)  # ONNX has no axis of a scalar


# normalization over the last dimensions, or over groups of channels


def _standardize(ctx: GraphBuilder, x: fx.Node, value: Value, axes: Dims, eps: float) -> tuple[Value, Value, Value]:
    """The values with mean 0 and variance 1 along ``axes``, and their mean and 1 / std before."""
    mean = reduce(ctx, "ReduceMean", x, value, axes, keepdim=True)
    centered = value - mean
    variance = reduce(ctx, "ReduceMean", x, centered * centered, axes, keepdim=True)
    rstd = elementary.rsqrt(variance + eps)
    return centered * rstd, mean, rstd


@converts(aten.native_layer_norm.default, variants=(EXPANDED,))
def native_layer_norm(
    ctx: GraphBuilder,
    node: fx.Node,
    x: fx.Node,
    normalized_shape: Sequence[Any],
    weight: MaybeNode,
    bias: MaybeNode,
    eps: float,
) -> tuple[Value, ...]:
    """native_layer_norm(Tensor input, SymInt[] shape, Tensor? weight, Tensor? bias, float eps) -> (Tensor, Tensor, Tensor)"""  # noqa: E501
    # not LayerNormalization: onnxruntime 1.19 takes E[x^2] - E[x]^2 for the variance. Where the mean is 100 standard
    # deviations that is 5 % wrong, at 1000 it is NaN; and it is no faster (0.55 and 0.50 ms, 1024 x 256 float32)
    value, axes = ctx.value(x, work_dtype(dtype_of(x))), list(range(-len(normalized_shape), 0))
    result, mean, rstd = _standardize(ctx, x, value, axes, eps)
    if weight is not None:
        result = result * weight
    if bias is not None:
        result = result + bias
    return result.cast(dtype_of(x)), mean, rstd


@converts(aten._fused_rms_norm.default, variants=(EXPANDED,))
def fused_rms_norm(
    ctx: GraphBuilder,
    node: fx.Node,
    x: fx.Node,
    normalized_shape: Sequence[int],
    weight: MaybeNode,
    eps: float | None,
) -> tuple[Value, Value]:
    """_fused_rms_norm(Tensor input, int[] normalized_shape, Tensor? weight, float? eps) -> (Tensor, Tensor)"""
    value, axes = ctx.value(x, work_dtype(dtype_of(x))), list(range(-len(normalized_shape), 0))
    power = reduce(ctx, "ReduceMean", x, value * value, axes, keepdim=True)
    rstd = elementary.rsqrt(power + (torch.finfo(dtype_of(x)).eps if eps is None else eps))
    result = value * rstd
    if weight is not None:
        result = result * weight
    return result.cast(dtype_of(x)), rstd


def grouped(ctx: GraphBuilder, value: Value, x: fx.Node, group: int) -> Value:
    """Reshape [N, C, ...] to [N, group, rest]."""
    rest = shape_of(x)[1:]
    return value.reshape([0, group, math.prod(rest) // group if static(rest) else -1])


@converts(aten.native_group_norm.default, variants=(EXPANDED,))
def native_group_norm(ctx: GraphBuilder, node: fx.Node, x: fx.Node, *args: Any) -> tuple[Value, ...]:
    """native_group_norm(Tensor input, Tensor? weight, Tensor? bias, SymInt N, SymInt C, SymInt HxW, int group, float eps) -> (Tensor, Tensor, Tensor)"""  # noqa: E501
    weight, bias, *_, group, eps = args
    value = grouped(ctx, ctx.value(x, work_dtype(dtype_of(x))), x, group)
    normal, mean, rstd = _standardize(ctx, x, value, 2, eps)
    result = _affine(ctx, normal.reshape(ctx.shape_tensor(x)), x, weight, bias)
    return result.cast(dtype_of(x)), mean.squeeze(2), rstd.squeeze(2)


def _affine(ctx: GraphBuilder, value: Value, x: fx.Node, weight: Value | MaybeNode, bias: MaybeNode) -> Value:
    """Multiply by a weight and add a bias, both per channel of ``x``."""
    if weight is not None:
        value = value * per_channel(ctx, ctx.value(weight, value.dtype), x)
    if bias is not None:
        value = value + per_channel(ctx, ctx.value(bias, value.dtype), x)
    return value


# normalization over all but the channels


def channel_axes(x: fx.Node) -> list[int]:
    """All dimensions of [N, C, ...] but C."""
    return [dim for dim in range(rank_of(x)) if dim != 1]


def _normalize(
    ctx: GraphBuilder, x: fx.Node, centered: Value, rstd: Value, weight: MaybeNode, bias: MaybeNode
) -> Value:
    """Multiply centered values by 1 / std and weight, and add the bias."""
    scale = rstd if weight is None else rstd * weight
    return _affine(ctx, centered, x, scale, bias).cast(dtype_of(x))


def _batch_norm_eval(
    ctx: GraphBuilder, x: fx.Node, weight: MaybeNode, bias: MaybeNode, mean: fx.Node, var: fx.Node, eps: float
) -> tuple[Value, Value, Value]:
    """Normalize with the running mean and variance; the batch's statistics are empty."""
    work = work_dtype(dtype_of(x))
    rstd = elementary.rsqrt(ctx.value(var, work) + eps)
    centered = ctx.value(x, work) - per_channel(ctx, ctx.value(mean, work), x)
    empty = ctx.const([], work)
    return _normalize(ctx, x, centered, rstd, weight, bias), empty, empty


def _batch_norm_train(
    ctx: GraphBuilder, x: fx.Node, weight: MaybeNode, bias: MaybeNode, eps: float
) -> tuple[Value, Value, Value, Value]:
    """The result, the batch's mean and 1 / std, and its variance (of the population)."""
    # not BatchNormalization with training_mode=1: onnxruntime's CPU kernel for it wants the running statistics, and
    # updates them with the variance of the population where torch takes that of a sample
    axes, value = channel_axes(x), ctx.value(x, work_dtype(dtype_of(x)))
    mean = reduce(ctx, "ReduceMean", x, value, axes)
    centered = value - per_channel(ctx, mean, x)
    variance = reduce(ctx, "ReduceMean", x, centered * centered, axes)
    rstd = elementary.rsqrt(variance + eps)
    return _normalize(ctx, x, centered, rstd, weight, bias), mean, rstd, variance


@converts(aten._native_batch_norm_legit_functional.default, variants=(EXPANDED,))
def batch_norm_functional(ctx: GraphBuilder, node: fx.Node, x: fx.Node, *args: Any) -> tuple[Value, ...]:
    """_native_batch_norm_legit_functional(Tensor input, Tensor? weight, Tensor? bias, Tensor running_mean, Tensor running_var, bool training, float momentum, float eps) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"""  # noqa: E501
    weight, bias, running_mean, running_var, training, momentum, eps = args
    old_mean, old_var = ctx.value(running_mean), ctx.value(running_var)
    if not training:
        return *_batch_norm_eval(ctx, x, weight, bias, running_mean, running_var, eps), old_mean, old_var
    if old_mean.dtype != work_dtype(dtype_of(x)):
        raise Unsupported(f"running statistics of {old_mean.dtype} for {dtype_of(x)}")
    result, mean, rstd, variance = _batch_norm_train(ctx, x, weight, bias, eps)
    # the running variance is that of a sample: n / (n - 1) times that of the population
    size = count(ctx, x, channel_axes(x), old_mean.dtype)
    new_mean = old_mean * (1 - momentum) + mean * momentum
    new_var = old_var * (1 - momentum) + variance * (size / (size - 1)) * momentum
    return result, mean, rstd, new_mean, new_var


@converts(aten._native_batch_norm_legit.no_stats)
def batch_norm_no_stats(ctx: GraphBuilder, node: fx.Node, *args: Any) -> tuple[Value, ...]:
    """_native_batch_norm_legit.no_stats(Tensor input, Tensor? weight, Tensor? bias, bool training, float momentum, float eps) -> (Tensor, Tensor, Tensor)"""  # noqa: E501
    x, weight, bias, _, _, eps = args
    return _batch_norm_train(ctx, x, weight, bias, eps)[:3]


@converts(aten._native_batch_norm_legit_no_training.default)
def batch_norm_no_training(ctx: GraphBuilder, node: fx.Node, *args: Any) -> tuple[Value, ...]:
    """_native_batch_norm_legit_no_training(Tensor input, Tensor? weight, Tensor? bias, Tensor running_mean, Tensor running_var, float momentum, float eps) -> (Tensor, Tensor, Tensor)"""  # noqa: E501
    *tensors, _, eps = args
    return _batch_norm_eval(ctx, *tensors, eps)


@converts(aten.native_batch_norm.default)
def native_batch_norm(ctx: GraphBuilder, node: fx.Node, *args: Any) -> tuple[Value, ...]:
    """native_batch_norm(Tensor input, Tensor? weight, Tensor? bias, Tensor? running_mean, Tensor? running_var, bool training, float momentum, float eps) -> (Tensor, Tensor, Tensor)"""  # noqa: E501
    x, weight, bias, running_mean, running_var, training, _, eps = args
    if not training and running_mean is not None and running_var is not None:
        return _batch_norm_eval(ctx, x, weight, bias, running_mean, running_var, eps)
    if running_mean is not None:
        raise Unsupported("batch norm that updates its running statistics in place")
    return _batch_norm_train(ctx, x, weight, bias, eps)[:3]


# convolution and embedding


@converts(aten.convolution.default, variants=(EXPANDED,))
def convolution(ctx: GraphBuilder, node: fx.Node, x: fx.Node, weight: fx.Node, *args: Any) -> Value:
    """convolution(Tensor input, Tensor weight, Tensor? bias, SymInt[] stride, SymInt[] padding, SymInt[] dilation, bool transposed, SymInt[] output_padding, SymInt groups) -> Tensor"""  # noqa: E501
    bias, stride, padding, dilation, transposed, output_padding, groups = args
    spatial = rank_of(weight) - 2
    if rank_of(x) != spatial + 2 or spatial < 1:
        raise Unsupported("a convolution without batch dimension")
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


@converts(aten.embedding_dense_backward.default, variants=(EXPANDED,))
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
    return zeros.op("ScatterND", rows.unsqueeze(-1), grads, reduction="add")


@converts(aten.grid_sampler_2d.default)
def grid_sampler_2d(ctx: GraphBuilder, node: fx.Node, x: fx.Node, grid: fx.Node, *args: Any) -> Value:
    """grid_sampler_2d(Tensor input, Tensor grid, int interpolation_mode, int padding_mode, bool align_corners) -> Tensor"""  # noqa: E501
    # GridSample takes 5 to 10 times as long (1.19: 23 ms for 4 x 16 x 128 x 128 where torch takes 3), and reads other
    # places where the grid is NaN or huge
    raise Unsupported("a grid sample: torch's kernel is faster")
