"""Elementwise ops: arithmetic, comparison, logic, activations, casts."""

import math
from collections.abc import Callable
from typing import Any

import onnx_ir as ir
import torch
from torch import fx
from torch._prims_common import ELEMENTWISE_TYPE_PROMOTION_KIND, elementwise_dtypes

from lightning_ort.compiler.conversion.graph import Arg, GraphBuilder, Scalar, dtype_of, same_shape
from lightning_ort.compiler.conversion.registry import Unsupported, converts

aten = torch.ops.aten


def result_dtype(*args: Arg) -> torch.dtype:
    """The dtype that torch computes in for these arguments (its type promotion rules)."""
    samples = [arg.meta["val"] if isinstance(arg, fx.Node) else arg for arg in args]
    return elementwise_dtypes(*samples, type_promotion_kind=ELEMENTWISE_TYPE_PROMOTION_KIND.DEFAULT)[0]


def binary(ctx: GraphBuilder, onnx_op: str, x: Arg, y: Arg) -> ir.Value:
    """One ONNX op on two arguments, promoted as torch does."""
    dtype = result_dtype(x, y)
    return ctx.op(onnx_op, ctx.value(x, dtype), ctx.value(y, dtype))


# arithmetic


@converts(aten.add.Tensor, aten.add.Scalar)
def add(ctx: GraphBuilder, node: fx.Node, x: Arg, y: Arg, alpha: Scalar = 1) -> ir.Value:
    """add.Tensor(Tensor self, Tensor other, *, Scalar alpha=1) -> Tensor"""
    if dtype_of(node) is torch.bool:
        return ctx.op("Or", ctx.value(x), ctx.value(y))
    return _add_scaled(ctx, node, "Add", x, y, alpha)


@converts(aten.sub.Tensor, aten.sub.Scalar)
def sub(ctx: GraphBuilder, node: fx.Node, x: Arg, y: Arg, alpha: Scalar = 1) -> ir.Value:
    """sub.Tensor(Tensor self, Tensor other, *, Scalar alpha=1) -> Tensor"""
    return _add_scaled(ctx, node, "Sub", x, y, alpha)


@converts(aten.rsub.Scalar, aten.rsub.Tensor)
def rsub(ctx: GraphBuilder, node: fx.Node, x: Arg, y: Arg, alpha: Scalar = 1) -> ir.Value:
    """rsub.Scalar(Tensor self, Scalar other, Scalar alpha=1) -> Tensor"""
    return _add_scaled(ctx, node, "Sub", y, x, alpha)


def _add_scaled(ctx: GraphBuilder, node: fx.Node, onnx_op: str, x: Arg, y: Arg, alpha: Scalar) -> ir.Value:
    dtype = dtype_of(node)
    scaled = ctx.value(y, dtype) if alpha == 1 else ctx.op("Mul", ctx.value(y, dtype), ctx.value(alpha, dtype))
    return ctx.op(onnx_op, ctx.value(x, dtype), scaled)


@converts(aten.mul.Tensor, aten.mul.Scalar)
def mul(ctx: GraphBuilder, node: fx.Node, x: Arg, y: Arg) -> ir.Value:
    """mul.Tensor(Tensor self, Tensor other) -> Tensor"""
    if dtype_of(node) is torch.bool:
        return ctx.op("And", ctx.value(x), ctx.value(y))
    return binary(ctx, "Mul", x, y)


@converts(aten.div.Tensor, aten.div.Scalar)
def div(ctx: GraphBuilder, node: fx.Node, x: Arg, y: Arg) -> ir.Value:
    """div.Tensor(Tensor self, Tensor other) -> Tensor"""
    dtype = dtype_of(node)
    return ctx.op("Div", ctx.value(x, dtype), ctx.value(y, dtype))


@converts(aten.div.Tensor_mode, aten.div.Scalar_mode)
def div_mode(ctx: GraphBuilder, node: fx.Node, x: Arg, y: Arg, *, rounding_mode: str | None = None) -> ir.Value:
    """div.Tensor_mode(Tensor self, Tensor other, *, str? rounding_mode) -> Tensor"""
    if rounding_mode is None:
        return div(ctx, node, x, y)
    dtype = dtype_of(node)
    if not dtype.is_floating_point:
        raise Unsupported(f"integer division rounded by {rounding_mode!r}")
    quotient = ctx.op("Div", ctx.value(x, dtype), ctx.value(y, dtype))
    if rounding_mode == "floor":
        return ctx.op("Floor", quotient)
    return ctx.op("Mul", ctx.op("Sign", quotient), ctx.op("Floor", ctx.op("Abs", quotient)))


@converts(aten.fmod.Scalar, aten.fmod.Tensor)
def fmod(ctx: GraphBuilder, node: fx.Node, x: fx.Node, y: Arg) -> ir.Value:
    """fmod.Tensor(Tensor self, Tensor other) -> Tensor"""
    dtype = dtype_of(node)
    return ctx.op("Mod", ctx.value(x, dtype), ctx.value(y, dtype), fmod=1)


@converts(aten.remainder.Scalar, aten.remainder.Tensor)
def remainder(ctx: GraphBuilder, node: fx.Node, x: fx.Node, y: Arg) -> ir.Value:
    """remainder.Tensor(Tensor self, Tensor other) -> Tensor"""
    dtype = dtype_of(node)
    a, b = ctx.value(x, dtype), ctx.value(y, dtype)
    if not dtype.is_floating_point:
        return ctx.op("Mod", a, b)  # the sign of the divisor, as in Python
    rest = ctx.op("Mod", a, b, fmod=1)  # the sign of the dividend
    zero = ctx.const(0, dtype)
    differs = ctx.op("Less", ctx.op("Mul", rest, ctx.op("Sign", b)), zero)
    return ctx.op("Where", differs, ctx.op("Add", rest, b), rest)


@converts(aten.pow.Tensor_Scalar)
def pow_scalar(ctx: GraphBuilder, node: fx.Node, x: fx.Node, exponent: Scalar) -> ir.Value:
    """pow.Tensor_Scalar(Tensor self, Scalar exponent) -> Tensor"""
    dtype = dtype_of(node)
    value = ctx.value(x, dtype)
    if exponent == 2:
        return ctx.op("Mul", value, value)
    if exponent == 3:
        return ctx.op("Mul", ctx.op("Mul", value, value), value)
    if exponent == 0.5 and dtype.is_floating_point:
        return ctx.op("Sqrt", value)
    if exponent == -0.5 and dtype.is_floating_point:
        return ctx.op("Reciprocal", ctx.op("Sqrt", value))
    return ctx.op("Pow", value, ctx.const(exponent, dtype))


@converts(aten.pow.Tensor_Tensor)
def pow_tensor(ctx: GraphBuilder, node: fx.Node, x: fx.Node, exponent: fx.Node) -> ir.Value:
    """pow.Tensor_Tensor(Tensor self, Tensor exponent) -> Tensor"""
    return binary(ctx, "Pow", x, exponent)


@converts(aten.pow.Scalar)
def pow_base(ctx: GraphBuilder, node: fx.Node, base: Scalar, exponent: fx.Node) -> ir.Value:
    """pow.Scalar(Scalar self, Tensor exponent) -> Tensor"""
    return binary(ctx, "Pow", base, exponent)


@converts(aten.maximum.default)
def maximum(ctx: GraphBuilder, node: fx.Node, x: fx.Node, y: fx.Node) -> ir.Value:
    """maximum(Tensor self, Tensor other) -> Tensor"""
    return binary(ctx, "Max", x, y)


@converts(aten.minimum.default)
def minimum(ctx: GraphBuilder, node: fx.Node, x: fx.Node, y: fx.Node) -> ir.Value:
    """minimum(Tensor self, Tensor other) -> Tensor"""
    return binary(ctx, "Min", x, y)


@converts(aten.clamp.default)
def clamp(
    ctx: GraphBuilder, node: fx.Node, x: fx.Node, min: Scalar | None = None, max: Scalar | None = None
) -> ir.Value:
    """clamp(Tensor self, Scalar? min=None, Scalar? max=None) -> Tensor"""
    dtype = dtype_of(node)
    value = ctx.value(x, dtype)
    # not Clip: with min > max torch gives max, ONNX Clip of opset 18 leaves it open
    if min is not None:
        value = ctx.op("Max", value, ctx.const(min, dtype))
    if max is not None:
        value = ctx.op("Min", value, ctx.const(max, dtype))
    return value


@converts(aten.clamp_min.default)
def clamp_min(ctx: GraphBuilder, node: fx.Node, x: fx.Node, min: Scalar) -> ir.Value:
    """clamp_min(Tensor self, Scalar min) -> Tensor"""
    return clamp(ctx, node, x, min)


@converts(aten.clamp_max.default)
def clamp_max(ctx: GraphBuilder, node: fx.Node, x: fx.Node, max: Scalar) -> ir.Value:
    """clamp_max(Tensor self, Scalar max) -> Tensor"""
    return clamp(ctx, node, x, None, max)


@converts(aten.clamp.Tensor)
def clamp_tensor(
    ctx: GraphBuilder, node: fx.Node, x: fx.Node, min: fx.Node | None = None, max: fx.Node | None = None
) -> ir.Value:
    """clamp.Tensor(Tensor self, Tensor? min=None, Tensor? max=None) -> Tensor"""
    dtype = dtype_of(node)
    value = ctx.value(x, dtype)
    if min is not None:
        value = ctx.op("Max", value, ctx.value(min, dtype))
    return value if max is None else ctx.op("Min", value, ctx.value(max, dtype))


@converts(aten.clamp_min.Tensor)
def clamp_min_tensor(ctx: GraphBuilder, node: fx.Node, x: fx.Node, min: fx.Node) -> ir.Value:
    """clamp_min.Tensor(Tensor self, Tensor min) -> Tensor"""
    return clamp_tensor(ctx, node, x, min)


@converts(aten.clamp_max.Tensor)
def clamp_max_tensor(ctx: GraphBuilder, node: fx.Node, x: fx.Node, max: fx.Node) -> ir.Value:
    """clamp_max.Tensor(Tensor self, Tensor max) -> Tensor"""
    return clamp_tensor(ctx, node, x, None, max)


# unary functions that ONNX has under the same meaning


def _unary(onnx_op: str) -> Callable[..., ir.Value]:
    def convert(ctx: GraphBuilder, node: fx.Node, x: fx.Node) -> ir.Value:
        return ctx.op(onnx_op, ctx.value(x, dtype_of(node)))

    convert.__doc__ = f"{onnx_op.lower()}(Tensor self) -> Tensor"
    convert.__qualname__ = f"unary_{onnx_op.lower()}"
    return convert


for _overload, _onnx_op in {
    aten.abs.default: "Abs",
    aten.acos.default: "Acos",
    aten.asin.default: "Asin",
    aten.atan.default: "Atan",
    aten.ceil.default: "Ceil",
    aten.cos.default: "Cos",
    aten.cosh.default: "Cosh",
    aten.exp.default: "Exp",
    aten.floor.default: "Floor",
    aten.log.default: "Log",
    aten.neg.default: "Neg",
    aten.reciprocal.default: "Reciprocal",
    aten.round.default: "Round",
    aten.sigmoid.default: "Sigmoid",
    aten.sign.default: "Sign",
    aten.sin.default: "Sin",
    aten.sinh.default: "Sinh",
    aten.sqrt.default: "Sqrt",
    aten.tan.default: "Tan",
    aten.tanh.default: "Tanh",
    aten.relu.default: "Relu",
}.items():
    converts(_overload)(_unary(_onnx_op))


@converts(aten.rsqrt.default)
def rsqrt(ctx: GraphBuilder, node: fx.Node, x: fx.Node) -> ir.Value:
    """rsqrt(Tensor self) -> Tensor"""
    return ctx.op("Reciprocal", ctx.op("Sqrt", ctx.value(x, dtype_of(node))))


@converts(aten.erf.default)
def erf(ctx: GraphBuilder, node: fx.Node, x: fx.Node) -> ir.Value:
    """erf(Tensor self) -> Tensor"""
    # onnxruntime 1.19's kernel makes 1 of a NaN
    value = ctx.value(x, dtype_of(node))
    return ctx.op("Where", ctx.op("IsNaN", value), value, ctx.op("Erf", value))


@converts(aten.expm1.default)
def expm1(ctx: GraphBuilder, node: fx.Node, x: fx.Node) -> ir.Value:
    """expm1(Tensor self) -> Tensor"""
    # tanh(x / 2) (exp(x) + 1) keeps the digits of a small x, which exp(x) - 1 loses
    dtype = dtype_of(node)
    value = ctx.value(x, dtype)
    half = ctx.op("Tanh", ctx.op("Mul", value, ctx.const(0.5, dtype)))
    return ctx.op("Mul", half, ctx.op("Add", ctx.op("Exp", value), ctx.const(1, dtype)))


@converts(aten.trunc.default)
def trunc(ctx: GraphBuilder, node: fx.Node, x: fx.Node) -> ir.Value:
    """trunc(Tensor self) -> Tensor"""
    value = ctx.value(x)
    if not dtype_of(node).is_floating_point:
        return value
    return ctx.op("Mul", ctx.op("Sign", value), ctx.op("Floor", ctx.op("Abs", value)))


@converts(aten.log2.default)
def log2(ctx: GraphBuilder, node: fx.Node, x: fx.Node) -> ir.Value:
    """log2(Tensor self) -> Tensor"""
    dtype = dtype_of(node)
    return ctx.op("Mul", ctx.op("Log", ctx.value(x, dtype)), ctx.const(1 / math.log(2), dtype))


@converts(aten.log1p.default)
def log1p(ctx: GraphBuilder, node: fx.Node, x: fx.Node) -> ir.Value:
    """log1p(Tensor self) -> Tensor"""
    # log(1 + x) loses all digits of a small x; x * log(u) / (u - 1) with u = 1 + x does not (Goldberg 1991, theorem 4)
    dtype = dtype_of(node)
    value, one = ctx.value(x, dtype), ctx.const(1, dtype)
    lifted = ctx.op("Add", value, one)
    offset = ctx.op("Sub", lifted, one)
    exact = ctx.op("Div", ctx.op("Mul", value, ctx.op("Log", lifted)), offset)
    # offset is 0 for a tiny x (answer x), infinite for an infinite one (answer the log itself)
    is_tiny = ctx.op("Equal", offset, ctx.const(0, dtype))
    is_huge = ctx.op("IsInf", offset)
    return ctx.op("Where", is_tiny, value, ctx.op("Where", is_huge, ctx.op("Log", lifted), exact))


# comparison and logic


def _compare(onnx_op: str, negate: bool = False) -> Callable[..., ir.Value]:
    def convert(ctx: GraphBuilder, node: fx.Node, x: Arg, y: Arg) -> ir.Value:
        result = binary(ctx, onnx_op, x, y)
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


def _logical(onnx_op: str, bool_only: bool) -> Callable[..., ir.Value]:
    def convert(ctx: GraphBuilder, node: fx.Node, x: Arg, y: Arg) -> ir.Value:
        if bool_only and dtype_of(node) is not torch.bool:
            raise Unsupported("bitwise op on integers")
        return ctx.op(onnx_op, ctx.value(x, torch.bool), ctx.value(y, torch.bool))

    convert.__doc__ = f"{onnx_op}(Tensor self, Tensor other) -> Tensor"
    convert.__qualname__ = f"logical_{onnx_op.lower()}"
    return convert


for _name, _onnx_op in (("and", "And"), ("or", "Or"), ("xor", "Xor")):
    converts(getattr(aten, f"logical_{_name}").default)(_logical(_onnx_op, bool_only=False))
    _bitwise = getattr(aten, f"bitwise_{_name}")
    converts(_bitwise.Tensor, _bitwise.Scalar)(_logical(_onnx_op, bool_only=True))


@converts(aten.logical_not.default)
def logical_not(ctx: GraphBuilder, node: fx.Node, x: fx.Node) -> ir.Value:
    """logical_not(Tensor self) -> Tensor"""
    return ctx.op("Not", ctx.value(x, torch.bool))


@converts(aten.bitwise_not.default)
def bitwise_not(ctx: GraphBuilder, node: fx.Node, x: fx.Node) -> ir.Value:
    """bitwise_not(Tensor self) -> Tensor"""
    if dtype_of(x) is not torch.bool:
        raise Unsupported("bitwise op on integers")
    return ctx.op("Not", ctx.value(x))


@converts(aten.isnan.default)
def isnan(ctx: GraphBuilder, node: fx.Node, x: fx.Node) -> ir.Value:
    """isnan(Tensor self) -> Tensor"""
    return ctx.op("IsNaN", ctx.value(x))


@converts(aten.isinf.default)
def isinf(ctx: GraphBuilder, node: fx.Node, x: fx.Node) -> ir.Value:
    """isinf(Tensor self) -> Tensor"""
    return ctx.op("IsInf", ctx.value(x))


@converts(aten.where.self)
def where(ctx: GraphBuilder, node: fx.Node, condition: fx.Node, x: fx.Node, y: fx.Node) -> ir.Value:
    """where.self(Tensor condition, Tensor self, Tensor other) -> Tensor"""
    dtype = dtype_of(node)
    chosen, x_value, y_value = ctx.value(condition, torch.bool), ctx.value(x, dtype), ctx.value(y, dtype)
    if dtype is torch.bool:  # no kernel of Where in onnxruntime 1.19 to 1.31
        kept = ctx.op("And", chosen, x_value)
        return ctx.op("Or", kept, ctx.op("And", ctx.op("Not", chosen), y_value))
    return ctx.op("Where", chosen, x_value, y_value)


@converts(aten.masked_fill.Scalar)
def masked_fill(ctx: GraphBuilder, node: fx.Node, x: fx.Node, mask: fx.Node, value: Arg) -> ir.Value:
    """masked_fill.Scalar(Tensor self, Tensor mask, Scalar value) -> Tensor"""
    filled, dtype = ctx.value(mask, torch.bool), dtype_of(node)
    if dtype is torch.bool:
        chosen = ctx.op("And", filled, ctx.value(value, dtype))
        return ctx.op("Or", chosen, ctx.op("And", ctx.op("Not", filled), ctx.value(x)))
    return ctx.op("Where", filled, ctx.value(value, dtype), ctx.value(x))


@converts(aten.masked_fill.Tensor)
def masked_fill_tensor(ctx: GraphBuilder, node: fx.Node, x: fx.Node, mask: fx.Node, value: fx.Node) -> ir.Value:
    """masked_fill.Tensor(Tensor self, Tensor mask, Tensor value) -> Tensor"""
    return masked_fill(ctx, node, x, mask, value)


# copies and casts


@converts(aten.clone.default, aten.alias.default, aten.detach.default, aten.lift_fresh_copy.default)
def clone(ctx: GraphBuilder, node: fx.Node, x: fx.Node, memory_format: Any = None) -> ir.Value:
    """clone(Tensor self, *, MemoryFormat? memory_format=None) -> Tensor"""
    # values are immutable inside a region: no copy is needed
    return ctx.value(x)


@converts(aten.copy.default)
def copy(ctx: GraphBuilder, node: fx.Node, x: fx.Node, src: fx.Node, non_blocking: bool = False) -> ir.Value:
    """copy(Tensor self, Tensor src, bool non_blocking=False) -> Tensor"""
    if src.meta["val"].device != x.meta["val"].device:
        raise Unsupported("a copy between devices")
    value = ctx.value(src, dtype_of(x))
    return value if same_shape(x, src) else ctx.op("Expand", value, ctx.shape_tensor(x))


@converts(aten._to_copy.default)
def to_copy(ctx: GraphBuilder, node: fx.Node, x: fx.Node, **kwargs: Any) -> ir.Value:
    """_to_copy(Tensor self, *, dtype?, layout?, device?, pin_memory?, bool non_blocking, memory_format?) -> Tensor"""
    if node.meta["val"].device != x.meta["val"].device:
        raise Unsupported("a copy between devices")
    source, target = dtype_of(x), dtype_of(node)
    if source.is_floating_point and not target.is_floating_point and target is not torch.bool and target.itemsize < 4:
        raise Unsupported(f"a cast from {source} to {target}: out-of-range values wrap differently")
    return ctx.value(x, target)


# activations


@converts(aten.gelu.default)
def gelu(ctx: GraphBuilder, node: fx.Node, x: fx.Node, approximate: str = "none") -> ir.Value:
    """gelu(Tensor self, *, str approximate='none') -> Tensor"""
    if dtype_of(x) is not torch.float32:
        return _gelu_expanded(ctx, x, approximate)
    # FastGelu is the tanh form (contrib ops, CPU and CUDA)
    return ctx.ms("Gelu" if approximate == "none" else "FastGelu", ctx.value(x))


def _gelu_expanded(ctx: GraphBuilder, x: fx.Node, approximate: str) -> ir.Value:
    dtype, value = dtype_of(x), ctx.value(x)
    if approximate == "none":
        inner = ctx.op("Erf", ctx.op("Mul", value, ctx.const(math.sqrt(0.5), dtype)))
    else:
        cube = ctx.op("Mul", ctx.op("Mul", value, value), ctx.op("Mul", value, ctx.const(0.044715, dtype)))
        scaled = ctx.op("Mul", ctx.op("Add", value, cube), ctx.const(math.sqrt(2 / math.pi), dtype))
        inner = ctx.op("Tanh", scaled)
    half = ctx.op("Mul", value, ctx.const(0.5, dtype))
    return ctx.op("Mul", half, ctx.op("Add", inner, ctx.const(1, dtype)))


@converts(aten.silu.default)
def silu(ctx: GraphBuilder, node: fx.Node, x: fx.Node) -> ir.Value:
    """silu(Tensor self) -> Tensor"""
    value = ctx.value(x)
    return ctx.op("Mul", value, ctx.op("Sigmoid", value))


@converts(aten.leaky_relu.default)
def leaky_relu(ctx: GraphBuilder, node: fx.Node, x: fx.Node, negative_slope: Scalar = 0.01) -> ir.Value:
    """leaky_relu(Tensor self, Scalar negative_slope=0.01) -> Tensor"""
    dtype, value = dtype_of(x), ctx.value(x)
    if dtype is torch.float64:  # ONNX attributes are float32
        positive = ctx.op("Greater", value, ctx.const(0, dtype))
        return ctx.op("Where", positive, value, ctx.op("Mul", value, ctx.const(negative_slope, dtype)))
    return ctx.op("LeakyRelu", value, alpha=float(negative_slope))


@converts(aten.elu.default)
def elu(
    ctx: GraphBuilder, node: fx.Node, x: fx.Node, alpha: Scalar = 1, scale: Scalar = 1, input_scale: Scalar = 1
) -> ir.Value:
    """elu(Tensor self, Scalar alpha=1, Scalar scale=1, Scalar input_scale=1) -> Tensor"""
    if input_scale != 1:
        raise Unsupported(f"elu with input_scale={input_scale}")
    dtype, value = dtype_of(x), ctx.value(x)
    if dtype is torch.float64:  # ONNX attributes are float32
        negative = ctx.op("Mul", ctx.op("Elu", value), ctx.const(alpha, dtype))
        value = ctx.op("Where", ctx.op("Greater", value, ctx.const(0, dtype)), value, negative)
    else:
        value = ctx.op("Elu", value, alpha=float(alpha))
    return value if scale == 1 else ctx.op("Mul", value, ctx.const(scale, dtype))


@converts(aten.softplus.default)
def softplus(ctx: GraphBuilder, node: fx.Node, x: fx.Node, beta: Scalar = 1, threshold: Scalar = 20) -> ir.Value:
    """softplus(Tensor self, Scalar beta=1, Scalar threshold=20) -> Tensor"""
    dtype, value = dtype_of(x), ctx.value(x)
    scaled = value if beta == 1 else ctx.op("Mul", value, ctx.const(beta, dtype))
    smooth = ctx.op("Softplus", scaled)
    if beta != 1:
        smooth = ctx.op("Mul", smooth, ctx.const(1 / beta, dtype))
    return ctx.op("Where", ctx.op("Greater", scaled, ctx.const(threshold, dtype)), value, smooth)


@converts(aten.hardtanh.default)
def hardtanh(ctx: GraphBuilder, node: fx.Node, x: fx.Node, min_val: Scalar = -1, max_val: Scalar = 1) -> ir.Value:
    """hardtanh(Tensor self, Scalar min_val=-1, Scalar max_val=1) -> Tensor"""
    return clamp(ctx, node, x, min_val, max_val)


@converts(aten.hardsigmoid.default)
def hardsigmoid(ctx: GraphBuilder, node: fx.Node, x: fx.Node) -> ir.Value:
    """hardsigmoid(Tensor self) -> Tensor"""
    dtype, value = dtype_of(x), ctx.value(x)
    if dtype is torch.float64:  # ONNX attributes are float32
        line = ctx.op("Div", ctx.op("Add", value, ctx.const(3, dtype)), ctx.const(6, dtype))
        return ctx.op("Clip", line, ctx.const(0, dtype), ctx.const(1, dtype))
    return ctx.op("HardSigmoid", value, alpha=1 / 6, beta=0.5)


@converts(aten.hardswish.default)
def hardswish(ctx: GraphBuilder, node: fx.Node, x: fx.Node) -> ir.Value:
    """hardswish(Tensor self) -> Tensor"""
    return ctx.op("Mul", ctx.value(x), hardsigmoid(ctx, node, x))
