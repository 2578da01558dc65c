"""AOTAutograd's joint graph of a module with what each input and output is: private in torch 2.13."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
from torch.fx import proxy, traceback

from lightning_ort.compat.torch import OpOverload


@dataclass
class JointGraph:
    """A module's forward pass, and the gradients of its first result, as one graph of ATen ops.

    Args:
        module: The graph.
        parameters: Its inputs that are parameters, by name; so are ``buffers``.
        arguments: Its inputs that are the module's arguments, in their order.
        results: What the module returns.
        written: The new values of the buffers that it writes to.
        gradients: Those of the parameters that get one.
        tangents: Its inputs that are gradients of results.

    """

    module: fx.GraphModule
    parameters: dict[str, fx.Node] = field(default_factory=dict)
    buffers: dict[str, fx.Node] = field(default_factory=dict)
    arguments: list[fx.Node] = field(default_factory=list)
    tangents: list[fx.Node] = field(default_factory=list)
    results: list[fx.Node] = field(default_factory=list)
    written: dict[str, fx.Node] = field(default_factory=dict)
    gradients: dict[str, fx.Node] = field(default_factory=dict)


def joint_graph(
    module: nn.Module, arguments: Sequence[Any], decompositions: Mapping[OpOverload, Callable[..., Any]]
) -> JointGraph:
    """Trace a module with fake arguments; its nodes keep the lines and submodules that they come from (torch 2.13)."""
    with ExitStack() as stack, traceback.preserve_node_meta():
        traced = aot_export_joint_with_descriptors(
            stack, module, tuple(arguments), decompositions=dict(decompositions)
        ).graph_module
    found = JointGraph(traced)
    for node in traced.graph.find_nodes(op="placeholder"):
        about = node.meta["desc"]
        kind = type(about).__name__
        if kind == "ParamAOTInput":
            found.parameters[about.target] = node
        elif kind == "BufferAOTInput":
            found.buffers[about.target] = node
        elif kind == "PlainAOTInput":
            found.arguments.append(node)
        elif kind == "TangentAOTInput":
            found.tangents.append(node)
        elif kind != "ForwardTokenAOTInput":  # which orders ops with effects
            raise NotImplementedError(f"an input of the graph that is {about}")
    output = traced.graph.output_node()
    results: Any = output.args[0]
    for node, about in zip(results, output.meta["desc"], strict=True):
        kind = type(about).__name__
        if kind == "PlainAOTOutput":
            found.results.append(node)
        elif kind == "InputMutationAOTOutput":
            found.written[about.mutated_input.target] = node
        elif kind == "GradAOTOutput" and node is not None:
            found.gradients[about.grad_of.target] = node
        elif node is not None and kind != "ForwardTokenAOTOutput":
            raise NotImplementedError(f"an output of the graph that is {about}")
    return found


def symbols_of(fake: torch.Tensor) -> Mapping[Any, tuple[int, int | None]]:
    """The lowest and highest value that each symbol of a fake tensor's sizes may have (torch 2.13)."""
    found: dict[Any, tuple[int, int | None]] = {}
    for size in fake.shape:
        if isinstance(size, torch.SymInt):
            for symbol in size.node.expr.free_symbols:
                bounds = size.node.shape_env.bound_sympy(symbol)
                upper = int(bounds.upper) if bounds.upper.is_Integer and bounds.upper < 2**31 else None
                found[symbol] = (int(bounds.lower), upper)
    return found


class _Frames:
    def __init__(self, is_kept: Callable[[str], bool]) -> None:
        self._is_kept = is_kept

    def __contains__(self, frame: tuple[str, str]) -> bool:
        return self._is_kept(frame[0])


@contextmanager
def keeping_frames(is_kept: Callable[[str], bool]) -> Iterator[None]:
    """Within the block torch.export notes lines of all functions in such files, not of ``forward`` alone (2.13)."""
    name = "_STACK_TRACE_ANCHORS"
    before = getattr(proxy, name, None)
    setattr(proxy, name, _Frames(is_kept))
    try:
        yield
    finally:
        if before is None:
            delattr(proxy, name)
        else:
            setattr(proxy, name, before)
