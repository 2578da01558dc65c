"""Dropout: the only random numbers of a model. Where nothing is dropped, what it draws is always the mean."""

import onnx_ir as ir
import torch
from torch import fx

from lightning_ort.compiler.executors.ort.conversion.choice import scaled_mask
from lightning_ort.compiler.executors.ort.conversion.graph import Value
from lightning_ort.compiler.executors.ort.conversion.metadata import DTYPES, dtype_of
from lightning_ort.onnx_export.training.graph import PortableGraph, form

aten = torch.ops.aten


@form(aten.native_dropout.default)
def native_dropout(ctx: PortableGraph, node: fx.Node, x: fx.Node, p: float, train: bool | None) -> tuple[Value, Value]:
    """native_dropout(Tensor input, float p, bool? train) -> (Tensor, Tensor)"""
    value, dtype = ctx.value(x), dtype_of(x)
    if train is False or p == 0 or not ctx.drops:
        return value, ctx.const(True, torch.bool).expand(ctx.shape_tensor(x))
    if p == 1:
        return value * 0, ctx.const(False, torch.bool).expand(ctx.shape_tensor(x))
    mask = _uniform(value, dtype) >= p
    return value * scaled_mask(mask, 1 / (1 - p), dtype), mask


@form(aten.bernoulli.p)
def bernoulli(ctx: PortableGraph, node: fx.Node, x: fx.Node, p: float = 0.5) -> Value:
    """bernoulli.p(Tensor self, float p, *, Generator? generator=None) -> Tensor"""
    dtype = dtype_of(node)
    if not ctx.drops:
        return ctx.const(p, dtype).expand(ctx.shape_tensor(x))
    return (_uniform(ctx.value(x), dtype) < p).cast(dtype)


@form(aten.bernoulli.default)
def bernoulli_of(ctx: PortableGraph, node: fx.Node, p: fx.Node) -> Value:
    """bernoulli(Tensor self, *, Generator? generator=None) -> Tensor"""
    chance, dtype = ctx.value(p), dtype_of(node)
    return (_uniform(chance, dtype) < chance).cast(dtype) if ctx.drops else chance


@form(aten.bernoulli.Tensor)
def bernoulli_like(ctx: PortableGraph, node: fx.Node, x: fx.Node, p: fx.Node) -> Value:
    """bernoulli.Tensor(Tensor self, Tensor p, *, Generator? generator=None) -> Tensor"""
    dtype = dtype_of(node)
    chance = ctx.value(p, dtype).expand(ctx.shape_tensor(x))
    return (_uniform(chance, dtype) < chance).cast(dtype) if ctx.drops else chance


def _uniform(value: Value, dtype: torch.dtype) -> Value:
    """Numbers from 0 to 1, one for each of a value's."""
    # the attribute is called like the argument of `op` that names the result's dtype
    result = value.op("RandomUniformLike")
    node = result.ir.producer()
    assert node is not None
    node.attributes["dtype"] = ir.AttrInt64("dtype", int(DTYPES[dtype]))
    return result


@form(aten.native_dropout_backward.default)
def native_dropout_backward(ctx: PortableGraph, node: fx.Node, grad: fx.Node, mask: fx.Node, scale: float) -> Value:
    """native_dropout_backward(Tensor grad_output, Tensor mask, float scale) -> Tensor"""
    if not ctx.drops:
        return ctx.value(grad)
    dtype = dtype_of(node)
    return ctx.value(grad, dtype) * scaled_mask(ctx.value(mask), scale, dtype)
