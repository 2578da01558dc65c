"""Comparison, logic, and choice between tensors."""

from collections.abc import Callable

import torch
from torch import fx

from lightning_ort.compiler.executors.ort.conversion.graph import GraphBuilder, Value
from lightning_ort.compiler.executors.ort.conversion.metadata import Arg, dtype_of
from lightning_ort.compiler.executors.ort.conversion.pointwise import NARROW, binary, result_dtype, wrapped
from lightning_ort.compiler.executors.ort.conversion.registry import converts

aten = torch.ops.aten


def _compare(onnx_op: str, negate: bool = False) -> Callable[..., Value]:
    def convert(ctx: GraphBuilder, node: fx.Node, x: Arg, y: Arg) -> Value:
        dtype = result_dtype(x, y)
        if dtype in NARROW:  # `torch.eye` compares bytes
            result = binary(ctx, onnx_op, wrapped(x, dtype), wrapped(y, dtype), torch.int32)
        else:
            result = binary(ctx, onnx_op, x, y, dtype)
        return ctx.op("Not", result) if negate else result

    convert.__doc__ = f"{'not ' if negate else ''}{onnx_op}(Tensor self, Tensor other) -> Tensor"
    convert.__qualname__ = f"compare_{onnx_op.lower()}"
    return convert


converts(aten.eq.Tensor, aten.eq.Scalar)(_compare("Equal"))
converts(aten.ne.Tensor, aten.ne.Scalar)(_compare("Equal", negate=True))
converts(aten.lt.Tensor, aten.lt.Scalar)(_compare("Less"))
converts(aten.le.Tensor, aten.le.Scalar)(_compare("LessOrEqual"))
converts(aten.gt.Tensor, aten.gt.Scalar)(_compare("Greater"))
converts(aten.ge.Tensor, aten.ge.Scalar)(_compare("GreaterOrEqual"))


def _logical(onnx_op: str, bitwise: bool) -> Callable[..., Value]:
    def convert(ctx: GraphBuilder, node: fx.Node, x: Arg, y: Arg) -> Value:
        if bitwise and dtype_of(node) is not torch.bool:
            return binary(ctx, f"Bitwise{onnx_op}", x, y)
        return ctx.op(onnx_op, ctx.value(x, torch.bool), ctx.value(y, torch.bool))

    convert.__doc__ = f"{onnx_op}(Tensor self, Tensor other) -> Tensor"
    convert.__qualname__ = f"logical_{onnx_op.lower()}"
    return convert


for _name, _onnx_op in (("and", "And"), ("or", "Or"), ("xor", "Xor")):
    converts(getattr(aten, f"logical_{_name}").default)(_logical(_onnx_op, bitwise=False))
    _bitwise = getattr(aten, f"bitwise_{_name}")
    converts(_bitwise.Tensor, _bitwise.Scalar)(_logical(_onnx_op, bitwise=True))


@converts(aten.logical_not.default)
def logical_not(ctx: GraphBuilder, node: fx.Node, x: fx.Node) -> Value:
    """logical_not(Tensor self) -> Tensor"""
    return ctx.op("Not", ctx.value(x, torch.bool))


@converts(aten.bitwise_not.default)
def bitwise_not(ctx: GraphBuilder, node: fx.Node, x: fx.Node) -> Value:
    """bitwise_not(Tensor self) -> Tensor"""
    return ctx.op("Not" if dtype_of(x) is torch.bool else "BitwiseNot", ctx.value(x))


@converts(aten.isnan.default)
def isnan(ctx: GraphBuilder, node: fx.Node, x: fx.Node) -> Value:
    """isnan(Tensor self) -> Tensor"""
    return _of_floats(ctx, "IsNaN", x)


@converts(aten.isinf.default)
def isinf(ctx: GraphBuilder, node: fx.Node, x: fx.Node) -> Value:
    """isinf(Tensor self) -> Tensor"""
    return _of_floats(ctx, "IsInf", x)


def _of_floats(ctx: GraphBuilder, onnx_op: str, x: fx.Node) -> Value:
    return ctx.op(onnx_op, ctx.value(x, None if dtype_of(x).is_floating_point else torch.float32))


@converts(aten.where.self)
def where(ctx: GraphBuilder, node: fx.Node, condition: fx.Node, x: fx.Node, y: fx.Node) -> Value:
    """where.self(Tensor condition, Tensor self, Tensor other) -> Tensor"""
    dtype = dtype_of(node)
    chosen, x_value, y_value = ctx.value(condition, torch.bool), ctx.value(x, dtype), ctx.value(y, dtype)
    if dtype is torch.bool:  # no kernel of Where in onnxruntime 1.19 to 1.31
        kept = ctx.op("And", chosen, x_value)
        return ctx.op("Or", kept, ctx.op("And", ctx.op("Not", chosen), y_value))
    return ctx.op("Where", chosen, x_value, y_value)


@converts(aten.masked_fill.Scalar)
def masked_fill(ctx: GraphBuilder, node: fx.Node, x: fx.Node, mask: fx.Node, value: Arg) -> Value:
    """masked_fill.Scalar(Tensor self, Tensor mask, Scalar value) -> Tensor"""
    filled, dtype = ctx.value(mask, torch.bool), dtype_of(node)
    if dtype is torch.bool:
        chosen = ctx.op("And", filled, ctx.value(value, dtype))
        return ctx.op("Or", chosen, ctx.op("And", ctx.op("Not", filled), ctx.value(x)))
    return ctx.op("Where", filled, ctx.value(value, dtype), ctx.value(x))


@converts(aten.masked_fill.Tensor)
def masked_fill_tensor(ctx: GraphBuilder, node: fx.Node, x: fx.Node, mask: fx.Node, value: fx.Node) -> Value:
    """masked_fill.Tensor(Tensor self, Tensor mask, Tensor value) -> Tensor"""
    return masked_fill(ctx, node, x, mask, value)
