"""What is written otherwise elsewhere: with contributed operators, which onnxruntime makes of these, or by torch."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from lightning_ort.compiler.executors.ort.conversion.activations import expanded_gelu
from lightning_ort.compiler.executors.ort.conversion.graph import Value
from lightning_ort.compiler.executors.ort.conversion.linalg import plus_bias
from lightning_ort.compiler.executors.ort.conversion.metadata import dtype_of
from lightning_ort.compiler.executors.ort.conversion.registry import form
from lightning_ort.compiler.executors.ort.conversion.shape import filled
from lightning_ort.onnx_export.training.graph import PortableGraph

aten = torch.ops.aten


@form(aten.bmm.default)
def bmm(ctx: PortableGraph, node: fx.Node, x: fx.Node, y: fx.Node) -> Value:
    """bmm(Tensor self, Tensor mat2) -> Tensor"""
    return ctx.value(x).op("MatMul", ctx.value(y))


@form(aten.baddbmm.default)
def baddbmm(
    ctx: PortableGraph, node: fx.Node, bias: fx.Node, x: fx.Node, y: fx.Node, *, beta: Any = 1, alpha: Any = 1
) -> Value:
    """baddbmm(Tensor self, Tensor batch1, Tensor batch2, *, Scalar beta=1, Scalar alpha=1) -> Tensor"""
    return plus_bias(bmm(ctx, node, x, y), ctx.value(bias), beta, alpha)


@form(aten.gelu.default)
def gelu(ctx: PortableGraph, node: fx.Node, x: fx.Node, *, approximate: str = "none") -> Value:
    """gelu(Tensor self, *, str approximate='none') -> Tensor"""
    return expanded_gelu(ctx.value(x), approximate)


@form(aten.empty.memory_format, aten.empty_strided.default, aten.empty_permuted.default)
def empty(ctx: PortableGraph, node: fx.Node, size: Sequence[Any], *args: Any, **kwargs: Any) -> Value:
    """empty.memory_format(SymInt[] size, *, dtype?, layout?, device?, pin_memory?, memory_format?) -> Tensor"""
    # whoever reads what is not there gets zeros
    return filled(ctx, ctx.sizes(size), 0, dtype_of(node))


@form(aten.new_empty.default, aten.new_empty_strided.default)
def new_empty(ctx: PortableGraph, node: fx.Node, x: fx.Node, size: Sequence[Any], *args: Any, **kwargs: Any) -> Value:
    """new_empty(Tensor self, SymInt[] size, *, dtype?, layout?, device?, pin_memory?) -> Tensor"""
    return empty(ctx, node, size)
