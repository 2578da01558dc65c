"""What graphs are compiled for: :class:`CompileRequest`, a value that whoever calls ``torch.compile`` hands over."""

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import fx

from lightning_ort.compiler.reason import Reason
from lightning_ort.compiler.running.graph_check import GraphCheck


class Stopped(BaseException):
    """No more may be spent on compiling, which is no failure; whoever called the compiler goes on without it."""


def weakly(method: Any, otherwise: Any = None) -> Callable[..., Any]:
    """Return a function that calls a method of an object while that lives, and then returns something else.

    Dynamo keeps compiled code as long as the function that it compiled, such as a method of a class, and compiled code
    keeps its request: that must not keep a module.
    """
    owner, function = weakref.ref(method.__self__), method.__func__

    def call(*args: Any) -> Any:
        living = owner()
        return otherwise if living is None else function(living, *args)

    return call


@dataclass(frozen=True)
class CompileRequest:
    """What the backend is told about the step whose graphs it compiles, and whom it tells what it finds out."""

    label: str = ""  # prefix for the names of graphs, such as ``"training_step"``
    one_graph: bool = False  # whether a captured graph with a loss is run as one graph under ``step_graph="auto"``
    # whether the step calls for backward passes itself (manual optimization), and so maybe for several
    by_hand: bool = False
    began_at: int = 0  # the number of autograd's first node of the step; 0 if there is none
    logs_graphs: bool = True  # whether each graph gets a line in the log
    # takes a captured graph; returns whether to compile it
    may_compile: Callable[[fx.GraphModule], bool] = lambda gm: True
    # called between the stages of compiling, timing among them; raises :class:`Stopped` if that may go on no longer
    check_budget: Callable[[], None] = lambda: None
    # returns whether ``loss.backward()`` may write gradients to parameters without the autograd engine
    writes_gradients: Callable[[], bool] = lambda: False
    # drops the gradients of the last step, where that is possible, before large new ones are made
    drop_gradients: Callable[[], None] = lambda: None
    # takes a function that returns the gradients of a run (:class:`.WaitingGradients`); calls it, and returns True, if
    # they are handed over in place of ``loss.backward()``
    leave_gradients: Callable[[Callable[[], Any]], bool] = lambda make: False
    # takes a key and what was measured in this process; returns what all processes of the run use
    agree: Callable[[str, dict[str, Any]], Mapping[str, Any]] | None = None
    # takes why something in the step is for eager alone; ``None`` if nobody wants to know
    refuse: Callable[[Reason], None] | None = None
    split: Callable[[str], None] = lambda why: None  # takes why a step that was run as one graph needs separate passes
    # gets what runs each compiled graph: whoever calls its ``leave()`` frees what was compiled
    keep: Callable[[Any], None] = lambda graph: None
    activation_memory_budget: float | None = None
    # takes whether a graph draws random numbers; returns what compares its first runs with eager, if anything
    check: Callable[[bool], GraphCheck | None] = lambda draws: None
