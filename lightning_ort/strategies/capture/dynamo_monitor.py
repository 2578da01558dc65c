"""What dynamo did during a step, and the settings that it needs while it compiles one.

All of this runs when dynamo compiles. A step that compiles nothing only reads one flag: ``torch._dynamo.config.patch``
around each call would cost more than a small model's step.
"""

import logging
import threading
from dataclasses import dataclass
from types import CodeType
from typing import Any

from lightning_ort.compat import dynamo


@dataclass
class Outcome:
    """What dynamo did during one call.

    Attributes:
        recompiles: Frames that it compiled again.
        graph_breaks: Graphs that it ended early.
        skipped: Why it left the step's own frame in Python, if it did.
        skipped_rest: Why it left the rest of that frame in Python after a graph break, if it did.
        error: An error while compiling; the frame concerned ran in Python.
        calls_autograd_grad: Whether a graph ended at ``torch.autograd.grad``.
        untraceable: Why a graph ended at an operation that torch traces for no backend, if one did.
        limit: The frame that reached the recompile limit and runs in Python from now on, and why.

    """

    recompiles: int = 0
    graph_breaks: int = 0
    skipped: str | None = None
    skipped_rest: str | None = None
    error: BaseException | None = None
    calls_autograd_grad: bool = False
    untraceable: str | None = None
    limit: str | None = None


class DynamoMonitor:
    """Observes dynamo during the calls between :meth:`begin` and :meth:`end`, in the thread that makes them.

    Of dynamo's ways to survive an error in a frame, only ``suppress_errors`` never runs a part of the user's code
    twice: the frame that failed to compile has not started to run. Dynamo reports such an error, and a frame that
    reached the recompile limit, only in its log: a filter removes those messages and leaves all others.

    Several monitors may be active, each in a thread of its own. Dynamo compiles in one thread at a time, its settings
    are per thread, and what it reports is for the monitor of the thread that compiles. But torch 2.13 has one variable
    for the whole process that says whose compiled code is looked up, so such calls of several threads run one by one.

    Attributes:
        saw_compile: Whether dynamo did anything since the last :meth:`outcome`.

    """

    def __init__(self) -> None:
        self.saw_compile = False
        self._outcome = Outcome()
        self._graph_breaks: list[str] = []  # their reasons, in this call
        self._breaks_before: int | None = None  # while dynamo compiles: how many there were in the process
        self._settings: Any = None
        self._last_compilation: Any = None
        self._other_threads: set[str] = set()  # ids of what they compiled meanwhile
        self._holds_lock = False

    def install(self) -> None:
        """Register with dynamo; a second call changes nothing."""
        with _monitors_lock:
            _monitors.add(self)
            dynamo.add_compile_callbacks(_on_compile_start, _on_compile_end)
            for logger in dynamo.LOGGERS:
                logger.addFilter(_is_for_others)

    def remove(self) -> None:
        """Undo :meth:`install`; a second call changes nothing."""
        with _monitors_lock:
            _monitors.discard(self)
            if not _monitors:
                dynamo.remove_compile_callbacks(_on_compile_start, _on_compile_end)
                for logger in dynamo.LOGGERS:
                    logger.removeFilter(_is_for_others)

    def begin(self) -> None:
        """Observe this thread from now on."""
        if not dynamo.has_compile_callback(_on_compile_start):
            self.install()
        if len(_monitors) > 1:
            _call_lock.acquire()
            self._holds_lock = True
        _thread.monitor = self

    def end(self) -> None:
        """Stop observing, and restore dynamo's settings."""
        _thread.monitor = None
        if self._settings is not None:
            self._settings.__exit__(None, None, None)
            self._settings = None
        if self._holds_lock:
            self._holds_lock = False
            _call_lock.release()

    def calls_autograd_grad(self) -> bool:
        """Whether the graph that is compiled now, or one before it in this call, ends at ``torch.autograd.grad``."""
        return self._settings is not None and self._ended_at_autograd_grad()

    def outcome(self, code: CodeType | None) -> Outcome:
        """Return what happened since the last time.

        Args:
            code: The code of the step, to tell its own frame from those that it calls.

        """
        outcome, self._outcome, self.saw_compile = self._outcome, Outcome(), False
        outcome.graph_breaks = len(self._graph_breaks)
        outcome.calls_autograd_grad = self._ended_at_autograd_grad()
        for frame in dynamo.compilations_since(self._last_compilation):
            if frame.compile_id in self._other_threads:
                continue
            outcome.recompiles += frame.recompiled
            if code is None or frame.skipped is None:
                continue
            if frame.runs(code):
                outcome.skipped = frame.skipped
            elif frame.resumes(code):
                outcome.skipped_rest = frame.skipped
        if outcome.untraceable is not None:
            outcome.skipped = outcome.skipped and outcome.untraceable
            outcome.skipped_rest = outcome.skipped_rest and outcome.untraceable
        if outcome.limit is not None:  # such a frame is also skipped, which says nothing more
            outcome.skipped = outcome.skipped_rest = None
        self._last_compilation = dynamo.last_compilation()
        self._other_threads.clear()
        self._graph_breaks = []
        return outcome

    def read_log(self, record: logging.LogRecord) -> bool:
        """Read one of dynamo's log messages; return whether it was about this call and needs no other reader."""
        if (operation := dynamo.untraceable_operation(record)) is not None:
            # the message is a page that blames the backend
            self._outcome.untraceable = f"no graph can hold `{operation}` or its gradient"
        elif (error := dynamo.suppressed_error(record)) is not None:
            self._outcome.error = self._outcome.error or error
        elif (reached := dynamo.recompile_limit(record)) is not None:
            function, limit, reason = reached
            self._outcome.limit = f"{function} was compiled {limit} times; last because {reason}"
        else:
            return False
        self.saw_compile = True
        return True

    def on_compile_start(self) -> None:
        """Prepare for a frame that dynamo compiles in this call."""
        self._breaks_before = dynamo.num_graph_breaks()
        if self._settings is not None:
            return
        self.saw_compile = True
        self._last_compilation = dynamo.last_compilation()
        # otherwise GPT-2 in transformers, which logs, becomes four graphs
        self._settings = dynamo.settings_for_steps(_transformers_log_methods())
        self._settings.__enter__()

    def on_compile_end(self) -> None:
        """Collect the graph breaks of the frame."""
        self._graph_breaks += self._new_graph_breaks()
        self._breaks_before = None

    def on_compile_elsewhere(self, compile_id: str) -> None:
        """Ignore what another thread compiles."""
        self._other_threads.add(compile_id)

    def _new_graph_breaks(self) -> list[str]:
        # all are of this thread: dynamo compiles in one at a time
        return [] if self._breaks_before is None else dynamo.graph_breaks_since(self._breaks_before)

    def _ended_at_autograd_grad(self) -> bool:
        return any(map(dynamo.breaks_at_autograd_grad, (*self._graph_breaks, *self._new_graph_breaks())))


# Dynamo's lists of callbacks are the process's, and get one listener for all monitors: a list that one thread iterates
# over while another changes it skips entries.
_monitors_lock = threading.Lock()
_call_lock = threading.RLock()
_monitors: set[DynamoMonitor] = set()
_thread = threading.local()


def _monitor_of_this_thread() -> DynamoMonitor | None:
    return getattr(_thread, "monitor", None)


def _on_compile_start(args: Any) -> None:
    compile_id = dynamo.compile_id(args)
    if compile_id is None:
        return
    mine = _monitor_of_this_thread()
    if mine is not None:
        mine.on_compile_start()
    for monitor in tuple(_monitors):
        if monitor is not mine:
            monitor.on_compile_elsewhere(compile_id)


def _on_compile_end(args: Any) -> None:
    mine = _monitor_of_this_thread()
    if mine is not None and dynamo.compile_id(args) is not None:
        mine.on_compile_end()


def _is_for_others(record: logging.LogRecord) -> bool:
    """Filter out the log messages that the monitor of the thread reads."""
    mine = _monitor_of_this_thread()
    return mine is None or not mine.read_log(record)


def _transformers_log_methods() -> set[Any]:
    loggers = logging.root.manager.loggerDict.items()
    return {
        getattr(logger, method)
        for name, logger in loggers
        if name.partition(".")[0] == "transformers" and isinstance(logger, logging.Logger)
        for method in ("debug", "info", "warning", "warning_once", "error")
        if hasattr(logger, method)
    }
