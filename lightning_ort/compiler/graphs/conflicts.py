"""What a graph is not captured for, because a compiled one would differ from eager: :func:`conflict_of`.

Each function below is one such case, with its reason; :data:`CONFLICTS` is the whole list. The step of such a graph is
for eager alone, also for inductor, which differs from eager in the same ways. What is not on the list behaves as
under ``torch.compile``, and audits look for it; a new case is one function here.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from lightning_ort.compat.autograd import casts_within, is_recorded_before
from lightning_ort.compat.dynamo import hooks_a_result
from lightning_ort.compat.torch import without_torch_function
from lightning_ort.compiler.graphs.nodes import has_separate_gradients, tensor_class_of
from lightning_ort.compiler.graphs.writes import InputWrites
from lightning_ort.compiler.reason import Reason, ReasonType
from lightning_ort.compiler.request import CompileRequest


@dataclass(frozen=True)
class Captured:
    """A graph as dynamo captured it."""

    gm: fx.GraphModule
    inputs: Sequence[Any]  # examples of its inputs
    request: CompileRequest
    writes: InputWrites  # what it writes to its inputs


def conflict_of(captured: Captured) -> Reason | None:
    """Return why a graph is not to be compiled, if it is not."""
    return next(filter(None, (conflict(captured) for conflict in CONFLICTS)), None)


def in_eager(captured: Captured) -> Callable[..., Any]:
    """Return what runs a graph that is not compiled."""
    forward = captured.gm.forward
    return forward if tensor_class(captured) is None else without_torch_function(forward)


def tensor_class(captured: Captured) -> Reason | None:
    """Dynamo traces into the functions of a class of tensors; the graph has their results, and must not call them."""
    if (kind := tensor_class_of(captured.inputs)) is None:
        return None
    text = f"an input is a {kind.__qualname__}, a class of tensors with functions of its own"
    return Reason(ReasonType.UNSUPPORTED_ARGUMENTS, text)


def hooked_result(captured: Captured) -> Reason | None:
    """AOTAutograd runs the hook inside the backward graph, after what ``retain_grad`` keeps."""
    if not hooks_a_result(captured.gm):
        return None
    return Reason(ReasonType.HOOKED_RESULT, "compiled graphs give it the gradient before the hook")


def earlier_step(captured: Captured) -> Reason | None:
    """A compiled backward pass goes on to an earlier step with zeros, where eager has nothing to go on with."""
    number = captured.request.began_at
    if not torch.is_grad_enabled() or not any(is_recorded_before(one, number) for one in captured.inputs):
        return None
    return Reason(ReasonType.EARLIER_STEP, "`detach()` it so that the step can be compiled")


def cast_within_a_kernel(captured: Captured) -> Reason | None:
    """A captured graph runs without autocast, since its casts are in the graph; those within a kernel are not."""
    if not casts_within(captured.gm):
        return None
    text = "without `torch.backends.mha.set_fastpath_enabled(False)`, autocast is needed within a kernel"
    return Reason(ReasonType.UNSUPPORTED_ARGUMENTS, text)


def separate_gradients(captured: Captured) -> Reason | None:
    """With manual optimization each result may have a backward pass of its own; a compiled graph has one for all."""
    if not captured.request.by_hand or not has_separate_gradients(captured.gm):
        return None
    return Reason(ReasonType.SEPARATE_GRADIENTS, "a compiled graph has one backward pass")


def written_inputs(captured: Captured) -> Reason | None:
    """AOTAutograd copies new values to inputs when a graph is over, which autograd then sees otherwise."""
    conflict = captured.writes.conflict
    return None if conflict is None else Reason(ReasonType.WRITES_TO_INPUT, conflict)


CONFLICTS: tuple[Callable[[Captured], Reason | None], ...] = (
    tensor_class,
    hooked_result,
    earlier_step,
    cast_within_a_kernel,
    separate_gradients,
    written_inputs,
)
