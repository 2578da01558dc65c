"""Passes over the joint graph, before it is split into forward and backward, and over the two halves."""

import operator
from collections.abc import Collection
from typing import Any

import torch
from torch import fx

from lightning_ort.compat.torch import OpOverload, assign_to_backward, half_of
from lightning_ort.compiler.graphs.layouts import IN_ORDER, memory_order
from lightning_ort.compiler.graphs.nodes import insert_call, is_static, is_view, results_of

aten = torch.ops.aten


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
    """Whether a node with a converter computes a tensor that is not contiguous."""
    val = node.meta.get("val")
    if node.target not in converted or node.target is operator.getitem or not isinstance(val, torch.Tensor):
        return False
    return not is_view(node) and is_static(node) and not val.is_contiguous()
