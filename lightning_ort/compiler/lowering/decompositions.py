"""Which ops AOTAutograd splits into simpler ones while it traces, and which stay whole."""

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any

import torch

from lightning_ort.compat.first_compilation import core_decompositions
from lightning_ort.compat.torch_graphs import (
    OpOverload,
    decomposition_of,
    interpolated_size,
    python_kernels,
    suggest_memory_format,
    without_tracing,
)
from lightning_ort.compiler.graphs.nodes import IN_ORDER, int_hint, memory_order, was_in_order

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


# which of these ops is being traced; it meets the op again within
_tracing: ContextVar[OpOverload | None] = ContextVar("traced op", default=None)


def as_eager_lays_out(op: OpOverload, split: Callable[..., Any] | None, *args: Any, **kwargs: Any) -> Any:
    """The decomposition of one of these ops: itself, or what ``split`` makes of it, with eager's layout."""
    if _tracing.get() is op:
        return NotImplemented  # it stays whole
    outer = _tracing.set(op)
    try:
        result = (split or op)(*args, **kwargs)
    finally:
        _tracing.reset(outer)
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


# Torch runs these well as they are; decomposed they would be slower there, and no faster on ONNX Runtime.
_WHOLE = {
    aten.bernoulli.default,
    aten.convolution_backward.default,
    aten.embedding_dense_backward.default,
    aten.native_dropout.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten.native_batch_norm_backward.default,
    aten.native_group_norm_backward.default,
    aten.max_pool2d_with_indices_backward.default,
    aten.max_unpool2d.default,
    aten.multi_margin_loss.default,
    aten.multilabel_margin_loss_forward.default,
    aten.nll_loss_forward.default,
    aten.nll_loss_backward.default,
    aten.nll_loss2d_forward.default,
    aten.nll_loss2d_backward.default,
    aten.upsample_bilinear2d.vec,
    aten.upsample_nearest2d.vec,
    # these refuse numbers that their dtype cannot hold, and round as their kernels do
    aten.linspace.Tensor_Tensor,
    aten.linspace.Tensor_Scalar,
    aten.linspace.Scalar_Tensor,
    aten.logspace.Tensor_Tensor,
    aten.logspace.Tensor_Scalar,
    aten.logspace.Scalar_Tensor,
}

_BATCH_NORMS = (
    aten._native_batch_norm_legit_functional.default,
    aten._native_batch_norm_legit_no_training.default,
    aten._native_batch_norm_legit.no_stats,
)

# torch's parts of these, or their gradients, differ from eager's at NaN; with the gradients of the whole
_OTHERWISE_AT_NAN = {
    aten.hardshrink.default: aten.hardshrink_backward.default,
    aten.softshrink.default: aten.softshrink_backward.default,
    aten.multi_margin_loss.default: aten.multi_margin_loss_backward.default,
    aten.multilabel_margin_loss_forward.default: aten.multilabel_margin_loss_backward.default,
}


@functools.cache
def decompositions(converted: frozenset[OpOverload], layouts: bool = True) -> dict[OpOverload, Callable[..., Any]]:
    """Return torch's decompositions to core ATen, except of ops that have a converter or run well whole.

    Without ``layouts`` the results of some ops are not laid out in memory as eager's.
    """
    needed = {op: split for op, split in core_decompositions().items() if op not in converted and op not in _WHOLE}
    needed |= {aten.sgn.default: _sign, aten.take.default: _take, aten.put.default: _put}
    if not layouts:
        return needed
    needed |= {op: functools.partial(as_eager_lays_out, op, needed.get(op)) for op in LAYOUTS}
    return needed | {op: functools.partial(_with_eager_layout, op) for op in _BATCH_NORMS}


def _take(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """``take`` with an index of any shape; torch's decomposition reads the value of a scalar index."""
    return aten.index.Tensor(x.reshape(-1), [index.reshape(-1)]).reshape(index.shape)


def _put(x: torch.Tensor, index: torch.Tensor, source: torch.Tensor, accumulate: bool = False) -> torch.Tensor:
    """``put``, for the same reason."""
    flat = aten.index_put.default(x.reshape(-1), [index.reshape(-1)], source.reshape(-1), accumulate)
    return flat.reshape(x.shape)


def _sign(x: torch.Tensor) -> Any:
    """``sgn`` of real numbers. For complex numbers it stays whole: a denormal divided by its size becomes NaN."""
    return NotImplemented if x.is_complex() else aten.sign.default(x)


def _with_eager_layout(op: OpOverload, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """A batch norm whose result has eager's layout, contiguous or channels_last; traced, it has that of its input.

    The order in which a following dropout fills its mask depends on it (torch 2.13).
    """
    memory_format = suggest_memory_format(x)
    if x.device.type != "cpu" or x.is_contiguous(memory_format=memory_format):
        return NotImplemented  # no change needed
    return op(x.contiguous(memory_format=memory_format), *args, **kwargs)


def traced_as_eager() -> AbstractContextManager[None]:
    """Within the block, ops that torch decomposes otherwise than eager computes them are traced as eager's.

    Torch 2.13 decomposes these above autograd, whatever the table of decompositions says. Of the gradients of some
    torch knows the shape only if no size is symbolic, or not at all. A ``dropout`` that drops nothing becomes a copy,
    where eager returns its input, which may be written to. Of two dimensions that are interpolated to the nearest,
    eager takes one whose size stays or doubles without its scale factor (``nearest_idx`` in
    ATen/native/UpSample.h), on a CPU.
    """
    kernels: dict[tuple[OpOverload, str], Callable[..., Any] | None] = dict.fromkeys(
        ((op, "Autograd") for op in _OTHERWISE_AT_NAN), None
    )
    kernels |= {(op, "Meta"): lambda grad, x, *_: torch.empty_like(x) for op in _OTHERWISE_AT_NAN.values()}
    for key in ("Autograd", "CompositeImplicitAutograd"):
        kernels[aten.dropout.default, key] = _dropout
        kernels[aten.upsample_nearest2d.default, key] = upsample_nearest2d
        kernels[aten.upsample_nearest2d.vec, key] = _upsample_nearest2d_by_factors
    return python_kernels(kernels)


def _dropout(x: torch.Tensor, p: float, train: bool) -> torch.Tensor:
    return aten.native_dropout.default(x, p, train)[0] if train and p != 0 else x


def upsample_nearest2d(
    x: torch.Tensor, output_size: Sequence[Any], scales_h: float | None = None, scales_w: float | None = None
) -> torch.Tensor:
    """Interpolate to the nearest as eager does (:func:`traced_as_eager`)."""
    scales: list[float | None] = [scales_h, scales_w]
    if x.device.type == "cpu":
        for axis, (scale, size, out) in enumerate(zip(scales, x.shape[2:], output_size, strict=True)):
            if scale not in (None, 1, 2) and (out == size or out == 2 * size):
                scales[axis] = None
    return decomposition_of(aten.upsample_nearest2d.default)(x, output_size, *scales)


def _upsample_nearest2d_by_factors(
    x: torch.Tensor, output_size: Sequence[Any] | None, scale_factors: Sequence[float] | None
) -> torch.Tensor:
    sizes = interpolated_size(x.shape, output_size, scale_factors)
    return upsample_nearest2d(x, sizes, *(scale_factors or ()))
