"""A region as torch runs it: :class:`RegionModule`.

A graph is traced with torch's fake kernels, and the results of some have other strides than those of the real kernels
(torch 2.13 on the CPU: the gradients of batch, layer and group norm, of ``log_softmax`` and of several losses). Eager
adapts to them, but a traced graph does not: a ``view`` or a kernel that was traced for one layout fails on another, and
``as_strided`` reads the wrong elements. So the first run of a region in torch compares every result with its trace, and
from then on the few that differ are converted to the traced layout, or to the traced dtype where torch's fake kernel
has a wider one (2.13 on the CPU: the gradient of a group norm of a half type).
"""

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from lightning_ort.compiler.graphs.layouts import IN_ORDER, in_order, is_in_order, traced_order
from lightning_ort.compiler.graphs.nodes import is_view


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
        self._run = _converting(self.graph, first.converted, self._name)
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
