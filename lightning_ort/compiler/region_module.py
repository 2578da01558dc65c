"""A region as torch runs it: :class:`RegionModule`.

A graph is traced with torch's fake kernels, and the results of some have other strides than those of the real kernels
(torch 2.13 on the CPU: the gradients of batch, layer and group norm, of ``log_softmax`` and of several losses). Eager
adapts to them, but a traced graph does not: a ``view`` or a kernel that was traced for one layout fails on another, and
``as_strided`` reads the wrong elements. So the first run of a region in torch compares every result with its trace, and
from then on the few that differ are converted to the traced layout.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from lightning_ort.compiler.layouts import IN_ORDER, in_order, is_in_order, traced_order
from lightning_ort.compiler.nodes import is_view


class RegionModule:
    """A graph as torch runs it; its code is generated at the first call, which most regions do not get."""

    def __init__(self, graph: fx.Graph, name: str) -> None:
        self.graph = graph
        self._name = name
        self._run: Callable[..., Any] | None = None

    def forward(self, *args: Any) -> Any:
        """Run it."""
        if self._run is not None:
            return self._run(*args)
        first = _FirstRun(self.graph)
        outputs = first.run(*args)
        self._run = _with_layouts(self.graph, first.moved, self._name)
        return outputs


class _FirstRun(fx.Interpreter):
    """Runs a graph node by node, each on tensors in the layout that was traced."""

    def __init__(self, graph: fx.Graph) -> None:
        super().__init__(torch.nn.Module(), graph=graph)  # not a GraphModule, which would generate code
        self.moved: dict[fx.Node, list[int]] = {}  # results in another layout, and the order of dimensions when traced

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        traced = n.meta.get("val")
        if n.op != "call_function" or is_view(n) or not isinstance(value, torch.Tensor):
            return value
        _check_kind(n, value, traced)
        order = traced_order(traced)
        if order is None or is_in_order(value, order) or all(user.target is IN_ORDER for user in n.users):
            return value
        self.moved[n] = order
        return in_order(value, order)


def _check_kind(node: fx.Node, value: torch.Tensor, traced: Any) -> None:
    """Raise ``TypeError`` if dtype or shape are not as traced, as for a custom op whose fake kernel is wrong."""
    if not isinstance(traced, torch.Tensor):
        return
    fixed = [size if isinstance(size, int) else None for size in traced.shape]
    alike = len(fixed) == value.dim() and all(a in (None, b) for a, b in zip(fixed, value.shape, strict=True))
    if value.dtype is not traced.dtype or not alike:
        raise TypeError(
            f"{node.target} gave {value.dtype} {list(value.shape)}, and {traced.dtype} {list(traced.shape)} when traced"
        )


def _with_layouts(graph: fx.Graph, moved: dict[fx.Node, list[int]], name: str) -> Callable[..., Any]:
    """The function of a graph in which some results are converted to another layout."""
    if moved:
        inner: dict[fx.Node, fx.Node] = {}
        copy = fx.Graph()
        for node in graph.nodes:
            inner[node] = copy.node_copy(node, inner.__getitem__)
            if node in moved:
                inner[node] = copy.call_function(in_order, (inner[node], moved[node]))
        graph = copy
    return fx.GraphModule(torch.nn.Module(), graph, class_name=name).forward
