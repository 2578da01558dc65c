"""Operations of a model for everywhere where what runs in training will not do.

:mod:`~lightning_ort.compiler.executors.ort.conversion.registry`, the table that they are in, says which one holds.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from lightning_ort.compat.torch_graphs import OpOverload, decomposition_of, interpolated_size, without_tracing
from lightning_ort.compiler.executors.ort.conversion.elementary import where
from lightning_ort.compiler.executors.ort.conversion.graph import Value
from lightning_ort.compiler.executors.ort.conversion.metadata import dtype_of, static_sizes
from lightning_ort.compiler.executors.ort.conversion.registry import form, in_parts
from lightning_ort.compiler.executors.ort.conversion.shape import filled
from lightning_ort.compiler.lowering.decompositions import upsample_nearest2d
from lightning_ort.onnx_export.training.graph import PortableGraph

aten = torch.ops.aten

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


def _replication_pad(x: Tensor, padding: Sequence[int]) -> Tensor:
    for axis in range(len(padding) // 2):
        before, after = padding[2 * axis : 2 * axis + 2]
        dim, size = x.dim() - 1 - axis, x.shape[x.dim() - 1 - axis]
        places = [min(max(place, 0), size - 1) for place in range(-before, size + after)]
        x = x.index_select(dim, torch.tensor(places, device=x.device))
    return x


def _counts(x: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
    """How often each number is there, as metrics count classes."""
    if not minlength:
        raise NotImplementedError("bincount without minlength: the size of its result depends on the data")
    counted = torch.ones_like(x, dtype=torch.int64) if weights is None else weights.detach()
    return counted.new_zeros(minlength).index_add(0, x.long(), counted)


@in_parts(aten.embedding_renorm.default)
def _renormed(weight: Tensor, indices: Tensor, max_norm: float, norm_type: float) -> Tensor:
    """An embedding whose rows are scaled down where they are looked up and too long."""
    places = indices.reshape(-1)
    ones = torch.ones_like(places, dtype=weight.dtype)
    looked_up = torch.zeros_like(weight[:, :1]).squeeze(1).index_add(0, places, ones) > 0
    norms = torch.linalg.vector_norm(weight, norm_type, 1, keepdim=True)
    return torch.where(looked_up.unsqueeze(1) & (norms > max_norm), weight * (max_norm / (norms + 1e-7)), weight)


for _op in (aten.replication_pad1d.default, aten.replication_pad2d.default, aten.replication_pad3d.default):
    in_parts(_op, above_autograd=True)(_replication_pad)
in_parts(aten.bincount.default, above_autograd=True)(_counts)
in_parts(aten._cdist_forward.default, above_autograd=True)(_distances)
for _op in (aten.grid_sampler_2d.default, aten.affine_grid_generator.default):
    in_parts(_op, above_autograd=True)(decomposition_of(_op))


# average pooling and interpolation: linear along each dimension, so a product with a constant matrix for each

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


# tensors that are made empty, and a sum at repeated places, which runs leave to PyTorch


@form(aten.masked_scatter_backward.default)
def masked_scatter_backward(
    ctx: PortableGraph, node: fx.Node, grad: fx.Node, mask: fx.Node, sizes: Sequence[Any]
) -> Value:
    """masked_scatter_backward(Tensor grad_output, Tensor mask, SymInt[] sizes) -> Tensor"""
    shape = static_sizes(sizes, "the gradient of what was scattered")
    chosen = ctx.value(mask, torch.bool).expand(ctx.shape_tensor(grad)).reshape([-1])
    places = (chosen.cast(torch.int64).op("CumSum", 0) - 1).max(0)
    updates = where(chosen, ctx.value(grad).reshape([-1]), 0)
    zeros = filled(ctx, ctx.ints([math.prod(shape)]), 0, dtype_of(node))
    return zeros.op("ScatterElements", places, updates, axis=0, reduction="add").reshape(shape)


@form(aten.lift_fresh.default)
def lift_fresh(ctx: PortableGraph, node: fx.Node, x: fx.Node) -> Value:
    """lift_fresh(Tensor(a) self) -> Tensor(a)"""
    return ctx.value(x)


@form(aten.empty.memory_format, aten.empty_strided.default, aten.empty_permuted.default)
def empty(ctx: PortableGraph, node: fx.Node, size: Sequence[Any], *args: Any, **kwargs: Any) -> Value:
    """empty.memory_format(SymInt[] size, *, dtype?, layout?, device?, pin_memory?, memory_format?) -> Tensor"""
    # whoever reads what is not there gets zeros
    return filled(ctx, ctx.sizes(size), 0, dtype_of(node))


@form(aten.new_empty.default, aten.new_empty_strided.default)
def new_empty(ctx: PortableGraph, node: fx.Node, x: fx.Node, size: Sequence[Any], *args: Any, **kwargs: Any) -> Value:
    """new_empty(Tensor self, SymInt[] size, *, dtype?, layout?, device?, pin_memory?) -> Tensor"""
    return empty(ctx, node, size)
