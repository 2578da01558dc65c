"""What a graph is not captured for, because a compiled one would differ from eager: :func:`conflict_of`.

Each function of :data:`CONFLICTS`, the whole list, is one such case, with its reason. The step of such a graph is
for eager alone, also for inductor, which differs from eager in the same ways. What is not on the list behaves as
under ``torch.compile``; a new case is one function here.
"""

import inspect
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from lightning_ort.compat.aot_autograd import casts_within, is_checkpoint
from lightning_ort.compat.autograd import has_hook, is_recorded_before, keeping_versions, version_of
from lightning_ort.compat.dynamo import get_data, hooks_a_result, is_variable, leave_frame
from lightning_ort.compat.torch_graphs import storage_of, without_torch_function
from lightning_ort.compiler.graphs.nodes import has_separate_gradients, int_hint, tensor_class_of
from lightning_ort.compiler.reason import Reason, ReasonType
from lightning_ort.compiler.request import CompileRequest

_IN_PLACE = {
    operator.setitem, operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.ifloordiv,
    operator.imod, operator.ipow, operator.imatmul, operator.iand, operator.ior, operator.ixor,
}  # fmt: skip
_NO_WRITES = {"requires_grad_", "rename_"}  # of values


class InputWrites:
    """What a graph, as dynamo captured it, writes to its inputs.

    AOTAutograd computes new values and copies them to the inputs when a graph is over. That differs from eager

    - where the value of a module's attribute comes to depend on parameters, and so on the steps before: the backward
      pass of a compiled graph goes on to those with zeros, where eager has nothing to go on with;
    - where another input shares memory with one that is written to: a view of it that the graph returns begins at
      another element, and to return one may fail (2.13);
    - where ``x.data`` is written to, which autograd does not see: eager's backward pass then uses what was written
      last, that of a compiled graph what there was in the forward pass.

    Attributes:
        conflict: Why a compiled graph would differ from eager; ``None`` if it does not.
        indices: Of the inputs that are written to.
        of_data: The indices of the inputs that are written to through ``.data`` alone.
    """

    def __init__(self, gm: fx.GraphModule) -> None:
        inputs = {}
        self._shared: set[Any] = set()  # storages of several inputs
        for index, node in enumerate(gm.graph.find_nodes(op="placeholder")):
            if (key := storage_of(node)) is not None:
                if key in inputs:
                    self._shared.add(key)
                inputs[key] = (index, node)
        self.conflict: str | None = None
        self._used: set[Any] = set()  # storages that a backward pass may need
        self._data: set[fx.Node] = set()  # `x.data`, and views of it
        self._written: dict[Any, bool] = {}  # whether through `.data`
        for node in gm.graph.nodes:
            if node.op in ("call_function", "call_method") and self.conflict is None:
                self._visit(node, inputs)
        self.indices = {inputs[key][0] for key in self._written}
        self.of_data = [inputs[key][0] for key, by_data in self._written.items() if by_data]

    def _visit(self, node: fx.Node, inputs: Mapping[Any, tuple[int, fx.Node]]) -> None:
        key, value = storage_of(node), node.meta.get("example_value")
        aliased = [source for source in node.all_input_nodes if key is not None and storage_of(source) == key]
        if node.target is get_data or any(source in self._data for source in aliased):
            self._data.add(node)
        written = _written_by(node)
        if written is not None and (target := storage_of(written)) in inputs:
            self._write(written, target, inputs[target][1])
        elif isinstance(value, torch.Tensor) and value.requires_grad:
            self._used.update(storage_of(source) for source in node.all_input_nodes if source not in aliased)
            noise = [key for key, by_data in self._written.items() if by_data and key in self._used]
            if any(not inputs[key][1].meta["example_value"].requires_grad for key in noise):
                self.conflict = (
                    "a gradient depends on what is written to `.data`, as it is when the gradient is computed"
                )

    def _write(self, written: fx.Node, key: Any, placeholder: fx.Node) -> None:
        by_data = written in self._data
        self._written[key] = by_data and self._written.get(key, True)
        if key in self._shared:
            self.conflict = "two of its inputs share memory, and it writes to one"
        if by_data and key in self._used:
            self.conflict = "`.data` is written to after a gradient came to depend on it"
        value = written.meta["example_value"]  # as the write has left it
        depends = value.requires_grad and not value.is_leaf
        if not by_data and depends and not is_variable(placeholder):
            self.conflict = "it keeps values that need a gradient for the next step"

    def hide(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """Return a compiled graph so that what it writes to ``.data`` is no change to autograd, as in eager."""
        if not self.of_data:
            return run

        def hidden(*args: Any) -> Any:
            with keeping_versions(tuple(args[index] for index in self.of_data)):
                return run(*args)

        return hidden


def _written_by(node: fx.Node) -> fx.Node | None:
    """The tensor that a call writes to."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    in_place = node.target in _IN_PLACE or (name.endswith("_") and not name.endswith("__") and name not in _NO_WRITES)
    if isinstance(out := node.kwargs.get("out"), fx.Node):
        return out
    if (in_place or node.kwargs.get("inplace") is True) and node.args and isinstance(node.args[0], fx.Node):
        return node.args[0]
    return None


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
    """Return what runs a graph that is not compiled; where that would not be eager, Python runs the function."""
    if (reason := recomputed_write(captured)) is not None:
        leave_frame(reason.text)
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


def hooked_parameters(captured: Captured) -> Reason | None:
    """Autograd calls hooks of gradients where it has each; a graph has all at once, and another order."""
    if not torch.is_grad_enabled() or sum(map(has_hook, captured.inputs)) < 2:
        return None
    text = "so have several parameters, and a compiled graph calls theirs in another order"
    return Reason(ReasonType.HOOKED_RESULT, text)


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


# a view with gaps, and parts that AOTAutograd takes to be no views
_INEXACT_VIEWS = {"unfold", "unsafe_chunk", "unsafe_split", torch.Tensor.unfold}

_INEXACT_VIEWS |= {getattr(owner, name) for owner in (torch, torch.Tensor) for name in ("unsafe_chunk", "unsafe_split")}


def inexact_view(captured: Captured) -> Reason | None:
    """AOTAutograd computes a tensor again from a view of it that was written to: not exactly for each kind of view."""
    for gm in captured.gm.modules():
        for node in gm.graph.nodes if isinstance(gm, fx.GraphModule) else ():
            if (written := _written_by(node)) is None or storage_of(written) is None:
                continue
            overlaps = _overlaps(written.meta["example_value"])
            if overlaps or any(one.target in _INEXACT_VIEWS for one in _views_to(written)):
                text = "a view with gaps, or with elements in the same place, which a graph takes back otherwise"
                return Reason(ReasonType.WRITES_TO_INPUT, text)
    return None


def _views_to(node: fx.Node) -> Iterator[fx.Node]:
    """The calls that made a view, the last one first."""
    key, todo = storage_of(node), [node]
    while todo:
        yield (one := todo.pop())
        parts = (list, tuple)
        todo += [
            each
            for each in one.all_input_nodes
            if storage_of(each) == key or isinstance(each.meta.get("example_value"), parts)
        ]


def _overlaps(view: torch.Tensor) -> bool:
    """Whether elements of a tensor are in the same place."""
    reach = 1
    for stride, size in sorted(zip(view.stride(), view.shape, strict=True), key=lambda pair: int_hint(pair[0])):
        if int_hint(size) > 1:
            if int_hint(stride) < reach:
                return True
            reach += (int_hint(size) - 1) * int_hint(stride)
    return False


def recomputed_write(captured: Captured) -> Reason | None:
    """A checkpoint of eager computes again from what was written since, and writes again; a graph has the old values.

    Dynamo's own graph, run in eager, keeps what a checkpoint is given, which must then not be written to.
    """
    if not torch.is_grad_enabled():
        return None
    graphs = [one.graph for one in captured.gm.modules() if isinstance(one, fx.GraphModule)]
    nodes = [node for graph in graphs for node in graph.nodes]
    again = {storage_of(source) for node in nodes if is_checkpoint(node) for source in node.all_input_nodes}
    if not again:  # as in most graphs
        return None
    inputs = {storage_of(node) for node in captured.gm.graph.find_nodes(op="placeholder")}
    if not any(key in again and key in inputs for node in nodes for key in _written_in(node)):
        return None
    text = "a checkpoint computes again from what the step has written to, such as the statistics of a BatchNorm"
    return Reason(ReasonType.WRITES_TO_INPUT, text)


def _written_in(node: fx.Node) -> Iterator[int]:
    """The storage of a node that is written to, or of running statistics, whose writes torch does not count (2.13)."""
    statistics: list[Any] = []
    if node.target in (F.batch_norm, F.instance_norm):
        bound = inspect.signature(node.target).bind(*node.args, **node.kwargs)
        bound.apply_defaults()
        _, mean, variance, _, _, updates, *_ = bound.arguments.values()
        statistics = [mean, variance] if updates is not False else []
    elif node.target in (torch.batch_norm, torch.instance_norm) and node.args[5] is not False:
        statistics = list(node.args[3:5])
    for one in (node, *statistics):
        if (key := storage_of(one)) is not None and (one is not node or version_of(node.meta["example_value"])):
            yield key


CONFLICTS: tuple[Callable[[Captured], Reason | None], ...] = (
    tensor_class,
    hooked_result,
    hooked_parameters,
    earlier_step,
    cast_within_a_kernel,
    separate_gradients,
    written_inputs,
    inexact_view,
    recomputed_write,
)
