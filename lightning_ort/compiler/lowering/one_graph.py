"""Makes one graph of a joint graph: forward pass, loss, backward pass and gradients, for :mod:`~..step_graph`."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from lightning_ort.compat.aot_autograd import half_of, is_higher_order
from lightning_ort.compat.torch_graphs import is_contiguous_or_false
from lightning_ort.compiler.graphs.nodes import (
    GRADIENTS_FROM,
    IN_ORDER,
    base_of,
    insert_call,
    is_static,
    memory_order,
    reached,
    results_of,
)

aten = torch.ops.aten


def loss_of(gm: fx.GraphModule) -> int | None:
    """Return which output of a captured step is its loss, if that is clear.

    It is the only scalar that needs a gradient, or the one that all other such scalars are part of.
    """
    outputs = results_of(gm)
    scalars = [index for index, node in enumerate(outputs) if _is_differentiable_scalar(node)]
    for index in scalars:
        parts = reached([outputs[index]], lambda node: node.all_input_nodes)
        if all(other == index or outputs[other] in parts for other in scalars):
            return index
    return None


def one_graph(joint: fx.GraphModule, num_fwd_outputs: int, loss_tangent: int) -> fx.GraphModule | None:
    """Make a joint graph one that computes the forward pass and the gradients of the loss.

    Args:
        joint: AOTAutograd's joint graph, which is edited in place. Its inputs are those of the forward pass and a
            tangent for each output that needs a gradient, its results the outputs and the gradient of each input,
            ``None`` where there is none.
        num_fwd_outputs: How many outputs there are.
        loss_tangent: Which of the tangents is the loss's.

    Returns:
        The graph with the same inputs, but one tangent, and the same results, or ``None`` if there is none: a gradient
        is sparse, or the graph holds an operation of a higher order.
    """
    if any(map(is_higher_order, joint.graph.nodes)):
        return None
    results = [node.meta["val"] for node in joint.graph.output_node().all_input_nodes]
    if any(isinstance(value, torch.Tensor) and value.layout is not torch.strided for value in results):
        return None  # sparse gradients
    tangents = [node for node in joint.graph.find_nodes(op="placeholder") if half_of(node) == "backward"]
    loss = tangents.pop(loss_tangent)
    if not _drop_zeros(joint, tangents, loss):
        return None
    for node in tangents:
        joint.graph.erase_node(node)
    _separate_gradients(joint, num_fwd_outputs)
    joint.graph.lint()
    joint.recompile()
    return joint


def _drop_zeros(gm: fx.GraphModule, tangents: list[fx.Node], loss: fx.Node) -> bool:
    """Remove what the tangents of other outputs contribute: a gradient is linear in them, and they are zero."""
    of_loss, of_others = (reached(starts, lambda node: node.users) for starts in ([loss], tangents))
    zeros = of_others - of_loss
    for node in list(gm.graph.nodes):
        if node not in of_loss or node.op == "output":
            continue
        for source in [source for source in node.all_input_nodes if source in zeros]:
            if (other := _other_addend(node, source)) is not None:
                node.replace_all_uses_with(other)
                break
            value = source.meta["val"]
            if not isinstance(value, torch.Tensor) or not is_static(source):
                return False
            with gm.graph.inserting_before(node):
                like = {"dtype": value.dtype, "device": value.device, "pin_memory": False}
                zero = insert_call(gm, aten.full.default, list(value.shape), 0, **like)
            node.replace_input_with(source, zero)
    output = gm.graph.output_node()
    output.args = (fx.map_arg(output.args[0], lambda node: None if node in zeros else node),)
    gm.graph.eliminate_dead_code()
    return all(not node.users for node in tangents)


def _other_addend(node: fx.Node, source: fx.Node) -> fx.Node | None:
    """The tensor that a sum with zero is equal to."""
    if node.target is not aten.add.Tensor or node.kwargs or len(node.args) != 2:
        return None
    others = [arg for arg in node.args if arg is not source]
    if len(others) != 1 or not isinstance(others[0], fx.Node):
        return None
    mine, its = node.meta["val"], others[0].meta["val"]
    alike = isinstance(its, torch.Tensor) and (mine.shape, mine.dtype) == (its.shape, its.dtype)
    return others[0] if alike else None


def _separate_gradients(gm: fx.GraphModule, num_fwd_outputs: int) -> None:
    """Give each gradient memory of its own, laid out as its parameter: it becomes ``.grad``, which is written to."""
    output = gm.graph.output_node()
    results = results_of(gm)
    inputs = gm.graph.find_nodes(op="placeholder")
    taken = {base_of(node) for node in results[:num_fwd_outputs] if isinstance(node, fx.Node)}
    for index in range(num_fwd_outputs, len(results)):
        node, of = results[index], inputs[index - num_fwd_outputs]
        if not isinstance(node, fx.Node):
            continue
        base, value, like = base_of(node), node.meta["val"], of.meta["val"]
        owned = base.op == "call_function" and base not in taken and (base is node or _is_whole(node, base))
        taken.add(base)
        if owned and str(value.stride()) == str(like.stride()):
            continue
        contiguous = is_contiguous_or_false(like)
        order = torch.contiguous_format if contiguous else torch.preserve_format
        with gm.graph.inserting_before(output):
            results[index] = copy = insert_call(gm, aten.clone.default, node, memory_format=order)
            if not contiguous:
                results[index] = insert_call(gm, IN_ORDER, copy, memory_order(like))
    output.args = (results,)
    output.meta[GRADIENTS_FROM] = num_fwd_outputs


def _is_whole(view: fx.Node, base: fx.Node) -> bool:
    val = base.meta["val"]
    return isinstance(val, torch.Tensor) and str(val.numel()) == str(view.meta["val"].numel())


def _is_differentiable_scalar(result: Any) -> bool:
    value = result.meta.get("example_value") if isinstance(result, fx.Node) else None
    return (
        isinstance(value, torch.Tensor) and value.requires_grad and value.dim() == 0 and value.dtype.is_floating_point
    )


def reaches_outputs(gm: fx.GraphModule, source: fx.Node, outputs: set[int]) -> bool:
    """Whether any of these results of a graph depends on the value of an input."""
    found, results = reached([source], _readers), results_of(gm)
    return any(results[index] in found for index in outputs)


def _readers(node: fx.Node) -> Iterator[fx.Node]:
    """Nodes whose values depend on a node's; a batch norm in training mode only updates its running statistics."""
    for user in node.users:
        if user.target is aten._native_batch_norm_legit_functional.default and user.args[5] is True:
            x, weight, bias, *statistics = user.args[:5]
            if node in statistics and node not in (x, weight, bias):
                yield from (item for item in user.users if item.args[1] in (3, 4))
                continue
        yield user
