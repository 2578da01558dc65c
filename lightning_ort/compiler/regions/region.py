"""Cut a graph into regions, each run by one executor.

Every node has a level, which is at least that of each node it reads, and higher if that one has another executor. All
nodes with the same level and executor form a region. So regions are acyclic by construction, their number is as small
as the changes between executors allow, and random ops keep their order: each is held at or above the level of the
previous one, so that a seeded run draws the same numbers as eager (torch's CapabilityBasedPartitioner does not
guarantee this).

Views are not assigned. Each region repeats the views it needs of what it reads, so no view crosses a boundary (ONNX
Runtime would have to copy it), and views at the end of the graph are taken in torch, where they cost nothing.
"""

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from lightning_ort.compat.torch import expression_of, flop_formula
from lightning_ort.compiler.graphs.layouts import int_hint
from lightning_ort.compiler.graphs.nodes import is_compute, is_known, is_random, is_view, sizes_of, values_of
from lightning_ort.compiler.reason import Reason, ReasonType
from lightning_ort.compiler.regions.region_module import RegionModule

TORCH = "torch"  # the executor that can run everything


@dataclass(frozen=True)
class Support:
    """Whether an executor can run a node, and if not, why."""

    ok: bool
    reason: Reason | None = None


@dataclass
class Candidates:
    """Which executors can run each ``call_function`` node of a graph, preferred first, and why others do not."""

    executors: dict[fx.Node, list[str]]  # the first one runs the node; torch is the last
    reasons: dict[fx.Node, Reason]

    @classmethod
    def of(cls, answers: Mapping[str, Mapping[fx.Node, Support]]) -> "Candidates":
        """Collect the answers of executors, which are in order of preference."""
        candidates = cls({}, {})
        for node in next(iter(answers.values())):
            own = {name: answers[name][node] for name in answers}
            candidates.executors[node] = [*(name for name, answer in own.items() if answer.ok), TORCH]
            if reasons := [answer.reason for answer in own.values() if answer.reason is not None]:
                candidates.reasons[node] = reasons[0]
        return candidates

    def owner(self, node: fx.Node) -> fx.Node:
        """Return the node whose executor a node has: access to a tuple stays with the op that makes the tuple."""
        op = node.args[0] if node.target is operator.getitem else node
        return op if op in self.executors else node  # type: ignore[return-value]

    def demote(self, region: "Region", reason: Reason, nodes: Sequence[fx.Node] = ()) -> None:
        """Take the region's executor from the candidates of its nodes, or of some of them."""
        for each in nodes or region.nodes:
            node = self.owner(each)
            self.executors[node] = [name for name in self.executors[node] if name != region.executor]
            self.reasons[node] = reason


@dataclass
class Region:
    """What one executor runs in one call."""

    executor: str
    level: int  # regions run in this order
    nodes: list[fx.Node] = field(default_factory=list)  # that it owns, in graph order
    inputs: list[fx.Node] = field(default_factory=list)  # made elsewhere
    outputs: list[fx.Node] = field(default_factory=list)  # of its own nodes, those that others read
    module: RegionModule = field(init=False)  # the region as torch runs it
    originals: dict[fx.Node, fx.Node] = field(init=False, repr=False)  # of the nodes of its module

    @property
    def name(self) -> str:
        """Executor and level, such as ``ort_1``."""
        return f"{self.executor}_{self.level}"

    @property
    def key(self) -> tuple[str | fx.Node, ...]:
        """The same for a region of the same nodes on the same executor, whatever its level."""
        return (self.executor, *self.nodes)

    @property
    def compute_nodes(self) -> list[fx.Node]:
        """The nodes that compute something."""
        return [node for node in self.nodes if is_compute(node)]


@dataclass(frozen=True)
class Variant:
    """One way to run a region: with a number of intra-op threads."""

    threads: int = 1


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
    """A region is not run by its executor, or some of its ``nodes``; ``timing`` is its time, if it was timed."""

    def __init__(
        self, type: ReasonType, error: BaseException | str, timing: Timing | None = None, nodes: Sequence[fx.Node] = ()
    ) -> None:
        text = error if isinstance(error, str) else f"{error.__class__.__name__}: {error}"
        self.reason = Reason(type, text.strip().splitlines()[0])
        self.timing, self.nodes = timing, nodes
        super().__init__(str(self.reason))


def partition(
    gm: fx.GraphModule, candidates: Candidates, min_region_nodes: int, previous: Sequence[Region] = ()
) -> list[Region]:
    """Cut a functional ATen graph into regions, of which those of the previous partition are already finalized.

    The nodes of regions with fewer compute nodes than ``min_region_nodes`` are demoted.
    """
    finalized = {region.key: region for region in previous}
    views = {node for node in candidates.executors if is_view(node) and _first(node, candidates) != TORCH}
    while True:
        regions = _assign(candidates, views)
        small = [r for r in regions if r.executor != TORCH and len(r.compute_nodes) < min_region_nodes]
        if not small:
            break
        for region in small:
            text = f"{len(region.compute_nodes)} compute nodes, min_region_nodes={min_region_nodes}"
            candidates.demote(region, Reason(ReasonType.TOO_SMALL, text))
    for region in regions:
        if (same := finalized.get(region.key)) is not None:
            region.inputs, region.outputs = same.inputs, same.outputs
            region.module, region.originals = same.module, same.originals
        else:
            finalize_region(region, gm, views, candidates)
    return regions


def _first(node: fx.Node, candidates: Candidates) -> str:
    return candidates.executors[candidates.owner(node)][0]


def _assign(candidates: Candidates, unassigned_views: set[fx.Node]) -> list[Region]:
    names = dict.fromkeys(name for executors in candidates.executors.values() for name in executors)
    # the first level at which each executor can read a value; other executors start after torch, so that those of their
    # nodes that read nothing from torch are in the region of those that do
    start = {name: int(name != TORCH) for name in names}
    levels: dict[fx.Node, dict[str, int]] = {}
    regions: dict[tuple[int, str], Region] = {}
    after_random = start
    for node in candidates.executors:
        sources = [start, *(levels[source] for source in node.all_input_nodes if source in levels)]
        if node in unassigned_views:
            # an executor that cannot run a view gets it from torch, after the region that makes its base
            repeats = candidates.executors[node]
            levels[node] = {
                name: max(source[name] if name in repeats else max(source.values()) for source in sources)
                for name in names
            }
            continue
        executor = _first(node, candidates)
        keeps_order = node.is_impure() or is_random(node)
        if keeps_order:
            sources.append(after_random)
        level = max(source[executor] for source in sources)
        levels[node] = {name: level + (name != executor) for name in names}
        if keeps_order:
            after_random = levels[node]
        regions.setdefault((level, executor), Region(executor, level)).nodes.append(node)
    return sorted(regions.values(), key=lambda region: region.level)


def finalize_region(region: Region, gm: fx.GraphModule, unassigned_views: set[fx.Node], candidates: Candidates) -> None:
    """Find what a region reads and returns, and make its module."""
    own = set(region.nodes)

    def bases(node: fx.Node) -> Iterator[fx.Node]:
        for source in node.all_input_nodes:
            if source in unassigned_views and region.executor in candidates.executors[source]:
                yield from bases(source)
            elif source not in own:
                yield source

    def read_outside(node: fx.Node) -> bool:
        return any(read_outside(user) if user in unassigned_views else user not in own for user in node.users)

    region.inputs = list(dict.fromkeys(source for node in region.nodes for source in bases(node)))
    region.outputs = [node for node in region.nodes if len(values_of(node)) == 1 and read_outside(node)]
    if region.executor != TORCH:
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
    region.originals = {copy: node for node, copy in inner.items()}


def _missing_symbols(region: Region, gm: fx.GraphModule) -> list[fx.Node]:
    """The symbolic sizes that the outputs' shapes need and no input has, as placeholders of the graph."""
    shown, needed = set(), set()
    for node in region.inputs:
        shown |= {expression_of(size) for size in sizes_of(node.meta["val"]) if isinstance(size, torch.SymInt)}
    for node in region.outputs:
        for size in node.meta["val"].shape:
            if isinstance(size, torch.SymInt):
                needed |= expression_of(size).free_symbols
    return [
        node
        for node in gm.graph.find_nodes(op="placeholder")
        if isinstance(node.meta["val"], torch.SymInt) and expression_of(node.meta["val"]) in needed - shown
    ]


def copy_with_views(node: fx.Node, graph: fx.Graph, inner: dict[fx.Node, fx.Node]) -> fx.Node:
    """Copy a node into another graph, after whatever it reads that is not there yet."""
    if node not in inner:
        for source in node.all_input_nodes:
            copy_with_views(source, graph, inner)
        inner[node] = graph.node_copy(node, inner.__getitem__)
    return inner[node]


def count_flops(region: Region) -> float:
    """Floating-point operations of the region's products and convolutions, for the sizes seen at tracing."""
    total = 0.0
    for node in region.nodes:
        formula = flop_formula(node.target)
        if formula is not None and all(map(is_known, (node, *node.all_input_nodes))):
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda source: source.meta["val"])
            total += int_hint(formula(*args, **kwargs, out_val=node.meta["val"]))
    return total
