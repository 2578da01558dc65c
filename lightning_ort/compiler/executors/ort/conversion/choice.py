"""Choice between values by a condition: :func:`where`, and what takes less time where that is exact."""

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
