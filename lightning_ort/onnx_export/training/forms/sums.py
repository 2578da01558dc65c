"""Sums at places that may repeat.

``ScatterND`` adds in several threads and loses parts of large sums (onnxruntime 1.19); ``ScatterElements`` adds in one.
"""

import functools
import math
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from lightning_ort.compiler.executors.ort.conversion import indexing
from lightning_ort.compiler.executors.ort.conversion.checks import front, inverse, static_axis, static_sizes
from lightning_ort.compiler.executors.ort.conversion.choice import where
from lightning_ort.compiler.executors.ort.conversion.graph import Value
from lightning_ort.compiler.executors.ort.conversion.metadata import Scalar, dtype_of, rank_of, shape_of
from lightning_ort.compiler.executors.ort.conversion.registry import Unsupported, form
from lightning_ort.compiler.executors.ort.conversion.shape import filled
from lightning_ort.onnx_export.training.graph import PortableGraph

aten = torch.ops.aten


def _add_rows(target: Value, rows: Value, updates: Value) -> Value:
    """Add rows of [n, width] to those of [rows, width] that a vector of n lists."""
    places = rows.unsqueeze(1).expand(updates.op("Shape"))
    return target.op("ScatterElements", places, updates, axis=0, reduction="add")


@form(aten.embedding_dense_backward.default)
def embedding_dense_backward(
    ctx: PortableGraph, node: fx.Node, grad: fx.Node, indices: fx.Node, num_weights: Any, padding_idx: Any, scaled: bool
) -> Value:
    """embedding_dense_backward(Tensor grad_output, Tensor indices, SymInt num_weights, SymInt padding_idx, bool scale_grad_by_freq) -> Tensor"""  # noqa: E501
    if scaled:
        raise Unsupported("an embedding's gradient scaled by frequency")
    shape = static_sizes(shape_of(node), "the gradient of an embedding")
    rows, grads = ctx.value(indices, torch.int64), ctx.value(grad)
    if padding_idx >= 0:
        grads = where((rows == padding_idx).unsqueeze(-1), 0, grads)
    zeros = filled(ctx, ctx.ints(shape), 0, dtype_of(node))
    return _add_rows(zeros, rows.reshape([-1]), grads.reshape([-1, shape[1]]))


@form(aten.index_add.default)
def index_add(
    ctx: PortableGraph, node: fx.Node, x: fx.Node, dim: int, index: fx.Node, source: fx.Node, *, alpha: Scalar = 1
) -> Value:
    """index_add(Tensor self, int dim, Tensor index, Tensor source, *, Scalar alpha=1) -> Tensor"""
    updates = ctx.value(source, dtype_of(x))
    if alpha != 1:
        updates = updates * alpha
    axis, rank = dim % rank_of(x), rank_of(x)
    rows = indexing.refusing_negative(ctx, index, x, dim)
    places = rows.unsqueeze(*(other for other in range(rank) if other != axis)).expand(updates.op("Shape"))
    return ctx.value(x).op("ScatterElements", places, updates, axis=axis, reduction="add")


@form(aten.index_put.default, aten._unsafe_index_put.default)
def index_put(
    ctx: PortableGraph,
    node: fx.Node,
    x: fx.Node,
    indices: Sequence[fx.Node | None],
    values: fx.Node,
    accumulate: bool = False,
) -> Value:
    """index_put(Tensor self, Tensor?[] indices, Tensor values, bool accumulate=False) -> Tensor"""
    mask = indices[0] if len(indices) == 1 else None
    if mask is not None and dtype_of(mask) in (torch.bool, torch.uint8) and not accumulate and rank_of(values) == 0:
        chosen = ctx.value(mask, torch.bool)
        beside = range(rank_of(mask), rank_of(x))
        return where(chosen.unsqueeze(*beside) if beside else chosen, ctx.value(values, dtype_of(x)), ctx.value(x))
    if not accumulate:
        return indexing.index_put(ctx, node, x, indices, values)
    (dims, tensors), rank = indexing.index_tensors(x, indices), rank_of(x)
    perm = front(dims, rank)
    sizes = [shape_of(x)[dim] for dim in perm]
    places = _flat_places(ctx, x, dims, tensors)
    moved = ctx.value(x).transpose(perm)
    added = max(rank_of(tensor) for tensor in tensors)
    shape = ctx.op("Concat", places.op("Shape"), moved.op("Shape", start=len(dims)), axis=0)
    back = indexing.result_order(dims, rank, added)
    if back != list(range(len(back))):
        shape = shape.op("Gather", back)
    updates = ctx.value(values, dtype_of(x)).expand(shape).transpose(inverse(back))
    width = _product(ctx, moved, range(len(dims), rank), sizes)
    flat = moved.reshape(ctx.op("Concat", ctx.ints([-1]), width, axis=0))
    rows = updates.reshape(ctx.op("Concat", ctx.ints([-1]), width, axis=0))
    written = _add_rows(flat, places.reshape([-1]), rows)
    return written.reshape(moved.op("Shape")).transpose(inverse(perm))


def _flat_places(ctx: PortableGraph, x: fx.Node, dims: Sequence[int], tensors: Sequence[fx.Node]) -> Value:
    """Positions in the indexed dimensions taken as one; negative ones count from the end."""
    total: Value | None = None
    for dim, tensor in zip(dims, tensors, strict=True):
        size = _size(ctx, x, dim)
        place = ctx.value(tensor, torch.int64)
        place = where(place < 0, place + size, place)
        total = place if total is None else total * size + place
    assert total is not None
    return total


def _size(ctx: PortableGraph, x: fx.Node, dim: int) -> Value:
    size = shape_of(x)[dim]
    return ctx.const(size, torch.int64) if isinstance(size, int) else ctx.number(size.node.expr)


def _product(ctx: PortableGraph, value: Value, dims: Sequence[int] | range, sizes: Sequence[Any]) -> Value:
    """The product of some sizes, as a vector of one."""
    numbers = [sizes[dim] for dim in dims]
    if all(isinstance(number, int) for number in numbers):
        return ctx.ints([math.prod(numbers)])
    parts = [value.op("Shape", start=dim, end=dim + 1) for dim in dims]
    return functools.reduce(operator.mul, parts)


@form(aten.unfold_backward.default)
def unfold_backward(
    ctx: PortableGraph, node: fx.Node, grad: fx.Node, input_sizes: Sequence[Any], dim: int, size: int, step: int
) -> Value:
    """unfold_backward(Tensor grad_in, SymInt[] input_sizes, int dim, int size, int step) -> Tensor"""
    axis, length = static_axis(node, dim, "windows")
    rank = rank_of(node)
    starts = range(0, length - size + 1, step)
    places = ctx.ints([first + offset for first in starts for offset in range(size)])
    # from [..., windows, ..., entries] to [..., windows x entries, ...]
    perm = [*range(axis + 1), rank, *range(axis + 1, rank)]
    moved = ctx.value(grad).transpose(perm)
    tail = moved.op("Shape", start=axis + 2)
    shape = ctx.op("Concat", moved.op("Shape", end=axis), ctx.ints([len(starts) * size]), tail, axis=0)
    updates = moved.reshape(shape)
    rows = places.unsqueeze(*(other for other in range(rank) if other != axis)).expand(updates.op("Shape"))
    zeros = ctx.const(0, dtype_of(node)).expand(ctx.sizes(input_sizes))
    return zeros.op("ScatterElements", rows, updates, axis=axis, reduction="add")


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


@form(aten.bincount.default)
def bincount(
    ctx: PortableGraph, node: fx.Node, x: fx.Node, weights: fx.Node | None = None, minlength: int = 0
) -> Value:
    """bincount(Tensor self, Tensor? weights=None, SymInt minlength=0) -> Tensor"""
    if not minlength:
        raise Unsupported("bincount without minlength: the size of its result depends on the data")
    places, dtype = ctx.value(x, torch.int64), dtype_of(node)
    counted = ctx.const(1, dtype).expand(places.op("Shape")) if weights is None else ctx.value(weights, dtype)
    zeros = filled(ctx, ctx.ints([minlength]), 0, dtype)
    return zeros.op("ScatterElements", places, counted, axis=0, reduction="add")


@form(aten.lift_fresh_copy.default, aten.lift_fresh.default)
def lift_fresh_copy(ctx: PortableGraph, node: fx.Node, x: fx.Node) -> Value:
    """lift_fresh_copy(Tensor self) -> Tensor"""
    return ctx.value(x)
