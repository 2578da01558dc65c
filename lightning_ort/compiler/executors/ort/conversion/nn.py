"""Convolution, embedding, dropout, and their gradients."""

from typing import Any

import torch
from torch import fx

from lightning_ort.compiler.executors.ort.conversion.checks import per_dimension, static_sizes
from lightning_ort.compiler.executors.ort.conversion.choice import scaled_mask, where
from lightning_ort.compiler.executors.ort.conversion.graph import GraphBuilder, Value
from lightning_ort.compiler.executors.ort.conversion.indexing import refusing_negative
from lightning_ort.compiler.executors.ort.conversion.metadata import dtype_of, rank_of, shape_of
from lightning_ort.compiler.executors.ort.conversion.registry import EXPANDED, Unsupported, converts
from lightning_ort.compiler.executors.ort.conversion.shape import filled
from lightning_ort.compiler.reason import ReasonType

aten = torch.ops.aten


@converts(aten.convolution.default, variants=(EXPANDED,))
def convolution(ctx: GraphBuilder, node: fx.Node, x: fx.Node, weight: fx.Node, *args: Any) -> Value:
    """convolution(Tensor input, Tensor weight, Tensor? bias, SymInt[] stride, SymInt[] padding, SymInt[] dilation, bool transposed, SymInt[] output_padding, SymInt groups) -> Tensor"""  # noqa: E501
    bias, stride, padding, dilation, transposed, output_padding, groups = args
    spatial = rank_of(weight) - 2
    if rank_of(x) != spatial + 2 or spatial < 1:
        raise Unsupported("a convolution without batch dimension")
    if dtype_of(node) is torch.bfloat16:
        if transposed:
            raise Unsupported("a transposed convolution of bfloat16", ReasonType.NO_KERNEL)
        ctx.need_opset(22, "a convolution of bfloat16")
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
    return ctx.sum_at(zeros, [rows], grads, 2, shape_of(grad), "the gradient of an embedding")


@converts(aten.native_dropout_backward.default)
def native_dropout_backward(ctx: GraphBuilder, node: fx.Node, grad: fx.Node, mask: fx.Node, scale: float) -> Value:
    """native_dropout_backward(Tensor grad_output, Tensor mask, float scale) -> Tensor"""
    dtype = dtype_of(node)
    return ctx.value(grad, dtype) * scaled_mask(ctx.value(mask), scale, dtype)


@converts(aten.grid_sampler_2d.default)
def grid_sampler_2d(ctx: GraphBuilder, node: fx.Node, x: fx.Node, grid: fx.Node, *args: Any) -> Value:
    """grid_sampler_2d(Tensor input, Tensor grid, int interpolation_mode, int padding_mode, bool align_corners) -> Tensor"""  # noqa: E501
    # GridSample takes 5 to 10 times as long (1.19: 23 ms for 4 x 16 x 128 x 128 where torch takes 3), and reads other
    # places where the grid is NaN or huge
    raise Unsupported("a grid sample: torch's kernel is faster")
