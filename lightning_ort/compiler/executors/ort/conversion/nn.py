"""Layers: softmax, normalization, convolution, embedding."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from lightning_ort.compiler.executors.ort.conversion import elementary
from lightning_ort.compiler.executors.ort.conversion.graph import GraphBuilder, Value
from lightning_ort.compiler.executors.ort.conversion.indexing import refusing_negative
from lightning_ort.compiler.executors.ort.conversion.metadata import dtype_of, rank_of, shape_of, static
from lightning_ort.compiler.executors.ort.conversion.reduction import count, reduce
from lightning_ort.compiler.executors.ort.conversion.registry import EXPANDED, Unsupported, converts
from lightning_ort.compiler.report import ReasonType

aten = torch.ops.aten


def static_sizes(sizes: Sequence[Any], what: str) -> list[int]:
    """The sizes as plain integers.

    Raises:
        Unsupported: If one is symbolic.

    """
    if not static(sizes):
        raise Unsupported(f"{what} of symbolic size", ReasonType.DYNAMIC_SHAPE)
    return [int(size) for size in sizes]


def work_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which torch keeps the statistics of values of ``dtype``."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def per_channel(ctx: GraphBuilder, value: Value, x: fx.Node) -> Value:
    """A vector of one entry per channel, shaped to broadcast against ``x`` of [N, C, ...]."""
    spatial = rank_of(x) - 2
    return ctx.op("Unsqueeze", value, ctx.ints(list(range(1, spatial + 1)))) if spatial > 0 else value


# softmax


def refuse_empty(x: fx.Node, what: str) -> None:
    """Refuse an empty tensor: SoftmaxGrad_13 divides by its size, which ends the process (onnxruntime 1.19).

    A symbolic size that turns out to be 0 is seen to by :mod:`~lightning_ort.compiler.output_shapes`.
    """
    if any(isinstance(size, int) and size == 0 for size in shape_of(x)):
        raise Unsupported(f"{what} of an empty tensor")


@converts(aten._softmax.default)
def softmax(ctx: GraphBuilder, node: fx.Node, x: fx.Node, dim: int, half_to_float: bool) -> Value:
    """_softmax(Tensor self, int dim, bool half_to_float) -> Tensor"""
    refuse_empty(x, "a softmax")
    dtype = dtype_of(node)
    value = ctx.value(x, dtype)
    if dtype is not torch.float64 or not ctx.on_cpu:
        return _along(ctx, "Softmax", value, x, dim)
    powers = elementary.exp(_below_largest(ctx, value, x, dim))
    return ctx.op("Div", powers, reduce(ctx, "ReduceSum", x, powers, dim, keepdim=True))


@converts(aten._log_softmax.default)
def log_softmax(ctx: GraphBuilder, node: fx.Node, x: fx.Node, dim: int, half_to_float: bool) -> Value:
    """_log_softmax(Tensor self, int dim, bool half_to_float) -> Tensor"""
    refuse_empty(x, "a softmax")
    dtype = dtype_of(node)
    value = ctx.value(x, dtype)
    if dtype is not torch.float64 or not ctx.on_cpu:
        return _along(ctx, "LogSoftmax", value, x, dim)
    below = _below_largest(ctx, value, x, dim)
    total = reduce(ctx, "ReduceSum", x, elementary.exp(below), dim, keepdim=True)
    return ctx.op("Sub", below, ctx.op("Log", total))


def _below_largest(ctx: GraphBuilder, value: Value, x: fx.Node, dim: int) -> Value:
    # onnxruntime's kernels for float64 (1.19) return numbers for a row with a NaN or an infinity, where torch has NaN
    return ctx.op("Sub", value, reduce(ctx, "ReduceMax", x, value, dim, keepdim=True))


def _along(ctx: GraphBuilder, op_type: str, value: Value, x: fx.Node, dim: int) -> Value:
    if rank_of(x):
        return ctx.op(op_type, value, axis=dim)
    # ONNX has no axis of a scalar
    row = ctx.op(op_type, ctx.op("Unsqueeze", value, ctx.ints([0])), axis=0)
    return ctx.op("Squeeze", row, ctx.ints([0]))


# normalization over the last dimensions


@converts(aten.native_layer_norm.default, variants=(EXPANDED,))
def native_layer_norm(
    ctx: GraphBuilder,
    node: fx.Node,
    x: fx.Node,
    normalized_shape: Sequence[Any],
    weight: fx.Node | None,
    bias: fx.Node | None,
    eps: float,
) -> tuple[Value, ...]:
    """native_layer_norm(Tensor input, SymInt[] shape, Tensor? weight, Tensor? bias, float eps) -> (Tensor, Tensor, Tensor)"""  # noqa: E501
    # not LayerNormalization: onnxruntime 1.19 takes E[x^2] - E[x]^2 for the variance. Where the mean is 100 standard
    # deviations that is 5 % wrong, at 1000 it is NaN; and it is no faster (0.55 and 0.50 ms, 1024 x 256 float32)
    dtype = dtype_of(x)
    work = work_dtype(dtype)
    axes, value = list(range(-len(normalized_shape), 0)), ctx.value(x, work)
    mean = reduce(ctx, "ReduceMean", x, value, axes, keepdim=True)
    centered = ctx.op("Sub", value, mean)
    variance = reduce(ctx, "ReduceMean", x, ctx.op("Mul", centered, centered), axes, keepdim=True)
    rstd = elementary.rsqrt(ctx.op("Add", variance, ctx.const(eps, work)))
    result = ctx.op("Mul", centered, rstd)
    if weight is not None:
        result = ctx.op("Mul", result, ctx.value(weight, work))
    if bias is not None:
        result = ctx.op("Add", result, ctx.value(bias, work))
    return (result if work == dtype else ctx.cast(result, dtype)), mean, rstd


@converts(aten._fused_rms_norm.default, variants=(EXPANDED,))
def fused_rms_norm(
    ctx: GraphBuilder,
    node: fx.Node,
    x: fx.Node,
    normalized_shape: Sequence[int],
    weight: fx.Node | None,
    eps: float | None,
) -> tuple[Value, Value]:
    """_fused_rms_norm(Tensor input, int[] normalized_shape, Tensor? weight, float? eps) -> (Tensor, Tensor)"""
    dtype = dtype_of(x)
    work = work_dtype(dtype)
    value = ctx.value(x, work)
    axes = list(range(-len(normalized_shape), 0))
    power = reduce(ctx, "ReduceMean", x, ctx.op("Mul", value, value), axes, keepdim=True)
    lifted = ctx.op("Add", power, ctx.const(torch.finfo(dtype).eps if eps is None else eps, work))
    rstd = elementary.rsqrt(lifted)
    result = ctx.op("Mul", value, rstd)
    if weight is not None:
        result = ctx.op("Mul", result, ctx.value(weight, work))
    return (result if work == dtype else ctx.cast(result, dtype)), rstd


# normalization over channels


def grouped(ctx: GraphBuilder, value: Value, x: fx.Node, group: int) -> Value:
    """Reshape [N, C, ...] to [N, group, rest]."""
    rest = shape_of(x)[1:]
    last = math.prod(rest) // group if static(rest) else -1
    return ctx.op("Reshape", value, ctx.ints([0, group, last]))


@converts(aten.native_group_norm.default, variants=(EXPANDED,))
def native_group_norm(
    ctx: GraphBuilder,
    node: fx.Node,
    x: fx.Node,
    weight: fx.Node | None,
    bias: fx.Node | None,
    N: Any,
    C: Any,
    HxW: Any,
    group: int,
    eps: float,
) -> tuple[Value, ...]:
    """native_group_norm(Tensor input, Tensor? weight, Tensor? bias, SymInt N, SymInt C, SymInt HxW, int group, float eps) -> (Tensor, Tensor, Tensor)"""  # noqa: E501
    dtype = dtype_of(x)
    work = work_dtype(dtype)
    value = grouped(ctx, ctx.value(x, work), x, group)
    mean = reduce(ctx, "ReduceMean", x, value, 2, keepdim=True)
    centered = ctx.op("Sub", value, mean)
    variance = reduce(ctx, "ReduceMean", x, ctx.op("Mul", centered, centered), 2, keepdim=True)
    rstd = elementary.rsqrt(ctx.op("Add", variance, ctx.const(eps, work)))
    result = ctx.op("Reshape", ctx.op("Mul", centered, rstd), ctx.shape_tensor(x))
    if weight is not None:
        result = ctx.op("Mul", result, per_channel(ctx, ctx.value(weight, work), x))
    if bias is not None:
        result = ctx.op("Add", result, per_channel(ctx, ctx.value(bias, work), x))
    last = ctx.ints([2])
    statistics = (ctx.op("Squeeze", mean, last), ctx.op("Squeeze", rstd, last))
    return (result if work == dtype else ctx.cast(result, dtype)), *statistics


def channel_axes(x: fx.Node) -> list[int]:
    """All dimensions of [N, C, ...] but C."""
    return [dim for dim in range(rank_of(x)) if dim != 1]


def _empty(ctx: GraphBuilder, dtype: torch.dtype) -> Value:
    """What batch norm in evaluation returns in place of statistics."""
    return ctx.const([], dtype)


def _normalize(
    ctx: GraphBuilder,
    x: fx.Node,
    value: Value,
    rstd: Value,
    weight: fx.Node | None,
    bias: fx.Node | None,
) -> Value:
    """Multiply centered values by 1 / std and weight, add bias."""
    dtype, work = dtype_of(x), work_dtype(dtype_of(x))
    scale = rstd if weight is None else ctx.op("Mul", rstd, ctx.value(weight, work))
    result = ctx.op("Mul", value, per_channel(ctx, scale, x))
    if bias is not None:
        result = ctx.op("Add", result, per_channel(ctx, ctx.value(bias, work), x))
    return result if work == dtype else ctx.cast(result, dtype)


def _batch_norm_eval(
    ctx: GraphBuilder,
    x: fx.Node,
    weight: fx.Node | None,
    bias: fx.Node | None,
    running_mean: fx.Node,
    running_var: fx.Node,
    eps: float,
) -> tuple[Value, Value, Value]:
    work = work_dtype(dtype_of(x))
    rstd = elementary.rsqrt(ctx.op("Add", ctx.value(running_var, work), ctx.const(eps, work)))
    centered = ctx.op("Sub", ctx.value(x, work), per_channel(ctx, ctx.value(running_mean, work), x))
    return _normalize(ctx, x, centered, rstd, weight, bias), _empty(ctx, work), _empty(ctx, work)


def _batch_norm_train(
    ctx: GraphBuilder, x: fx.Node, weight: fx.Node | None, bias: fx.Node | None, eps: float
) -> tuple[Value, Value, Value, Value]:
    """The result, the batch's mean and 1 / std, and its variance (of the population)."""
    # not BatchNormalization with training_mode=1: onnxruntime's CPU kernel for it wants the running statistics, and
    # updates them with the variance of the population where torch takes that of a sample
    work = work_dtype(dtype_of(x))
    axes, value = channel_axes(x), ctx.value(x, work)
    mean = reduce(ctx, "ReduceMean", x, value, axes)
    centered = ctx.op("Sub", value, per_channel(ctx, mean, x))
    variance = reduce(ctx, "ReduceMean", x, ctx.op("Mul", centered, centered), axes)
    rstd = elementary.rsqrt(ctx.op("Add", variance, ctx.const(eps, work)))
    return _normalize(ctx, x, centered, rstd, weight, bias), mean, rstd, variance


def _blend(ctx: GraphBuilder, old: fx.Node, new: Value, momentum: float) -> Value:
    """(1 - momentum) * old + momentum * new, in the dtype of ``old``."""
    dtype = dtype_of(old)
    kept = ctx.op("Mul", ctx.value(old), ctx.const(1 - momentum, dtype))
    return ctx.op("Add", kept, ctx.op("Mul", new, ctx.const(momentum, dtype)))


@converts(aten._native_batch_norm_legit_functional.default, variants=(EXPANDED,))
def batch_norm_functional(
    ctx: GraphBuilder,
    node: fx.Node,
    x: fx.Node,
    weight: fx.Node | None,
    bias: fx.Node | None,
    running_mean: fx.Node,
    running_var: fx.Node,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Value, ...]:
    """_native_batch_norm_legit_functional(Tensor input, Tensor? weight, Tensor? bias, Tensor running_mean, Tensor running_var, bool training, float momentum, float eps) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"""  # noqa: E501
    if not training:
        outputs = _batch_norm_eval(ctx, x, weight, bias, running_mean, running_var, eps)
        return *outputs, ctx.value(running_mean), ctx.value(running_var)
    if dtype_of(running_mean) != work_dtype(dtype_of(x)):
        raise Unsupported(f"running statistics of {dtype_of(running_mean)} for {dtype_of(x)}")
    result, mean, rstd, variance = _batch_norm_train(ctx, x, weight, bias, eps)
    # the running variance is that of a sample: n / (n - 1) times that of the population
    work = work_dtype(dtype_of(x))
    size = count(ctx, x, channel_axes(x), work)
    correction = ctx.op("Div", size, ctx.op("Sub", size, ctx.const(1, work)))
    new_mean = _blend(ctx, running_mean, mean, momentum)
    new_var = _blend(ctx, running_var, ctx.op("Mul", variance, correction), momentum)
    return result, mean, rstd, new_mean, new_var


@converts(aten._native_batch_norm_legit.no_stats)
def batch_norm_no_stats(
    ctx: GraphBuilder,
    node: fx.Node,
    x: fx.Node,
    weight: fx.Node | None,
    bias: fx.Node | None,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Value, ...]:
    """_native_batch_norm_legit.no_stats(Tensor input, Tensor? weight, Tensor? bias, bool training, float momentum, float eps) -> (Tensor, Tensor, Tensor)"""  # noqa: E501
    return _batch_norm_train(ctx, x, weight, bias, eps)[:3]


@converts(aten._native_batch_norm_legit_no_training.default)
def batch_norm_no_training(
    ctx: GraphBuilder,
    node: fx.Node,
    x: fx.Node,
    weight: fx.Node | None,
    bias: fx.Node | None,
    running_mean: fx.Node,
    running_var: fx.Node,
    momentum: float,
    eps: float,
) -> tuple[Value, ...]:
    """_native_batch_norm_legit_no_training(Tensor input, Tensor? weight, Tensor? bias, Tensor running_mean, Tensor running_var, float momentum, float eps) -> (Tensor, Tensor, Tensor)"""  # noqa: E501
    return _batch_norm_eval(ctx, x, weight, bias, running_mean, running_var, eps)


@converts(aten.native_batch_norm.default)
def native_batch_norm(
    ctx: GraphBuilder,
    node: fx.Node,
    x: fx.Node,
    weight: fx.Node | None,
    bias: fx.Node | None,
    running_mean: fx.Node | None,
    running_var: fx.Node | None,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Value, ...]:
    """native_batch_norm(Tensor input, Tensor? weight, Tensor? bias, Tensor? running_mean, Tensor? running_var, bool training, float momentum, float eps) -> (Tensor, Tensor, Tensor)"""  # noqa: E501
    if not training and running_mean is not None and running_var is not None:
        return _batch_norm_eval(ctx, x, weight, bias, running_mean, running_var, eps)
    if running_mean is not None:
        raise Unsupported("batch norm that updates its running statistics in place")
    return _batch_norm_train(ctx, x, weight, bias, eps)[:3]


# convolution


def spread(values: Sequence[Any], rank: int, what: str) -> list[int]:
    """One value per spatial dimension; torch lets one stand for all."""
    sizes = static_sizes(values, what)
    return sizes * rank if len(sizes) == 1 else sizes


@converts(aten.convolution.default, variants=(EXPANDED,))
def convolution(
    ctx: GraphBuilder,
    node: fx.Node,
    x: fx.Node,
    weight: fx.Node,
    bias: fx.Node | None,
    stride: Sequence[Any],
    padding: Sequence[Any],
    dilation: Sequence[Any],
    transposed: bool,
    output_padding: Sequence[Any],
    groups: int,
) -> Value:
    """convolution(Tensor input, Tensor weight, Tensor? bias, SymInt[] stride, SymInt[] padding, SymInt[] dilation, bool transposed, SymInt[] output_padding, SymInt groups) -> Tensor"""  # noqa: E501
    spatial = rank_of(weight) - 2
    if rank_of(x) != spatial + 2 or spatial < 1:
        raise Unsupported("a convolution without batch dimension")
    inputs = [ctx.value(x), ctx.value(weight)] + ([] if bias is None else [ctx.value(bias)])
    pads = spread(padding, spatial, "a padding")
    attributes: dict[str, Any] = {
        "kernel_shape": static_sizes(shape_of(weight)[2:], "a kernel"),
        "strides": spread(stride, spatial, "a stride"),
        "pads": pads + pads,
        "dilations": spread(dilation, spatial, "a dilation"),
        "group": groups,
    }
    if transposed:
        attributes["output_padding"] = spread(output_padding, spatial, "a padding")
        if any(pad >= step for pad, step in zip(attributes["output_padding"], attributes["strides"], strict=True)):
            raise Unsupported("an output_padding not below the stride: onnxruntime 1.19 gets it wrong")
        return ctx.op("ConvTranspose", *inputs, **attributes)
    return ctx.op("Conv", *inputs, **attributes)


@converts(aten.embedding.default)
def embedding(
    ctx: GraphBuilder,
    node: fx.Node,
    weight: fx.Node,
    indices: fx.Node,
    padding_idx: Any = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Value:
    """embedding(Tensor weight, Tensor indices, SymInt padding_idx=-1, bool scale_grad_by_freq, bool sparse) -> Tensor"""  # noqa: E501
    # the last three matter in the backward pass only
    rows = refusing_negative(ctx, ctx.value(indices, torch.int64), weight, 0)
    return ctx.op("Gather", ctx.value(weight), rows, axis=0)


@converts(aten.grid_sampler_2d.default)
def grid_sampler_2d(ctx: GraphBuilder, node: fx.Node, x: fx.Node, grid: fx.Node, *args: Any) -> Value:
    """grid_sampler_2d(Tensor input, Tensor grid, int interpolation_mode, int padding_mode, bool align_corners) -> Tensor"""  # noqa: E501
    # GridSample takes 5 to 10 times as long (1.19: 23 ms for 4 x 16 x 128 x 128 where torch takes 3), and reads other
    # places where the grid is NaN or huge
    raise Unsupported("a grid sample: torch's kernel is faster")
