"""Makes one graph of a joint graph: forward pass, loss, backward pass and gradients, for :mod:`~..step_graph`."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx

from lightning_ort.compat.autograd import half_of, is_higher_order, is_recomputed
from lightning_ort.compat.torch import is_contiguous_or_false
from lightning_ort.compiler.graphs.nodes import (
    GRADIENTS_FROM,
    IN_ORDER,
    base_of,
    insert_call,
    is_static,
    is_view,
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
        The graph with the same inputs, but one tangent, and the same results, or ``None`` if there is none: blocks are
        recomputed, a gradient is sparse, or the graph holds an operation of a higher order.
    """
    if any(is_recomputed(node) or is_higher_order(node) for node in joint.graph.nodes):
        return None
    results = [node.meta["val"] for node in joint.graph.output_node().all_input_nodes]
    if any(isinstance(value, torch.Tensor) and value.layout is not torch.strided for value in results):
        return None  # sparse gradients
    tangents = [node for node in joint.graph.find_nodes(op="placeholder") if half_of(node) == "backward"]
    loss = tangents.pop(loss_tangent)
    if not _drop_zeros(joint, tangents, loss) or not _is_linear(loss):
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


# What is linear in the gradient that it is given, as are views and, in their first argument, torch's own backward
# operations. A gradient's own backward function may do anything else with it, such as clip it.
_LINEAR_NAMES = (
    "_conj _conj_physical _fft_c2c _fft_c2r _fft_r2c _to_copy _unsafe_index _unsafe_index_put _unsafe_masked_index"
    " _unsafe_view add addmm baddbmm bmm cat clone complex constant_pad_nd convert_element_type convolution copy cumsum"
    " div dot flip gather getitem imag index index_add index_fill index_put index_select linalg_lu_solve"
    " linalg_solve_triangular masked_fill masked_scatter mean mm mul mv neg real repeat roll rsub scatter scatter_add"
    " select_scatter slice_scatter stack sub sum trace tril triu where"
)
_LINEAR = set(_LINEAR_NAMES.split())
# which arguments become parts of the result
_PARTS: dict[Any, tuple[int, ...]] = {
    **dict.fromkeys((aten.addmm, aten.baddbmm), (0,)),
    **dict.fromkeys((aten.add, aten.sub, aten.rsub, aten.slice_scatter, aten.select_scatter, aten.complex), (0, 1)),
    **dict.fromkeys((aten.masked_fill, aten.masked_scatter, aten.constant_pad_nd), (0, 2)),
    **dict.fromkeys((aten.index_put, aten._unsafe_index_put), (0, 2)),
    **dict.fromkeys((aten.scatter, aten.scatter_add, aten.index_add, aten.index_fill), (0, 3)),
    aten.where: (1, 2),
}
_ZEROS = (aten.zeros, aten.zeros_like, aten.new_zeros)
_FILL_VALUES = {aten.full: 1, aten.full_like: 1, aten.scalar_tensor: 0}  # which argument
_PRODUCTS = {
    **dict.fromkeys((aten.mul, aten.mm, aten.bmm, aten.dot, aten.mv, aten.convolution), 0),
    **dict.fromkeys((aten.addmm, aten.baddbmm), 1),
}


def _is_linear(loss: fx.Node) -> bool:
    """Whether the gradients are linear in that of the loss, as far as the operations between them tell."""
    of_loss = reached([loss], lambda node: (user for user in node.users if not _reads_only_sizes(user)))
    for node in of_loss:
        if node.op == "call_function" and not _is_linear_operation(node, of_loss):
            return False
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and not (value.is_floating_point() or value.is_complex()):
            return False
        if not all(part in of_loss or _is_zero(part) for part in _parts(node)):
            return False  # such as a penalty's own term
    return True


def _is_linear_operation(node: fx.Node, of_loss: set[fx.Node]) -> bool:
    op = _packet(node)
    name = getattr(op or node.target, "__name__", "")
    if "_backward" in name:
        return of_loss.isdisjoint(other for other in node.all_input_nodes if other is not node.args[0])
    if (op is aten.div and node.args[1] in of_loss) or node.kwargs.keys() & {"rounding_mode", "reduce"}:
        return False
    if op in _PRODUCTS and all(factor in of_loss for factor in node.args[_PRODUCTS[op] :][:2]):
        return False
    return is_view(node) or getattr(node.target, "is_view", False) or name in _LINEAR


def _packet(node: fx.Node) -> Any:
    return getattr(node.target, "overloadpacket", None)


def _reads_only_sizes(node: fx.Node) -> bool:
    name = getattr(_packet(node), "__name__", "")
    return name.endswith("_like") or name.startswith(("new_", "sym_"))


def _parts(node: fx.Node) -> Sequence[Any]:
    """The arguments that become parts of a node's result as they are."""
    op = _packet(node)
    if op in (aten.cat, aten.stack):
        return node.args[0]  # type: ignore[return-value]
    if op is aten.constant_pad_nd and len(node.args) < 3:
        return ()
    return [node.args[index] for index in _PARTS.get(op, ())]


def _is_zero(value: Any) -> bool:
    if isinstance(value, fx.Node):
        op = _packet(value)
        return op in _ZEROS or (op in _FILL_VALUES and bool(value.args[_FILL_VALUES[op]] == 0))
    return bool(value == 0)


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
