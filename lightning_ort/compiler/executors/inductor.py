"""Inductor as an executor of whole graphs: under ``engine="auto"`` it is timed against the others on whole steps."""

import copy
import functools
import os
import re
import shutil
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn

from lightning_ort.compat.aot_autograd import GraphFacts, traced_graph_facts
from lightning_ort.compat.inductor import (
    chunking,
    has_triton,
    inductor_backend,
    inductor_cache_folder,
    inductor_repairs,
    joint_pass,
    keeping_budget,
)
from lightning_ort.compat.torch import copies_of
from lightning_ort.compat.torch_graphs import storage_of
from lightning_ort.compiler.graphs.conflicts import Captured, InputWrites, conflict_of, in_eager
from lightning_ort.compiler.machine.out_of_memory import is_out_of_memory
from lightning_ort.compiler.reason import Reason
from lightning_ort.compiler.request import CompileRequest, Stopped
from lightning_ort.compiler.running.fallbacks import GuardedGraph, PassMonitor
from lightning_ort.compiler.running.graph_check import GraphCheck
from lightning_ort.config import DropoutMasks


def cpp_compiler_name() -> str:
    """Return the name of the one C++ compiler that inductor looks for on a CPU."""
    return os.environ.get("CXX", {"darwin": "clang++", "win32": "cl"}.get(sys.platform, "g++"))


def cpp_compiler() -> str | None:
    """Return where that compiler is, or ``None`` if there is none."""
    return _which(cpp_compiler_name(), os.environ.get("PATH"))


@functools.cache
def _which(name: str, path: str | None) -> str | None:
    return shutil.which(name, path=path)


def obstacle(on_gpu: bool) -> str:
    """Return why inductor cannot compile here; nothing if it can."""
    if on_gpu:
        return "" if has_triton() else "Triton is not installed, or the GPU is too old for it"
    return "" if cpp_compiler() else f"no {cpp_compiler_name()} on the PATH"


def has_cache() -> bool:
    """Return whether torch has kept graphs that inductor has compiled; its folder is a temporary one by default."""
    return Path(inductor_cache_folder(), "fxgraph").is_dir()


# backward passes that eager could still do: CUDA graphs are warmed up, recorded and replayed, each in memory of its own
_PASSES = 3
# in the code of a graph that may draw random numbers
_DRAWS = re.compile(r"drop|rand|bernoulli|multinomial|normal_|uniform_|exponential_|poisson|rrelu|fractional")


def backend_for(
    masks: DropoutMasks,
    records: bool = False,
    on_failure: Callable[[Exception], None] = lambda error: None,
    request: Callable[[], CompileRequest] = CompileRequest,
) -> "GuardedBackend":
    """Return what compiles graphs, with eager's random numbers for ``"exact"`` masks, maybe as CUDA graphs."""
    # which a fit that compiles nothing need not load
    from lightning_ort.compiler.lowering import passes

    exact = masks == "exact"
    # a recording is what torch.compile's mode "reduce-overhead" sets
    options: dict[str, Any] = {"fallback_random": exact, **inductor_repairs(exact)}
    options |= {"triton.cudagraphs": True} if records else {}

    def compile(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        asked = request()
        if (budget := asked.activation_memory_budget) is None:
            edit, more = joint_pass([passes.separate_results]), {}
        else:
            edits = [passes.separate_results, passes.views_before_casts]
            edit = joint_pass(edits, budget, passes.draws_nothing)
            more = chunking()
        compile_graph = inductor_backend({**options, **more, "joint_custom_pre_pass": edit}, asked.check_budget)
        with keeping_budget():
            return compile_graph(gm, inputs)

    return GuardedBackend(_copying(compile) if records else compile, on_failure, request)


class GuardedBackend:
    """A backend whose graphs go on in eager if one fails in its first runs, or runs out of memory in any.

    ``on_failure`` gets what a graph failed with; from then on all graphs of this backend run in eager. ``request``
    returns what is compiled now, and is asked for each graph.
    """

    def __init__(
        self,
        compile: Callable[..., Callable[..., Any]],
        on_failure: Callable[[Exception], None],
        request: Callable[[], CompileRequest] = CompileRequest,
    ) -> None:
        self.compile = compile
        self._on_failure, self._request = on_failure, request
        self._guards: weakref.WeakSet[GuardedGraph] = weakref.WeakSet()

    def __call__(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """Compile a graph that dynamo has captured."""
        from lightning_ort.compiler.lowering import traced_as_eager  # which a fit that compiles nothing need not load

        request = self._request()
        captured = Captured(gm, inputs, request, InputWrites(gm))
        if (reason := conflict_of(captured)) is not None and request.refuse is not None:
            request.refuse(reason)
            return in_eager(captured)
        eager = fx.GraphModule(gm, copy.deepcopy(gm.graph))  # inductor changes the graph
        monitor = _MemoryMonitor(len(inputs))
        try:
            with traced_as_eager():
                compiled = self.compile(gm, inputs)
        except Stopped:
            return eager.forward
        monitor.facts = traced_graph_facts() or _facts_of(eager, inputs, captured.writes)
        monitor.draws = _DRAWS.search(gm.code) is not None
        check = GraphCheck.of(request.check(monitor.draws), gm)
        told = self._give_up, self._leave_to_eager
        guard = GuardedGraph(compiled, eager.forward, monitor, *told, passes=_PASSES, check=check)
        self._guards.add(guard)
        request.keep(guard)
        return guard

    def _give_up(self, error: Exception) -> None:
        for guard in self._guards:
            guard.leave()
        self._on_failure(error)

    def _leave_to_eager(self, reason: Reason) -> None:
        self._give_up(RuntimeError(reason.text))


class _MemoryMonitor(PassMonitor):
    """After the first runs, an error is inductor's if it is about memory: its passes are not told from other code."""

    def saw(self, error: Exception) -> bool:
        return is_out_of_memory(error)


def _copying(compile: Callable[..., Callable[..., Any]]) -> Callable[..., Callable[..., Any]]:
    """Return what compiles graphs to CUDA graphs, with results that are not overwritten.

    A recording has the results of each run at the same addresses, and torch raises no error when one of an earlier run
    is read (2.13). So whatever leaves a graph is copied: what a step returns, and what it keeps, as in a list.
    """

    def compile_and_copy(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        copied = _not_of_inputs(gm)
        compiled = compile(gm, inputs)

        def run(*args: Any) -> list[Any]:
            results = list(compiled(*args))
            for index in copied:
                if isinstance(results[index], torch.Tensor):
                    results[index] = results[index].clone()
            return results

        return run

    return compile_and_copy


def _facts_of(gm: fx.GraphModule, inputs: Sequence[Any], writes: InputWrites) -> GraphFacts:
    """Return what is known of a graph that torch has kept, so that nothing is traced; it may write to less."""
    written = [
        index
        for index, value in enumerate(inputs)
        if isinstance(value, torch.Tensor)
        and (index in writes.indices or not (value.requires_grad or isinstance(value, nn.Parameter)))
    ]
    results: Any = gm.graph.output_node().args[0]
    separate = len(_not_of_inputs(gm)) == len(results) and not any(inputs[index].requires_grad for index in written)
    return GraphFacts(len(inputs), written, separate)


def _not_of_inputs(gm: fx.GraphModule) -> list[int]:
    """Return which results of a graph have memory of their own, and are no views of its inputs."""
    inputs = {storage_of(node) for node in gm.graph.find_nodes(op="placeholder")}
    results: Any = gm.graph.output_node().args[0]
    return [index for index, node in enumerate(results) if (found := storage_of(node)) is None or found not in inputs]


class RecordedGradients:
    """The gradients in a recording's memory, which its next run overwrites.

    ``unseen`` returns whether nobody sees them after the optimizer has; ``drop`` drops those of the last step, if
    nobody sees them any more.
    """

    def __init__(self, unseen: Callable[[], bool], drop: Callable[[], None]) -> None:
        self._unseen, self._drop = unseen, drop
        self._parameters: Sequence[nn.Parameter] = ()

    def begin_step(self, trains: bool) -> None:
        """Let recordings overwrite what their last runs have left; once a step, which may consist of several."""
        if trains and self._parameters:
            self._drop()
        self.own()
        torch.compiler.cudagraph_mark_step_begin()

    @contextmanager
    def made_by(self, plugin: Any, parameters: Iterable[nn.Parameter]) -> Iterator[None]:
        """Within the block, a recorded backward pass runs, after which a precision plugin calls hooks."""
        new, attributes = [one for one in parameters if one.grad is None], vars(plugin)
        hooks, before = plugin.post_backward, attributes.get("post_backward")

        def after(*args: Any) -> Any:
            self._add(new)
            return hooks(*args)

        attributes["post_backward"] = after
        try:
            yield
        finally:
            del attributes["post_backward"]
            if before is not None:
                attributes["post_backward"] = before

    def _add(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = parameters
        if not self._unseen():  # people keep them, or add to them
            self.own()

    def own(self) -> None:
        """Copy those that are still there, before they are overwritten."""
        left = [(parameter, parameter.grad) for parameter in self._parameters if parameter.grad is not None]
        self._parameters = ()
        if left:
            with torch.no_grad():
                copies = copies_of([gradient for _, gradient in left])
            for (parameter, _), copy in zip(left, copies, strict=True):
                parameter.grad = copy
