"""Elementwise ops: arithmetic, elementary functions, casts, comparison, logic and choice."""

import functools
import math
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from lightning_ort.compat.torch_graphs import is_positive, promoted_dtype
from lightning_ort.compiler.executors.ort.conversion import elementary
from lightning_ort.compiler.executors.ort.conversion.elementary import scaled_mask, where
from lightning_ort.compiler.executors.ort.conversion.graph import GraphBuilder, Value
from lightning_ort.compiler.executors.ort.conversion.metadata import Arg, Scalar, dtype_of, same_shape
from lightning_ort.compiler.executors.ort.conversion.registry import Unsupported, converts

aten = torch.ops.aten

# onnxruntime has few kernels for these
NARROW = (torch.bool, torch.int8, torch.uint8, torch.int16)


def result_dtype(*args: Arg) -> torch.dtype:
    """The dtype in which torch computes with these arguments (its type promotion rules)."""
    return promoted_dtype(*[arg.meta["val"] if isinstance(arg, fx.Node) else arg for arg in args])


# arithmetic


@converts(aten.add.Tensor, aten.add.Scalar)
def add(ctx: GraphBuilder, node: fx.Node, x: Arg, y: Arg, alpha: Scalar = 1) -> Value:
    """add.Tensor(Tensor self, Tensor other, *, Scalar alpha=1) -> Tensor"""
    if dtype_of(node) is torch.bool:
        return ctx.value(x) | y
    return ctx.value(x, dtype_of(node)) + _scaled(ctx, node, y, alpha)


@converts(aten.sub.Tensor, aten.sub.Scalar)
def sub(ctx: GraphBuilder, node: fx.Node, x: Arg, y: Arg, alpha: Scalar = 1) -> Value:
    """sub.Tensor(Tensor self, Tensor other, *, Scalar alpha=1) -> Tensor"""
    return ctx.value(x, dtype_of(node)) - _scaled(ctx, node, y, alpha)


@converts(aten.rsub.Scalar, aten.rsub.Tensor)
def rsub(ctx: GraphBuilder, node: fx.Node, x: Arg, y: Arg, alpha: Scalar = 1) -> Value:
    """rsub.Scalar(Tensor self, Scalar other, Scalar alpha=1) -> Tensor"""
    return sub(ctx, node, y, x, alpha)


def _scaled(ctx: GraphBuilder, node: fx.Node, y: Arg, alpha: Scalar) -> Value:
    value = ctx.value(y, dtype_of(node))
    return value if alpha == 1 else value * alpha


@converts(aten.mul.Tensor, aten.mul.Scalar)
def mul(ctx: GraphBuilder, node: fx.Node, x: Arg, y: Arg) -> Value:
    """mul.Tensor(Tensor self, Tensor other) -> Tensor"""
    if dtype_of(node) is torch.bool:
        return ctx.value(x) & y
    if isinstance(x, fx.Node) and isinstance(y, float) and dtype_of(x) is torch.bool:
        return scaled_mask(ctx.value(x), y, dtype_of(node))
    return ctx.value(x, dtype_of(node)) * y


@converts(aten.div.Tensor, aten.div.Scalar, aten.true_divide.Tensor)
def div(ctx: GraphBuilder, node: fx.Node, x: Arg, y: Arg) -> Value:
    """div.Tensor(Tensor self, Tensor other) -> Tensor"""
    # true_divide, its old name, and prims.convert_element_type come from torch 2.13's pass that makes tensors of what
    # is computed from sizes, such as the number of elements in the gradient of a mean over batches that vary
    return ctx.value(x, dtype_of(node)) / y


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
    return elementary.truncate(dividend / divisor)


def _divide_integers(ctx: GraphBuilder, x: Arg, y: Arg, dtype: torch.dtype) -> dict[str, Value]:
    """The quotients and rests of an integer division, rounded towards zero (``trunc``, ``fmod``) and down."""
    x, y = wrapped(x, dtype), wrapped(y, dtype)
    always_positive = _is_size(y) if isinstance(y, fx.Node) else y > 0
    if y == 0 or (isinstance(y, fx.Node) and not always_positive):
        # onnxruntime 1.19 ends the process at a 0 (SIGFPE), torch raises
        raise Unsupported("an integer division by what may be 0")
    work = torch.int32 if dtype in NARROW else dtype
    dividend, divisor = ctx.value(x, work), ctx.value(y, work)
    # the smallest integer divided by -1 ends the process too
    trunc = -dividend if y == -1 else dividend / divisor
    rest = dividend - trunc * divisor  # not Mod: with fmod=1 it computes in float64
    opposed = (rest < 0 if always_positive else rest > 0).cast(work)
    results = {"trunc": trunc, "fmod": rest, "floor": trunc - opposed, "remainder": rest + opposed * divisor}
    return {name: value.cast(dtype) for name, value in results.items()}


def wrapped(arg: Arg, dtype: torch.dtype) -> Arg:
    """A Python integer as torch converts it to a dtype that has no room for it: -1 is 255 as a byte."""
    if isinstance(arg, (bool, float, fx.Node)) or dtype is torch.bool:
        return arg
    info = torch.iinfo(dtype)
    return (arg - info.min) % (info.max - info.min + 1) + info.min


def _is_size(node: fx.Node) -> bool:
    """Whether a node is a symbolic integer that is always above 0, as a size is."""
    val = node.meta["val"]
    return isinstance(val, torch.SymInt) and is_positive(val)


@converts(aten.remainder.Scalar, aten.remainder.Tensor, aten.fmod.Scalar, aten.fmod.Tensor)
def remainder(ctx: GraphBuilder, node: fx.Node, x: fx.Node, y: Arg) -> Value:
    """remainder.Tensor(Tensor self, Tensor other) -> Tensor"""
    dtype, has_sign_of_divisor = dtype_of(node), node.target in (aten.remainder.Scalar, aten.remainder.Tensor)
    if not dtype.is_floating_point:
        return _divide_integers(ctx, x, y, dtype)["remainder" if has_sign_of_divisor else "fmod"]
    divisor = ctx.value(y, dtype)
    rest = ctx.value(x, dtype).op("Mod", divisor, fmod=1)  # the sign of the dividend
    return where(elementary.opposed_signs(rest, divisor), rest + divisor, rest) if has_sign_of_divisor else rest


@converts(aten.pow.Tensor_Scalar)
def pow_scalar(ctx: GraphBuilder, node: fx.Node, x: fx.Node, exponent: Scalar) -> Value:
    """pow.Tensor_Scalar(Tensor self, Scalar exponent) -> Tensor"""
    value = ctx.value(x, dtype_of(node))
    if exponent == 2:
        return value * value
    if exponent == 3:
        return value * value * value
    if value.dtype.is_floating_point and exponent in (0.5, -0.5):
        return elementary.sqrt(value) if exponent > 0 else elementary.rsqrt(value)
    return _power(ctx, node, x, exponent)


@converts(aten.pow.Tensor_Tensor, aten.pow.Scalar)
def _power(ctx: GraphBuilder, node: fx.Node, x: Arg, exponent: Arg) -> Value:
    """pow.Tensor_Tensor(Tensor self, Tensor exponent) -> Tensor"""
    if not dtype_of(node).is_floating_point:  # onnxruntime 1.19 computes it in float64, which cannot hold every int64
        raise Unsupported(f"a power of {dtype_of(node)}")
    return ctx.value(x, dtype_of(node)) ** exponent


@converts(aten.maximum.default, aten.minimum.default)
def maximum(ctx: GraphBuilder, node: fx.Node, x: fx.Node, y: fx.Node) -> Value:
    """maximum(Tensor self, Tensor other) -> Tensor"""
    value = ctx.value(x, dtype_of(node))
    return value.max(y) if node.target is aten.maximum.default else value.min(y)


@converts(aten.clamp.default, aten.clamp.Tensor, aten.clamp_min.default, aten.clamp_min.Tensor)
def clamp(ctx: GraphBuilder, node: fx.Node, x: fx.Node, min: Arg | None = None, max: Arg | None = None) -> Value:
    """clamp(Tensor self, Scalar? min=None, Scalar? max=None) -> Tensor"""
    # not Clip: with min > max torch gives max, ONNX Clip of opset 18 leaves it open
    value = ctx.value(x, dtype_of(node))
    if min is not None:
        value = value.max(min)
    return value if max is None else value.min(max)


@converts(aten.clamp_max.default, aten.clamp_max.Tensor)
def clamp_max(ctx: GraphBuilder, node: fx.Node, x: fx.Node, max: Arg) -> Value:
    """clamp_max(Tensor self, Scalar max) -> Tensor"""
    return clamp(ctx, node, x, None, max)


# unary functions


def unary(name: str, function: Callable[[Value], Value]) -> None:
    """Register a function of one tensor, computed in the dtype of its result."""

    def convert(ctx: GraphBuilder, node: fx.Node, x: fx.Node) -> Value:
        return function(ctx.value(x, dtype_of(node)))

    convert.__doc__ = f"{name}(Tensor self) -> Tensor"
    convert.__qualname__ = name
    converts(getattr(aten, name).default)(convert)


def _rounding(function: Callable[[Value], Value]) -> Callable[[Value], Value]:
    return lambda x: function(x) if x.dtype.is_floating_point else x


def _sign(x: Value) -> Value:
    if x.dtype is torch.float32 and x.ctx.on_cpu:  # in a third of the time of Sign, which branches (1.19)
        return scaled_mask(x > 0, 1.0, x.dtype) - scaled_mask(x < 0, 1.0, x.dtype)
    # to torch a NaN has the sign 0
    return where(x.is_nan(), 0, x.op("Sign")) if x.dtype.is_floating_point else x.op("Sign")


# those that ONNX has under the same name and meaning
_SAME = "abs acos acosh asin asinh atan atanh cos cosh neg reciprocal sin sinh tan tanh relu"
for _name in _SAME.split():
    unary(_name, operator.methodcaller("op", _name.capitalize()))
for _name in ("ceil", "floor", "round"):
    unary(_name, _rounding(operator.methodcaller("op", _name.capitalize())))
for _name in ("exp", "expm1", "log", "log1p", "sqrt", "rsqrt", "erf"):
    unary(_name, getattr(elementary, _name))
unary("trunc", _rounding(elementary.truncate))
unary("sign", _sign)
unary("exp2", lambda x: 2**x)
for _base in (2, 10):
    unary(f"log{_base}", functools.partial(elementary.log_to_base, _base))


@converts(aten.atan2.default)
def atan2(ctx: GraphBuilder, node: fx.Node, y: fx.Node, x: fx.Node) -> Value:
    """atan2(Tensor self, Tensor other) -> Tensor"""
    # ONNX has none. atan of the smaller magnitude over the larger, then the octant
    a, b = ctx.value(y, dtype_of(node)), ctx.value(x, dtype_of(node))
    size_a, size_b = abs(a), abs(b)
    large, small = size_a.max(size_b), size_a.min(size_b)
    # equal ones have the ratio 1, be they 0 (the angle is 0 then, see below) or infinite
    angle = where(large == small, 1, small / large).op("Atan")
    angle = where(size_a == 0, 0, angle)
    angle = where(size_a > size_b, math.pi / 2 - angle, angle)
    # the sign of a zero counts: 1 / -0 is -inf
    angle = where(_is_negative(b), math.pi - angle, angle)
    angle = where(_is_negative(a), -angle, angle)
    return where(a.is_nan() | b.is_nan(), a + b, angle)


def _is_negative(value: Value) -> Value:
    return (value < 0) | ((value == 0) & (value.op("Reciprocal") < 0))


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
    return value if same_shape(x, src) else value.expand(ctx.shape_tensor(x))


@converts(aten._to_copy.default, torch.ops.prims.convert_element_type.default)
def to_copy(ctx: GraphBuilder, node: fx.Node, x: fx.Node, *args: Any, **kwargs: Any) -> Value:
    """_to_copy(Tensor self, *, dtype?, layout?, device?, pin_memory?, bool non_blocking, memory_format?) -> Tensor"""
    if node.meta["val"].device != x.meta["val"].device:
        raise Unsupported("a copy between devices")
    source, target = dtype_of(x), dtype_of(node)
    if source.is_floating_point and not target.is_floating_point and target is not torch.bool and target.itemsize < 4:
        return ctx.value(x, torch.int64).cast(target)  # which wraps where it is out of range, as torch does
    return ctx.value(x, target)


# comparison, logic, and choice between tensors


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


unary("logical_not", operator.invert)
unary("bitwise_not", lambda x: ~x if x.dtype is torch.bool else x.op("BitwiseNot"))


@converts(aten.isnan.default, aten.isinf.default)
def isnan(ctx: GraphBuilder, node: fx.Node, x: fx.Node) -> Value:
    """isnan(Tensor self) -> Tensor"""
    value = ctx.value(x, None if dtype_of(x).is_floating_point else torch.float32)
    return value.is_nan() if node.target is aten.isnan.default else value.op("IsInf")


@converts(aten.where.self)
def where_self(ctx: GraphBuilder, node: fx.Node, condition: fx.Node, x: Arg, y: Arg) -> Value:
    """where.self(Tensor condition, Tensor self, Tensor other) -> Tensor"""
    chosen, dtype = ctx.value(condition, torch.bool), dtype_of(node)
    if dtype is torch.bool:  # no kernel of Where in onnxruntime 1.19 to 1.31
        return (chosen & ctx.value(x, dtype)) | (~chosen & ctx.value(y, dtype))
    return where(chosen, x, y, dtype)


@converts(aten.masked_fill.Scalar, aten.masked_fill.Tensor)
def masked_fill(ctx: GraphBuilder, node: fx.Node, x: fx.Node, mask: fx.Node, value: Arg) -> Value:
    """masked_fill.Scalar(Tensor self, Tensor mask, Scalar value) -> Tensor"""
    return where_self(ctx, node, mask, value, x)
