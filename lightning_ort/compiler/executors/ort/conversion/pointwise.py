"""Elementwise ops: arithmetic, comparison, logic, casts."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch._prims_common import ELEMENTWISE_TYPE_PROMOTION_KIND, elementwise_dtypes

from lightning_ort.compiler.executors.ort.conversion import elementary
from lightning_ort.compiler.executors.ort.conversion.graph import GraphBuilder, Value
from lightning_ort.compiler.executors.ort.conversion.metadata import Arg, Scalar, dtype_of, same_shape
from lightning_ort.compiler.executors.ort.conversion.registry import Unsupported, converts

aten = torch.ops.aten

# onnxruntime has few kernels for these
NARROW = (torch.bool, torch.int8, torch.uint8, torch.int16)


def result_dtype(*args: Arg) -> torch.dtype:
    """The dtype that torch computes in for these arguments (its type promotion rules)."""
    samples = [arg.meta["val"] if isinstance(arg, fx.Node) else arg for arg in args]
    return elementwise_dtypes(*samples, type_promotion_kind=ELEMENTWISE_TYPE_PROMOTION_KIND.DEFAULT)[0]


def binary(ctx: GraphBuilder, onnx_op: str, x: Arg, y: Arg, dtype: torch.dtype | None = None) -> Value:
    """One ONNX op on two arguments, cast to ``dtype``, or promoted as torch does."""
    dtype = dtype or result_dtype(x, y)
    return ctx.op(onnx_op, ctx.value(x, dtype), ctx.value(y, dtype))


# arithmetic


@converts(aten.add.Tensor, aten.add.Scalar)
def add(ctx: GraphBuilder, node: fx.Node, x: Arg, y: Arg, alpha: Scalar = 1) -> Value:
    """add.Tensor(Tensor self, Tensor other, *, Scalar alpha=1) -> Tensor"""
    if dtype_of(node) is torch.bool:
        return ctx.op("Or", ctx.value(x), ctx.value(y))
    return _add_scaled(ctx, node, "Add", x, y, alpha)


@converts(aten.sub.Tensor, aten.sub.Scalar)
def sub(ctx: GraphBuilder, node: fx.Node, x: Arg, y: Arg, alpha: Scalar = 1) -> Value:
    """sub.Tensor(Tensor self, Tensor other, *, Scalar alpha=1) -> Tensor"""
    return _add_scaled(ctx, node, "Sub", x, y, alpha)


@converts(aten.rsub.Scalar, aten.rsub.Tensor)
def rsub(ctx: GraphBuilder, node: fx.Node, x: Arg, y: Arg, alpha: Scalar = 1) -> Value:
    """rsub.Scalar(Tensor self, Scalar other, Scalar alpha=1) -> Tensor"""
    return _add_scaled(ctx, node, "Sub", y, x, alpha)


def _add_scaled(ctx: GraphBuilder, node: fx.Node, onnx_op: str, x: Arg, y: Arg, alpha: Scalar) -> Value:
    dtype = dtype_of(node)
    scaled = ctx.value(y, dtype) if alpha == 1 else ctx.op("Mul", ctx.value(y, dtype), ctx.value(alpha, dtype))
    return ctx.op(onnx_op, ctx.value(x, dtype), scaled)


@converts(aten.mul.Tensor, aten.mul.Scalar)
def mul(ctx: GraphBuilder, node: fx.Node, x: Arg, y: Arg) -> Value:
    """mul.Tensor(Tensor self, Tensor other) -> Tensor"""
    if dtype_of(node) is torch.bool:
        return ctx.op("And", ctx.value(x), ctx.value(y))
    if isinstance(x, fx.Node) and isinstance(y, float) and dtype_of(x) is torch.bool:
        return ctx.scaled_mask(x, y, dtype_of(node))
    return binary(ctx, "Mul", x, y)


@converts(aten.div.Tensor, aten.div.Scalar, aten.true_divide.Tensor)
def div(ctx: GraphBuilder, node: fx.Node, x: Arg, y: Arg) -> Value:
    """div.Tensor(Tensor self, Tensor other) -> Tensor"""
    # true_divide, its old name, and prims.convert_element_type come from torch 2.13's pass that makes tensors of what
    # is computed from sizes, such as the number of elements in the gradient of a mean over batches that vary
    dtype = dtype_of(node)
    return ctx.op("Div", ctx.value(x, dtype), ctx.value(y, dtype))


@converts(aten.div.Tensor_mode, aten.div.Scalar_mode)
def div_mode(ctx: GraphBuilder, node: fx.Node, x: Arg, y: Arg, *, rounding_mode: str | None = None) -> Value:
    """div.Tensor_mode(Tensor self, Tensor other, *, str? rounding_mode) -> Tensor"""
    if rounding_mode is None:
        return div(ctx, node, x, y)
    dtype = dtype_of(node)
    if not dtype.is_floating_point:
        return _divide_integers(ctx, x, y, dtype)[rounding_mode]
    dividend, divisor = ctx.value(x, dtype), ctx.value(y, dtype)
    if rounding_mode == "floor":
        return elementary.floor_divide(dividend, divisor)
    quotient = ctx.op("Div", dividend, divisor)
    return ctx.op("Mul", ctx.op("Sign", quotient), ctx.op("Floor", ctx.op("Abs", quotient)))


def _divide_integers(ctx: GraphBuilder, x: Arg, y: Arg, dtype: torch.dtype) -> dict[str, Value]:
    """The quotients and rests of an integer division, rounded towards zero (``trunc``, ``fmod``) and down."""
    x, y = wrapped(x, dtype), wrapped(y, dtype)
    always_positive = _is_positive(y) if isinstance(y, fx.Node) else y > 0
    if y == 0 or (isinstance(y, fx.Node) and not always_positive):
        # onnxruntime 1.19 ends the process at a 0 (SIGFPE), torch raises
        raise Unsupported("an integer division by what may be 0")
    work = torch.int32 if dtype in NARROW else dtype
    dividend, divisor = ctx.value(x, work), ctx.value(y, work)
    # the smallest integer divided by -1 ends the process too
    trunc = ctx.op("Neg", dividend) if y == -1 else ctx.op("Div", dividend, divisor)
    rest = ctx.op("Sub", dividend, ctx.op("Mul", trunc, divisor))  # not Mod: with fmod=1 it computes in float64
    opposed = ctx.cast(ctx.op("Less" if always_positive else "Greater", rest, ctx.const(0, work)), work)
    results = {
        "trunc": trunc,
        "fmod": rest,
        "floor": ctx.op("Sub", trunc, opposed),
        "remainder": ctx.op("Add", rest, ctx.op("Mul", opposed, divisor)),
    }
    return results if work == dtype else {name: ctx.cast(value, dtype) for name, value in results.items()}


def wrapped(arg: Arg, dtype: torch.dtype) -> Arg:
    """A Python integer as torch converts it to a dtype that has no room for it: -1 is 255 as a byte."""
    if isinstance(arg, (bool, float, fx.Node)) or dtype is torch.bool:
        return arg
    info = torch.iinfo(dtype)
    return (arg - info.min) % (info.max - info.min + 1) + info.min


def _is_positive(node: fx.Node) -> bool:
    """Whether a symbolic integer, such as a size, is always above 0."""
    val = node.meta["val"]
    return isinstance(val, torch.SymInt) and bool(val.node.shape_env.bound_sympy(val.node.expr).lower > 0)


@converts(aten.fmod.Scalar, aten.fmod.Tensor)
def fmod(ctx: GraphBuilder, node: fx.Node, x: fx.Node, y: Arg) -> Value:
    """fmod.Tensor(Tensor self, Tensor other) -> Tensor"""
    dtype = dtype_of(node)
    if not dtype.is_floating_point:
        return _divide_integers(ctx, x, y, dtype)["fmod"]
    return ctx.op("Mod", ctx.value(x, dtype), ctx.value(y, dtype), fmod=1)


@converts(aten.remainder.Scalar, aten.remainder.Tensor)
def remainder(ctx: GraphBuilder, node: fx.Node, x: fx.Node, y: Arg) -> Value:
    """remainder.Tensor(Tensor self, Tensor other) -> Tensor"""
    dtype = dtype_of(node)
    if not dtype.is_floating_point:
        return _divide_integers(ctx, x, y, dtype)["remainder"]
    a, b = ctx.value(x, dtype), ctx.value(y, dtype)
    rest = ctx.op("Mod", a, b, fmod=1)  # the sign of the dividend
    opposed = ctx.op("Less", ctx.op("Mul", ctx.op("Sign", rest), ctx.op("Sign", b)), ctx.const(0, dtype))
    return ctx.op("Where", opposed, ctx.op("Add", rest, b), rest)


@converts(aten.pow.Tensor_Scalar)
def pow_scalar(ctx: GraphBuilder, node: fx.Node, x: fx.Node, exponent: Scalar) -> Value:
    """pow.Tensor_Scalar(Tensor self, Scalar exponent) -> Tensor"""
    dtype = dtype_of(node)
    value = ctx.value(x, dtype)
    if exponent == 2:
        return ctx.op("Mul", value, value)
    if exponent == 3:
        return ctx.op("Mul", ctx.op("Mul", value, value), value)
    if exponent == 0.5 and dtype.is_floating_point:
        return elementary.sqrt(value)
    if exponent == -0.5 and dtype.is_floating_point:
        return elementary.rsqrt(value)
    _refuse_integer_power(dtype)
    return ctx.op("Pow", value, ctx.value(exponent, dtype))


def _refuse_integer_power(dtype: torch.dtype) -> None:
    """onnxruntime 1.19 computes it in float64, which has no room for every int64."""
    if not dtype.is_floating_point:
        raise Unsupported(f"a power of {dtype}")


@converts(aten.pow.Tensor_Tensor)
def pow_tensor(ctx: GraphBuilder, node: fx.Node, x: fx.Node, exponent: fx.Node) -> Value:
    """pow.Tensor_Tensor(Tensor self, Tensor exponent) -> Tensor"""
    _refuse_integer_power(dtype_of(node))
    return binary(ctx, "Pow", x, exponent)


@converts(aten.pow.Scalar)
def pow_base(ctx: GraphBuilder, node: fx.Node, base: Scalar, exponent: fx.Node) -> Value:
    """pow.Scalar(Scalar self, Tensor exponent) -> Tensor"""
    _refuse_integer_power(dtype_of(node))
    return binary(ctx, "Pow", base, exponent)


@converts(aten.maximum.default)
def maximum(ctx: GraphBuilder, node: fx.Node, x: fx.Node, y: fx.Node) -> Value:
    """maximum(Tensor self, Tensor other) -> Tensor"""
    return binary(ctx, "Max", x, y)


@converts(aten.minimum.default)
def minimum(ctx: GraphBuilder, node: fx.Node, x: fx.Node, y: fx.Node) -> Value:
    """minimum(Tensor self, Tensor other) -> Tensor"""
    return binary(ctx, "Min", x, y)


@converts(aten.clamp.default)
def clamp(ctx: GraphBuilder, node: fx.Node, x: fx.Node, min: Scalar | None = None, max: Scalar | None = None) -> Value:
    """clamp(Tensor self, Scalar? min=None, Scalar? max=None) -> Tensor"""
    dtype = dtype_of(node)
    value = ctx.value(x, dtype)
    # not Clip: with min > max torch gives max, ONNX Clip of opset 18 leaves it open
    if min is not None:
        value = ctx.op("Max", value, ctx.value(min, dtype))
    if max is not None:
        value = ctx.op("Min", value, ctx.value(max, dtype))
    return value


@converts(aten.clamp_min.default)
def clamp_min(ctx: GraphBuilder, node: fx.Node, x: fx.Node, min: Scalar) -> Value:
    """clamp_min(Tensor self, Scalar min) -> Tensor"""
    return clamp(ctx, node, x, min)


@converts(aten.clamp_max.default)
def clamp_max(ctx: GraphBuilder, node: fx.Node, x: fx.Node, max: Scalar) -> Value:
    """clamp_max(Tensor self, Scalar max) -> Tensor"""
    return clamp(ctx, node, x, None, max)


@converts(aten.clamp.Tensor)
def clamp_tensor(
    ctx: GraphBuilder, node: fx.Node, x: fx.Node, min: fx.Node | None = None, max: fx.Node | None = None
) -> Value:
    """clamp.Tensor(Tensor self, Tensor? min=None, Tensor? max=None) -> Tensor"""
    dtype = dtype_of(node)
    value = ctx.value(x, dtype)
    if min is not None:
        value = ctx.op("Max", value, ctx.value(min, dtype))
    return value if max is None else ctx.op("Min", value, ctx.value(max, dtype))


@converts(aten.clamp_min.Tensor)
def clamp_min_tensor(ctx: GraphBuilder, node: fx.Node, x: fx.Node, min: fx.Node) -> Value:
    """clamp_min.Tensor(Tensor self, Tensor min) -> Tensor"""
    return clamp_tensor(ctx, node, x, min)


@converts(aten.clamp_max.Tensor)
def clamp_max_tensor(ctx: GraphBuilder, node: fx.Node, x: fx.Node, max: fx.Node) -> Value:
    """clamp_max.Tensor(Tensor self, Tensor max) -> Tensor"""
    return clamp_tensor(ctx, node, x, None, max)


# unary functions that ONNX has under the same meaning


def _unary(onnx_op: str) -> Callable[..., Value]:
    def convert(ctx: GraphBuilder, node: fx.Node, x: fx.Node) -> Value:
        if onnx_op in ("Ceil", "Floor", "Round") and not dtype_of(node).is_floating_point:
            return ctx.value(x)
        return ctx.op(onnx_op, ctx.value(x, dtype_of(node)))

    convert.__doc__ = f"{onnx_op.lower()}(Tensor self) -> Tensor"
    convert.__qualname__ = f"unary_{onnx_op.lower()}"
    return convert


for _overload, _onnx_op in {
    aten.abs.default: "Abs",
    aten.acos.default: "Acos",
    aten.acosh.default: "Acosh",
    aten.asin.default: "Asin",
    aten.asinh.default: "Asinh",
    aten.atan.default: "Atan",
    aten.atanh.default: "Atanh",
    aten.ceil.default: "Ceil",
    aten.cos.default: "Cos",
    aten.cosh.default: "Cosh",
    aten.floor.default: "Floor",
    aten.neg.default: "Neg",
    aten.reciprocal.default: "Reciprocal",
    aten.round.default: "Round",
    aten.sin.default: "Sin",
    aten.sinh.default: "Sinh",
    aten.tan.default: "Tan",
    aten.tanh.default: "Tanh",
    aten.relu.default: "Relu",
}.items():
    converts(_overload)(_unary(_onnx_op))


@converts(aten.sign.default)
def sign(ctx: GraphBuilder, node: fx.Node, x: fx.Node) -> Value:
    """sign(Tensor self) -> Tensor"""
    value, dtype = ctx.value(x), dtype_of(x)
    if not dtype.is_floating_point:
        return ctx.op("Sign", value)
    # to torch a NaN has the sign 0
    return ctx.op("Where", ctx.op("IsNaN", value), ctx.const(0, dtype), ctx.op("Sign", value))


# those that take care at the edges


def _elementary(function: Callable[[Value], Value]) -> Callable[..., Value]:
    def convert(ctx: GraphBuilder, node: fx.Node, x: fx.Node) -> Value:
        dtype = dtype_of(node)
        return function(ctx.value(x, dtype))

    convert.__doc__ = f"{function.__name__}(Tensor self) -> Tensor"
    convert.__qualname__ = f"elementary_{function.__name__}"
    return convert


converts(aten.exp.default)(_elementary(elementary.exp))
converts(aten.expm1.default)(_elementary(elementary.expm1))
converts(aten.log.default)(_elementary(elementary.log))
converts(aten.log1p.default)(_elementary(elementary.log1p))
converts(aten.sqrt.default)(_elementary(elementary.sqrt))
converts(aten.rsqrt.default)(_elementary(elementary.rsqrt))


@converts(aten.erf.default)
def erf(ctx: GraphBuilder, node: fx.Node, x: fx.Node) -> Value:
    """erf(Tensor self) -> Tensor"""
    return elementary.erf(ctx.value(x, dtype_of(node)))


@converts(aten.exp2.default)
def exp2(ctx: GraphBuilder, node: fx.Node, x: fx.Node) -> Value:
    """exp2(Tensor self) -> Tensor"""
    dtype = dtype_of(node)
    return ctx.op("Pow", ctx.const(2, dtype), ctx.value(x, dtype))


@converts(aten.trunc.default)
def trunc(ctx: GraphBuilder, node: fx.Node, x: fx.Node) -> Value:
    """trunc(Tensor self) -> Tensor"""
    value = ctx.value(x)
    if not dtype_of(node).is_floating_point:
        return value
    return ctx.op("Mul", ctx.op("Sign", value), ctx.op("Floor", ctx.op("Abs", value)))


@converts(aten.log2.default)
def log2(ctx: GraphBuilder, node: fx.Node, x: fx.Node) -> Value:
    """log2(Tensor self) -> Tensor"""
    return _log(ctx, node, x, 2)


@converts(aten.log10.default)
def log10(ctx: GraphBuilder, node: fx.Node, x: fx.Node) -> Value:
    """log10(Tensor self) -> Tensor"""
    return _log(ctx, node, x, 10)


def _log(ctx: GraphBuilder, node: fx.Node, x: fx.Node, base: int) -> Value:
    dtype = dtype_of(node)
    return ctx.op("Mul", elementary.log(ctx.value(x, dtype)), ctx.const(1 / math.log(base), dtype))


@converts(aten.atan2.default)
def atan2(ctx: GraphBuilder, node: fx.Node, y: fx.Node, x: fx.Node) -> Value:
    """atan2(Tensor self, Tensor other) -> Tensor"""
    # ONNX has none. atan of the smaller magnitude over the larger, then the octant
    dtype = dtype_of(node)
    a, b = ctx.value(y, dtype), ctx.value(x, dtype)
    pi, zero = ctx.const(math.pi, dtype), ctx.const(0, dtype)
    size_a, size_b = ctx.op("Abs", a), ctx.op("Abs", b)
    large, small = ctx.op("Max", size_a, size_b), ctx.op("Min", size_a, size_b)
    # equal ones have the ratio 1, be they 0 (the angle is 0 then, see below) or infinite
    ratio = ctx.op("Where", ctx.op("Equal", large, small), ctx.const(1, dtype), ctx.op("Div", small, large))
    angle = ctx.op("Atan", ratio)
    angle = ctx.op("Where", ctx.op("Equal", size_a, zero), zero, angle)
    steep = ctx.op("Greater", size_a, size_b)
    angle = ctx.op("Where", steep, ctx.op("Sub", ctx.const(math.pi / 2, dtype), angle), angle)
    # the sign of a zero counts: 1 / -0 is -inf
    angle = ctx.op("Where", _is_negative(ctx, b, dtype), ctx.op("Sub", pi, angle), angle)
    angle = ctx.op("Where", _is_negative(ctx, a, dtype), ctx.op("Neg", angle), angle)
    total = ctx.op("Add", a, b)
    unordered = ctx.op("Or", ctx.op("IsNaN", a), ctx.op("IsNaN", b))
    return ctx.op("Where", unordered, total, angle)


def _is_negative(ctx: GraphBuilder, value: Value, dtype: torch.dtype) -> Value:
    """Whether the sign bit is set."""
    zero = ctx.const(0, dtype)
    reciprocal = ctx.op("Less", ctx.op("Reciprocal", value), zero)
    return ctx.op("Or", ctx.op("Less", value, zero), ctx.op("And", ctx.op("Equal", value, zero), reciprocal))


# copies and casts


@converts(aten.clone.default, aten.alias.default, aten.detach.default, aten.lift_fresh_copy.default)
def clone(ctx: GraphBuilder, node: fx.Node, x: fx.Node, memory_format: Any = None) -> Value:
    """clone(Tensor self, *, MemoryFormat? memory_format=None) -> Tensor"""
    # values are immutable inside a region: no copy is needed
    return ctx.value(x)


@converts(aten.copy.default)
def copy(ctx: GraphBuilder, node: fx.Node, x: fx.Node, src: fx.Node, non_blocking: bool = False) -> Value:
    """copy(Tensor self, Tensor src, bool non_blocking=False) -> Tensor"""
    if src.meta["val"].device != x.meta["val"].device:
        raise Unsupported("a copy between devices")
    value = ctx.value(src, dtype_of(x))
    return value if same_shape(x, src) else ctx.op("Expand", value, ctx.shape_tensor(x))


@converts(torch.ops.prims.convert_element_type.default)
def convert_element_type(ctx: GraphBuilder, node: fx.Node, x: fx.Node, dtype: torch.dtype) -> Value:
    """convert_element_type(Tensor a, ScalarType dtype) -> Tensor"""
    return to_copy(ctx, node, x)


@converts(aten._to_copy.default)
def to_copy(ctx: GraphBuilder, node: fx.Node, x: fx.Node, **kwargs: Any) -> Value:
    """_to_copy(Tensor self, *, dtype?, layout?, device?, pin_memory?, bool non_blocking, memory_format?) -> Tensor"""
    if node.meta["val"].device != x.meta["val"].device:
        raise Unsupported("a copy between devices")
    source, target = dtype_of(x), dtype_of(node)
    if source.is_floating_point and not target.is_floating_point and target is not torch.bool and target.itemsize < 4:
        raise Unsupported(f"a cast from {source} to {target}: out-of-range values wrap differently")
    return ctx.value(x, target)
