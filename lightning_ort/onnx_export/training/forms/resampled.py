"""Average pooling and interpolation: linear along each dimension, so a product with a constant matrix for each."""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_ort.compat.torch import OpOverload, interpolated_size, without_tracing
from lightning_ort.compiler.executors.ort.conversion.registry import in_parts
from lightning_ort.compiler.lowering.decompositions import upsample_nearest2d
from lightning_ort.onnx_export.training.forms.decomposed import each

aten = torch.ops.aten
# what torch's kernel makes of a tensor that is longer than 1 along one of the last dimensions alone, the one of this
# number
Along = Callable[[Tensor, int], Tensor]


def _mapped(x: Tensor, along: Along, sizes: Sequence[int], transposed: bool = False) -> Tensor:
    """Multiply the last dimensions, of these sizes, each by the matrix of what is linear along it, or its transpose."""
    for axis, size in enumerate(sizes):
        with without_tracing():
            units = torch.eye(size, dtype=x.dtype).reshape(size, 1, *_only(axis, sizes, 1))
            fixed = along(units, axis).reshape(size, -1)
        matrix = aten.lift_fresh_copy.default(fixed)  # torch.eye itself would be an operation of the graph
        matrix = matrix.t() if transposed else matrix
        dim = axis - len(sizes)
        if dim == -1:
            x = torch.matmul(x, matrix)
        elif dim == -2:
            x = torch.matmul(matrix.t(), x)
        else:
            x = torch.matmul(x.movedim(dim, -1), matrix).movedim(-1, dim)
    return x


def _only(axis: int, numbers: Sequence[Any], otherwise: Any) -> list[Any]:
    """Return numbers of which all but one are replaced."""
    return [number if place == axis else otherwise for place, number in enumerate(numbers)]


def _is_static(*tensors: Tensor, spatial: int) -> bool:
    return all(isinstance(size, int) for tensor in tensors for size in tensor.shape[-spatial:])


# average pooling

_POOLS = (aten.avg_pool1d.default, aten.avg_pool2d.default, aten.avg_pool3d.default)
_ADAPTIVE = {2: aten._adaptive_avg_pool2d.default, 3: aten._adaptive_avg_pool3d.default}


def _pooled(
    x: Tensor,
    sizes: Sequence[int],
    transposed: bool,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    ceil_mode: bool,
    count_include_pad: bool,
    divisor_override: int | None = None,
) -> Tensor:
    spatial = len(sizes)
    width, step, pad = (each(numbers, spatial) for numbers in (kernel_size, stride or kernel_size, padding))
    divisor = () if divisor_override is None else (1,)

    def along(units: Tensor, axis: int) -> Tensor:
        windows = _only(axis, width, 1), _only(axis, step, 1), _only(axis, pad, 0)
        return _POOLS[spatial - 1](units, *windows, ceil_mode, count_include_pad, *divisor)

    result = _mapped(x, along, sizes, transposed)
    return result if divisor_override is None else result / divisor_override


@in_parts(aten.avg_pool2d_backward.default, aten.avg_pool3d_backward.default)
def avg_pool_backward(grad: Tensor, x: Tensor, kernel_size: Sequence[int], *args: Any) -> Tensor:
    """The gradient of average pooling."""
    spatial = len(kernel_size) if len(kernel_size) > 1 else x.dim() - 2
    if not _is_static(grad, x, spatial=spatial):
        return NotImplemented
    return _pooled(grad, x.shape[-spatial:], True, kernel_size, *args)


@in_parts(*_POOLS)
def avg_pool(
    x: Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Tensor:
    """Average pooling with windows that are cut off; otherwise it is left to its converter."""
    spatial = len(kernel_size)
    if not ceil_mode or not _is_static(x, spatial=spatial):
        return NotImplemented
    args = (kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override)
    return _pooled(x, x.shape[-spatial:], False, *args)


def _adaptive(x: Tensor, sizes: Sequence[int], outs: Sequence[int], transposed: bool = False) -> Tensor:
    """Adaptive average pooling; where its windows are alike, it is left to its converter."""
    if not all(isinstance(size, int) for size in (*sizes, *outs)):
        return NotImplemented
    if all(size % out == 0 for size, out in zip(sizes, outs, strict=True)):
        return NotImplemented
    pool = _ADAPTIVE[len(sizes)]
    return _mapped(x, lambda units, axis: pool(units, _only(axis, outs, 1)), sizes, transposed)


@in_parts(*_ADAPTIVE.values())
def adaptive_avg_pool(x: Tensor, output_size: Sequence[int]) -> Tensor:
    """Adaptive average pooling."""
    return _adaptive(x, x.shape[-len(output_size) :], output_size)


@in_parts(aten._adaptive_avg_pool2d_backward.default, aten._adaptive_avg_pool3d_backward.default)
def adaptive_avg_pool_backward(grad: Tensor, x: Tensor) -> Tensor:
    """Its gradient."""
    return _adaptive(grad, x.shape[2:], grad.shape[2:], transposed=True)


def _to_one_place(x: Tensor, output_size: Sequence[int]) -> Tensor:
    """Adaptive average pooling; as a plain mean where one place is left, whose strides torch would set to others."""
    spatial = len(output_size)
    if spatial == 1:
        return _to_one_place(x.unsqueeze(-2), (1, *output_size)).squeeze(-2)
    if all(out == 1 for out in output_size):
        return x.mean(list(range(-spatial, 0)), keepdim=True)
    return _ADAPTIVE[spatial](x, output_size)


for _op in (aten.adaptive_avg_pool1d.default, aten.adaptive_avg_pool2d.default, aten.adaptive_avg_pool3d.default):
    in_parts(_op, above_autograd=True)(_to_one_place)


def _adaptive_max_pool(x: Tensor, output_size: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Adaptive max pooling: windows that are alike as max pooling, others one by one; with places in the input."""
    spatial = len(output_size)
    if spatial == 1:
        values, places = _adaptive_max_pool(x.unsqueeze(-2), (1, *output_size))
        return values.squeeze(-2), places.squeeze(-2)
    if not _is_static(x, spatial=spatial):
        raise NotImplementedError("adaptive max pooling of a symbolic size")
    sizes = [int(size) for size in x.shape[-spatial:]]
    pairs = list(zip(sizes, output_size, strict=True))
    if all(size % out == 0 for size, out in pairs):
        pool = aten.max_pool2d_with_indices if spatial == 2 else aten.max_pool3d_with_indices
        width = [size // out for size, out in pairs]
        return pool(x, width, width)
    windows = [
        [range(place * size // out, -(-(place + 1) * size // out)) for place in range(out)] for size, out in pairs
    ]
    whole = np.arange(math.prod(sizes)).reshape(sizes)
    flat, found = x.flatten(-spatial), []
    for window in itertools.product(*windows):
        with without_tracing():
            fixed = torch.from_numpy(whole[np.ix_(*window)].reshape(-1))
        places = aten.lift_fresh_copy.default(fixed)
        values, first = flat.index_select(-1, places).max(-1)
        found.append((values, places[first]))
    shape = [*x.shape[:-spatial], *output_size]
    values, places = (torch.stack(parts, -1).reshape(shape) for parts in zip(*found, strict=True))
    return values, places


for _op in (aten.adaptive_max_pool1d.default, aten.adaptive_max_pool2d.default, aten.adaptive_max_pool3d.default):
    in_parts(_op, above_autograd=True)(_adaptive_max_pool)


# interpolation


def _interpolation(op: OpOverload, spatial: int, aligns: bool) -> Callable[..., Any]:
    """Return what stands for an operation that takes scale factors as one list; ``op`` takes one for each dimension."""

    def function(x: Tensor, output_size: Any, *args: Any, **kwargs: Any) -> Any:
        align = (bool(kwargs.get("align_corners", args[0] if args else False)),) if aligns else ()
        given = args[1:] if aligns else args
        factors = kwargs.get("scale_factors", given[0] if given else None)
        sizes = x.shape[-spatial:]
        if not _is_static(x, spatial=spatial):
            raise NotImplementedError("interpolation of a symbolic size")
        outs = interpolated_size(x.shape, output_size, factors)

        def along(units: Tensor, axis: int) -> Tensor:
            return op(units, _only(axis, outs, 1), *align, *_only(axis, factors or [None] * spatial, None))

        return _mapped(x, along, sizes)

    return function


for _name in ("nearest1d", "nearest2d", "nearest3d", "linear1d", "bilinear2d", "trilinear3d", "bicubic2d"):
    for _exact in ("", "_exact") if "nearest" in _name else ("",):
        _packet = getattr(aten, f"_upsample_nearest_exact{_name[-2:]}" if _exact else f"upsample_{_name}")
        in_parts(_packet.vec, above_autograd=True)(
            _interpolation(_packet.default, int(_name[-2]), "nearest" not in _name)
        )
in_parts(aten.upsample_nearest2d.default, above_autograd=True)(upsample_nearest2d)
