"""Tensors that are made from sizes."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from lightning_ort.compiler.executors.ort.conversion.graph import Value
from lightning_ort.compiler.executors.ort.conversion.metadata import dtype_of
from lightning_ort.compiler.executors.ort.conversion.registry import form
from lightning_ort.compiler.executors.ort.conversion.shape import filled
from lightning_ort.onnx_export.training.graph import PortableGraph

aten = torch.ops.aten


@form(aten.empty.memory_format, aten.empty_strided.default, aten.empty_permuted.default)
def empty(ctx: PortableGraph, node: fx.Node, size: Sequence[Any], *args: Any, **kwargs: Any) -> Value:
    """empty.memory_format(SymInt[] size, *, dtype?, layout?, device?, pin_memory?, memory_format?) -> Tensor"""
    # whoever reads what is not there gets zeros
    return filled(ctx, ctx.sizes(size), 0, dtype_of(node))


@form(aten.new_empty.default, aten.new_empty_strided.default)
def new_empty(ctx: PortableGraph, node: fx.Node, x: fx.Node, size: Sequence[Any], *args: Any, **kwargs: Any) -> Value:
    """new_empty(Tensor self, SymInt[] size, *, dtype?, layout?, device?, pin_memory?) -> Tensor"""
    return empty(ctx, node, size)
