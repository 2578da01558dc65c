"""The memory layout that eager gives to results for which torch's fake kernels (2.13) give another one.

A graph is traced with fake kernels. Those of some ops are compositions of simpler ops, or leave the layout of the
inputs out of account, so that results of the compiled graph would have other strides than in eager. Such a result is
brought into eager's order, which costs nothing where the op's own kernel has put it into that order already.
"""

import threading
from collections.abc import Callable
from typing import Any

import torch

from lightning_ort.compat.torch import OpOverload, suggest_memory_format, without_tracing
from lightning_ort.compiler.graphs.layouts import IN_ORDER, int_hint, memory_order, was_in_order

aten = torch.ops.aten


def _of_pair(x: Any, y: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    """As of any elementwise op of two tensors whose fake kernel is right."""
    return aten.mul.Tensor(x, y)


def _of_ldexp(x: torch.Tensor, exponent: torch.Tensor) -> torch.Tensor:
    """Eager multiplies by a power of 2."""
    return aten.mul.Tensor(x, _of_power(2, exponent))


def _of_power(base: Any, exponent: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(exponent, memory_format=torch.contiguous_format)


def _of_first(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    return torch.empty_like(x)


def _of_unpooled(x: torch.Tensor, indices: torch.Tensor, size: Any) -> torch.Tensor:
    shape = (*x.shape[:-2], *map(int_hint, size))
    return torch.empty(shape, device="meta").contiguous(memory_format=suggest_memory_format(x))


# ops, and a function that makes a tensor in the layout of eager's result
LAYOUTS: dict[OpOverload, Callable[..., torch.Tensor]] = {
    aten.copysign.Tensor: _of_pair,
    aten.div.Tensor_mode: _of_pair,
    aten.floor_divide.default: _of_pair,
    aten.heaviside.default: _of_pair,
    aten.ldexp.Tensor: _of_ldexp,
    aten.logaddexp.default: _of_pair,
    aten.logaddexp2.default: _of_pair,
    aten.logical_and.default: _of_pair,
    aten.logical_or.default: _of_pair,
    aten.logical_xor.default: _of_pair,
    aten.logit_backward.default: _of_pair,
    aten.max_unpool2d.default: _of_unpooled,
    aten.native_dropout_backward.default: _of_pair,
    aten.pow.Scalar: _of_power,
    aten.put.default: _of_first,
    aten.special_xlog1py.default: _of_pair,
    aten.xlogy.Tensor: _of_pair,
}


class _Tracing(threading.local):
    """Which of these ops this thread is tracing; it meets the op again within."""

    op: OpOverload | None = None


_tracing = _Tracing()


def as_eager_lays_out(op: OpOverload, split: Callable[..., Any] | None, *args: Any, **kwargs: Any) -> Any:
    """The decomposition of one of these ops: itself, or what ``split`` makes of it, with eager's layout."""
    if _tracing.op is op:
        return NotImplemented  # it stays whole
    outer, _tracing.op = _tracing.op, op
    try:
        result = (split or op)(*args, **kwargs)
    finally:
        _tracing.op = outer
    if not isinstance(result, torch.Tensor) or result.device.type != "cpu":
        return result
    try:
        order = _eager_order(op, args, kwargs)
        return result if was_in_order(result, order) else IN_ORDER(result, order)
    except TypeError:  # a size that depends on data has no hint
        return result


def _eager_order(op: OpOverload, args: Any, kwargs: Any) -> list[int]:
    with without_tracing():
        like = [_without_memory(arg) if isinstance(arg, torch.Tensor) else arg for arg in args]
        return memory_order(LAYOUTS[op](*like, **kwargs))


def _without_memory(x: torch.Tensor) -> torch.Tensor:
    shape, strides = map(int_hint, x.shape), map(int_hint, x.stride())
    return torch.empty_strided(tuple(shape), tuple(strides), dtype=x.dtype, device="meta")
