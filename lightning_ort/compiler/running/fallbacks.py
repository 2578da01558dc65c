"""Replaces a compiled graph by eager if it fails while it runs: :class:`GuardedGraph`, and :class:`Aftermath`.

What else can fail ends elsewhere. A region fails alone, with what its session raises, and goes on in torch
(:mod:`~lightning_ort.compiler.running.guarded_region`); a graph that cannot be compiled does too
(``Compilation.compile_graph``). Graphs of other engines are guarded here too; of these, of a step that cannot be
captured as it is, and of all that is for eager alone, :mod:`~lightning_ort.strategies.race.failures` says what is tried
instead.

If the forward pass fails, the graph as dynamo captured it runs instead, on the same inputs and from the same state of
torch's generators; inputs that the graph writes to get their values back. So nothing happens twice. If eager raises
too, the error is in the user's program or data, and the user gets it.

If the backward pass fails, the forward pass is long over. So until the first backward passes of a graph have succeeded,
each forward pass keeps what eager would need: inputs, the states of the generators, and copies of the buffers that the
graph writes to. What a later backward pass raises outside of regions reaches the user. The same serves backward passes
with ``create_graph=True``, as of networks for differential equations, force fields and penalties of gradients: compiled
graphs have no gradients of gradients, and eager has.

The results of a compiled graph have one backward pass, in which those that are not differentiated have gradients of
zero. In eager a result that shares nothing with the loss has a pass of its own, and a parameter that the differentiated
results do not depend on has no gradient. Where that makes a difference, eager can do each backward pass of the graph.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from lightning_ort.compat.aot_autograd import GraphFacts, half_of, joint_facts, traced_graph_facts
from lightning_ort.compat.autograd import keeps_graph
from lightning_ort.compat.torch_graphs import mark_boxed
from lightning_ort.compiler.graphs.nodes import reached, results_of
from lightning_ort.compiler.machine.out_of_memory import free_memory_of, is_out_of_memory
from lightning_ort.compiler.reason import Reason, ReasonType
from lightning_ort.compiler.regions.region import TORCH, RegionRejected
from lightning_ort.compiler.report.data import GraphReport
from lightning_ort.compiler.running.eager_runs import (
    GradientsOnce,
    RunState,
    gradients_by_eager,
    gradients_of,
    leaves,
    needs_gradient,
    versions_of,
)
from lightning_ort.compiler.running.graph_check import GraphCheck

CHANGED = "one of the variables needed for gradient computation has been modified by an inplace operation"
SECOND_PASS = (
    "a result beside the loss has a backward pass of its own, and a compiled graph has one; `detach()` what need not be"
    " differentiated"
)
SECOND_GRADIENT = "its gradients are differentiated (`create_graph=True`), and those of compiled graphs cannot be"
_FAILED = "_lightning_ort_pass"
# backward passes that eager could still do: a step may take a plain gradient first, and one to be differentiated next
PASSES = 4
# calls without a backward pass after which a graph no longer prepares for a failure of one
_PATIENCE = 100


class ORTFallbackError(RuntimeError):
    """Something could not run on ONNX Runtime, under ``ORTConfig(fallback="raise")``."""


class PassMonitor:
    """What the guard of a captured graph learns from its passes: whether they draw random numbers."""

    def __init__(self, num_inputs: int) -> None:
        self._num_inputs = num_inputs
        self.facts = GraphFacts(num_inputs, [], True)
        self.draws = False
        self._flows: list[set[int]] = []  # to the gradients of which inputs that of each differentiable result goes
        self._differentiable: list[int] = []  # results

    def see_joint(self, joint: fx.GraphModule, num_fwd_outputs: int) -> None:
        """Look at the forward and backward pass, before they are split."""
        gradients = results_of(joint)[num_fwd_outputs:]
        tangents = [node for node in joint.graph.find_nodes(op="placeholder") if half_of(node) == "backward"]
        found = [reached([tangent], lambda node: node.users) for tangent in tangents]
        self._flows = [{index for index, one in enumerate(gradients) if one in flow} for flow in found]

    def see_facts(self) -> None:
        """Look at what AOTAutograd has found out, while it compiles one of the passes."""
        self.facts = traced_graph_facts() or self.facts
        joint = joint_facts(self._num_inputs)
        self._differentiable = [] if joint is None else joint.differentiable

    @property
    def gradients_differ(self) -> bool:
        """Whether its results do not all depend on the same inputs, as far as gradients are concerned."""
        return any(flow != self._flows[0] for flow in self._flows)

    def without_zeros(self, found: list[Any], gradients: Sequence[Any]) -> list[Any]:
        """Drop the gradient of each input on which only results depend that are not differentiated.

        One on which none seems to depend is zero in eager too, as that of ``torch.sign`` is.
        """
        if not self._flows or len(self._differentiable) != len(self._flows):
            return found
        pairs = zip(self._differentiable, self._flows, strict=True)
        flows = set[int]().union(*(flow for result, flow in pairs if gradients[result] is not None))
        zeros = set[int]().union(*self._flows) - flows
        return [None if index in zeros else one for index, one in enumerate(found)]

    @property
    def separate(self) -> bool:
        """Whether its inputs share no memory with its outputs or with each other, as far as gradients are concerned."""
        return self.facts.separate and self.facts.num_inputs == self._num_inputs

    def copies_of_written(self, args: Sequence[Any]) -> dict[int, torch.Tensor]:
        """Copy the inputs that the graph writes to, by index."""
        written: Sequence[int] = self.facts.written
        if self.facts.num_inputs != self._num_inputs:  # of other inputs
            written = [i for i, arg in enumerate(args) if isinstance(arg, torch.Tensor) and not arg.requires_grad]
        return {index: args[index].detach().clone() for index in written}

    def watch(self, run: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
        """Return the pass, so that the monitor remembers what it failed with."""

        def watched(args: list[Any]) -> Any:
            try:
                return run(args)
            except ORTFallbackError:
                raise
            except Exception as error:
                vars(error)[_FAILED] = True  # on the error: kept here, its traceback would keep tensors
                raise

        return mark_boxed(watched)

    def saw(self, error: Exception) -> bool:
        """Return, once for each error, whether it came from one of the passes and not from the code around them."""
        return vars(error).pop(_FAILED, False)


class GuardedGraph:
    """A compiled graph that is replaced by eager, the graph as captured, once one of its passes has failed.

    ``give_up`` gets what the pass failed with and may raise to refuse eager. ``refuse`` gets why the graph is for eager
    alone, once that shows. Eager can take over the first ``passes`` backward passes, 0 if gradients need no compiled
    pass. ``separate`` tells whether, in eager, results share nothing and may have passes of their own: what these need
    is then kept. ``check`` compares its first run with eager, and the last one that eager could take over: that of a
    recording is then a replay.
    """

    # dynamo wraps it, and copies what is in `__dict__`: then nothing would be freed
    __slots__ = (
        *("run", "eager", "monitor", "separate", "trusted"),
        *("_calls", "_check", "_give_up", "_passes", "_refuse", "__weakref__"),
    )

    def __init__(
        self,
        compiled: Callable[..., Any],
        eager: Callable[..., Any],
        monitor: PassMonitor,
        give_up: Callable[[Exception], None],
        refuse: Callable[[Reason], None],
        passes: float = PASSES,
        separate: bool = False,
        check: GraphCheck | None = None,
    ) -> None:
        self.run = compiled
        self.separate, self._check = separate, check
        self._passes: float = passes  # that are left
        self._refuse = refuse
        self.eager = eager
        self.monitor = monitor
        self._give_up = give_up
        self.trusted = False
        self._calls = 0
        if separate and not monitor.separate:
            self.saw_second_pass()  # which cannot be prepared for

    def __call__(self, *args: Any) -> Any:
        """Run the graph."""
        trusted = self.trusted
        # what has run once fails in a pass or not at all, and passes write to nothing; the states take 2 us
        state = None if trusted and not self.monitor.draws else RunState(args)
        written = {} if trusted else self.monitor.copies_of_written(args)
        try:
            if state is None or trusted:
                return self.run(*args)
            return self._run_first(args, state, written)
        except ORTFallbackError:
            raise
        except Exception as error:
            # in its first runs also what AOTAutograd fails with around its passes, such as a recurrent layer's (2.13)
            if not self.monitor.saw(error) and trusted:
                raise
            failure = error
        if state is not None:
            state.restore_random_numbers()
            with torch.no_grad():
                for index, before in written.items():
                    args[index].copy_(before)
        self.make_room(failure)
        outputs = self.eager(*args)  # what it raises is the user's
        self.give_up(failure)
        return outputs

    def _run_first(self, args: Sequence[Any], state: "RunState", written: Mapping[int, torch.Tensor]) -> Any:
        self._calls += 1
        backward = torch.is_grad_enabled() and any(map(needs_gradient, args))
        waits = self._passes == math.inf or self._calls <= _PATIENCE
        prepares = self._passes and backward and self.monitor.separate and waits
        versions = versions_of(args)
        outputs = _run_for_first_backward(self, state, args, written) if prepares else self.run(*args)
        pairs = enumerate(zip(versions, versions_of(args), strict=True))
        if any(before != now and index not in written for index, (before, now) in pairs):
            self._check = None  # a graph that torch has kept, of which it is not known what it writes to
        if (check := self.check) is not None:
            check.results(self.eager, args, written, state, outputs)
            if backward and not prepares:
                check.skipped("a result shares memory with an input, so its gradients are not compared")
        self.trusted = self.trusted or not prepares
        return outputs

    @property
    def check(self) -> GraphCheck | None:
        """What compares this run with eager, if it is to be compared."""
        return self._check if self._calls == 1 or self._passes == 1 else None

    def make_room(self, error: Exception) -> None:
        """Free what a pass that ran out of memory has taken, and what its compiled graph keeps."""
        if is_out_of_memory(error):
            self.leave()
            free_memory_of(error)

    def passed(self) -> None:
        """Count a backward pass that has succeeded."""
        self._passes = max(self._passes - 1, 0)
        self.trusted = self.trusted or not self._passes

    def leave(self) -> None:
        """Go on in eager from now on, although nothing has failed."""
        self.run, self.trusted = self.eager, True

    def saw_second_gradient(self) -> None:
        """Go on in eager, as its gradients are differentiated."""
        if self.run is not self.eager:
            self.leave()
            self._refuse(Reason(ReasonType.SECOND_GRADIENT, SECOND_GRADIENT))

    def saw_second_pass(self) -> None:
        """Go on in eager if its results have backward passes of their own."""
        if self.separate and self.run is not self.eager:
            self.leave()
            self._refuse(Reason(ReasonType.SEPARATE_GRADIENTS, SECOND_PASS))

    def give_up(self, error: Exception) -> None:
        """Go on in eager from now on."""
        self.leave()
        self._give_up(error)


@dataclass(frozen=True)
class Aftermath:
    """What follows once eager runs a captured graph, beside that."""

    where: str
    graphs: Sequence[GraphReport]  # the reports of its passes
    # takes a place and a reason; reports a fallback and warns, or raises under ``fallback="raise"``
    fall_back: Callable[[str, Reason], None]
    # takes why the graph is for eager alone. The race then gives up the whole step, if it is one; else it is a note in
    # the report
    refuse: Callable[[Reason], None]

    def failed(self, error: Exception) -> None:
        """A pass has failed with an error; the step goes on in its way, with this graph in eager."""
        reason = RegionRejected(ReasonType.RUN_FAILED, error).reason
        self._mark(reason)
        self.fall_back(self.where, reason)

    def for_eager(self, reason: Reason) -> None:
        """Nothing has failed, but the graph turned out to be one that only eager can run."""
        self._mark(reason)
        self.refuse(reason)

    def _mark(self, reason: Reason) -> None:
        for region in (region for graph in self.graphs for region in graph.regions):
            region.executor, region.reason = TORCH, reason


@dataclass
class _FirstPass:
    """A forward pass of a graph whose backward pass eager could do."""

    guard: GuardedGraph
    state: RunState
    args: Sequence[Any]
    written: Mapping[int, torch.Tensor]  # the values that inputs had, by index, which the pass writes to
    inner: Sequence[Any]  # the inputs of the compiled graph, as leaves
    outputs: Sequence[Any] | None  # until a backward pass that keeps nothing
    versions: Sequence[int]
    passed: bool = False

    def is_unchanged(self) -> bool:
        """Whether nothing but the pass itself has written to its inputs."""
        pairs = enumerate(zip(self.versions, versions_of(self.args), strict=True))
        return all(before == now for index, (before, now) in pairs if index not in self.written)

    def gradients_by_eager(self, gradients: Sequence[Any]) -> list[Any]:
        """The gradient of each input; eager does the forward pass again."""
        return gradients_by_eager(self.guard.eager, self.args, self.written, self.state, gradients)


def _run_for_first_backward(
    guard: GuardedGraph, state: RunState, args: Sequence[Any], written: Mapping[int, torch.Tensor]
) -> Any:
    inner = leaves(args)
    outputs = guard.run(*inner)
    leaves_reached = _leaves_of(outputs)
    # as AOTAutograd does: the engine goes on to what made an input, even without a gradient, and frees what it keeps
    inputs = [
        arg.detach() if needs_gradient(arg) and leaf not in leaves_reached else arg
        for arg, leaf in zip(args, inner, strict=True)
    ]
    first = _FirstPass(guard, state, args, written, inner, outputs, versions_of(args))
    return _FirstBackward.apply(first, outputs, *inputs)


def _leaves_of(outputs: Sequence[Any]) -> set[torch.Tensor]:
    ends = [out.grad_fn for out in outputs if isinstance(out, torch.Tensor) and out.grad_fn is not None]
    nodes = reached(ends, lambda node: [following for following, _ in node.next_functions if following is not None])
    return {node.variable for node in nodes if hasattr(node, "variable")}


class _FirstBackward(torch.autograd.Function):
    """A graph that has not been through a backward pass: where that fails, eager does both passes again."""

    @staticmethod
    def forward(ctx: Any, first: _FirstPass, outputs: Sequence[Any], *inputs: Any) -> Any:
        ctx.first = first
        ctx.set_materialize_grads(False)
        detached = tuple(out.detach() if isinstance(out, torch.Tensor) else out for out in outputs)
        pairs = zip(outputs, detached, strict=True)
        ctx.mark_non_differentiable(
            *[mine for out, mine in pairs if isinstance(out, torch.Tensor) and not out.requires_grad]
        )
        return detached

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        first: _FirstPass = ctx.first
        guard = first.guard
        if all(gradient is None for gradient in gradients):
            return None, None, *[None] * len(first.args)
        repeatable = first.is_unchanged() and not any(first.args[index].requires_grad for index in first.written)
        if torch.is_grad_enabled() and repeatable:  # `create_graph=True`
            found = first.gradients_by_eager(gradients)
            guard.saw_second_gradient()
            return None, None, *found
        if first.passed:
            guard.saw_second_pass()
        first.passed = True
        keeps = keeps_graph() or guard.separate
        outputs, first.outputs = first.outputs, first.outputs if keeps else None
        failure: Exception | None = None
        if outputs is not None:
            try:
                found = gradients_of(outputs, first.inner, gradients, keeps)
                if guard.check is not None and first.is_unchanged():
                    guard.check.gradients(guard.eager, first.args, first.written, first.state, gradients, found)
            except ORTFallbackError:
                raise
            except Exception as error:  # of the pass, or of what AOTAutograd does before: nothing else takes part
                failure = error
        if outputs is None or failure is not None:  # it has failed, or this is its second time (`retain_graph=True`)
            if not first.is_unchanged():
                raise failure or RuntimeError(CHANGED)
            del outputs
            if failure is not None:
                guard.make_room(failure)
            found = first.gradients_by_eager(gradients)
        found = guard.monitor.without_zeros(found, gradients)
        if failure is not None:
            guard.give_up(failure)
        guard.passed()
        if torch.is_grad_enabled():
            found = GradientsOnce.apply(len(found), *found, *first.args)
        return None, None, *found
