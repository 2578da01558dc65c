"""Keeps the gradients of a graph's results apart: :func:`separate_results`."""

import functools
from typing import Any

import torch
from torch import fx

from lightning_ort.compat.torch import OpOverload, assign_to_backward, half_of
from lightning_ort.compiler.graphs.nodes import insert_call

aten = torch.ops.aten


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
