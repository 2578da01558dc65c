"""Private names of autograd's engine, one small function or class per use.

Each function names the torch version that it was read in. Those of AOTAutograd are in :mod:`.aot_autograd`.
"""

import math
import operator
import os
import sys
import threading
import types
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from typing_extensions import override

_HOOKS = operator.attrgetter("_backward_hooks"), operator.attrgetter("_post_accumulate_grad_hooks")


def have_gradient_hooks(parameters: Sequence[torch.Tensor]) -> bool:
    """Whether any of these leaves has hooks that autograd's engine runs when its gradient arrives (torch 2.13)."""
    before, after = _HOOKS
    return any(map(before, parameters)) or any(map(after, parameters))


def version_of(tensor: torch.Tensor) -> int:
    """How often a tensor was written to (torch 2.13)."""
    return tensor._version


# the number of the next node that autograd records in this thread (torch 2.13)
next_number: Callable[[], int] = torch.autograd._get_sequence_nr


def has_hook(value: Any) -> bool:
    """Whether a tensor has hooks of its gradient (torch 2.13)."""
    return isinstance(value, torch.Tensor) and bool(value._backward_hooks)


def is_recorded_before(value: Any, number: int) -> bool:
    """Whether a tensor was computed before autograd recorded the node of a number, in this thread (torch 2.13)."""
    return isinstance(value, torch.Tensor) and value.grad_fn is not None and value.grad_fn._sequence_nr() < number


def _nodes_of(tensor: torch.Tensor) -> set[Any]:
    seen: set[Any] = set()
    waiting = [tensor.grad_fn]
    while waiting:
        node: Any = waiting.pop()
        if node is not None and node not in seen and not hasattr(node, "variable"):
            seen.add(node)
            waiting += [one for one, _ in node.next_functions]
    return seen


def have_met(tensor: torch.Tensor, loss: torch.Tensor) -> bool:
    """Whether a backward pass from a loss has used up a part of a tensor's graph, so that there is no other (2.13)."""
    return not _nodes_of(tensor).isdisjoint(_nodes_of(loss))


class _Spent(torch.autograd.Function):
    @staticmethod
    def forward(_context: Any, value: torch.Tensor, _leaf: torch.Tensor) -> torch.Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(_context: Any, *_gradients: Any) -> Any:
        raise RuntimeError(
            "Trying to backward through the graph a second time: the backward pass of the step has used up the graph "
            "of the tensors that it keeps."
        )


def with_spent_graph(value: torch.Tensor) -> torch.Tensor:
    """Return a tensor as one whose graph a backward pass has used up."""
    with torch.enable_grad():
        kept: torch.Tensor = _Spent.apply(value, torch.empty(0, requires_grad=True))
        return kept


def is_share(value: torch.Tensor, leaf: torch.Tensor | None, share: float) -> bool:
    """Whether a tensor is a leaf, divided by one number, and its gradient that of the leaf times this share (2.13)."""
    node: Any = value.grad_fn
    return (
        type(node).__name__ == "DivBackward0"
        and getattr(node.next_functions[0][0], "variable", None) is leaf
        and node.next_functions[1][0] is None
        and math.isclose(share * float(node._saved_other), 1, rel_tol=1e-7)  # a share is rounded to float32
    )


def share_of(value: torch.Tensor, loss: torch.Tensor) -> float | None:
    """Return by which number a loss was multiplied to get a value, as by a division; ``None`` otherwise (2.13)."""
    if value is loss:
        return 1.0
    node: Any = value.grad_fn
    if type(node).__name__ != "DivBackward0" or node.next_functions[0][0] is not loss.grad_fn:
        return None
    return 1.0 / float(node._saved_other) if node.next_functions[1][0] is None else None


def at_gradient(leaf: torch.Tensor, call: Callable[[torch.Tensor], None]) -> None:
    """Call a function when a new leaf has got a gradient, by a hook that nothing can remove (torch 2.13)."""
    leaf._post_accumulate_grad_hooks = OrderedDict({0: call})


# what ``torch.no_grad`` calls, which takes ten times as long (torch 2.13)
set_gradients: Callable[[bool], None] = torch._C._set_grad_enabled


def keeping_versions(tensors: tuple[torch.Tensor, ...]) -> AbstractContextManager[None]:
    """A context in which tensors can be written to without a check of autograd noticing it (torch 2.13)."""
    return torch.autograd._unsafe_preserve_version_counter(tensors)


# whether the backward pass that runs is to be repeated, ``retain_graph=True`` (torch 2.13)
keeps_graph: Callable[[], bool] = torch._C._autograd._get_current_graph_task_keep_graph


class WatchedCalls(AbstractContextManager["WatchedCalls"]):
    """Within the block, notices calls in this thread that no compiled graph can stand for (torch 2.13).

    Of gradients, what a backward pass calls is not noticed, nor what graphs may hold (``torch.func``) or are told to
    leave out (``torch.compiler.disable``).

    Attributes:
        own: Whether `torch.autograd.grad` was called.
        second: Whether gradients are to be differentiated, as by ``create_graph=True``.
        reads_callers: Whether a function read local variables of its callers, as pandas' ``DataFrame.query`` does:
            after a graph break only those that the callers name are left.
    """

    def __init__(self) -> None:
        self.own = self.second = self.reads_callers = False

    @override
    def __enter__(self) -> "WatchedCalls":
        self._thread, self._frame = threading.get_ident(), sys._getframe(1)
        with _watch_lock:
            if not _watching:
                _replaced[:] = [torch.autograd._engine_run_backward, sys._getframe]
                torch.autograd._engine_run_backward = _watched_run  # type: ignore[assignment]
                sys._getframe = _watched_frame
            self._outer = _watching.get(self._thread)
            _watching[self._thread] = self
        return self

    @override
    def __exit__(self, *exc_info: object) -> None:
        del self._frame  # which has this object: what the step returned would stay until garbage is collected
        with _watch_lock:
            del _watching[self._thread]
            if self._outer is not None:
                _watching[self._thread] = self._outer
            elif not _watching:
                if torch.autograd._engine_run_backward is _watched_run:
                    torch.autograd._engine_run_backward = _replaced[0]
                if sys._getframe is _watched_frame:
                    sys._getframe = _replaced[1]

    def see_gradient(self, create_graph: bool, accumulates: bool) -> None:
        """Note a call of autograd's engine."""
        if self._callers():
            self.own = self.own or not accumulates
            self.second = self.second or create_graph

    def see_frame(self) -> None:
        """Note that somebody asks for a frame."""
        self.reads_callers = self.reads_callers or any("f_locals" in code.co_names for code in self._callers())

    def _callers(self) -> list[types.CodeType]:
        """What has called within the block; nothing if graphs hold or leave it out."""
        frame, found = _frame(3), list[types.CodeType]()
        while frame is not None and frame is not self._frame:
            if frame.f_code.co_filename in _OF_GRAPHS:
                return []
            found.append(frame.f_code)
            frame = frame.f_back
        return found


# files of torch's: what calls within these, graphs hold or leave out
_OF_GRAPHS = tuple(
    os.path.join(os.path.dirname(torch.__file__), *place)
    for place in (("_dynamo", "eval_frame.py"), ("_functorch", "eager_transforms.py"))
)
_frame: Callable[[int], Any] = sys._getframe
_watch_lock = threading.Lock()
_watching: dict[int, WatchedCalls] = {}  # by thread
_replaced: list[Any] = []  # the functions that are replaced meanwhile


def _watched_run(tensors: Any, gradients: Any, retain: Any, create_graph: Any, *args: Any, **kwargs: Any) -> Any:
    watch = _watching.get(threading.get_ident())
    if watch is not None and torch._C._current_graph_task_id() == -1:
        watch.see_gradient(bool(create_graph), kwargs.get("accumulate_grad", True))
    return _replaced[0](tensors, gradients, retain, create_graph, *args, **kwargs)


def _watched_frame(depth: int = 0, /) -> types.FrameType:
    if (watch := _watching.get(threading.get_ident())) is not None:
        watch.see_frame()
    return _replaced[1](depth + 1)
