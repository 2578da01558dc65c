"""A step as one graph, as it is kept between runs: tracing it takes longer than all that follows.

:func:`is_plain` tells whether all that AOTAutograd makes of a captured graph follows from what names the entry
(:mod:`.fingerprint`); :func:`to_plain` and :func:`from_plain` make JSON of a lowered graph, and that of it.
"""

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx, nn

from lightning_ort.compat.torch_graphs import FakeTensorMode, OpOverload
from lightning_ort.compiler.graphs.nodes import ANY_BYTE, GRADIENTS_FROM, MIXED, NAMESPACES, calls_torch

_META = (ANY_BYTE, MIXED, GRADIENTS_FROM)
_KINDS = (torch.dtype, torch.device, torch.layout, torch.memory_format)


def is_plain(gm: fx.GraphModule, inputs: Sequence[Any]) -> bool:
    """Whether a captured graph calls torch's own functions alone, on plain tensors of fixed sizes."""
    for node, value in zip(gm.graph.find_nodes(op="placeholder"), inputs, strict=True):
        traced = node.meta.get("example_value")
        if type(value) not in (torch.Tensor, nn.Parameter) or not isinstance(traced, torch.Tensor):
            return False
        if traced.layout is not torch.strided or not all(type(one) is int for one in (*traced.shape, *traced.stride())):
            return False
    return all(map(calls_torch, gm.graph.nodes))


def to_plain(graph: fx.Graph) -> list[Any] | None:
    """Return a lowered graph as the types of JSON; ``None`` if it holds anything that has no such form."""
    numbers: dict[fx.Node, int] = {}
    try:
        return [_plain_node(node, numbers) for node in graph.nodes]
    except TypeError:
        return None


def _plain_node(node: fx.Node, numbers: dict[fx.Node, int]) -> list[Any]:
    target = str(node.target)
    if node.op == "call_function":
        if node.target is operator.getitem:
            target = "getitem"
        elif not isinstance(node.target, OpOverload) or node.target.namespace not in NAMESPACES:
            raise TypeError(target)
    elif node.op not in ("placeholder", "output"):
        raise TypeError(node.op)
    parts = (
        node.args,
        dict(node.kwargs),
        node.meta.get("val"),
        {key: node.meta[key] for key in _META if key in node.meta},
    )
    plain = [node.op, node.name, target, *(_plain(part, numbers) for part in parts)]
    numbers[node] = len(numbers)
    return plain


def _plain(value: Any, numbers: dict[fx.Node, int]) -> Any:
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, fx.Node):
        return {"node": numbers[value]}
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided:
            raise TypeError(value.layout)
        return {
            "tensor": [
                _plain(one, numbers) for one in (list(value.shape), list(value.stride()), value.dtype, value.device)
            ]
        }
    if isinstance(value, list):
        return [_plain(item, numbers) for item in value]
    if type(value) is tuple:
        return {"tuple": [_plain(item, numbers) for item in value]}
    if type(value) is dict:
        return {"dict": [[key, _plain(item, numbers)] for key, item in value.items()]}
    for kind in _KINDS:
        if isinstance(value, kind):
            return {kind.__name__: str(value)}
    raise TypeError(type(value))


def from_plain(plain: list[Any]) -> fx.GraphModule:
    """Return the graph; may raise anything if that is of another."""
    graph, made = fx.Graph(), list[fx.Node]()
    with FakeTensorMode():
        for op, name, target, *parts in plain:
            args, kwargs, val, meta = (_restored(part, made) for part in parts)
            node = graph.create_node(op, _function(target) if op == "call_function" else target, args, kwargs, name)
            node.meta |= meta if op == "output" else {"val": val, **meta}
            made.append(node)
    graph.lint()
    return fx.GraphModule(nn.Module(), graph)


def _function(name: str) -> Any:
    if name == "getitem":
        return operator.getitem
    namespace, packet, overload = name.split(".")
    if namespace not in NAMESPACES:
        raise ValueError(name)
    return getattr(getattr(getattr(torch.ops, namespace), packet), overload)


def _restored(plain: Any, made: Sequence[fx.Node]) -> Any:
    if isinstance(plain, list):
        return [_restored(item, made) for item in plain]
    if not isinstance(plain, dict):
        return plain
    ((kind, content),) = plain.items()
    if kind == "node":
        return made[content]
    if kind == "device":
        return torch.device(content)
    if kind in ("dtype", "layout", "memory_format"):
        return getattr(torch, content.removeprefix("torch."))
    items = _restored(content, made)
    if kind == "tensor":
        sizes, strides, dtype, device = items
        return torch.empty_strided(sizes, strides, dtype=dtype, device=device)
    return {"tuple": tuple, "dict": dict}[kind](items)
