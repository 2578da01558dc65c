"""Choice by a condition and elementary functions, in the form that is right for every number, and fast where exact.

On a CPU, whose kernels (onnxruntime 1.19) are not: those of ``Sqrt`` and ``Log`` make NaN of an infinity and take
denormals for 0, or for the smallest normal number; ``Exp`` of a float64 never falls below 5e-309; ``Elu`` and
``Softplus`` lose small results. Elsewhere these functions are ONNX's own operators.
"""

import math

import numpy as np
import torch
from torch import fx

from lightning_ort.compiler.executors.ort.conversion.graph import Operand, Value
from lightning_ort.compiler.graphs.nodes import MIXED


def where(condition: Value, x: Operand, y: Operand, dtype: torch.dtype | None = None) -> Value:
    """``x`` where the condition holds, else ``y``: in ``dtype``, or that of ``x`` or ``y`` if one is a value."""
    dtype = dtype or next(arg.dtype for arg in (x, y) if isinstance(arg, Value))
    if dtype is torch.float32 and condition.ctx.on_cpu and isinstance(x, (int, float)) and isinstance(y, (int, float)):
        picked = _pick(condition, float(x), float(y))
        if picked is not None:
            return picked
    return condition.op("Where", condition.ctx.value(x, dtype), condition.ctx.value(y, dtype))


def _pick(condition: Value, x: float, y: float) -> Value | None:
    """One of two numbers by arithmetic, if that is exact.

    The kernel of ``Where`` branches for each element: on random conditions it takes up to ten times as long (1.19).
    """
    if x < y:
        condition, x, y = ~condition, y, x
    low, high = np.float32(y), np.float32(x)
    step = high - low
    if not (step > 0 and np.isfinite(step) and low + step == high):
        return None
    picked = scaled_mask(condition, float(step), torch.float32)
    return picked if y == 0 else picked + y


def scaled_mask(mask: Value, scale: float, dtype: torch.dtype) -> Value:
    """Booleans as 0 and ``scale``."""
    if dtype is torch.float32 and 0 < scale < math.inf and mask.ctx.dequantizes:
        # one pass over memory for Cast and Mul, in half the time; exact, since the mask is 0 or 1
        return mask.cast(torch.uint8).op("DequantizeLinear", mask.ctx.const(scale, dtype))
    return mask.cast(dtype) * scale


def masked(node: fx.Node, mask: Value, gradient: Value) -> Value:
    """A gradient, and 0 where the mask holds: the result of ``node``."""
    if node.meta.get(MIXED) and gradient.dtype is torch.float32 and mask.ctx.on_cpu:
        # in a fifth of the time of Where on random masks, or less; without Not, which is slow too (1.19)
        ctx = mask.ctx
        if not ctx.dequantizes:
            return gradient * (1 - mask.cast(torch.float32))
        one, scale = ctx.const(1, torch.uint8), ctx.const(-1, torch.float32)
        return gradient * mask.cast(torch.uint8).op("DequantizeLinear", scale, one)  # (mask - 1) * -1
    return where(mask, 0, gradient)


def sqrt(x: Value) -> Value:
    """The square root."""
    if x.dtype is torch.float32 and x.ctx.on_cpu:
        # the kernel for float64 is exact, and so is its result rounded to float32
        return x.cast(torch.float64).op("Sqrt").cast(x.dtype)
    return x.op("Sqrt")


def rsqrt(x: Value) -> Value:
    """1 / sqrt(x)."""
    return sqrt(x).op("Reciprocal")


def log(x: Value) -> Value:
    """The natural logarithm."""
    if not x.ctx.on_cpu:
        return x.op("Log")
    # log(x) = log(2^54 x) - 54 log(2) where x is denormal
    is_denormal = x < torch.finfo(x.dtype).tiny
    scale = where(is_denormal, 2.0**54, 1, x.dtype)
    shift = where(is_denormal, -54 * math.log(2), 0, x.dtype)
    return (x * scale).op("Log") + shift


def log_to_base(base: int, x: Value) -> Value:
    """The logarithm to a whole base, whole for its powers."""
    if x.dtype is torch.float32 and x.ctx.on_cpu:
        # the error of float64 goes when the result is rounded to float32
        return (x.cast(torch.float64).op("Log") * (1 / math.log(base))).cast(x.dtype)
    result = log(x) * (1 / math.log(base))
    whole = result.op("Round")
    return where(base**whole == x, whole, result)


def exp(x: Value) -> Value:
    """The exponential function."""
    if x.dtype is torch.float64 and x.ctx.on_cpu:
        root = (x * 0.5).op("Exp")
        return root * root
    return x.op("Exp")


def expm1(x: Value) -> Value:
    """exp(x) - 1."""
    # tanh(x / 2) (exp(x) + 1) keeps the digits of a small x, which exp(x) - 1 loses
    return (x * 0.5).op("Tanh") * (exp(x) + 1)


def log1p(x: Value) -> Value:
    """log(1 + x)."""
    # log(1 + x) loses all digits of a small x; log(u) * (x / (u - 1)) with u = 1 + x does not (Goldberg 1991, theorem
    # 4). The quotient is that of a finite x, so that it is 1 for an infinite one
    finite = x.min(torch.finfo(x.dtype).max)
    offset = finite + 1 - 1
    is_lost = (offset == 0).cast(x.dtype)  # then both factors are to be 1 and x, without Where, which is slow (1.19)
    return ((x + 1).op("Log") + is_lost) * (finite / (offset + is_lost))


def softplus(x: Value) -> Value:
    """log(1 + exp(x)), as max(x, 0) + log(1 + exp(-|x|)), which never overflows."""
    return x.max(0) + log1p(exp(-abs(x)))


def logistic(x: Value) -> Value:
    """1 / (1 + exp(-x)): onnxruntime's Sigmoid is 17 % off at -15 and 0 from -18 on, so that its log is -inf (1.19)."""
    beyond = exp(-x) + 1
    # a Reciprocal of bfloat16 needs two casts on a GPU
    return 1 / beyond if x.dtype is torch.bfloat16 else beyond.op("Reciprocal")


def erf(x: Value) -> Value:
    """The error function; onnxruntime's kernel makes 1 of a NaN (1.19)."""
    return where(x.is_nan(), x, x.op("Erf"))


def truncate(x: Value) -> Value:
    """Round towards zero."""
    return x.op("Sign") * abs(x).op("Floor")


def opposed_signs(x: Value, y: Value) -> Value:
    """Where one is positive and the other negative."""
    return x.op("Sign") * y.op("Sign") < 0


def floor_divide(dividend: Value, divisor: Value) -> Value:
    """The largest whole number that is not above the exact quotient of two floating-point numbers, as in Python.

    The rounded quotient will not do: 1.0 // 0.1 is 9, since 0.1 is a little more than a tenth, yet 1.0 / 0.1 rounds up
    to 10. The result is NaN for an infinite dividend, and the quotient itself where the divisor is 0.
    """
    rest = dividend.op("Mod", divisor, fmod=1)  # exact, with the dividend's sign
    opposed = opposed_signs(rest, divisor)
    quotient = (dividend - rest) / divisor  # whole, but for its rounding
    quotient = where(opposed, quotient - 1, quotient)
    floor = quotient.op("Floor")
    result = where(quotient - floor > 0.5, floor + 1, floor)
    return where(divisor == 0, dividend / divisor, result)
