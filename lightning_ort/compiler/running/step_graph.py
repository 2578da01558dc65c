"""A captured training step as one graph: :class:`StepGraph`.

AOTAutograd makes two graphs of a step, with torch's autograd engine between them. A step that ends in a loss needs only
one: it computes the loss and the gradients at once, and they wait until ``loss.backward()`` asks for them. Activations
stay inside the graph, and between forward and backward pass nothing is handed over.

Gradients are linear in the gradient of the loss, which is an input of the graph: the one that arrived last is expected
again, such as 1, or the scale of a gradient scaler. If another one arrives, the gradients are multiplied.
"""

import functools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from lightning_ort.compat.aot_autograd import JointFacts, adds_guards, joint_facts, without_autocast
from lightning_ort.compat.autograd import keeps_graph, set_gradients
from lightning_ort.compiler.cache.kept_step import from_plain, to_plain
from lightning_ort.compiler.graphs.nodes import int_hint, is_random, results_of
from lightning_ort.compiler.lowering.one_graph import one_graph, reaches_outputs
from lightning_ort.compiler.request import CompileRequest
from lightning_ort.compiler.running.eager_runs import GradientsOnce, RunState, gradients_by_eager, versions_of
from lightning_ort.compiler.running.fallbacks import CHANGED
from lightning_ort.compiler.running.graph_check import GraphCheck
from lightning_ort.recording.gradients import TWICE, Expected, WaitingGradients, accumulate


class GraphSource:
    """What one captured graph's :class:`StepGraph` is made of, collected while AOTAutograd compiles it."""

    def __init__(self, loss: int, num_inputs: int) -> None:
        self.loss = loss  # which result of the graph it is
        self._num_inputs = num_inputs
        self._joint: tuple[fx.GraphModule, int] | None = None
        self.facts: JointFacts | None = None
        self.gm: fx.GraphModule | None = None  # the step as one graph
        # the same, compiled, boxed; it takes the inputs and the expected gradient of the loss
        self.run: Callable[[list[Any]], Sequence[Any]] | None = None
        self.others: Sequence[int] = ()  # inputs on which results depend, but the loss does not
        self.can_repeat = False  # whether the step can be done again from what its buffers are afterwards
        self.is_kept = False  # whether an earlier run has traced it

    def keep_joint(self, joint: fx.GraphModule, num_fwd_outputs: int) -> None:
        """Keep a copy of the joint graph, which is split next."""
        graph = fx.Graph()
        graph.output(graph.graph_copy(joint.graph, {}))
        self._joint = fx.GraphModule(joint, graph), num_fwd_outputs

    def make(self) -> fx.GraphModule | None:
        """Return the step as one graph, or ``None`` if it cannot be one; called while the forward graph is compiled."""
        if self._joint is None:
            return None
        (joint, num_fwd_outputs), self._joint = self._joint, None
        self.facts = facts = joint_facts(self._num_inputs)
        if facts is None or self.loss not in facts.differentiable:
            return None
        before = results_of(joint)[num_fwd_outputs:]  # the gradient of each input
        gm = one_graph(joint, num_fwd_outputs, facts.differentiable.index(self.loss))
        if gm is None:
            return None
        inputs = gm.graph.find_nodes(op="placeholder")
        results = set(range(len(facts.written), num_fwd_outputs))
        self.can_repeat = not any(reaches_outputs(gm, inputs[i], results) for i in facts.written)
        if len(facts.differentiable) > 1 and not self.can_repeat:
            return None
        pairs = enumerate(zip(before, results_of(gm)[num_fwd_outputs:], strict=True))
        self.others = [index for index, (of_all, of_loss) in pairs if of_all is not None and of_loss is None]
        self.gm = gm
        return gm

    def to_plain(self) -> Any:
        """Return the same as the types of JSON, once the graph is lowered; ``None`` if that is not possible."""
        graph = None if self.gm is None or adds_guards() else to_plain(self.gm.graph)
        if graph is None or self.facts is None:
            return None
        return {**self.facts._asdict(), "graph": graph, "others": [*self.others], "can_repeat": self.can_repeat}

    def restore(self, plain: Any) -> None:
        """Take over what :meth:`to_plain` of the same graph has returned in an earlier run."""
        facts = JointFacts(plain["written"], plain["differentiable"])
        others, can_repeat, self.gm = plain["others"], plain["can_repeat"], from_plain(plain["graph"])
        self.facts, self.others, self.can_repeat, self.is_kept = facts, others, can_repeat, True


LARGE_BYTES = 2**23  # of gradients, beside which it costs no time to drop the old ones

_IS_LEAF = operator.attrgetter("is_leaf")


@dataclass
class _Pass:
    """One run of a step, whose gradients wait."""

    gradients: list[torch.Tensor] | None
    expected: Expected  # the gradient of the loss for which they were computed
    results: Sequence[torch.Tensor]  # differentiable
    parameters: Sequence[torch.Tensor] = ()  # if the gradients may be written to them
    args: Sequence[Any] = ()  # and what else it takes to do the step again
    versions: Sequence[int] = ()
    state: RunState | None = None


class StepGraph:
    """Runs a captured step as one graph.

    Args:
        source: Its parts.
        eager: The graph as captured.
        misfit: Called with the reason if the step turns out to need passes of its own; it is not to be used again.
        on_second_gradient: Called if its gradients are differentiated; it is not to be used again.
        request: Whose functions drop, write and hand over gradients.
        reads_gradients: Whether the step reads a gradient: if it hands the old one on, it does so after its graph.
        check: What compares its first run with eager, if anything.
    """

    def __init__(
        self,
        source: GraphSource,
        eager: Callable[..., Any],
        misfit: Callable[[str], None],
        on_second_gradient: Callable[[], None],
        request: CompileRequest,
        reads_gradients: bool,
        check: GraphCheck | None,
    ) -> None:
        self._check = check
        assert source.facts is not None
        assert source.gm is not None
        assert source.run is not None
        self._leave = request.leave_gradients
        self._run = source.run
        self._eager = eager
        self._misfit = misfit
        self._on_second_gradient = on_second_gradient
        self._direct = request.writes_gradients
        self._written, self._differentiable = source.facts.written, source.facts.differentiable
        self._loss = self._differentiable.index(source.loss)
        results = results_of(source.gm)
        *inputs, tangent = source.gm.graph.find_nodes(op="placeholder")
        self._start = len(results) - len(inputs)  # of the gradients
        self._num_results = self._start - len(self._written)
        self._targets = [index for index in range(len(inputs)) if results[self._start + index] is not None]
        self._gradients = [self._start + index for index in self._targets]
        sizes = [results[self._start + index].meta["val"] for index in self._targets]
        is_large = sum(int_hint(val.numel()) * val.element_size() for val in sizes) >= LARGE_BYTES
        self._drop = request.drop_gradients if is_large and not reads_gradients else None
        self._draws = any(is_random(node) for node in source.gm.graph.nodes)
        self._expected: Expected | None = None
        self._is_half = any(_is_half(node.meta.get("val")) for node in source.gm.graph.nodes)
        if not self._is_half:
            like = tangent.meta["val"]
            self._expected = (1.0, torch.ones((), dtype=like.dtype, device=like.device))
        self._waits = False  # for a backward pass
        self._others = source.others
        # what it takes to repeat the step is kept for others than the loss, and until a first gradient has been plain
        self._several = len(self._differentiable) > 1
        self._keeps = self._several or source.can_repeat

    def __call__(self, *args: Any) -> Any:
        """Run the step; its gradients wait for the backward pass."""
        if self._waits:
            self._misfit("no gradient of its loss was asked for")
            return self._eager(*args)
        if self._expected is None:  # float16 needs the scale of a gradient scaler, which the first step shows
            eager = self._eager(*args)
            eager[self._differentiable[self._loss]].register_hook(self._expect)
            return eager
        state, check, self._check = None, self._check, None
        before = None if check is None else (RunState(args), {i: args[i].detach().clone() for i in self._written})
        if self._keeps and (self._draws or any(map(torch.is_autocast_enabled, ("cpu", "cuda")))):
            state = RunState(args)
        expected = self._expected
        if self._drop is not None:
            self._drop()
        takes_gradients = torch.is_grad_enabled()
        set_gradients(False)
        try:
            with without_autocast():  # as AOTAutograd runs its graphs, whose casts are traced
                outputs = self._run([*args, expected[1]])
                for index, new in zip(self._written, outputs, strict=False):
                    args[index].copy_(new)
        finally:
            set_gradients(takes_gradients)
        results = list(outputs[len(self._written) : self._start])
        gradients = list(map(outputs.__getitem__, self._gradients))
        if check is not None and before is not None:
            self._compare(check, args, *before, results, gradients, expected[1])
        inputs, others = list(map(args.__getitem__, self._targets)), map(args.__getitem__, self._others)
        if not self._keeps and all(map(_IS_LEAF, inputs)):
            loss = results[self._differentiable[self._loss]]
            make = functools.partial(WaitingGradients, loss, expected, inputs, gradients, self._took)
            if self._leave(make):
                self._waits = True
                return tuple(results)
        one = _Pass(gradients, expected, list(map(results.__getitem__, self._differentiable)))
        if all(map(_IS_LEAF, inputs)):
            one.parameters = inputs
        if self._keeps:
            one.args, one.state, one.versions = args, state, versions_of(args)
        for index, result in zip(self._differentiable, _Results.apply(self, one, *inputs, *others), strict=True):
            results[index] = result
        self._waits = True
        return tuple(results)

    def _compare(
        self,
        check: GraphCheck,
        args: Sequence[Any],
        state: RunState,
        written: Mapping[int, torch.Tensor],
        results: Sequence[Any],
        gradients: Sequence[torch.Tensor],
        tangent: torch.Tensor,
    ) -> None:
        """Compare a run with eager, which raises ``GraphDiffers``."""
        check.results(self._eager, args, written, state, results)
        by_index = dict(zip(self._targets, gradients, strict=True))
        own = [by_index.get(index) for index in range(len(args))]
        loss = self._differentiable[self._loss]
        tangents = [tangent if index == loss else None for index in range(len(results))]
        with torch.no_grad():
            check.gradients(self._eager, args, written, state, tangents, own)

    def _took(self, tangent: torch.Tensor | None) -> None:
        self._waits = False
        if tangent is not None:
            self._expect(tangent)

    def backward(self, one: _Pass, tangents: Sequence[torch.Tensor | None]) -> Sequence[torch.Tensor | None]:
        """Return the gradients of a run for those of its results."""
        self._waits = False
        tangent = tangents[self._loss]
        if torch.is_grad_enabled() and one.args:  # `create_graph=True`
            self._on_second_gradient()
            return self._again(one, tangents)
        self._keeps = self._several
        if self._several and any(other is not None for index, other in enumerate(tangents) if index != self._loss):
            self._misfit("a result beside its loss is differentiated")
            found = self._again(one, tangents)
        elif tangent is None:
            return [None] * len(self._targets)
        else:
            if one.gradients is None:
                raise RuntimeError(TWICE)
            gradients = one.gradients
            if keeps_graph():
                gradients = [gradient.clone() for gradient in gradients]
            else:  # it gives them away
                one.gradients = None
            # on another device, to compare would wait for it
            if tangent.device.type != "cpu" or float(tangent) != one.expected[0]:
                torch._foreach_mul_(gradients, tangent / one.expected[1])
                self._expect(tangent)
            if one.gradients is None:
                one.args, one.state = (), None  # a loss that is kept, as people do, keeps no batch
            may_write = one.parameters and not torch.is_grad_enabled() and self._direct()
            if may_write and accumulate(one.parameters, gradients):
                return [None] * len(gradients)
            found = [*gradients]
        if torch.is_grad_enabled():
            found = GradientsOnce.apply(len(found), *found, *one.parameters, tangent)
        return found

    def _expect(self, tangent: torch.Tensor) -> None:
        """Expect this gradient of the loss from now on, if gradients can be computed from it."""
        new = tangent.detach().clone()
        if new.device.type == "cpu":
            if (value := float(new)) and math.isfinite(value):
                self._expected = (value, new)
        elif self._is_half:  # to look at it would wait for the device, so nobody knows the number
            old = torch.ones_like(new) if self._expected is None else self._expected[1]
            self._expected = (math.nan, torch.where(new.isfinite() & (new != 0), new, old))

    def _again(self, one: _Pass, tangents: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """The gradients of several results, or such as can be differentiated: eager does the step again."""
        if not one.args:
            raise RuntimeError(TWICE)
        if one.versions != versions_of(one.args):
            raise RuntimeError(CHANGED)
        assert one.state is not None or not self._draws
        written = {index: one.args[index].clone() for index in self._written}
        by_index = dict(zip(self._differentiable, tangents, strict=True))
        gradients = [by_index.get(index) for index in range(self._num_results)]
        found = gradients_by_eager(self._eager, one.args, written, one.state, gradients)
        return [found[index] for index in (*self._targets, *self._others)]


class _Results(torch.autograd.Function):
    """The differentiable results of a run, for the autograd engine."""

    @staticmethod
    def forward(ctx: Any, graph: StepGraph, one: _Pass, *inputs: torch.Tensor) -> Any:
        ctx.graph, ctx.one = graph, one
        ctx.set_materialize_grads(False)
        results, one.results = tuple(one.results), ()
        return results

    @staticmethod
    def backward(ctx: Any, *tangents: torch.Tensor | None) -> Any:
        found = ctx.graph.backward(ctx.one, tangents)
        return None, None, *found, *[None] * (len(ctx.needs_input_grad) - 2 - len(found))


def _is_half(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype is torch.float16
