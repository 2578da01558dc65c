"""Cut a graph into regions, each run by one executor.

Every compute node gets a level: torch nodes have even levels, ORT nodes odd ones, and a node's level is never below
that of what it reads. All nodes of one level form a region, so regions are acyclic by construction, there are as few of
them as the alternation between executors allows, and random ops keep their order (each is held at or above the level of
the one before it, so a seeded run draws the same numbers as eager; torch's CapabilityBasedPartitioner promises none).

Views are not assigned: each region repeats the views that it needs of what it reads, so that no view ever crosses a
boundary (ONNX Runtime would have to materialize it), and views at the end of the graph are taken in torch, where they
cost nothing.
"""

import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from lightning_ort.compiler.executors.ort.support import Support
from lightning_ort.compiler.nodes import is_compute, is_random, is_view, sizes_of, values_of
from lightning_ort.compiler.region_module import RegionModule
from lightning_ort.compiler.report import Reason, ReasonType


@dataclass
class Region:
    """What one executor runs in one go.

    Args:
        level: Even for torch, odd for ORT; regions run in this order.
        nodes: The nodes it owns, in graph order.
        inputs: Values it reads, made elsewhere.
        outputs: Values of its own that others read.
        module: The region as torch runs it. Set when the region is complete.

    """

    level: int
    nodes: list[fx.Node] = field(default_factory=list)
    inputs: list[fx.Node] = field(default_factory=list)
    outputs: list[fx.Node] = field(default_factory=list)
    module: RegionModule = field(init=False)

    @property
    def on_ort(self) -> bool:
        """Whether ONNX Runtime runs it."""
        return self.level % 2 == 1

    @property
    def name(self) -> str:
        """``ort_N`` or ``torch_N``."""
        return f"{'ort' if self.on_ort else 'torch'}_{self.level}"

    @property
    def compute_nodes(self) -> list[fx.Node]:
        """The nodes that compute something."""
        return [node for node in self.nodes if is_compute(node)]


@dataclass(frozen=True)
class Variant:
    """One way to run a region: with a number of intra-op threads, and recorded as a CUDA graph or not."""

    threads: int
    cuda_graph: bool = False


@dataclass(frozen=True)
class Timing:
    """The median times of a region in ms by executor, without those that were not timed, and its fastest variant."""

    ms: Mapping[str, float]
    variant: Variant

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Timing":
        """Return what ``dataclasses.asdict`` made a dict of."""
        return cls(data["ms"], Variant(**data["variant"]))


class RegionRejected(Exception):
    """A region does not run on ONNX Runtime.

    Args:
        type: At which stage it was given up.
        error: What happened there.
        timing: What it took, where it was timed.

    """

    def __init__(self, type: ReasonType, error: BaseException | str, timing: Timing | None = None) -> None:
        text = error if isinstance(error, str) else f"{error.__class__.__name__}: {error}"
        self.reason = Reason(type, text.strip().splitlines()[0])
        self.timing = timing
        super().__init__(str(self.reason))


@dataclass
class Partition:
    """A graph cut into regions.

    Args:
        gm: The graph.
        regions: In order of execution.
        floating: Views that belong to no region and are repeated wherever they are read.

    """

    gm: fx.GraphModule
    regions: list[Region]
    floating: set[fx.Node]


def partition(
    gm: fx.GraphModule, support: dict[fx.Node, Support], min_region_nodes: int, before: Partition | None = None
) -> Partition:
    """Cut a graph into regions.

    Args:
        gm: A functional ATen graph.
        support: The answer for each ``call_function`` node; nodes that are demoted to torch here are updated in place.
        min_region_nodes: ORT regions with fewer compute nodes go to torch.
        before: How it was cut before some of its nodes were demoted; what has stayed the same is taken from there.

    """
    complete = {} if before is None else {(region.on_ort, *region.nodes): region for region in before.regions}
    floating = {node for node in support if is_view(node) and _view_supported(node, support)}
    while True:
        regions = _assign(gm, support, floating)
        small = [r for r in regions if r.on_ort and len(r.compute_nodes) < min_region_nodes]
        if not small:
            break
        for region in small:
            text = f"{len(region.compute_nodes)} compute nodes, min_region_nodes={min_region_nodes}"
            demote(region, support, Reason(ReasonType.TOO_SMALL, text))
    for region in regions:
        if (same := complete.get((region.on_ort, *region.nodes))) is not None:
            region.inputs, region.outputs, region.module = same.inputs, same.outputs, same.module
        else:
            close(region, gm, floating)
    return Partition(gm, regions, floating)


def demote(region: Region, support: dict[fx.Node, Support], reason: Reason) -> None:
    """Send the nodes of a region to torch."""
    for node in region.nodes:
        support[node] = Support(False, reason)


def _view_supported(node: fx.Node, support: dict[fx.Node, Support]) -> bool:
    op = node.args[0] if node.target is operator.getitem else node
    return isinstance(op, fx.Node) and support[op].ok


def _assign(gm: fx.GraphModule, support: dict[fx.Node, Support], floating: set[fx.Node]) -> list[Region]:
    levels: dict[fx.Node, int] = {}
    regions: dict[int, Region] = {}
    last_impure = 0
    for node in support:
        level = max((levels.get(source, 0) for source in node.all_input_nodes), default=0)
        if node not in floating:
            impure = node.is_impure() or is_random(node)
            if impure:
                level = max(level, last_impure)
            # access to a tuple stays with the op that made it
            if node.target is not operator.getitem or node.args[0] not in levels:
                level += level % 2 != support[node].ok
            if impure:
                last_impure = level
            if level not in regions:
                regions[level] = Region(level)
            regions[level].nodes.append(node)
        levels[node] = level
    return [regions[level] for level in sorted(regions)]


def close(region: Region, gm: fx.GraphModule, floating: set[fx.Node]) -> None:
    """Find what a region reads and yields, and make its module."""
    own = set(region.nodes)

    def bases(node: fx.Node) -> Iterator[fx.Node]:
        for source in node.all_input_nodes:
            if source in floating:
                yield from bases(source)
            elif source not in own:
                yield source

    def read_outside(node: fx.Node) -> bool:
        return any(read_outside(user) if user in floating else user not in own for user in node.users)

    region.inputs = list(dict.fromkeys(source for node in region.nodes for source in bases(node)))
    region.outputs = [node for node in region.nodes if len(values_of(node)) == 1 and read_outside(node)]
    if region.on_ort:
        region.inputs += _missing_symbols(region, gm)
    graph = fx.Graph()
    inner: dict[fx.Node, fx.Node] = {}
    for source in region.inputs:
        inner[source] = graph.placeholder(source.name)
        inner[source].meta = dict(source.meta)
    for node in region.nodes:
        copy_with_views(node, graph, inner)
    graph.output(tuple(inner[node] for node in region.outputs))
    region.module = RegionModule(graph, region.name)


def _missing_symbols(region: Region, gm: fx.GraphModule) -> list[fx.Node]:
    """The symbolic sizes that the outputs' shapes need and no input shows, as placeholders of the graph."""
    shown, needed = set(), set()
    for node in region.inputs:
        shown |= {size.node.expr for size in sizes_of(node.meta["val"]) if isinstance(size, torch.SymInt)}
    for node in region.outputs:
        for size in node.meta["val"].shape:
            if isinstance(size, torch.SymInt):
                needed |= size.node.expr.free_symbols
    return [
        node
        for node in gm.graph.find_nodes(op="placeholder")
        if isinstance(node.meta["val"], torch.SymInt) and node.meta["val"].node.expr in needed - shown
    ]


def copy_with_views(node: fx.Node, graph: fx.Graph, inner: dict[fx.Node, fx.Node]) -> fx.Node:
    """Copy a node into another graph, and before it whatever it reads that is not there yet."""
    if node not in inner:
        for source in node.all_input_nodes:
            copy_with_views(source, graph, inner)
        inner[node] = graph.node_copy(node, inner.__getitem__)
    return inner[node]
