"""Facts about nodes of an FX graph, about the order of their tensors' dimensions in memory, and what it returns."""

import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch import fx

from lightning_ort.compat.torch_graphs import OpOverload, fake_mode_of, hint_of, is_contiguous_or_false


def int_hint(size: Any) -> int:
    """A size as a number; for a symbolic size, the one that was seen when the graph was traced."""
    return size if isinstance(size, int) else int(hint_of(size))


def memory_order(x: torch.Tensor) -> list[int]:
    """The dimensions of a dense tensor, slowest first."""
    if is_contiguous_or_false(x):
        return list(range(x.dim()))
    steps = [(int_hint(stride), int_hint(size)) for stride, size in zip(x.stride(), x.shape, strict=True)]
    return sorted(range(x.dim()), key=steps.__getitem__, reverse=True)


def in_order(x: torch.Tensor, order: list[int]) -> torch.Tensor:
    """A strided tensor made dense with its dimensions in this order, slowest first; itself if it already is."""
    inverse = sorted(range(len(order)), key=order.__getitem__)
    return x.permute(order).contiguous().permute(inverse)


def traced_order(traced: Any) -> list[int] | None:
    """The order of a traced tensor's dimensions in memory; ``None`` if unknown, or if it has gaps or overlaps."""
    if not isinstance(traced, torch.Tensor) or traced.layout is not torch.strided:
        return None
    try:
        order = memory_order(traced)
        dense = _is_dense(list(map(int_hint, traced.shape)), list(map(int_hint, traced.stride())), order)
    except TypeError:  # a size that depends on data has no hint
        return None
    return order if dense else None


def is_in_order(x: torch.Tensor, order: Sequence[int]) -> bool:
    """Whether a tensor is dense with its dimensions in this order, or has another layout or rank."""
    return x.layout is not torch.strided or x.dim() != len(order) or _is_dense(x.shape, x.stride(), order)


def was_in_order(traced: torch.Tensor, order: Sequence[int]) -> bool:
    """The same of a traced tensor, whose sizes may be symbolic."""
    return _is_dense(list(map(int_hint, traced.shape)), list(map(int_hint, traced.stride())), order)


def _is_dense(sizes: Sequence[int], strides: Sequence[int], order: Sequence[int]) -> bool:
    """Whether dimensions follow each other in memory in this order; those of size 1 may be anywhere."""
    step = 1
    for dim in reversed(order):
        if sizes[dim] != 1:
            if strides[dim] != step:
                return False
            step *= sizes[dim]
    return True


# the same as an op, for graphs; to ONNX Runtime, which has only one layout, it is a view
_LIBRARY = torch.library.Library("lightning_ort", "FRAGMENT")
_LIBRARY.define("in_order(Tensor x, int[] order) -> Tensor")
_LIBRARY.impl("in_order", in_order, "CompositeExplicitAutograd")
IN_ORDER = torch.ops.lightning_ort.in_order.default

aten = torch.ops.aten
_Node = TypeVar("_Node")

NAMESPACES = ("aten", "prims", "lightning_ort")  # whose operations no program defines
_OWN_MODULES = ("torch", "_operator", "operator", "builtins", "math")

# Executors run views inside a region; a view alone is no reason to make one.
VIEWS = {
    aten.view.default,
    aten._unsafe_view.default,
    aten.reshape.default,
    aten.t.default,
    aten.transpose.int,
    aten.permute.default,
    aten.unsqueeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.expand.default,
    aten.slice.Tensor,
    aten.select.int,
    aten.split.Tensor,
    aten.split_with_sizes.default,
    aten.unbind.int,
    aten.as_strided.default,
    aten.alias.default,
    aten.detach.default,
    IN_ORDER,
}
_ALLOCATIONS = {
    aten.empty.memory_format,
    aten.empty_like.default,
    aten.empty_permuted.default,
    aten.empty_strided.default,
}
_SIZES = {aten.sym_size.int, aten.sym_stride.int, aten.sym_numel.default}
_CHECKS = {aten._assert_async.default, aten._assert_async.msg}
# meta key of a boolean tensor in which any byte but 0 is true; onnxruntime expects 1
ANY_BYTE = "any_byte"
# meta key of a node that sets parts of a gradient to 0: if a NaN is in these parts, there are NaN elsewhere too
MIXED = "mixed"
# meta key of the output of a graph that returns gradients: from which result on
GRADIENTS_FROM = "gradients_from"
_NO_COMPUTE = VIEWS | _ALLOCATIONS | _SIZES | _CHECKS


def is_compute(node: fx.Node) -> bool:
    """Whether a node computes something.

    Views, tuple access, arithmetic on sizes, allocations, value checks and random draws (which torch always runs) do
    not count.
    """
    return (
        node.op == "call_function"
        and isinstance(node.target, OpOverload)
        and node.target not in _NO_COMPUTE
        and not is_random(node)
    )


def calls_torch(node: fx.Node) -> bool:
    """Whether a node of a graph, as dynamo captured it, calls nothing but a function of torch or Python.

    Operations that take functions, as backward functions and hooks are captured, count as functions of others.
    """
    if node.op not in ("call_function", "call_method"):
        return node.op != "call_module"
    function = getattr(torch.Tensor, node.target, None) if isinstance(node.target, str) else node.target
    module = getattr(function, "__module__", None)  # methods of C++ have none
    above, _, name = (module or "").rpartition(".")
    if above in ("torch.ops", "torch._ops"):
        return name in NAMESPACES
    return function is not None and (module is None or module.partition(".")[0] in _OWN_MODULES)


def is_view(node: fx.Node) -> bool:
    """Whether a node is a view of a tensor, a tuple of views, or access to such a tuple."""
    if node.target is operator.getitem:
        return isinstance(node.args[0], fx.Node) and node.args[0].target in VIEWS
    return node.op == "call_function" and node.target in VIEWS


def base_of(node: fx.Node) -> fx.Node:
    """The tensor that a node is a view of, or a view of a view, or the node itself."""
    # no list has all views, such as those of complex numbers
    while (is_view(node) or getattr(node.target, "is_view", False)) and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node


def is_random(node: fx.Node) -> bool:
    """Whether a node draws from a random generator."""
    return isinstance(node.target, OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags


def values_of(node: fx.Node) -> list[Any]:
    """The values (fake tensors, symbolic numbers) that a node returns."""
    val = node.meta.get("val")
    return list(val) if isinstance(val, (tuple, list)) else [val]


def sizes_of(value: Any) -> Sequence[Any]:
    """The sizes of a tensor; a number counts as one size."""
    return value.shape if isinstance(value, torch.Tensor) else [value]


def is_empty(value: Any) -> bool:
    """Whether a value is a tensor that surely has no elements; a symbolic size may still turn out to be 0."""
    return isinstance(value, torch.Tensor) and any(isinstance(size, int) and size == 0 for size in value.shape)


def is_static(node: fx.Node) -> bool:
    """Whether no size of the values that a node returns is symbolic."""
    return not any(isinstance(size, torch.SymInt) for value in values_of(node) for size in sizes_of(value))


def is_known(node: fx.Node) -> bool:
    """Whether the trace had values for all sizes and numbers that a node returns; none if they depend on data."""
    numbers = (number for value in values_of(node) for number in sizes_of(value))
    return all(hint_of(n) is not None for n in numbers if isinstance(n, (torch.SymInt, torch.SymFloat, torch.SymBool)))


def insert_call(gm: fx.GraphModule, target: OpOverload, *args: Any, **kwargs: Any) -> fx.Node:
    """Add a call to a graph, together with its traced value."""
    node = gm.graph.call_function(target, args, kwargs)
    fake_args, fake_kwargs = fx.map_arg((args, kwargs), lambda n: n.meta["val"])
    mode = next(mode for n in gm.graph.nodes if (mode := fake_mode_of(n.meta.get("val"))) is not None)
    with mode:
        node.meta["val"] = target(*fake_args, **fake_kwargs)
    return node


def has_separate_gradients(gm: fx.GraphModule) -> bool:
    """Whether the results of a graph, as dynamo captured it, are of groups that share nothing that autograd keeps.

    In eager the gradient of one can then be taken after that of another, such as of two losses with an optimizer each.
    The results of a compiled graph have one backward pass.
    """
    groups: list[set[fx.Node]] = []  # of nodes that results share
    for result in results_of(gm):
        if not _has_history(result) or result.op == "placeholder":
            continue
        found = reached([result], lambda node: filter(_has_history, node.all_input_nodes))
        joined = found.union(*(group for group in groups if not group.isdisjoint(found)))
        groups = [*(group for group in groups if group.isdisjoint(found)), joined]
    return len(groups) > 1


def num_operations(gm: fx.GraphModule) -> int:
    """How many operations with a gradient a graph calls, as dynamo captured it; without any, how many it calls."""
    calls = [node for node in gm.graph.nodes if node.op.startswith("call_")]
    return sum(map(_has_history, calls)) or len(calls)


def _has_history(node: Any) -> bool:
    """Whether autograd keeps something for a node of a graph as dynamo captured it."""
    value = node.meta.get("example_value") if isinstance(node, fx.Node) else None
    values = value if isinstance(value, (list, tuple)) else [value]
    return any(isinstance(one, torch.Tensor) and one.requires_grad and not one.is_leaf for one in values)


def results_of(gm: fx.GraphModule) -> list[Any]:
    """The results of a graph: nodes, and constants such as ``None``."""
    return list(gm.graph.output_node().args[0])  # type: ignore[arg-type]


def reached(starts: Iterable[_Node], neighbours: Callable[[_Node], Iterable[_Node]]) -> set[_Node]:
    """Some nodes of any graph, their neighbours, the neighbours of these, and so on."""
    todo = list(starts)
    found = set(todo)
    while todo:
        new = [node for node in neighbours(todo.pop()) if node not in found]
        found.update(new)
        todo += new
    return found


def tensor_class_of(inputs: Sequence[Any]) -> type[torch.Tensor] | None:
    """Return the first class with a ``__torch_function__`` of its own, but no ``__torch_dispatch__``, among inputs.

    Dynamo traces into that function. The graph has its results already, and must not call it.
    """
    for value in inputs:
        kind = type(value)
        is_plain = not isinstance(value, torch.Tensor) or not torch.overrides.has_torch_function((value,))
        if not is_plain and kind.__torch_dispatch__ is torch.Tensor.__torch_dispatch__:
            return kind
    return None


def device_of(inputs: Sequence[Any]) -> torch.device:
    """Return the device that a graph of these inputs computes on."""
    devices = [value.device for value in inputs if isinstance(value, torch.Tensor)]
    # a scalar on the CPU may be an input of a graph on an accelerator
    return next((device for device in devices if device.type != "cpu"), torch.device("cpu"))
