"""Memory layouts of tensors: those that a graph was traced with, and those that torch's kernels give.

A graph is traced with torch's fake kernels, and some of them give a result other strides than the real kernels do
(torch 2.13 on the CPU: the gradients of batch, layer and group norm, of ``log_softmax`` and of several losses). Eager
goes by what it gets, but a traced graph does not: a ``view`` or a kernel that was traced for one layout fails on
another, and ``as_strided`` reads the wrong elements. So the first run of a region in torch compares every result with
its trace, and from then on the few that differ are brought to the traced layout.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch._prims_common import is_contiguous_or_false

from lightning_ort.compiler.support import is_view


def int_hint(size: Any) -> int:
    """A size as a number: of a symbolic one, that which it had when the graph was traced."""
    return size if isinstance(size, int) else int(size.node.hint)


def memory_order(x: torch.Tensor) -> list[int]:
    """The dimensions of a dense tensor from the slowest to the fastest."""
    if is_contiguous_or_false(x):
        return list(range(x.dim()))
    steps = [(int_hint(stride), int_hint(size)) for stride, size in zip(x.stride(), x.shape, strict=True)]
    return sorted(range(x.dim()), key=steps.__getitem__, reverse=True)


def in_order(x: torch.Tensor, order: list[int]) -> torch.Tensor:
    """The tensor, dense in memory with its dimensions in this order; itself where it is.

    Args:
        x: Any strided tensor.
        order: Its dimensions from the slowest to the fastest.

    """
    inverse = sorted(range(len(order)), key=order.__getitem__)
    return x.permute(order).contiguous().permute(inverse)


class RegionModule:
    """A region as torch runs it; its code is made at the first call, and an ORT region is seldom called so.

    Args:
        graph: Same inputs as the region, a tuple of its outputs.
        name: The region's.

    """

    def __init__(self, graph: fx.Graph, name: str) -> None:
        self.graph = graph
        self._name = name
        self._run: Callable[..., Any] | None = None

    def forward(self, *args: Any) -> Any:
        """Run it."""
        if self._run is not None:
            return self._run(*args)
        first = _FirstRun(fx.GraphModule(torch.nn.Module(), self.graph, class_name=self._name))
        outputs = first.run(*args)
        self._run = _with_layouts(self.graph, first.moved, self._name)
        return outputs


class _FirstRun(fx.Interpreter):
    """Runs a graph node by node, each on tensors in the layout that was traced.

    Attributes:
        moved: Nodes whose result came in another layout, and the order of dimensions that was traced.

    """

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.moved: dict[fx.Node, list[int]] = {}

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        traced = n.meta.get("val")
        if n.op != "call_function" or is_view(n) or not isinstance(value, torch.Tensor):
            return value
        _check_kind(n, value, traced)
        order = _traced_order(traced)
        if order is None or _is_in_order(value, order):
            return value
        self.moved[n] = order
        return in_order(value, order)


def _check_kind(node: fx.Node, value: torch.Tensor, traced: Any) -> None:
    """Refuse a result that is not what was traced, as by a custom op whose fake kernel is wrong.

    Raises:
        TypeError: If its dtype or shape differs.

    """
    if not isinstance(traced, torch.Tensor):
        return
    fixed = [size if isinstance(size, int) else None for size in traced.shape]
    alike = len(fixed) == value.dim() and all(a in (None, b) for a, b in zip(fixed, value.shape, strict=True))
    if value.dtype is not traced.dtype or not alike:
        raise TypeError(
            f"{node.target} gave {value.dtype} {list(value.shape)}, and {traced.dtype} {list(traced.shape)} when traced"
        )


def _traced_order(traced: Any) -> list[int] | None:
    """The order of a traced tensor's dimensions in memory; ``None`` if it is not known, or has gaps or overlaps."""
    if not isinstance(traced, torch.Tensor) or traced.layout is not torch.strided:
        return None
    try:
        sizes, strides = list(map(int_hint, traced.shape)), list(map(int_hint, traced.stride()))
    except TypeError:  # a size that depends on data has no hint
        return None
    order = sorted(range(len(sizes)), key=lambda dim: (strides[dim], sizes[dim]), reverse=True)
    return order if _is_dense(sizes, strides, order) else None


def _is_in_order(x: torch.Tensor, order: Sequence[int]) -> bool:
    return x.layout is not torch.strided or x.dim() != len(order) or _is_dense(x.shape, x.stride(), order)


def _is_dense(sizes: Sequence[int], strides: Sequence[int], order: Sequence[int]) -> bool:
    """Whether dimensions follow each other in memory in this order; where one lies that has one element is open."""
    step = 1
    for dim in reversed(order):
        if sizes[dim] != 1:
            if strides[dim] != step:
                return False
            step *= sizes[dim]
    return True


def _with_layouts(graph: fx.Graph, moved: dict[fx.Node, list[int]], name: str) -> Callable[..., Any]:
    """The function of a graph in which some results are brought to a layout."""
    if moved:
        inner: dict[fx.Node, fx.Node] = {}
        copy = fx.Graph()
        for node in graph.nodes:
            inner[node] = copy.node_copy(node, inner.__getitem__)
            if node in moved:
                inner[node] = copy.call_function(in_order, (inner[node], moved[node]))
        graph = copy
    return fx.GraphModule(torch.nn.Module(), graph, class_name=name).forward
