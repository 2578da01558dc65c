"""Operations that runs leave to PyTorch: some sums at repeated places, and tensors that are made empty."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from lightning_ort.compiler.executors.ort.conversion.elementary import where
from lightning_ort.compiler.executors.ort.conversion.graph import Value
from lightning_ort.compiler.executors.ort.conversion.metadata import dtype_of, static_sizes
from lightning_ort.compiler.executors.ort.conversion.registry import form
from lightning_ort.compiler.executors.ort.conversion.shape import filled
from lightning_ort.onnx_export.training.graph import PortableGraph

aten = torch.ops.aten


@form(aten.masked_scatter_backward.default)
def masked_scatter_backward(
    ctx: PortableGraph, node: fx.Node, grad: fx.Node, mask: fx.Node, sizes: Sequence[Any]
) -> Value:
    """masked_scatter_backward(Tensor grad_output, Tensor mask, SymInt[] sizes) -> Tensor"""
    shape = static_sizes(sizes, "the gradient of what was scattered")
    chosen = ctx.value(mask, torch.bool).expand(ctx.shape_tensor(grad)).reshape([-1])
    places = (chosen.cast(torch.int64).op("CumSum", 0) - 1).max(0)
    updates = where(chosen, ctx.value(grad).reshape([-1]), 0)
    zeros = filled(ctx, ctx.ints([math.prod(shape)]), 0, dtype_of(node))
    return zeros.op("ScatterElements", places, updates, axis=0, reduction="add").reshape(shape)


@form(aten.lift_fresh.default)
def lift_fresh(ctx: PortableGraph, node: fx.Node, x: fx.Node) -> Value:
    """lift_fresh(Tensor(a) self) -> Tensor(a)"""
    return ctx.value(x)


@form(aten.empty.memory_format, aten.empty_strided.default, aten.empty_permuted.default)
def empty(ctx: PortableGraph, node: fx.Node, size: Sequence[Any], *args: Any, **kwargs: Any) -> Value:
    """empty.memory_format(SymInt[] size, *, dtype?, layout?, device?, pin_memory?, memory_format?) -> Tensor"""
    # whoever reads what is not there gets zeros
    return filled(ctx, ctx.sizes(size), 0, dtype_of(node))


@form(aten.new_empty.default, aten.new_empty_strided.default)
def new_empty(ctx: PortableGraph, node: fx.Node, x: fx.Node, size: Sequence[Any], *args: Any, **kwargs: Any) -> Value:
    """new_empty(Tensor self, SymInt[] size, *, dtype?, layout?, device?, pin_memory?) -> Tensor"""
    return empty(ctx, node, size)
