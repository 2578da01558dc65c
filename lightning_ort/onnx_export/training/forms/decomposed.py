"""Backward operations, and what is linear along a dimension, as functions of other operations."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_ort.compat.torch import OpOverload, decomposition_of
from lightning_ort.compiler.executors.ort.conversion.registry import in_parts

aten = torch.ops.aten
_SHIFT = 8  # where Stirling's series are as right as float32 can be

# convolution


@in_parts(aten.convolution_backward.default)
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
    stride, padding, dilation = (each(numbers, spatial) for numbers in (stride, padding, dilation))
    none, kernel = [0] * spatial, weight.shape[2:]
    of_x = of_weight = of_bias = None
    if output_mask[0] and transposed:
        of_x = aten.convolution(grad, weight, None, stride, padding, dilation, False, none, groups)
    elif output_mask[0]:
        # what no window reached at the end is not in the result: add as much as there may be, and cut
        sizes = zip(x.shape[2:], grad.shape[2:], stride, padding, dilation, kernel, strict=True)
        rest = [
            size - ((out - 1) * step - 2 * pad + stretch * (width - 1) + 1)
            for size, out, step, pad, stretch, width in sizes
        ]
        is_known = all(isinstance(size, int) for size in rest)
        more = rest if is_known else [step - 1 for step in stride]
        of_x = aten.convolution(grad, weight, None, stride, padding, dilation, True, more, groups)
        of_x = of_x if is_known else _cut(of_x, x.shape[2:])
    if output_mask[1]:  # a convolution of the input by the gradient, where images take the place of channels
        source, result = (grad, x) if transposed else (x, grad)
        if groups > 1:
            images, channels, *lengths = source.shape
            parts = source.reshape(images, groups, channels // groups, *lengths).transpose(0, 2)
            swapped = parts.reshape(channels // groups, groups * images, *lengths)
        else:
            swapped = source.transpose(0, 1)
        filters = result.transpose(0, 1)
        found = aten.convolution(swapped, filters, None, dilation, padding, stride, False, none, groups)
        of_weight = _cut(found, kernel).transpose(0, 1)
    if output_mask[2]:
        of_bias = grad.sum([dim for dim in range(grad.dim()) if dim != 1])
    return of_x, of_weight, of_bias


def each(numbers: Sequence[int], spatial: int) -> list[int]:
    """Return one number for each dimension; a single one stands for all."""
    return list(numbers) * spatial if len(numbers) == 1 else list(numbers)


def _cut(x: Tensor, sizes: Sequence[int]) -> Tensor:
    for dim, size in enumerate(sizes, 2):
        if not isinstance(size, int) or x.shape[dim] != size:
            x = aten.slice.Tensor(x, dim, 0, size)
    return x


# others, whose backward ops have no form


def _distances(x: Tensor, y: Tensor, p: float, compute_mode: int | None = None) -> Tensor:
    return torch.linalg.vector_norm(x.unsqueeze(-2) - y.unsqueeze(-3), p, -1)


def _distances_of_pairs(x: Tensor, p: float = 2) -> Tensor:
    first = [i for i in range(x.shape[0]) for _ in range(i + 1, x.shape[0])]
    second = [j for i in range(x.shape[0]) for j in range(i + 1, x.shape[0])]
    return torch.linalg.vector_norm(x[first] - x[second], p, -1)


def _product(x: Tensor, dim: int | None = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Tensor:
    """A product by halves, whose gradient is right at zeros."""
    x = x if dtype is None else x.to(dtype)
    if x.dim() == 0:
        return x * 1
    if not all(isinstance(size, int) for size in x.shape) or not x.dtype.is_floating_point:
        raise NotImplementedError("the product of a symbolic size, or of integers")
    if dim is None:
        return _product(x.reshape(-1), 0)
    if x.shape[dim] == 0:
        return torch.ones_like(x.sum(dim, keepdim))
    while (size := x.shape[dim]) > 1:
        half = size // 2
        pairs = x.narrow(dim, 0, half) * x.narrow(dim, half, half)
        x = pairs if size == 2 * half else torch.cat([pairs, x.narrow(dim, size - 1, 1)], dim)
    return x if keepdim else x.squeeze(dim)


def _cumulative(combine: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    """Return what combines each entry with all before it, in steps that double."""

    def function(x: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Tensor:
        x, reach = (x if dtype is None else x.to(dtype)), 1
        while x.dim() and reach < x.shape[dim]:
            rest = x.shape[dim] - reach
            combined = combine(x.narrow(dim, reach, rest), x.narrow(dim, 0, rest))
            x = torch.cat([x.narrow(dim, 0, reach), combined], dim)
            reach *= 2
        return x * 1

    return function


def _replication_pad(x: Tensor, padding: Sequence[int]) -> Tensor:
    for axis in range(len(padding) // 2):
        before, after = padding[2 * axis : 2 * axis + 2]
        dim, size = x.dim() - 1 - axis, x.shape[x.dim() - 1 - axis]
        places = [min(max(place, 0), size - 1) for place in range(-before, size + after)]
        x = x.index_select(dim, torch.tensor(places, device=x.device))
    return x


def _places_among(bounds: Tensor, x: Tensor, right: bool) -> Tensor:
    """How many sorted numbers are below each entry, or with ``right`` not above it; NaN is above all."""
    bounds, x = bounds.unsqueeze(-2), x.unsqueeze(-1)
    return (~(bounds > x) if right else ~(bounds >= x)).sum(-1)


@in_parts(aten.bucketize.Tensor)
def _bucketized(x: Tensor, bounds: Tensor, *, out_int32: bool = False, right: bool = False) -> Tensor:
    found = _places_among(bounds, x, right)
    return found.to(torch.int32) if out_int32 else found


@in_parts(aten.searchsorted.Tensor)
def _searched(
    bounds: Tensor,
    x: Tensor,
    *,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: Tensor | None = None,
) -> Tensor:
    bounds = bounds if sorter is None else bounds.gather(-1, sorter)
    return _bucketized(x, bounds, out_int32=out_int32, right=right or side == "right")


def _log_gamma(x: Tensor) -> Tensor:
    """Stirling's series, eight further on, in float64, since large numbers cancel; mirrored below zero."""
    x = x if x.is_floating_point() else x.float()
    y = torch.where(x > 0, x, 1 - x).double()
    z = y + _SHIFT
    found = (z - 0.5) * z.log() - z + math.log(2 * math.pi) / 2
    found = found + 1 / (12 * z) - 1 / (360 * z**3) + 1 / (1260 * z**5) - 1 / (1680 * z**7)
    found = (found - sum((y + step).log() for step in range(_SHIFT))).to(x.dtype)
    below = torch.where(x > 0, 0.5, x)  # elsewhere its gradient may be infinite
    return torch.where(x > 0, found, math.log(math.pi) - (math.pi * below).sin().abs().log() - found)


def _digamma(x: Tensor) -> Tensor:
    """The gradient of :func:`_log_gamma`, by its own series."""
    x = x if x.is_floating_point() else x.float()
    y = torch.where(x > 0, x, 1 - x).double()
    z = y + _SHIFT
    found = z.log() - 1 / (2 * z) - 1 / (12 * z**2) + 1 / (120 * z**4) - 1 / (252 * z**6) + 1 / (240 * z**8)
    found = (found - sum(1 / (y + step) for step in range(_SHIFT))).to(x.dtype)
    below = math.pi * torch.where(x > 0, 0.5, x)
    return torch.where(x > 0, found, found - math.pi * below.cos() / below.sin())


@in_parts(aten.embedding_renorm.default)
def _renormed(weight: Tensor, indices: Tensor, max_norm: float, norm_type: float) -> Tensor:
    """An embedding whose rows are scaled down where they are looked up and too long."""
    places = indices.reshape(-1)
    ones = torch.ones_like(places, dtype=weight.dtype)
    looked_up = torch.zeros_like(weight[:, :1]).squeeze(1).index_add(0, places, ones) > 0
    norms = torch.linalg.vector_norm(weight, norm_type, 1, keepdim=True)
    return torch.where(looked_up.unsqueeze(1) & (norms > max_norm), weight * (max_norm / (norms + 1e-7)), weight)


def _bilinear(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    found = torch.einsum("...i,oij,...j->...o", x, weight, y)
    return found if bias is None else found + bias


def _with_bags(
    weight: Tensor,
    indices: Tensor,
    offsets: Tensor,
    scale_grad_by_freq: bool = False,
    mode: int = 0,
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int = -1,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Sums (0), means (1) or maxima (2) of rows of an embedding, in bags that begin at these places."""
    if scale_grad_by_freq:  # the CPU's kernel takes the counts of other rows (torch 2.13)
        raise NotImplementedError("EmbeddingBag(scale_grad_by_freq=True): what its gradient is depends on the device")
    begun = indices.new_zeros(indices.shape[0] + 1).index_add(0, offsets, torch.ones_like(offsets))
    bags = begun.cumsum(0)[:-1] - 1
    counted = (indices != padding_idx).to(weight.dtype)
    share = counted if per_sample_weights is None else counted * per_sample_weights
    rows = torch.embedding(weight, indices)
    counts = rows.new_zeros(offsets.shape[0]).index_add(0, bags, counted)
    none = rows.new_zeros(offsets.shape[0], weight.shape[1])
    if mode == 2:
        found = _largest_of_bags(rows, bags, counted, none)
    else:
        found = none.index_add(0, bags, rows * share.unsqueeze(1))
        found = found / counts.clamp(min=1).unsqueeze(1) if mode else found
    # the last one may be what is in none
    return (found[:-1] if include_last_offset else found), bags, counts, bags


@in_parts(aten.embedding_dense_backward.default)
def _gradient_by_frequency(
    grad: Tensor, indices: Tensor, count: int, padding_idx: int, scale_grad_by_freq: bool
) -> Tensor:
    """The gradient of an embedding, where each row's may be divided by how often it is looked up."""
    if not scale_grad_by_freq:
        return NotImplemented
    places = indices.reshape(-1)
    often = grad.new_zeros(count).index_add(0, places, grad.new_ones(places.shape))
    return aten.embedding_dense_backward(grad / often[indices].unsqueeze(-1), indices, count, padding_idx, False)


def _multilabel_margin_loss(x: Tensor, target: Tensor, reduction: int) -> tuple[Tensor, Tensor]:
    """A hinge of each label that is none against each that is one, up to the first -1 (torch's own parts differ)."""
    rows, labels = torch.atleast_2d(x), torch.atleast_2d(target)
    counted = ((labels < 0).long().cumsum(-1) == 0).to(x.dtype)
    own = torch.where(counted > 0, labels, 0)
    is_label = torch.zeros_like(rows.detach()).scatter_reduce(1, own, counted, "amax")
    hinges = (1 - rows.gather(1, own).unsqueeze(2) + rows.unsqueeze(1)).clamp(min=0)
    found = (hinges * counted.unsqueeze(2) * (1 - is_label).unsqueeze(1)).sum((1, 2)) / rows.shape[1]
    found = found.mean() if reduction == 1 else found.sum() if reduction == 2 else found.reshape(x.shape[:-1])
    return found, is_label.reshape(x.shape)


def _largest_of_bags(rows: Tensor, bags: Tensor, counted: Tensor, none: Tensor) -> Tensor:
    """The largest number of each column in each bag; the first of equal ones has the gradient."""
    to, values = bags.unsqueeze(1).expand(rows.shape), rows.detach()
    values = torch.where(counted.unsqueeze(1) > 0, values, -torch.inf)
    largest = (none - torch.inf).scatter_reduce(0, to, values, "amax")
    places = torch.ones_like(values).cumsum(0) - 1
    places = torch.where(values == largest.gather(0, to), places, torch.inf)
    first = (none + torch.inf).scatter_reduce(0, to, places, "amin")
    found = rows.gather(0, torch.where(largest == -torch.inf, 0, first).long())
    return torch.where(largest == -torch.inf, 0, found)  # of an empty bag


def _best_so_far(is_better: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return what finds the best of each entry and all before it, the last if several are, in steps that double."""

    def function(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
        places = torch.zeros_like(x, dtype=torch.int64)
        if x.dim() == 0:
            return x * 1, places
        places, reach = torch.ones_like(places).cumsum(dim) - 1, 1
        while reach < x.shape[dim]:
            rest = x.shape[dim] - reach
            best = x.detach().gather(dim, places)
            before, now = best.narrow(dim, 0, rest), best.narrow(dim, reach, rest)
            is_before = is_better(before, now) | (before.isnan() & ~now.isnan())
            moved = torch.where(is_before, places.narrow(dim, 0, rest), places.narrow(dim, reach, rest))
            places = torch.cat([places.narrow(dim, 0, reach), moved], dim)
            reach *= 2
        return x.gather(dim, places), places

    return function


def _entries(x: Tensor, places: Tensor, dim: int, keepdim: bool) -> tuple[Tensor, Tensor]:
    """The one entry at each place along a dimension, and the places."""
    found = x.gather(dim, places)
    return (found, places) if keepdim else (found.squeeze(dim), places.squeeze(dim))


def _kth_of(x: Tensor, k: int, dim: int = -1, keepdim: bool = False, nan: bool = False) -> tuple[Tensor, Tensor]:
    """The k-th smallest along a dimension, where NaN are the largest, or with ``nan`` a NaN if there is one."""
    if x.dim() == 0:
        return x * 1, torch.zeros_like(x, dtype=torch.int64)
    places = x.detach().sort(dim=dim)[1].narrow(dim, k - 1, 1)
    if nan:
        is_nan = x.isnan()
        places = torch.where(is_nan.any(dim, True), is_nan.float().argmax(dim, True), places)
    return _entries(x, places, dim, keepdim)


def _median_along(x: Tensor, dim: int, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    return _kth_of(x, (x.shape[dim] + 1) // 2 if x.dim() else 1, dim, keepdim, nan=True)


def _nanmedian_along(x: Tensor, dim: int, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    if x.dim() == 0:
        return x * 1, torch.zeros_like(x, dtype=torch.int64)
    middle = ((~x.isnan()).sum(dim, True) - 1).clamp(min=0) // 2
    places = x.detach().sort(dim=dim)[1].gather(dim, middle)
    return _entries(x, places, dim, keepdim)


def _mode(x: Tensor, dim: int = -1, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    """The smallest of the most frequent along a dimension, and the last place where it is."""
    if x.dim() == 0:
        return x * 1, torch.zeros_like(x, dtype=torch.int64)
    values = x.detach().movedim(dim, -1)
    counts = (values.unsqueeze(-1) == values.unsqueeze(-2)).sum(-1)
    order = values.sort(dim=-1, stable=True)[1]
    counts = counts.gather(-1, order)
    values, frequent = values.gather(-1, order), counts == counts.amax(-1, True)
    first = values.gather(-1, frequent.float().argmax(-1, True))  # of the sorted ones
    ranks = torch.ones_like(order).cumsum(-1)
    last = torch.where(values == first, ranks, 0).float().argmax(-1, True)
    places = order.gather(-1, last).movedim(-1, dim)
    return _entries(x, places, dim, keepdim)


def _middle(x: Tensor, along: Callable[..., tuple[Tensor, Tensor]]) -> Tensor:
    """The lower median of all; its gradient is shared by those that are equal to it."""
    flat = x.reshape(-1)
    found = along(flat.detach(), 0)[0]
    is_it = (flat == found) | (flat.isnan() & found.isnan())
    own = torch.where(is_it, flat - flat.detach(), 0)  # zeros that have the gradient
    return found + own.sum() / is_it.sum()


def _pivots(x: Tensor) -> tuple[Tensor, list[Tensor]]:
    """What stands on the diagonal after an elimination with the largest pivots, and the sign of swapping rows."""
    sign, found = torch.ones_like(x[..., 0, 0]), []
    while size := x.shape[-1]:
        place = x[..., 0].detach().abs().argmax(-1, keepdim=True)
        row = x.gather(-2, place.unsqueeze(-1).expand(*place.shape, size)).squeeze(-2)
        sign = torch.where(place.squeeze(-1) % 2 == 1, -sign, sign)
        found.append(row[..., 0])
        others = torch.arange(size - 1, device=x.device)
        others = others + (others >= place)
        rest = x.gather(-2, others.unsqueeze(-1).expand(*others.shape, size))
        x = (rest - rest[..., :1] * (row / row[..., :1]).unsqueeze(-2))[..., 1:]
    return sign, found


def _determinant(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    sign, found = _pivots(x)
    return sign * _product(torch.stack(found, -1), -1), x, sign


def _log_determinant(x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    sign, found = _pivots(x)
    pivots = torch.stack(found, -1)
    return sign * _product(pivots.detach().sign(), -1), pivots.abs().log().sum(-1), x, sign


def _of_each(op: OpOverload) -> Callable[..., list[Tensor]]:
    def run(*args: Any, **kwargs: Any) -> list[Tensor]:
        return [
            op(*(each[index] if isinstance(each, (list, tuple)) else each for each in args), **kwargs)
            for index in range(len(args[0]))
        ]

    return run


for _name in ("add", "sub", "mul", "div", "lerp", "addcmul", "addcdiv", "neg", "sqrt", "pow"):
    _many, _one = getattr(aten, f"_foreach_{_name}"), getattr(aten, _name)
    for _overload in ("default", "Scalar", "List", "Tensor", "ScalarList"):
        if _overload in _many.overloads():
            in_parts(getattr(_many, _overload))(_of_each(_one))

in_parts(aten.logcumsumexp.default, above_autograd=True)(_cumulative(torch.logaddexp))
in_parts(aten.prod.default, above_autograd=True)(_product)
in_parts(aten.prod.dim_int, above_autograd=True)(_product)
in_parts(aten.cumprod.default, above_autograd=True)(_cumulative(torch.mul))
for _op in (aten.replication_pad1d.default, aten.replication_pad2d.default, aten.replication_pad3d.default):
    in_parts(_op, above_autograd=True)(_replication_pad)
in_parts(aten.lgamma.default, above_autograd=True)(_log_gamma)
in_parts(aten.digamma.default, above_autograd=True)(_digamma)
in_parts(aten._cdist_forward.default, above_autograd=True)(_distances)
in_parts(aten._pdist_forward.default, above_autograd=True)(_distances_of_pairs)
for _op in (aten.grid_sampler_2d.default, aten.affine_grid_generator.default):
    in_parts(_op, above_autograd=True)(decomposition_of(_op))
for _op in (aten._embedding_bag.default, aten._embedding_bag_forward_only.default):
    in_parts(_op, above_autograd=True)(_with_bags)
in_parts(aten.bilinear.default, above_autograd=True)(_bilinear)
in_parts(aten.cummax.default, above_autograd=True)(_best_so_far(torch.gt))
in_parts(aten.cummin.default, above_autograd=True)(_best_so_far(torch.lt))
in_parts(aten.kthvalue.default, above_autograd=True)(_kth_of)
in_parts(aten.median.default, above_autograd=True)(partial(_middle, along=_median_along))
in_parts(aten.median.dim, above_autograd=True)(_median_along)
in_parts(aten.nanmedian.default, above_autograd=True)(partial(_middle, along=_nanmedian_along))
in_parts(aten.nanmedian.dim, above_autograd=True)(_nanmedian_along)
in_parts(aten.mode.default, above_autograd=True)(_mode)
in_parts(aten.multilabel_margin_loss_forward.default, above_autograd=True)(_multilabel_margin_loss)
in_parts(aten._linalg_det.default, above_autograd=True)(_determinant)
in_parts(aten._linalg_slogdet.default, above_autograd=True)(_log_determinant)
