"""Layer, group, batch and other norms, and their gradients."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from lightning_ort.compat.torch_graphs import arguments_of
from lightning_ort.compiler.executors.ort.conversion.elementary import rsqrt
from lightning_ort.compiler.executors.ort.conversion.graph import GraphBuilder, Value
from lightning_ort.compiler.executors.ort.conversion.metadata import (
    Dims,
    dtype_of,
    rank_of,
    shape_of,
    static_sizes,
    work_dtype,
)
from lightning_ort.compiler.executors.ort.conversion.reduction import count, reduce, reduce_shaped
from lightning_ort.compiler.executors.ort.conversion.registry import Unsupported, converts

aten = torch.ops.aten

Gradients = tuple[Value | None, ...]
MaybeNode = fx.Node | None


def _as_traced(node: fx.Node, *results: Value | None) -> tuple[Any, ...]:
    """The results in the dtypes that torch expects: under autocast those of weights and statistics may be float32."""
    return tuple(
        None if result is None else result.cast(expected.dtype)
        for result, expected in zip(results, node.meta["val"], strict=True)
    )


def _per_channel(value: Value, x: fx.Node) -> Value:
    """A vector of one entry per channel, shaped to broadcast against ``x`` of [N, C, ...]."""
    return value.unsqueeze(*range(1, rank_of(x) - 1)) if rank_of(x) > 2 else value


def _masked(output_mask: Sequence[bool], *make: Callable[[], Value]) -> Gradients:
    """The gradients that are wanted; ``None`` for the others."""
    return tuple(function() if wanted else None for function, wanted in zip(make, output_mask, strict=True))


# over the last dimensions, or over groups of channels


def _standardize(shape: Sequence[Any], value: Value, axes: Dims, eps: float) -> tuple[Value, Value, Value]:
    """The values with mean 0 and variance 1 along ``axes``, and their mean and 1 / std before."""
    mean = reduce_shaped("ReduceMean", shape, value, axes, keepdim=True)
    centered = value - mean
    variance = reduce_shaped("ReduceMean", shape, centered * centered, axes, keepdim=True)
    rstd = rsqrt(variance + eps)
    return centered * rstd, mean, rstd


@converts(aten.native_layer_norm.default, timed=True)
def native_layer_norm(ctx: GraphBuilder, node: fx.Node, x: fx.Node, *args: Any) -> tuple[Value, ...]:
    """native_layer_norm(Tensor input, SymInt[] normalized_shape, Tensor? weight, Tensor? bias, float eps) -> (Tensor, Tensor, Tensor)"""  # noqa: E501
    # not LayerNormalization: onnxruntime 1.19 takes E[x^2] - E[x]^2 for the variance on a CPU. Where the mean is 100
    # standard deviations that is 5 % wrong, at 1000 it is NaN; and it is no faster (0.55, 0.50 ms, 1024 x 256 float32)
    normalized_shape, weight, bias, eps = args
    value, axes = ctx.value(x, work_dtype(x)), list(range(-len(normalized_shape), 0))
    result, mean, rstd = _standardize(shape_of(x), value, axes, eps)
    if weight is not None:
        result = result * weight
    if bias is not None:
        result = result + bias
    return _as_traced(node, result, mean, rstd)


@converts(aten._fused_rms_norm.default, timed=True)
def fused_rms_norm(ctx: GraphBuilder, node: fx.Node, x: fx.Node, *args: Any) -> tuple[Value, Value]:
    """_fused_rms_norm(Tensor input, int[] normalized_shape, Tensor? weight, float? eps) -> (Tensor, Tensor)"""
    normalized_shape, weight, eps = args
    value, axes = ctx.value(x, work_dtype(x)), list(range(-len(normalized_shape), 0))
    power = reduce("ReduceMean", x, value * value, axes, keepdim=True)
    rstd = rsqrt(power + (torch.finfo(value.dtype).eps if eps is None else eps))
    result = value * rstd
    if weight is not None:
        result = result * weight
    return _as_traced(node, result, rstd)


@converts(aten.native_layer_norm_backward.default, timed=True)
def layer_norm_backward(
    ctx: GraphBuilder, node: fx.Node, grad: fx.Node, x: fx.Node, normalized_shape: Sequence[Any], *args: Any
) -> Gradients:
    """native_layer_norm_backward(Tensor grad_out, Tensor input, SymInt[] normalized_shape, Tensor mean, Tensor rstd, Tensor? weight, Tensor? bias, bool[3] output_mask) -> (Tensor, Tensor, Tensor)"""  # noqa: E501
    mean, rstd, weight, _, output_mask = args
    # the kernel of onnxruntime 1.19 refuses rows of one element
    fits = dtype_of(x) is torch.float32 and any(size != 1 for size in normalized_shape)
    if fits and ctx.kernels.has_training("LayerNormalizationGrad"):
        if weight is None:
            sizes = static_sizes(normalized_shape, "a layer norm without weight")
            weight = ctx.const(torch.ones(sizes).tolist(), torch.float32)
        inputs = (grad, x, ctx.value(weight, torch.float32), mean, rstd)
        gradients = ctx.ms("LayerNormalizationGrad", *inputs, axis=-len(normalized_shape), outputs=3)
        return tuple(value if wanted else None for value, wanted in zip(gradients, output_mask, strict=True))
    work = work_dtype(x)
    centered = ctx.value(x, work) - mean
    gradients = _last_dims_backward(
        grad, x, centered, ctx.value(rstd, work), weight, output_mask, normalized_shape, True
    )
    return _as_traced(node, *gradients)


@converts(aten._fused_rms_norm_backward.default, timed=True)
def fused_rms_norm_backward(
    ctx: GraphBuilder, node: fx.Node, grad: fx.Node, x: fx.Node, normalized_shape: Sequence[int], *args: Any
) -> Gradients:
    """_fused_rms_norm_backward(Tensor grad_out, Tensor input, int[] normalized_shape, Tensor rstd, Tensor? weight, bool[2] output_mask) -> (Tensor, Tensor)"""  # noqa: E501
    rstd, weight, output_mask = args
    work, mask = work_dtype(x), (output_mask[0], output_mask[1] and weight is not None, False)
    value, rstd = ctx.value(x, work), ctx.value(rstd, work)
    return _as_traced(node, *_last_dims_backward(grad, x, value, rstd, weight, mask, normalized_shape, False)[:2])


def _last_dims_backward(
    grad: fx.Node,
    x: fx.Node,
    centered: Value,
    rstd: Value,
    weight: MaybeNode,
    output_mask: Sequence[bool],
    normalized_shape: Sequence[Any],
    subtract_mean: bool,
) -> Gradients:
    """Gradients of a norm over the last dimensions: of the input, the weight and the bias."""
    ctx, dtype = centered.ctx, dtype_of(x)
    grads = ctx.value(grad, centered.dtype)
    normal = centered * rstd
    axes = list(range(-len(normalized_shape), 0))
    outer = list(range(rank_of(x) - len(normalized_shape)))

    def input_gradient() -> Value:
        inner = grads if weight is None else grads * weight
        result = inner - normal * reduce("ReduceMean", x, inner * normal, axes, keepdim=True)
        if subtract_mean:
            result = result - reduce("ReduceMean", x, inner, axes, keepdim=True)
        return (result * rstd).cast(dtype)

    def outer_sum(value: Value) -> Value:
        return (reduce("ReduceSum", x, value, outer) if outer else value).cast(dtype)

    return _masked(output_mask, input_gradient, lambda: outer_sum(grads * normal), lambda: outer_sum(grads))


@converts(aten._weight_norm_interface_backward.default)
def weight_norm_backward(
    ctx: GraphBuilder, node: fx.Node, grad: fx.Node, v: fx.Node, g: fx.Node, norms: fx.Node, dim: int
) -> Gradients:
    """_weight_norm_interface_backward(Tensor grad_w, Tensor saved_v, Tensor saved_g, Tensor saved_norms, int dim) -> (Tensor, Tensor)"""  # noqa: E501
    work = dtype_of(norms)  # float32 for half types on CUDA
    norm, grads = ctx.value(norms), ctx.value(grad, work)
    others = [index for index in range(rank_of(v)) if index != dim % rank_of(v)]
    direction = ctx.value(v, work) / norm
    along = reduce("ReduceSum", v, grads * direction, others, keepdim=True)
    gradient = (grads - direction * along) * (ctx.value(g, work) / norm)
    return gradient.cast(dtype_of(v)), along.cast(dtype_of(g))


def _grouped(value: Value, x: fx.Node, group: int) -> Value:
    """Reshape [N, C, ...] to [N, group, rest]."""
    _, _, rest = _grouped_shape(x, group)
    return value.reshape([0, group, rest if isinstance(rest, int) else -1])


def _grouped_shape(x: fx.Node, group: int) -> tuple[Any, int, Any]:
    size, *rest = shape_of(x)
    return size, group, math.prod(rest) // group


@converts(aten.native_group_norm.default, timed=True)
def native_group_norm(ctx: GraphBuilder, node: fx.Node, x: fx.Node, *args: Any) -> tuple[Value, ...]:
    """native_group_norm(Tensor input, Tensor? weight, Tensor? bias, SymInt N, SymInt C, SymInt HxW, int group, float eps) -> (Tensor, Tensor, Tensor)"""  # noqa: E501
    weight, bias, *_, group, eps = args
    value = _grouped(ctx.value(x, work_dtype(x)), x, group)
    normal, mean, rstd = _standardize(_grouped_shape(x, group), value, 2, eps)
    result = _affine(normal.reshape(ctx.shape_tensor(x)), x, weight, bias)
    return _as_traced(node, result, mean.squeeze(2), rstd.squeeze(2))


def _affine(value: Value, x: fx.Node, weight: Value | MaybeNode, bias: MaybeNode) -> Value:
    """Multiply by a weight and add a bias, both per channel of ``x``."""
    if weight is not None:
        value = value * _per_channel(value.ctx.value(weight, value.dtype), x)
    if bias is not None:
        value = value + _per_channel(value.ctx.value(bias, value.dtype), x)
    return value


@converts(aten.native_group_norm_backward.default, timed=True)
def group_norm_backward(ctx: GraphBuilder, node: fx.Node, grad: fx.Node, x: fx.Node, *args: Any) -> Gradients:
    """native_group_norm_backward(Tensor grad_out, Tensor input, Tensor mean, Tensor rstd, Tensor? weight, SymInt N, SymInt C, SymInt HxW, int group, bool[3] output_mask) -> (Tensor, Tensor, Tensor)"""  # noqa: E501
    mean, rstd, weight, *_, group, output_mask = args
    dtype, work = dtype_of(x), work_dtype(x)
    grads, spread = ctx.value(grad, work), ctx.value(rstd, work).unsqueeze(2)
    normal = (_grouped(ctx.value(x, work), x, group) - ctx.value(mean, work).unsqueeze(2)) * spread

    def input_gradient() -> Value:
        inner = grads if weight is None else grads * _per_channel(ctx.value(weight, work), x)
        inner = _grouped(inner, x, group)
        shape = _grouped_shape(x, group)
        along = reduce_shaped("ReduceMean", shape, inner * normal, 2, keepdim=True)
        result = inner - reduce_shaped("ReduceMean", shape, inner, 2, keepdim=True) - normal * along
        return (result * spread).reshape(ctx.shape_tensor(x)).cast(dtype)

    def channel_sum(value: Value) -> Value:
        return reduce("ReduceSum", x, value, _channel_axes(x)).cast(dtype)

    shape = ctx.shape_tensor(x)
    return _masked(
        output_mask, input_gradient, lambda: channel_sum(grads * normal.reshape(shape)), lambda: channel_sum(grads)
    )


# over all but the channels


def _channel_axes(x: fx.Node) -> list[int]:
    return [dim for dim in range(rank_of(x)) if dim != 1]


def _normalize(x: fx.Node, centered: Value, rstd: Value, weight: MaybeNode, bias: MaybeNode) -> Value:
    """Multiply centered values by 1 / std and weight, and add the bias."""
    scale = rstd if weight is None else rstd * weight
    return _affine(centered, x, scale, bias).cast(dtype_of(x))


def _batch_norm_eval(
    ctx: GraphBuilder, x: fx.Node, weight: MaybeNode, bias: MaybeNode, mean: fx.Node, var: fx.Node, eps: float
) -> tuple[Value, Value, Value]:
    """Normalize with the running mean and variance, which a GPU returns for the batch's; on a CPU those are empty."""
    work = work_dtype(x)
    used, rstd = ctx.value(mean, work), rsqrt(ctx.value(var, work) + eps)
    result = _normalize(x, ctx.value(x, work) - _per_channel(used, x), rstd, weight, bias)
    if x.meta["val"].device.type == "cpu":
        used = rstd = ctx.const([], work)
    return result, used, rstd


def _batch_norm_train(
    ctx: GraphBuilder, x: fx.Node, weight: MaybeNode, bias: MaybeNode, eps: float
) -> tuple[Value, Value, Value, Value]:
    """The result, the batch's mean and 1 / std, and its variance (of the population)."""
    # not BatchNormalization with training_mode=1: onnxruntime's CPU kernel for it wants the running statistics, and
    # updates them with the variance of the population where torch takes that of a sample
    axes, value = _channel_axes(x), ctx.value(x, work_dtype(x))
    mean = reduce("ReduceMean", x, value, axes)
    centered = value - _per_channel(mean, x)
    variance = reduce("ReduceMean", x, centered * centered, axes)
    rstd = rsqrt(variance + eps)
    return _normalize(x, centered, rstd, weight, bias), mean, rstd, variance


@converts(aten._native_batch_norm_legit_functional.default, timed=True, takes_empty=True)
def batch_norm_functional(ctx: GraphBuilder, node: fx.Node, x: fx.Node, *args: Any) -> tuple[Value, ...]:
    """_native_batch_norm_legit_functional(Tensor input, Tensor? weight, Tensor? bias, Tensor running_mean, Tensor running_var, bool training, float momentum, float eps) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"""  # noqa: E501
    weight, bias, running_mean, running_var, training, momentum, eps = args
    old_mean, old_var = ctx.value(running_mean), ctx.value(running_var)
    if not training:
        results = _batch_norm_eval(ctx, x, weight, bias, running_mean, running_var, eps)
        return _as_traced(node, *results, old_mean, old_var)
    if old_mean.dtype != work_dtype(x):
        raise Unsupported(f"running statistics of {old_mean.dtype} for {dtype_of(x)}")
    result, mean, rstd, variance = _batch_norm_train(ctx, x, weight, bias, eps)
    # the running variance is that of a sample: n / (n - 1) times that of the population
    size = count(ctx, x, _channel_axes(x), old_mean.dtype)
    new_mean = old_mean * (1 - momentum) + mean * momentum
    new_var = old_var * (1 - momentum) + variance * (size / (size - 1)) * momentum
    return _as_traced(node, result, mean, rstd, new_mean, new_var)


@converts(
    aten.native_batch_norm.default,
    aten._native_batch_norm_legit_no_training.default,
    aten._native_batch_norm_legit.no_stats,
    takes_empty=True,
)
def native_batch_norm(ctx: GraphBuilder, node: fx.Node, x: fx.Node, *args: Any) -> tuple[Value, ...]:
    """native_batch_norm(Tensor input, Tensor? weight, Tensor? bias, Tensor? running_mean, Tensor? running_var, bool training, float momentum, float eps) -> (Tensor, Tensor, Tensor)"""  # noqa: E501
    given = arguments_of(node)
    weight, bias, eps = given["weight"], given["bias"], given["eps"]
    mean, var = given.get("running_mean"), given.get("running_var")
    if not given.get("training") and mean is not None and var is not None:
        return _as_traced(node, *_batch_norm_eval(ctx, x, weight, bias, mean, var, eps))
    if mean is not None:
        raise Unsupported("batch norm that updates its running statistics in place")
    return _as_traced(node, *_batch_norm_train(ctx, x, weight, bias, eps)[:3])


@converts(aten.native_batch_norm_backward.default, timed=True, takes_empty=True)
def batch_norm_backward(ctx: GraphBuilder, node: fx.Node, grad: fx.Node, x: fx.Node, *args: Any) -> Gradients:
    """native_batch_norm_backward(Tensor grad_out, Tensor input, Tensor? weight, Tensor? running_mean, Tensor? running_var, Tensor? save_mean, Tensor? save_invstd, bool train, float eps, bool[3] output_mask) -> (Tensor, Tensor, Tensor)"""  # noqa: E501
    weight, running_mean, running_var, save_mean, save_invstd, train, eps, output_mask = args
    dtype, work, axes = dtype_of(x), work_dtype(x), _channel_axes(x)
    if train and save_mean is not None and save_invstd is not None:
        mean, rstd = ctx.value(save_mean, work), ctx.value(save_invstd, work)
    elif not train and running_mean is not None and running_var is not None:
        mean, rstd = ctx.value(running_mean, work), rsqrt(ctx.value(running_var, work) + eps)
    else:
        raise Unsupported("the gradient of a batch norm without statistics")
    grads = ctx.value(grad, work)
    centered = ctx.value(x, work) - _per_channel(mean, x)
    total = reduce("ReduceSum", x, grads, axes)
    along = reduce("ReduceSum", x, grads * centered, axes) * rstd

    def input_gradient() -> Value:
        scale = rstd if weight is None else rstd * weight
        result = grads
        if train:  # the statistics depend on the input too
            size = count(ctx, x, axes, work)
            result = grads - _per_channel(total / size, x) - centered * _per_channel(along * rstd / size, x)
        return (result * _per_channel(scale, x)).cast(dtype)

    parameter = dtype if weight is None else dtype_of(weight)
    return _masked(output_mask, input_gradient, lambda: along.cast(parameter), lambda: total.cast(parameter))
