"""Slices and entries that are written to, also along sizes that are known only when the model runs."""

from typing import Any

import torch
from torch import fx

from lightning_ort.compiler.executors.ort.conversion import slices
from lightning_ort.compiler.executors.ort.conversion.choice import where
from lightning_ort.compiler.executors.ort.conversion.graph import Value
from lightning_ort.compiler.executors.ort.conversion.metadata import dtype_of, rank_of, shape_of, static
from lightning_ort.compiler.executors.ort.conversion.registry import form
from lightning_ort.onnx_export.training.graph import PortableGraph

aten = torch.ops.aten


def _start(ctx: PortableGraph, size: Any, start: Any) -> Value:
    """Where a slice begins along a dimension of this size: within it, counted from its beginning."""
    length = ctx.const(size, torch.int64) if isinstance(size, int) else ctx.number(size.node.expr)
    first = ctx.value(0 if start is None else start, torch.int64)
    return where(first < 0, first + length, first).max(0).min(length)


def _written(target: Value, rank: int, axis: int, updates: Value, start: Value, step: int) -> Value:
    """``target`` with the entries from ``start`` on, every ``step``-th, replaced along one dimension."""
    count = updates.op("Shape", start=axis, end=axis + 1).squeeze(0)
    ctx = target.ctx
    places = ctx.op("Range", ctx.const(0, torch.int64), count, ctx.const(1, torch.int64)) * step + start
    others = [dim for dim in range(rank) if dim != axis]
    places = (places.unsqueeze(*others) if others else places).expand(updates.op("Shape"))
    return target.op("ScatterElements", places, updates, axis=axis)


def _is_known(*arguments: Any) -> bool:
    return static([each for each in arguments if each is not None])


@form(aten.slice_backward.default)
def slice_backward(
    ctx: PortableGraph, node: fx.Node, grad: fx.Node, input_sizes: Any, dim: int, start: Any, end: Any, step: Any
) -> Value:
    """slice_backward(Tensor grad_output, SymInt[] input_sizes, int dim, SymInt start, SymInt end, SymInt step) -> Tensor"""  # noqa: E501
    if _is_known(*shape_of(node), *shape_of(grad), start, end, step):
        return slices.slice_backward(ctx, node, grad, input_sizes, dim, start, end, step)
    axis, dtype = dim % rank_of(node), dtype_of(node)
    zeros = ctx.const(0, dtype).expand(ctx.sizes(input_sizes))
    first = _start(ctx, shape_of(node)[axis], start)
    return _written(zeros, rank_of(node), axis, ctx.value(grad, dtype), first, step)


@form(aten.select_backward.default)
def select_backward(ctx: PortableGraph, node: fx.Node, grad: fx.Node, input_sizes: Any, dim: int, index: Any) -> Value:
    """select_backward(Tensor grad_output, SymInt[] input_sizes, int dim, SymInt index) -> Tensor"""
    axis, dtype = dim % rank_of(node), dtype_of(node)
    if _is_known(shape_of(node)[axis], index):
        return slices.select_backward(ctx, node, grad, input_sizes, dim, index)
    zeros = ctx.const(0, dtype).expand(ctx.sizes(input_sizes))
    first = _start(ctx, shape_of(node)[axis], index)
    return _written(zeros, rank_of(node), axis, ctx.value(grad, dtype).unsqueeze(axis), first, 1)


@form(aten.slice_scatter.default)
def slice_scatter(
    ctx: PortableGraph,
    node: fx.Node,
    x: fx.Node,
    src: fx.Node,
    dim: int = 0,
    start: Any = None,
    end: Any = None,
    step: Any = 1,
) -> Value:
    """slice_scatter(Tensor self, Tensor src, int dim=0, SymInt? start=None, SymInt? end=None, SymInt step=1) -> Tensor"""  # noqa: E501
    axis = dim % rank_of(x)
    if _is_known(shape_of(x)[axis], start, end, step):
        return slices.slice_scatter(ctx, node, x, src, dim, start, end, step)
    first = _start(ctx, shape_of(x)[axis], start)
    return _written(ctx.value(x), rank_of(x), axis, ctx.value(src, dtype_of(x)), first, step)


@form(aten.select_scatter.default)
def select_scatter(ctx: PortableGraph, node: fx.Node, x: fx.Node, src: fx.Node, dim: int, index: Any) -> Value:
    """select_scatter(Tensor self, Tensor src, int dim, SymInt index) -> Tensor"""
    axis = dim % rank_of(x)
    if _is_known(shape_of(x)[axis], index):
        return slices.select_scatter(ctx, node, x, src, dim, index)
    first = _start(ctx, shape_of(x)[axis], index)
    return _written(ctx.value(x), rank_of(x), axis, ctx.value(src, dtype_of(x)).unsqueeze(axis), first, 1)
