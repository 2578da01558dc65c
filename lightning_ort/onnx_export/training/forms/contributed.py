"""What is written with contributed operators elsewhere; onnxruntime makes such of these by itself where it has them."""

from typing import Any

import torch
from torch import fx

from lightning_ort.compiler.executors.ort.conversion.activations import expanded_gelu
from lightning_ort.compiler.executors.ort.conversion.graph import Value
from lightning_ort.compiler.executors.ort.conversion.linalg import plus_bias
from lightning_ort.compiler.executors.ort.conversion.registry import form
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
