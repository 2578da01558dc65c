"""Passes over each graph that is compiled: a forward, a backward or an inference graph."""

import functools
import math
import operator
from typing import Any

import torch
from torch import fx

from lightning_ort.compat.torch import expression_of, fake_mode_of, is_graph_argument
from lightning_ort.compiler.graphs.layouts import memory_order
from lightning_ort.compiler.graphs.nodes import ANY_BYTE, MIXED, insert_call, is_view

aten = torch.ops.aten


def divide_as_eager(gm: fx.GraphModule) -> None:
    """Divide symbolic numbers as C++ does in eager's gradients, where dividing by 0 is not an error.

    The gradient of a variance of n numbers divides by n minus the correction.
    """
    for node in gm.graph.find_nodes(op="call_function", target=operator.truediv):
        node.target = quotient


def quotient(x: Any, y: Any) -> Any:
    """``x / y``, infinite or NaN where ``y`` is 0."""
    if isinstance(y, (int, float)) and y == 0:
        return math.copysign(math.inf, x) * math.copysign(1.0, y) if x else math.nan
    return x / y


def draw_masks_first(gm: fx.GraphModule) -> None:
    """Draw each dropout mask knowing only its size, so that drawing never splits an ORT region.

    The CPU kernel of ``native_dropout`` is ``input * mask.bernoulli_(1 - p) * scale``, and the same generator yields
    the same mask here. Kernels of other devices fuse both, so there it stays whole. In float32 ``mask * scale`` comes
    first, which rounds no more and saves a pass over memory; in half precision it would round the scale.
    """
    for node in gm.graph.find_nodes(op="call_function", target=aten.native_dropout.default):
        x, p, train = node.args
        val = x.meta["val"]
        sizes = _known_sizes(x, gm)
        if not train or p in (0, 1) or val.device.type != "cpu" or sizes is None:
            continue
        with fake_mode_of(val):  # type: ignore[union-attr]
            order = memory_order(torch.empty_like(val))  # in which eager fills the mask
        with gm.graph.inserting_before(node):
            call = functools.partial(insert_call, gm)
            shape = [sizes[dim] for dim in order]
            empty = call(aten.empty.memory_format, shape, dtype=torch.bool, device=val.device)
            mask = call(aten.bernoulli.p, empty, 1 - p)
            if order != sorted(order):
                mask = call(aten.permute.default, mask, [order.index(dim) for dim in range(len(order))])
            scale = 1 / (1 - p)
            if val.dtype is torch.float32 is torch.get_default_dtype():
                scaled = call(aten.mul.Tensor, x, call(aten.mul.Tensor, mask, scale))
            else:
                scaled = call(aten.mul.Tensor, call(aten.mul.Tensor, x, mask), scale)
        for user in list(node.users):  # all getitem
            user.replace_all_uses_with((scaled, mask)[user.args[1]])
            gm.graph.erase_node(user)
        gm.graph.erase_node(node)


def _known_sizes(x: fx.Node, gm: fx.GraphModule) -> list[Any] | None:
    """The sizes of a tensor as constants and placeholders, which are known before the tensor is computed."""
    symbols = {
        expression_of(node.meta["val"]): node
        for node in gm.graph.find_nodes(op="placeholder")
        if isinstance(node.meta["val"], torch.SymInt)
    }
    sizes = [size if isinstance(size, int) else symbols.get(expression_of(size)) for size in x.meta["val"].shape]
    return None if None in sizes else sizes


def cancel_transposes(gm: fx.GraphModule) -> None:
    """``t(t(x))`` is ``x``: autograd transposes every weight gradient twice."""
    for node in gm.graph.find_nodes(op="call_function", target=aten.t.default):
        source = node.args[0]
        if source.target is aten.t.default:
            node.replace_all_uses_with(source.args[0])
            gm.graph.erase_node(node)
            if not source.users:
                gm.graph.erase_node(source)


def drop_kept_dims(gm: fx.GraphModule) -> None:
    """``view(sum(x, dims, keepdim=True), sizes without dims)`` is ``sum(x, dims)``: autograd's bias gradient."""
    for node in gm.graph.find_nodes(op="call_function", target=aten.view.default):
        source = node.args[0]
        if source.target is not aten.sum.dim_IntList or len(source.args) < 3 or len(source.users) > 1:
            continue
        x, dims = source.args[:2]
        rank = x.meta["val"].dim()
        kept = [size for dim, size in enumerate(x.meta["val"].shape) if dim - rank not in dims and dim not in dims]
        if dims and source.args[2] is True and str(kept) == str(list(node.meta["val"].shape)):
            source.args = (x, dims)
            source.meta["val"] = node.meta["val"]
            node.replace_all_uses_with(source)
            gm.graph.erase_node(node)


def stack_selections(gm: fx.GraphModule) -> None:
    """Stack the gradients of ``x[0]``, ``x[1]``, ... instead of padding each with zeros and adding them.

    An attention computes its queries, keys and values by one projection, whose gradient is put together this way.
    """
    for node in reversed(gm.graph.find_nodes(op="call_function", target=aten.add.Tensor)):
        leaves = _added_selections(node)
        if len(leaves) < 2:
            continue
        sizes, dim = leaves[0].args[1:3]
        dim %= len(sizes)
        if not isinstance(sizes[dim], int) or len(leaves) != sizes[dim]:
            continue
        alike = all(leaf.args[1] == sizes and leaf.args[2] % len(sizes) == dim for leaf in leaves)
        parts = {leaf.args[3] % sizes[dim]: leaf.args[0] for leaf in leaves}
        if not alike or len(parts) != sizes[dim]:
            continue
        with gm.graph.inserting_before(node):
            stacked = insert_call(gm, aten.stack.default, [parts[index] for index in sorted(parts)], dim)
        node.replace_all_uses_with(stacked)
    replaced = {aten.add.Tensor, aten.select_backward.default}
    gm.graph.eliminate_dead_code(lambda node: node.op != "call_function" or node.target not in replaced)


def _added_selections(node: fx.Node, root: bool = True) -> list[Any]:
    """The ``select_backward`` nodes that a tree of additions sums; empty if it sums anything else."""
    if not root and len(node.users) > 1:
        return []
    if node.target is aten.select_backward.default:
        return [node]
    if node.target is not aten.add.Tensor or node.kwargs:
        return []
    added = [_added_selections(arg, False) if isinstance(arg, fx.Node) else [] for arg in node.args]
    return sum(added, []) if all(added) else []


def trust_no_view(gm: fx.GraphModule) -> None:
    """Replace ``view`` by ``reshape``, which copies if a tensor does not have the layout that was traced."""
    for view in (aten.view.default, aten._unsafe_view.default):
        for node in gm.graph.find_nodes(op="call_function", target=view):
            node.target = aten.reshape.default


def mark_foreign_booleans(gm: fx.GraphModule) -> None:
    """Mark booleans that were computed elsewhere: in ``bytes.view(torch.bool)`` any byte but 0 is true."""
    for node in gm.graph.nodes:
        val = node.meta.get("val")
        is_boolean = isinstance(val, torch.Tensor) and val.dtype is torch.bool
        if is_boolean and (is_graph_argument(node) or node.target is aten.view.dtype):
            node.meta[ANY_BYTE] = True


# what they get with a NaN makes the gradient of their weight, or of their other factor, NaN as well
_MIX = {
    aten.mm.default,
    aten.addmm.default,
    aten.bmm.default,
    aten.baddbmm.default,
    aten.convolution_backward.default,
    aten.native_batch_norm_backward.default,
    aten.native_group_norm_backward.default,
    aten.native_layer_norm_backward.default,
}
_KEEP_MIXED = {
    operator.getitem,
    aten.add.Tensor,
    aten.avg_pool2d_backward.default,
    aten.clone.default,
    aten.max_pool2d_with_indices_backward.default,
}
_MASKS = {
    aten.threshold_backward.default,
    aten.hardtanh_backward.default,
    aten.hardshrink_backward.default,
    aten.softshrink_backward.default,
}


def mark_mixed_gradients(gm: fx.GraphModule) -> None:
    """Mark what sets parts of a gradient to 0, where that may be a product with 0 and 1, which takes less time.

    A NaN times 0 is NaN and not 0. That matters where nothing but what is set to 0 would be NaN, as in the gradient of
    ``x.relu().sqrt()``, and not in a gradient from a matrix product: a NaN in it is in those of its factors, too.
    """
    mixed: set[fx.Node] = set()
    for node in gm.graph.nodes:
        if node.op != "call_function":
            continue
        sources = node.all_input_nodes if node.target is aten.add.Tensor else node.all_input_nodes[:1]
        keeps = (node.target in _KEEP_MIXED or is_view(node)) and sources and mixed.issuperset(sources)
        if node.target in _MIX or keeps:
            mixed.add(node)
        elif node.target in _MASKS and node.args[0] in mixed:
            node.meta[MIXED] = True
