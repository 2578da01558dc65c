"""Backward operations, and what is linear along a dimension, as functions of other operations."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_ort.compat.torch import OpOverload

aten = torch.ops.aten
DECOMPOSED: dict[OpOverload, Callable[..., Any]] = {}


def _instead_of(*overloads: OpOverload) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        DECOMPOSED.update(dict.fromkeys(overloads, function))
        return function

    return register


# convolution


@_instead_of(aten.convolution_backward.default)
def convolution_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    bias_sizes: Sequence[int] | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    output_mask: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of a convolution as convolutions."""
    spatial = x.dim() - 2
    stride, padding, dilation = (_each(numbers, spatial) for numbers in (stride, padding, dilation))
    of_x = of_weight = of_bias = None
    if output_mask[0]:
        of_x = _input_gradient(grad, x, weight, stride, padding, dilation, transposed, groups)
    if output_mask[1]:
        source, result = (grad, x) if transposed else (x, grad)
        of_weight = _weight_gradient(source, result, weight.shape[2:], stride, padding, dilation, groups)
    if output_mask[2]:
        of_bias = grad.sum([dim for dim in range(grad.dim()) if dim != 1])
    return of_x, of_weight, of_bias


def _each(numbers: Sequence[int], spatial: int) -> list[int]:
    return list(numbers) * spatial if len(numbers) == 1 else list(numbers)


def _input_gradient(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    groups: int,
) -> Tensor:
    none = [0] * len(stride)
    if transposed:
        return aten.convolution(grad, weight, None, stride, padding, dilation, False, none, groups)
    # what no window reached at the end is not in the result: add as much as there may be, and cut
    rest = [
        size - ((out - 1) * step - 2 * pad + stretch * (width - 1) + 1)
        for size, out, step, pad, stretch, width in zip(
            x.shape[2:], grad.shape[2:], stride, padding, dilation, weight.shape[2:], strict=True
        )
    ]
    is_known = all(isinstance(size, int) for size in rest)
    more = rest if is_known else [step - 1 for step in stride]
    result = aten.convolution(grad, weight, None, stride, padding, dilation, True, more, groups)
    return result if is_known else _cut(result, x.shape[2:])


def _cut(x: Tensor, sizes: Sequence[int]) -> Tensor:
    for dim, size in enumerate(sizes, 2):
        if not isinstance(size, int) or x.shape[dim] != size:
            x = aten.slice.Tensor(x, dim, 0, size)
    return x


def _weight_gradient(
    x: Tensor,
    grad: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> Tensor:
    """A convolution of the input by the gradient, where images take the place of channels."""
    images, channels, *sizes = x.shape
    order = range(2, x.dim())
    if groups == 1:
        swapped = x.permute(1, 0, *order)
    else:
        parts = x.reshape(images, groups, channels // groups, *sizes)
        swapped = parts.permute(2, 1, 0, *range(3, parts.dim())).reshape(channels // groups, groups * images, *sizes)
    filters = grad.permute(1, 0, *order)
    none = [0] * len(sizes)
    found = aten.convolution(swapped, filters, None, dilation, padding, stride, False, none, groups)
    return _cut(found, kernel).permute(1, 0, *order)
