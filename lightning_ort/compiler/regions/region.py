"""Cut a graph into regions, each run by one executor.

Every node has a level, which is at least that of each node it reads, and higher if that one has another executor. All
nodes with the same level and executor form a region. So regions are acyclic by construction, their number is as small
as the changes between executors allow, and random ops keep their order: each is held at or above the level of the
previous one, so that a seeded run draws the same numbers as eager (torch's CapabilityBasedPartitioner does not
guarantee this).

Views are not assigned. Each region repeats the views it needs of what it reads, so no view crosses a boundary (ONNX
Runtime would have to copy it), and views at the end of the graph are taken in torch, where they cost nothing.
"""

import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch import fx

from lightning_ort.compat.torch_graphs import expression_of, flop_formula, is_positive, size_printer
from lightning_ort.compiler.graphs.nodes import (
    IN_ORDER,
    in_order,
    int_hint,
    is_compute,
    is_in_order,
    is_known,
    is_random,
    is_view,
    sizes_of,
    traced_order,
    values_of,
)
from lightning_ort.compiler.reason import Reason, ReasonType


class RegionModule:
    """A graph as torch runs it; its code is generated at the first call, which most regions do not get.

    A graph is traced with torch's fake kernels, and the results of some have other strides than those of the real ones
    (torch 2.13 on the CPU: the gradients of batch, layer and group norm, of ``log_softmax`` and of several losses).
    Eager adapts to them, but a traced graph does not: a ``view`` or a kernel that was traced for one layout fails on
    another, and ``as_strided`` reads the wrong elements. So the first run compares every result with its trace, and
    from then on the few that differ are converted to the traced layout, or to the traced dtype where torch's fake
    kernel has a wider one (2.13 on the CPU: the gradient of a group norm of a half type).
    """

    def __init__(self, graph: fx.Graph, name: str) -> None:
        self.graph = graph
        self.__name__ = name  # how it appears in the code of the compiled graph
        self._run: Callable[..., Any] | None = None

    def __call__(self, *args: Any) -> Any:
        """Run it."""
        if self._run is not None:
            return self._run(*args)
        first = _FirstRun(self.graph)
        outputs = first.run(*args)
        self._run = _converting(self.graph, first.converted, self.__name__)
        return outputs


class _FirstRun(fx.Interpreter):
    """Runs a graph node by node, each on tensors in the layout that was traced."""

    def __init__(self, graph: fx.Graph) -> None:
        super().__init__(torch.nn.Module(), graph=graph)  # not a GraphModule, which would generate code
        # results of another layout or dtype, and what was traced: the order of dimensions and the dtype, if they differ
        self.converted: dict[fx.Node, tuple[list[int] | None, torch.dtype | None]] = {}

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        traced = n.meta.get("val")
        if n.op != "call_function" or is_view(n) or not isinstance(value, torch.Tensor):
            return value
        _check_kind(n, value, traced)
        order = traced_order(traced)
        if order is None or is_in_order(value, order) or all(user.target is IN_ORDER for user in n.users):
            order = None
        dtype = traced.dtype if isinstance(traced, torch.Tensor) and traced.dtype is not value.dtype else None
        if order is not None or dtype is not None:
            self.converted[n] = order, dtype
        if dtype is not None:
            value = value.to(dtype)
        return value if order is None else in_order(value, order)


def _check_kind(node: fx.Node, value: torch.Tensor, traced: Any) -> None:
    """Raise ``TypeError`` if dtype or shape are not as traced, as for a custom op whose fake kernel is wrong."""
    if not isinstance(traced, torch.Tensor):
        return
    fixed = [size if isinstance(size, int) else None for size in traced.shape]
    alike = len(fixed) == value.dim() and all(a in (None, b) for a, b in zip(fixed, value.shape, strict=True))
    if (value.dtype is not traced.dtype and not _is_known_difference(node, value, traced.dtype)) or not alike:
        raise TypeError(
            f"{node.target} gave {value.dtype} {list(value.shape)}, and {traced.dtype} {list(traced.shape)} when traced"
        )


def _is_known_difference(node: fx.Node, value: torch.Tensor, traced: torch.dtype) -> bool:
    """Whether one of torch's own kernels gives another dtype than its fake one, and the values are the same.

    Fake kernels give wider floating types; real ones give other dtypes of nothing, as ``native_dropout`` does (2.13).
    """
    made_by = node.args[0] if node.target is operator.getitem else node
    own = isinstance(made_by, fx.Node) and getattr(made_by.target, "namespace", "") == "aten"
    is_wider = value.is_floating_point() and torch.promote_types(value.dtype, traced) is traced
    return own and (is_wider or not value.numel())


def _converting(
    graph: fx.Graph, converted: dict[fx.Node, tuple[list[int] | None, torch.dtype | None]], name: str
) -> Callable[..., Any]:
    """The function of a graph in which some results are converted to another layout or dtype."""
    if converted:
        inner: dict[fx.Node, fx.Node] = {}
        copy = fx.Graph()
        for node in graph.nodes:
            inner[node] = copy.node_copy(node, inner.__getitem__)
            order, dtype = converted.get(node, (None, None))
            if dtype is not None:
                inner[node] = copy.call_method("to", (inner[node], dtype))
            if order is not None:
                inner[node] = copy.call_function(in_order, (inner[node], order))
        graph = copy
    return fx.GraphModule(torch.nn.Module(), graph, class_name=name).forward


TORCH = "torch"  # the executor that can run everything


@dataclass
class Candidates:
    """Which executors can run each ``call_function`` node of a graph, preferred first, and why others do not."""

    executors: dict[fx.Node, list[str]]  # the first one runs the node; torch is the last
    reasons: dict[fx.Node, Reason]

    @classmethod
    def of(cls, refusals: Mapping[str, Mapping[fx.Node, Reason | None]]) -> "Candidates":
        """Collect why executors, which are in order of preference, cannot run nodes; ``None`` where they can."""
        candidates = cls({}, {})
        for node in next(iter(refusals.values())):
            own = {name: refusals[name][node] for name in refusals}
            candidates.executors[node] = [*(name for name, reason in own.items() if reason is None), TORCH]
            if (reason := next(filter(None, own.values()), None)) is not None:
                candidates.reasons[node] = reason
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
class Timing:
    """The median times of a region in ms by executor, where it was timed, and the number of threads that is fastest."""

    ms: dict[str, float]
    threads: int


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
        if is_random(node):
            sources.append(after_random)
        level = max(source[executor] for source in sources)
        levels[node] = {name: level + (name != executor) for name in names}
        if is_random(node):
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


Shapes = tuple[tuple[int, ...], ...]


def output_shapes_fn(region: Region) -> Shapes | Callable[..., Shapes]:
    """The shapes of the outputs, a function of the inputs if they are not static; may raise ``RegionRejected``."""
    shapes = tuple(tuple(node.meta["val"].shape) for node in region.outputs)
    inputs = [sizes_of(node.meta["val"]) for node in region.inputs if isinstance(node.meta["val"], torch.Tensor)]
    if len(inputs) == len(region.inputs) and all(isinstance(n, int) for sizes in (*inputs, *shapes) for n in sizes):
        return shapes
    return _function(shapes, _symbols(region))


def is_emptied_fn(region: Region) -> Callable[..., bool] | None:
    """A function from a region's inputs to whether a tensor in it is empty; ``None`` if that cannot happen.

    A size such as ``s - 2`` is only known when the region runs. Some of onnxruntime's kernels divide by it, which ends
    the process if it is 0 (``SoftmaxGrad_13`` in 1.19), and others refuse it. Torch handles it, at no cost.
    """
    tensors = [v for node in region.module.graph.nodes for v in values_of(node) if isinstance(v, torch.Tensor)]
    sizes: list[Any] = [size for tensor in tensors for size in tensor.shape if isinstance(size, torch.SymInt)]
    symbols = _symbols(region)
    doubtful = {
        str(expression_of(size)): size
        for size in sizes
        if not is_positive(size) and expression_of(size).free_symbols <= symbols.keys()
    }
    if not doubtful:
        return None
    found = _function((tuple(size for _, size in sorted(doubtful.items())),), symbols)
    return lambda *args: 0 in found(*args)[0]


def _symbols(region: Region) -> dict[sympy.Symbol, sympy.Symbol]:
    """Where the inputs ``a`` of a call show the value of each symbol, such as ``a[0].shape[1]``."""
    where: dict[sympy.Symbol, sympy.Symbol] = {}
    for index, node in enumerate(region.inputs):
        is_tensor = isinstance(node.meta["val"], torch.Tensor)
        for dim, size in enumerate(sizes_of(node.meta["val"])):
            if isinstance(size, torch.SymInt) and expression_of(size).is_Symbol:
                code = f"a[{index}].shape[{dim}]" if is_tensor else f"a[{index}]"
                where.setdefault(expression_of(size), sympy.Symbol(code))
    return where


def _function(shapes: Sequence[Sequence[Any]], where: dict[sympy.Symbol, sympy.Symbol]) -> Callable[..., Any]:
    """A function from a region's inputs to the values of sizes.

    It is compiled, since it runs at every call of the region. (``sympy.lambdify`` takes 10 ms to do that.)

    Raises:
        RegionRejected: If the inputs do not show a symbol.
    """
    sizes = sympy.Tuple(*(sympy.Tuple(*map(expression_of, shape)) for shape in shapes))
    if missing := sizes.free_symbols - where.keys():
        raise RegionRejected(ReasonType.DYNAMIC_SHAPE, f"no input shows {missing}, which its sizes depend on")
    symbols = sorted(sizes.free_symbols, key=str)
    names = {symbol: sympy.Symbol(f"n{index}", integer=True) for index, symbol in enumerate(symbols)}
    arguments = sympy.Tuple(*(where[symbol] for symbol in symbols))
    code = size_printer().doprint  # prints tuples as Python does, over names made here
    compute = eval(f"lambda {', '.join(map(str, names.values()))}: {code(sizes.xreplace(names))}", {"math": math})
    return eval(f"lambda *a: compute{code(arguments)}", {"compute": compute})
