"""Torch as an executor: it supports every op, and runs what no other executor runs."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import fx, ops
from typing_extensions import override

from lightning_ort.compiler import mask_prefetcher as masks
from lightning_ort.compiler.executors.base import Executor
from lightning_ort.compiler.nodes import is_random, is_static
from lightning_ort.compiler.regions import TORCH, Region, Support, Variant

aten = ops.aten


class TorchExecutor(Executor):
    """Runs regions in torch."""

    name = TORCH
    title = "torch"

    @override
    def supports(self, node: fx.Node) -> Support:
        return Support(True)

    @override
    def build(self, region: Region, artifact: bytes = b"", variant: Variant | None = None) -> Callable[..., Any]:
        return TorchRegion(region)


class TorchRegion:
    """A torch region as the compiled graph calls it."""

    def __init__(self, region: Region) -> None:
        # how it appears in the code of the compiled graph
        self.__name__, self.__module__ = region.name, __name__
        self._masks = _take_out_masks(region.module.graph)
        self._module = region.module

    def __call__(self, *args: Any) -> Sequence[Any]:
        """Run the region."""
        return self._module.forward(*args) if self._masks is None else self._module.forward(*args, *self._masks())


def _take_out_masks(graph: fx.Graph) -> masks.MaskPrefetcher | None:
    """Have dropout masks drawn by our own functions.

    If all random ops of a region are masks, the masks become additional inputs, and what draws them is returned.
    Otherwise each mask is drawn in its place.
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
            node.replace_all_uses_with(mask := graph.placeholder(f"mask_{index}"))
            mask.meta = dict(node.meta)
            graph.erase_node(node)
    graph.eliminate_dead_code()
    return masks.MaskPrefetcher(kinds)
