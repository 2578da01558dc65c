"""Which nodes of a region would go out of bounds on made-up inputs: :func:`may_go_out_of_bounds`.

Made-up integers are 0, which is a valid index and a valid label, but ``labels - 1`` is none. On a CPU that raises, and
the region is not timed. On a GPU it is an assertion of the device, after which nothing runs there in this process. So
what computes positions is computed on the CPU first, for the inputs that a region will be timed with.
"""

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from lightning_ort.compat.torch import OpOverload, arguments_of
from lightning_ort.compiler.graphs.layouts import int_hint
from lightning_ort.compiler.graphs.nodes import is_view, values_of
from lightning_ort.compiler.regions.region import Region

aten = torch.ops.aten

_MAX_ELEMENTS = 1 << 22  # of a tensor that is worth computing on the CPU
_POSITIONS = ("index", "indices", "target")  # what they are called in the schemas of torch
_COUNT_FROM_END = {
    getattr(aten, name)
    for name in ("index", "_unsafe_index", "index_put", "_unsafe_index_put", "index_fill", "take", "put")
}
_CHOOSE = {
    getattr(aten, name)
    for name in ("argmax", "argmin", "sort", "topk", "max", "min", "kthvalue", "median", "mode", "cummax", "cummin")
} | {aten.max_pool2d_with_indices, aten.max_pool3d_with_indices}
# these assert that numbers are between 0 and 1, which made-up ones are
_OF_PROBABILITIES = {aten.binary_cross_entropy}
_MAKE_PROBABILITIES = {aten.sigmoid, aten._softmax}


class _Unknown(Exception):
    """A value that only a run of the region would show."""


def may_go_out_of_bounds(region: Region) -> list[fx.Node]:
    """Return the nodes of a region whose positions are not surely in bounds where it runs on made-up inputs."""
    values = {node: _made_up(node.meta["val"]) for node in region.inputs}
    return [node for node in region.nodes if isinstance(node.target, OpOverload) and not _is_safe(node, values)]


def _is_safe(node: fx.Node, values: dict[fx.Node, Any]) -> bool:
    packet, arguments = node.target.overloadpacket, arguments_of(node)  # type: ignore[union-attr]
    if packet in _OF_PROBABILITIES and not _is_probability(arguments["self"], values):
        return False
    for name in _POSITIONS:
        for dim, position in _integers(arguments.get(name)):
            size = _size_for(arguments, dim)
            if size is not None and (choices := _choices(position, values)) is not None and choices <= size:
                continue
            try:
                found = _value(position, values)
            except Exception:  # torch's own too: nobody knows
                return False
            if found.any() and not _in_bounds(found, size, arguments, packet in _COUNT_FROM_END):
                return False  # 0 is in bounds of whatever is not empty
    return True


def _integers(argument: Any) -> Iterator[tuple[int, fx.Node]]:
    """The integer tensors of an argument, a node or a list of them, with their places in the list."""
    for place, node in enumerate(argument if isinstance(argument, (list, tuple)) else [argument]):
        val = node.meta.get("val") if isinstance(node, fx.Node) else None
        if isinstance(val, torch.Tensor) and not (val.is_floating_point() or val.dtype is torch.bool):
            yield place, node


def _in_bounds(positions: torch.Tensor, size: int | None, arguments: dict[str, Any], from_end: bool) -> bool:
    if size is None:
        return False
    if (ignored := arguments.get("ignore_index")) is not None:
        positions = positions[positions != ignored]
    return bool(((positions >= (-size if from_end else 0)) & (positions < size)).all())


def _choices(position: fx.Node, values: dict[fx.Node, Any]) -> int | None:
    """Among how many places positions were chosen, as by ``argmax``, ``sort`` and a maximum pool."""
    node: Any = position
    while node not in values and (is_view(node) or node.target is operator.getitem):
        node = node.args[0]
    if node in values or getattr(node.target, "overloadpacket", None) not in _CHOOSE:
        return None
    arguments = arguments_of(node)
    sizes = [int_hint(size) for size in arguments["self"].meta["val"].shape]
    dim = arguments.get("dim")
    return sizes[dim] if sizes and isinstance(dim, int) else torch.Size(sizes).numel()


def _size_for(arguments: dict[str, Any], place: int) -> int | None:
    """How many places there are to choose from, if that is known."""
    if "num_weights" in arguments:
        return int_hint(arguments["num_weights"])
    table = arguments.get("weight") if "padding_idx" in arguments else arguments.get("self")
    if not isinstance(table, fx.Node):
        return None
    sizes = [int_hint(size) for size in table.meta["val"].shape]
    if "padding_idx" in arguments:
        return sizes[0]
    if "ignore_index" in arguments:  # classes
        return sizes[1] if len(sizes) > 1 else sizes[0]
    if isinstance(dim := arguments.get("dim"), int):
        return sizes[dim] if sizes else 1
    if isinstance(arguments.get("indices"), (list, tuple)):
        return sizes[place]
    return torch.Size(sizes).numel()  # of a flattened tensor, or of one that was pooled


def _is_probability(node: Any, values: dict[fx.Node, Any]) -> bool:
    while isinstance(node, fx.Node) and node not in values and is_view(node):
        node = node.args[0]
    return node in values or getattr(node.target, "overloadpacket", None) in _MAKE_PROBABILITIES


def _made_up(val: Any) -> Any:
    """What a region's input is when it is timed, on the CPU, or ``None`` if that is not worth it."""
    if not isinstance(val, torch.Tensor):
        return None if isinstance(val, torch.SymFloat) else int_hint(val)
    sizes = [int_hint(size) for size in val.shape]
    elements = torch.Size(sizes).numel()
    if val.is_floating_point() or val.is_complex() or elements > _MAX_ELEMENTS:
        return None
    return torch.zeros(sizes, dtype=val.dtype)


def _value(node: fx.Node, values: dict[fx.Node, Any]) -> Any:
    if node not in values:
        is_small = all(
            not isinstance(value, torch.Tensor) or torch.Size(map(int_hint, value.shape)).numel() <= _MAX_ELEMENTS
            for value in values_of(node)
        )
        values[node] = _computed(node, values) if is_small else None
    if values[node] is None:
        raise _Unknown(node)
    return values[node]


def _computed(node: fx.Node, values: dict[fx.Node, Any]) -> Any:
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda source: _value(source, values))
    if "device" in kwargs:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    target: Any = aten.reshape.default if node.target is aten.view.default else node.target
    return target(*args, **kwargs)
