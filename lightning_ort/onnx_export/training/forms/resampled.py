"""Average pooling and interpolation: linear along each dimension, so a product with a constant matrix for each."""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_ort.compat.torch import OpOverload, without_tracing
from lightning_ort.compiler.executors.ort.conversion.registry import in_parts
from lightning_ort.onnx_export.training.forms.decomposed import each

aten = torch.ops.aten
Rows = list[dict[int, float]]  # of a matrix: the weight of each input in each result


def _mapped(x: Tensor, matrices: Sequence[Rows], sizes: Sequence[int], transposed: bool = False) -> Tensor:
    """Multiply the last dimensions, of these sizes, each by a matrix, or by its transpose."""
    for axis, (rows, size) in enumerate(zip(matrices, sizes, strict=True)):
        dense = [[row.get(place, 0.0) for place in range(size)] for row in rows]
        with without_tracing():
            fixed = torch.tensor(dense, dtype=x.dtype)
        matrix = aten.lift_fresh_copy.default(fixed)  # torch.tensor itself detaches in place, which no graph has
        matrix = matrix.t() if transposed else matrix
        dim = axis - len(matrices)
        if dim == -1:
            x = torch.matmul(x, matrix.t())
        elif dim == -2:
            x = torch.matmul(matrix, x)
        else:
            x = torch.matmul(x.movedim(dim, -1), matrix.t()).movedim(-1, dim)
    return x


def _is_static(*tensors: Tensor, spatial: int) -> bool:
    return all(isinstance(size, int) for tensor in tensors for size in tensor.shape[-spatial:])


# average pooling


def _windows(size: int, out: int, window: tuple[int, int, int], counts_pad: bool, is_mean: bool) -> Rows:
    (width, step, pad), rows = window, []
    for place in range(out):
        first = place * step - pad
        last = min(first + width, size + pad)
        length = last - first
        first, last = max(first, 0), min(last, size)
        share = (1 / (length if counts_pad else last - first)) if is_mean else 1.0
        rows.append(dict.fromkeys(range(first, last), share))
    return rows


def _pool_matrices(sizes: Sequence[int], outs: Sequence[int], args: tuple[Any, ...], divisor: int | None) -> list[Rows]:
    width, step, pad, counts_pad = args
    spatial = len(sizes)
    step = step or width
    numbers_of = [each(numbers, spatial) for numbers in (width, step, pad)]
    return [
        _windows(size, out, numbers, counts_pad, divisor is None)
        for size, out, numbers in zip(sizes, outs, zip(*numbers_of, strict=True), strict=True)
    ]


@in_parts(aten.avg_pool2d_backward.default, aten.avg_pool3d_backward.default)
def avg_pool_backward(
    grad: Tensor,
    x: Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    ceil_mode: bool,
    count_include_pad: bool,
    divisor_override: int | None,
) -> Tensor:
    """The gradient of average pooling."""
    spatial = len(kernel_size) if len(kernel_size) > 1 else x.dim() - 2
    if not _is_static(grad, x, spatial=spatial):
        return NotImplemented
    sizes = x.shape[-spatial:]
    args = (kernel_size, stride, padding, count_include_pad)
    matrices = _pool_matrices(sizes, grad.shape[-spatial:], args, divisor_override)
    result = _mapped(grad, matrices, sizes, transposed=True)
    return result if divisor_override is None else result / divisor_override


@in_parts(aten.avg_pool1d.default, aten.avg_pool2d.default, aten.avg_pool3d.default)
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
    sizes, args = x.shape[-spatial:], (kernel_size, stride, padding, count_include_pad)
    outs = []
    for size, width, step, pad in zip(sizes, kernel_size, stride or kernel_size, each(padding, spatial), strict=True):
        out = -(-(size + 2 * pad - width) // step) + 1
        outs.append(out - 1 if (out - 1) * step >= size + pad else out)  # the last window starts within
    result = _mapped(x, _pool_matrices(sizes, outs, args, divisor_override), sizes)
    return result if divisor_override is None else result / divisor_override


def _adaptive(size: int, out: int) -> Rows:
    rows = []
    for place in range(out):
        first, last = place * size // out, -(-(place + 1) * size // out)
        rows.append(dict.fromkeys(range(first, last), 1 / (last - first)))
    return rows


@in_parts(aten._adaptive_avg_pool2d.default, aten._adaptive_avg_pool3d.default)
def adaptive_avg_pool(x: Tensor, output_size: Sequence[int]) -> Tensor:
    """Adaptive average pooling; where its windows are alike, it is left to its converter."""
    spatial = len(output_size)
    sizes = x.shape[-spatial:]
    if not _is_static(x, spatial=spatial) or all(size % out == 0 for size, out in zip(sizes, output_size, strict=True)):
        return NotImplemented
    return _mapped(x, [_adaptive(*pair) for pair in zip(sizes, output_size, strict=True)], sizes)


@in_parts(aten._adaptive_avg_pool2d_backward.default, aten._adaptive_avg_pool3d_backward.default)
def adaptive_avg_pool_backward(grad: Tensor, x: Tensor) -> Tensor:
    """Its gradient."""
    spatial = x.dim() - 2
    sizes, outs = x.shape[-spatial:], grad.shape[-spatial:]
    if not _is_static(grad, x, spatial=spatial) or all(s % out == 0 for s, out in zip(sizes, outs, strict=True)):
        return NotImplemented
    return _mapped(grad, [_adaptive(*pair) for pair in zip(sizes, outs, strict=True)], sizes, transposed=True)


def _to_one_place(x: Tensor, output_size: Sequence[int]) -> Tensor:
    """Adaptive average pooling; as a plain mean where one place is left, whose strides torch would set to others."""
    spatial = len(output_size)
    if spatial == 1:
        return _to_one_place(x.unsqueeze(-2), (1, *output_size)).squeeze(-2)
    if all(out == 1 for out in output_size):
        return x.mean(list(range(-spatial, 0)), keepdim=True)
    return (aten._adaptive_avg_pool2d if spatial == 2 else aten._adaptive_avg_pool3d)(x, output_size)


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
    windows = [[range(min(row), max(row) + 1) for row in _adaptive(*pair)] for pair in pairs]
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


def _scale(size: int, out: int, factor: float | None, align_corners: bool) -> np.float32:
    if align_corners:
        return np.float32((size - 1) / (out - 1) if out > 1 else 0.0)
    return np.float32(1 / factor if factor else size / out)


def _nearest(size: int, out: int, scale: np.float32, shift: float) -> Rows:
    return [{min(int((place + np.float32(shift)) * scale), size - 1): 1.0} for place in range(out)]


def _linear(size: int, out: int, scale: np.float32, align_corners: bool) -> Rows:
    rows: Rows = []
    for place in range(out):
        at = float(place * scale if align_corners else (place + np.float32(0.5)) * scale - np.float32(0.5))
        at = max(at, 0.0)
        first = min(int(at), size - 1)
        share = min(at - first, 1.0)
        row = {first: 1 - share}
        second = min(first + 1, size - 1)
        row[second] = row.get(second, 0.0) + share
        rows.append(row)
    return rows


def _cubic(size: int, out: int, scale: np.float32, align_corners: bool) -> Rows:
    rows: Rows = []
    for place in range(out):
        at = float(place * scale if align_corners else (place + np.float32(0.5)) * scale - np.float32(0.5))
        first = math.floor(at)
        row: dict[int, float] = {}
        for offset in range(-1, 3):
            near = min(max(first + offset, 0), size - 1)
            row[near] = row.get(near, 0.0) + _cubic_weight(abs(at - first - offset))
        rows.append(row)
    return rows


def _cubic_weight(distance: float, a: float = -0.75) -> float:
    if distance <= 1:
        return ((a + 2) * distance - (a + 3)) * distance * distance + 1
    return ((a * distance - 5 * a) * distance + 8 * a) * distance - 4 * a if distance < 2 else 0.0


def _interpolation(spatial: int, rows_of: Callable[..., Rows], aligns: bool) -> Callable[..., Any]:
    def function(x: Tensor, output_size: Any, *args: Any, **kwargs: Any) -> Any:
        align_corners = bool(kwargs.get("align_corners", args[0] if args else False)) if aligns else False
        given = args[1:] if aligns else args
        factors = kwargs.get("scale_factors", given[0] if given else None)
        sizes = x.shape[-spatial:]
        if not _is_static(x, spatial=spatial):
            raise NotImplementedError("interpolation of a symbolic size")
        pairs = zip(sizes, factors or (), strict=False)
        outs = list(output_size or [int(math.floor(size * factor)) for size, factor in pairs])
        matrices = []
        for axis, (size, out) in enumerate(zip(sizes, outs, strict=True)):
            scale = _scale(size, out, factors[axis] if factors else None, align_corners)
            matrices.append(rows_of(size, out, scale, align_corners))
        return _mapped(x, matrices, sizes)

    return function


def _nearest_at(shift: float) -> Callable[..., Rows]:
    return lambda size, out, scale, _: _nearest(size, out, scale, shift)


_INTERPOLATIONS: dict[OpOverload, Callable[..., Any]] = {
    aten.upsample_nearest1d.vec: _interpolation(1, _nearest_at(0), False),
    aten.upsample_nearest2d.vec: _interpolation(2, _nearest_at(0), False),
    aten.upsample_nearest3d.vec: _interpolation(3, _nearest_at(0), False),
    aten._upsample_nearest_exact1d.vec: _interpolation(1, _nearest_at(0.5), False),
    aten._upsample_nearest_exact2d.vec: _interpolation(2, _nearest_at(0.5), False),
    aten._upsample_nearest_exact3d.vec: _interpolation(3, _nearest_at(0.5), False),
    aten.upsample_linear1d.vec: _interpolation(1, _linear, True),
    aten.upsample_bilinear2d.vec: _interpolation(2, _linear, True),
    aten.upsample_trilinear3d.vec: _interpolation(3, _linear, True),
    aten.upsample_bicubic2d.vec: _interpolation(2, _cubic, True),
}


for _op, _function in _INTERPOLATIONS.items():
    in_parts(_op, above_autograd=True)(_function)
