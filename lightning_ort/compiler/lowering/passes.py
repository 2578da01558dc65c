"""Passes over the joint graph, before and after it is split, and over each graph that is compiled."""

import functools
import math
import operator
from collections.abc import Collection
from typing import Any

import torch
from torch import fx

from lightning_ort.compat.aot_autograd import assign_to_backward, half_of, is_graph_argument
from lightning_ort.compat.torch_graphs import OpOverload, arguments_of, expression_of, fake_mode_of
from lightning_ort.compiler.graphs.nodes import (
    ANY_BYTE,
    IN_ORDER,
    MIXED,
    insert_call,
    is_random,
    is_static,
    is_view,
    memory_order,
    results_of,
)

aten, prims = torch.ops.aten, torch.ops.prims


def drop_detach(gm: fx.GraphModule) -> None:
    """Read a tensor instead of its detached alias, since nothing in the joint graph is differentiated again.

    A detached output of the graph stays, because AOTAutograd distinguishes outputs by identity.
    """
    for node in gm.graph.find_nodes(op="call_function", target=aten.detach.default):
        node.replace_all_uses_with(node.args[0], delete_user_cb=lambda user: user.op != "output")
        if not node.users:
            gm.graph.erase_node(node)


_WITH_STATISTICS = (
    aten._native_batch_norm_legit_functional.default,
    aten.native_batch_norm.default,
    aten.native_group_norm.default,
    aten.native_layer_norm.default,
)


def keep_statistics_wide(gm: fx.GraphModule) -> None:
    """Give the mean and deviation that a norm of a half type saves the dtype of float32 weights.

    On a CPU torch's fake kernels (2.13) give them that of the input, its real ones that of the weights.
    """
    for target in _WITH_STATISTICS:
        for node in gm.graph.find_nodes(op="call_function", target=target):
            source, weights = node.args[0], node.args[2 if target is aten.native_layer_norm.default else 1]
            if not isinstance(source, fx.Node) or not isinstance(weights, fx.Node):
                continue
            x, weight = source.meta["val"], weights.meta["val"]
            if x.device.type != "cpu" or x.dtype is weight.dtype:
                continue
            values = list(node.meta["val"])
            values[1:3] = [value.to(weight.dtype) for value in values[1:3]]
            node.meta["val"] = type(node.meta["val"])(values)
            for item in node.users:
                item.meta["val"] = values[item.args[1]]


def drop_casts(gm: fx.GraphModule) -> None:
    """Remove repeated casts of a tensor to the same dtype, and casts to a wider dtype and back.

    Autocast casts the input of an attention once for each projection. Casting float16 or bfloat16 to float32 and back
    changes nothing; casting float32 to a narrower dtype and back rounds, and stays.
    """
    made: dict[tuple[Any, ...], fx.Node] = {}
    casts = gm.graph.find_nodes(op="call_function", target=aten._to_copy.default)
    for node in casts:
        if set(node.kwargs) != {"dtype"}:
            continue
        source = node.args[0]
        replacement = _before_widening(node)
        if replacement is None:
            # separate for the halves of a joint graph: what the backward half casts itself need not be saved
            key = (source, node.kwargs["dtype"], half_of(node))
            replacement = made.setdefault(key, node)
        if replacement is not node:  # what is returned keeps memory of its own
            node.replace_all_uses_with(replacement, delete_user_cb=lambda user: not _is_returned(user))
    for node in reversed(casts):
        if not node.users:
            gm.graph.erase_node(node)


def _is_returned(user: fx.Node) -> bool:
    """Whether a node is the output, or reads a tensor for a view that reaches it."""
    return user.op == "output" or (is_view(user) and any(map(_is_returned, user.users)))


def _before_widening(node: fx.Node) -> fx.Node | None:
    """The tensor that a cast restores if it undoes a cast to a wider dtype, else ``None``."""
    widening = node.args[0]
    assert isinstance(widening, fx.Node)
    if widening.target is not aten._to_copy.default or set(widening.kwargs) != {"dtype"}:
        return None
    source = widening.args[0]
    assert isinstance(source, fx.Node)
    before, wide, after = (value.meta["val"] for value in (source, widening, node))
    if not (before.dtype == after.dtype and before.is_floating_point() and wide.is_floating_point()):
        return None
    exact = torch.finfo(wide.dtype).bits > torch.finfo(before.dtype).bits
    return source if exact and str(before.stride()) == str(after.stride()) else None


def recompute_views(gm: fx.GraphModule) -> None:
    """Repeat views in the backward graph instead of saving them, which would be copies in ONNX."""
    nodes = list(gm.graph.nodes)
    border = max(index for index, node in enumerate(nodes) if half_of(node) == "forward")
    position = {node: index for index, node in enumerate(nodes)}
    anchor = nodes[border + 1]
    for node in reversed(nodes[: border + 1]):
        later = [user for user in node.users if position.get(user, border + 1) > border and user.op != "output"]
        if not later or not is_view(node):
            continue
        with gm.graph.inserting_before(anchor):
            anchor = copy = gm.graph.node_copy(node)
        assign_to_backward(copy)
        node.replace_all_uses_with(copy, delete_user_cb=set(later).__contains__)


def save_contiguous(
    forward: fx.GraphModule, backward: fx.GraphModule, num_fwd_outputs: int, converted: Collection[OpOverload]
) -> None:
    """Save contiguous tensors for the backward pass, the only layout that ONNX Runtime writes and reads.

    The result of an elementwise op on a transposed tensor, such as an attention's scaled queries, is transposed in
    memory too. It would be copied to that layout in the forward pass and back in the backward pass. Where torch reads
    such a tensor, it gets the traced layout: its group norm returns wrong gradients for mixed layouts (2.13, CPU).
    """
    results = results_of(forward)
    placeholders = {node.name: node for node in backward.graph.find_nodes(op="placeholder")}
    transposed = [
        (index, node)
        for index, node in enumerate(results)
        if index >= num_fwd_outputs
        and isinstance(node, fx.Node)
        and _is_transposed(node, converted)
        and node.name in placeholders
        and any(user.target in converted or is_view(user) for user in placeholders[node.name].users)
    ]
    border = next(node for node in backward.graph.nodes if node.op != "placeholder")
    for index, node in transposed:
        with forward.graph.inserting_after(node):
            results[index] = insert_call(forward, aten.clone.default, node, memory_format=torch.contiguous_format)
        saved = placeholders[node.name]
        with backward.graph.inserting_before(border):
            as_before = backward.graph.call_function(IN_ORDER, (saved, memory_order(node.meta["val"])))
        as_before.meta = dict(saved.meta)
        saved.replace_all_uses_with(as_before, delete_user_cb=lambda user, mine=as_before: user is not mine)
        saved.meta["val"] = results[index].meta["val"]
    forward.graph.output_node().args = (tuple(results),)
    forward.recompile()
    backward.recompile()


def _is_transposed(node: fx.Node, converted: Collection[OpOverload]) -> bool:
    val = node.meta.get("val")
    if node.target not in converted or node.target is operator.getitem or not isinstance(val, torch.Tensor):
        return False
    return not is_view(node) and is_static(node) and not val.is_contiguous()


def separate_results(joint: fx.GraphModule) -> None:
    """Leave out of a sum of gradients what comes from results that are not differentiated.

    In eager such a result takes no part in the backward pass. AOTAutograd's graph gets zeros for its gradient, and zero
    times an infinite or undefined slope is NaN: a value that only a metric reads would spoil all gradients.
    """
    tangents = [node for node in joint.graph.find_nodes(op="placeholder") if half_of(node) == "backward"]
    if len(tangents) < 2:
        return
    flows: dict[fx.Node, frozenset[fx.Node]] = {node: frozenset([node]) for node in tangents}
    for node in joint.graph.nodes:
        if node.op in ("call_function", "output"):
            flows[node] = frozenset[fx.Node]().union(*(flows.get(source, ()) for source in node.all_input_nodes))
    masked: dict[fx.Node, fx.Node] = {}
    for node in [node for node in joint.graph.nodes if flows.get(node)]:
        for source in node.all_input_nodes:
            mine, value = flows.get(source), source.meta.get("val")
            if not mine or mine == flows[node] or not isinstance(value, torch.Tensor):
                continue
            if source not in masked:
                with joint.graph.inserting_before(node):
                    masked[source] = _where_differentiated(joint, source, sorted(mine, key=tangents.index))
            node.replace_input_with(source, masked[source])


def _where_differentiated(joint: fx.GraphModule, source: fx.Node, tangents: list[fx.Node]) -> fx.Node:
    """A part of a gradient, or zeros if no value of these tangents differs from zero."""

    def call(target: OpOverload, *args: Any, **kwargs: Any) -> fx.Node:
        node = insert_call(joint, target, *args, **kwargs)
        assign_to_backward(node)
        return node

    flags = [call(aten.any.default, call(aten.ne.Scalar, tangent, 0)) for tangent in tangents]
    flag = functools.reduce(functools.partial(call, aten.logical_or.default), flags)
    like = source.meta["val"]
    zero = call(aten.full.default, [], 0, dtype=like.dtype, device=like.device, pin_memory=False)
    return call(aten.where.self, flag, source, zero)


_SHAPES = {aten.view.default, aten._unsafe_view.default, aten.reshape.default}
_CAST = prims.convert_element_type.default


def views_before_casts(joint: fx.GraphModule) -> None:
    """Turn views of views into one, and a view of a cast of a view into a cast of a view.

    Hugging Face's models cast logits of three dimensions, and view them as two for the loss. torch's chunker follows a
    matrix product to its loss and back, in pieces of rows, and does not see through such a view (2.13).
    """
    for node in joint.graph.nodes:
        if _is_shape(node) and _is_shape(node.args[0]):
            node.replace_all_uses_with(_view(joint, node, node.args[0].args[0]))
        elif node.target is _CAST and _is_shape(node.args[0]):
            views = list(node.users)
            if all(_is_shape(view) and half_of(view) == half_of(node) for view in views):
                for view in views:
                    view.replace_all_uses_with(_view(joint, view, node.args[0].args[0], node.args[1]))
    joint.graph.eliminate_dead_code()


def _is_shape(node: fx.Node) -> bool:
    return node.target in _SHAPES and is_static(node)


def _view(joint: fx.GraphModule, view: fx.Node, source: fx.Node, dtype: torch.dtype | None = None) -> fx.Node:
    """Return what a view is of a source, and with a dtype its cast, in front of the view."""
    made = []
    with joint.graph.inserting_before(view):
        if view.meta["val"].shape != source.meta["val"].shape:
            made.append(source := insert_call(joint, aten.view.default, source, view.args[1]))
        if dtype is not None:
            made.append(source := insert_call(joint, _CAST, source, dtype))
    for node in made:
        node.meta = {**view.meta, "val": node.meta["val"]}
    return source


def draws_nothing(joint: fx.GraphModule) -> bool:
    """Return whether a graph draws no random numbers; attention without dropout draws none."""
    return all(arguments_of(node).get("dropout_p") == 0 for node in joint.graph.nodes if is_random(node))


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
