"""Comparison, logic, and choice between tensors."""

import operator
from collections.abc import Callable

import torch
from torch import fx

from lightning_ort.compiler.executors.ort.conversion.choice import where as choose
from lightning_ort.compiler.executors.ort.conversion.graph import GraphBuilder, Value
from lightning_ort.compiler.executors.ort.conversion.metadata import Arg, dtype_of
from lightning_ort.compiler.executors.ort.conversion.pointwise import NARROW, result_dtype, wrapped
from lightning_ort.compiler.executors.ort.conversion.registry import converts

aten = torch.ops.aten


def _compare(name: str) -> None:
    compare: Callable[[Value, Value], Value] = getattr(operator, name)

    def convert(ctx: GraphBuilder, node: fx.Node, x: Arg, y: Arg) -> Value:
        dtype = result_dtype(x, y)
        if dtype in NARROW:  # `torch.eye` compares bytes
            x, y, dtype = wrapped(x, dtype), wrapped(y, dtype), torch.int32
        return compare(ctx.value(x, dtype), ctx.value(y, dtype))

    convert.__doc__ = f"{name}.Tensor(Tensor self, Tensor other) -> Tensor"
    convert.__qualname__ = f"compare_{name}"
    packet = getattr(aten, name)
    converts(packet.Tensor, packet.Scalar)(convert)


for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    _compare(_name)


def _logical(name: str, onnx_op: str, bitwise: bool) -> None:
    def convert(ctx: GraphBuilder, node: fx.Node, x: Arg, y: Arg) -> Value:
        if bitwise and dtype_of(node) is not torch.bool:
            dtype = result_dtype(x, y)
            return ctx.value(x, dtype).op(f"Bitwise{onnx_op}", ctx.value(y, dtype))
        return ctx.value(x, torch.bool).op(onnx_op, ctx.value(y, torch.bool))

    convert.__qualname__ = name
    packet = getattr(aten, name)
    if bitwise:
        convert.__doc__ = f"{name}.Tensor(Tensor self, Tensor other) -> Tensor"
        converts(packet.Tensor, packet.Scalar)(convert)
    else:
        convert.__doc__ = f"{name}(Tensor self, Tensor other) -> Tensor"
        converts(packet.default)(convert)


for _onnx_op in ("And", "Or", "Xor"):
    _logical(f"logical_{_onnx_op.lower()}", _onnx_op, bitwise=False)
    _logical(f"bitwise_{_onnx_op.lower()}", _onnx_op, bitwise=True)


@converts(aten.logical_not.default)
def logical_not(ctx: GraphBuilder, node: fx.Node, x: fx.Node) -> Value:
    """logical_not(Tensor self) -> Tensor"""
    return ~ctx.value(x, torch.bool)


@converts(aten.bitwise_not.default)
def bitwise_not(ctx: GraphBuilder, node: fx.Node, x: fx.Node) -> Value:
    """bitwise_not(Tensor self) -> Tensor"""
    value = ctx.value(x)
    return ~value if value.dtype is torch.bool else value.op("BitwiseNot")


@converts(aten.isnan.default)
def isnan(ctx: GraphBuilder, node: fx.Node, x: fx.Node) -> Value:
    """isnan(Tensor self) -> Tensor"""
    return _as_float(ctx, x).is_nan()


@converts(aten.isinf.default)
def isinf(ctx: GraphBuilder, node: fx.Node, x: fx.Node) -> Value:
    """isinf(Tensor self) -> Tensor"""
    return _as_float(ctx, x).op("IsInf")


def _as_float(ctx: GraphBuilder, x: fx.Node) -> Value:
    return ctx.value(x, None if dtype_of(x).is_floating_point else torch.float32)


@converts(aten.where.self)
def where(ctx: GraphBuilder, node: fx.Node, condition: fx.Node, x: fx.Node, y: fx.Node) -> Value:
    """where.self(Tensor condition, Tensor self, Tensor other) -> Tensor"""
    return _where(ctx, node, condition, x, y)


@converts(aten.masked_fill.Scalar, aten.masked_fill.Tensor)
def masked_fill(ctx: GraphBuilder, node: fx.Node, x: fx.Node, mask: fx.Node, value: Arg) -> Value:
    """masked_fill.Scalar(Tensor self, Tensor mask, Scalar value) -> Tensor"""
    return _where(ctx, node, mask, value, x)


def _where(ctx: GraphBuilder, node: fx.Node, condition: fx.Node, x: Arg, y: Arg) -> Value:
    chosen, dtype = ctx.value(condition, torch.bool), dtype_of(node)
    if dtype is torch.bool:  # no kernel of Where in onnxruntime 1.19 to 1.31
        return (chosen & ctx.value(x, dtype)) | (~chosen & ctx.value(y, dtype))
    return choose(chosen, x, y, dtype)
