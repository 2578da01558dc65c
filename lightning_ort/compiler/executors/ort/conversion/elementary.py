"""Elementary functions that are right for every number, where onnxruntime's CPU kernels (1.19) are not at the edges.

Its vector kernels of ``Sqrt`` and ``Log`` make NaN of an infinity and take denormals for 0, or for the smallest normal
number; ``Exp`` of a float64 never falls below 5e-309; ``Elu`` and ``Softplus`` lose small results. What is written here
is for the CPU; elsewhere these functions are ONNX's own ops.
"""

import math

import onnx_ir as ir
import torch

from lightning_ort.compiler.executors.ort.conversion.graph import GraphBuilder


def sqrt(ctx: GraphBuilder, value: ir.Value, dtype: torch.dtype) -> ir.Value:
    """The square root."""
    if dtype is torch.float32 and ctx.on_cpu:
        # of a float64 the kernel is exact, and so is what rounding to float32 makes of it
        return ctx.cast(ctx.op("Sqrt", ctx.cast(value, torch.float64)), dtype)
    return ctx.op("Sqrt", value)


def rsqrt(ctx: GraphBuilder, value: ir.Value, dtype: torch.dtype) -> ir.Value:
    """1 / sqrt(x)."""
    return ctx.op("Reciprocal", sqrt(ctx, value, dtype))


def log(ctx: GraphBuilder, value: ir.Value, dtype: torch.dtype) -> ir.Value:
    """The natural logarithm."""
    if not ctx.on_cpu:
        return ctx.op("Log", value)
    # log(x) = log(2^54 x) - 54 log(2) where x is denormal
    is_denormal = ctx.op("Less", value, ctx.const(torch.finfo(dtype).tiny, dtype))
    scale = ctx.op("Where", is_denormal, ctx.const(2.0**54, dtype), ctx.const(1, dtype))
    shift = ctx.op("Where", is_denormal, ctx.const(-54 * math.log(2), dtype), ctx.const(0, dtype))
    return ctx.op("Add", ctx.op("Log", ctx.op("Mul", value, scale)), shift)


def exp(ctx: GraphBuilder, value: ir.Value, dtype: torch.dtype) -> ir.Value:
    """The exponential function."""
    if dtype is torch.float64 and ctx.on_cpu:
        root = ctx.op("Exp", ctx.op("Mul", value, ctx.const(0.5, dtype)))
        return ctx.op("Mul", root, root)
    return ctx.op("Exp", value)


def expm1(ctx: GraphBuilder, value: ir.Value, dtype: torch.dtype) -> ir.Value:
    """exp(x) - 1."""
    # tanh(x / 2) (exp(x) + 1) keeps the digits of a small x, which exp(x) - 1 loses
    half = ctx.op("Tanh", ctx.op("Mul", value, ctx.const(0.5, dtype)))
    return ctx.op("Mul", half, ctx.op("Add", exp(ctx, value, dtype), ctx.const(1, dtype)))


def log1p(ctx: GraphBuilder, value: ir.Value, dtype: torch.dtype) -> ir.Value:
    """log(1 + x)."""
    # log(1 + x) loses all digits of a small x; log(u) * (x / (u - 1)) with u = 1 + x does not (Goldberg 1991, theorem
    # 4). The quotient is taken of a finite x, so that it is 1 for an infinite one
    one = ctx.const(1, dtype)
    finite = ctx.op("Min", value, ctx.const(torch.finfo(dtype).max, dtype))
    offset = ctx.op("Sub", ctx.op("Add", finite, one), one)
    exact = ctx.op("Mul", ctx.op("Log", ctx.op("Add", value, one)), ctx.op("Div", finite, offset))
    return ctx.op("Where", ctx.op("Equal", offset, ctx.const(0, dtype)), value, exact)


def softplus(ctx: GraphBuilder, value: ir.Value, dtype: torch.dtype) -> ir.Value:
    """log(1 + exp(x)), as max(x, 0) + log(1 + exp(-|x|)), which never overflows."""
    small = exp(ctx, ctx.op("Neg", ctx.op("Abs", value)), dtype)
    return ctx.op("Add", ctx.op("Max", value, ctx.const(0, dtype)), log1p(ctx, small, dtype))


def logistic(ctx: GraphBuilder, value: ir.Value, dtype: torch.dtype) -> ir.Value:
    """1 / (1 + exp(-x)): onnxruntime's Sigmoid is 17 % off at -15 and 0 from -18 on, so that its log is -inf (1.19)."""
    lifted = ctx.op("Add", exp(ctx, ctx.op("Neg", value), dtype), ctx.const(1, dtype))
    return ctx.op("Reciprocal", lifted)


def erf(ctx: GraphBuilder, value: ir.Value) -> ir.Value:
    """The error function; onnxruntime's kernel makes 1 of a NaN (1.19)."""
    return ctx.op("Where", ctx.op("IsNaN", value), value, ctx.op("Erf", value))


def floor_divide(ctx: GraphBuilder, dividend: ir.Value, divisor: ir.Value, dtype: torch.dtype) -> ir.Value:
    """The largest whole number that is not above the exact quotient of two floating-point numbers, as in Python.

    The rounded quotient will not do: 1.0 // 0.1 is 9, since 0.1 is a little more than a tenth, yet 1.0 / 0.1 rounds up
    to 10. Of an infinite dividend it is NaN, and the quotient itself where the divisor is 0.
    """
    if dtype is torch.float32 and ctx.on_cpu:
        return _floor_divide_in_float64(ctx, dividend, divisor)
    zero, one = ctx.const(0, dtype), ctx.const(1, dtype)
    rest = ctx.op("Mod", dividend, divisor, fmod=1)  # exact, with the dividend's sign
    opposed = ctx.op("Less", ctx.op("Mul", ctx.op("Sign", rest), ctx.op("Sign", divisor)), zero)
    quotient = ctx.op("Div", ctx.op("Sub", dividend, rest), divisor)  # whole, but for its rounding
    quotient = ctx.op("Where", opposed, ctx.op("Sub", quotient, one), quotient)
    floor = ctx.op("Floor", quotient)
    above = ctx.op("Greater", ctx.op("Sub", quotient, floor), ctx.const(0.5, dtype))
    result = ctx.op("Where", above, ctx.op("Add", floor, one), floor)
    return ctx.op("Where", ctx.op("Equal", divisor, zero), ctx.op("Div", dividend, divisor), result)


def _floor_divide_in_float64(ctx: GraphBuilder, dividend: ir.Value, divisor: ir.Value) -> ir.Value:
    # in a quarter of the time: float64 tells the quotient of two float32 numbers from a whole one below 2^24, and above
    # that the result is rounded anyway
    dtype = torch.float64
    a, b, zero = ctx.cast(dividend, dtype), ctx.cast(divisor, dtype), ctx.const(0, dtype)
    # a finite number instead of an infinite divisor: -1 // inf is -1
    finite = ctx.op("Max", ctx.op("Min", b, ctx.const(1e200, dtype)), ctx.const(-1e200, dtype))
    floor = ctx.op("Floor", ctx.op("Div", a, finite))
    poison = ctx.op("Sub", a, a)  # NaN of what is infinite, else 0
    result = ctx.op("Where", ctx.op("Equal", b, zero), ctx.op("Div", a, b), ctx.op("Add", floor, poison))
    return ctx.cast(result, torch.float32)
