"""Torch as an executor: it runs every op, and whatever no other executor runs."""

from collections.abc import Sequence
from typing import Any

from torch import fx, ops

from lightning_ort.compiler import mask_prefetcher as masks
from lightning_ort.compiler.nodes import is_random, is_static
from lightning_ort.compiler.regions import Region

aten = ops.aten


class TorchRegion:
    """A torch region as the compiled graph calls it.

    Args:
        region: The region.

    """

    def __init__(self, region: Region) -> None:
        # how it appears in the code of the compiled graph
        self.__name__, self.__module__ = region.name, __name__
        self._masks = _draw_together(region.module.graph)
        self._module = region.module

    def __call__(self, *args: Any) -> Sequence[Any]:
        """Run the region."""
        return self._module.forward(*args) if self._masks is None else self._module.forward(*args, *self._masks())


def _draw_together(graph: fx.Graph) -> masks.MaskPrefetcher | None:
    """Have the masks of a region drawn by our own functions.

    Returns:
        What draws them, if the region has come to take them as inputs after its own; else the region does.

    """
    random = [node for node in graph.nodes if is_random(node)]
    draws = [node for node in random if node.target is aten.bernoulli.p and "generator" not in node.kwargs]
    if not draws:
        return None
    together = len(draws) == len(random) and all(
        node.args[0].target is aten.empty.memory_format and is_static(node) for node in draws
    )
    if not (together and draws[0].meta["val"].device.type == "cpu" and masks.matches_torch()):
        for node in draws:
            node.target = masks.bernoulli
        return None
    kinds = [(tuple(node.meta["val"].shape), node.meta["val"].dtype, float(node.args[1])) for node in draws]
    with graph.inserting_before(next(node for node in graph.nodes if node.op != "placeholder")):
        for index, node in enumerate(draws):
            node.replace_all_uses_with(graph.placeholder(f"mask_{index}"))
            graph.erase_node(node)
    graph.eliminate_dead_code()
    return masks.MaskPrefetcher(kinds)
