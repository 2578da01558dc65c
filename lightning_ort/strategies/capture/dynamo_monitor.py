"""What dynamo did during a step, and the settings that it needs while it compiles one: :class:`DynamoMonitor`.

All of this runs when dynamo compiles. A step that compiles nothing only reads one flag: ``torch._dynamo.config.patch``
around each call would cost more than a small model's step.
"""

import copy
import logging
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

from lightning_ort.compat import dynamo, dynamo_messages, dynamo_repairs
from lightning_ort.compat.aot_autograd import backward_at_once
from lightning_ort.compat.first_compilation import compiled_quickly

log = logging.getLogger(__name__)


@dataclass
class Outcome:
    """What dynamo did during one call."""

    recompiles: int = 0
    graph_breaks: int = 0
    skipped: str | None = None  # why it left the step's own frame in Python
    skipped_rest: str | None = None  # why it left the rest of that frame in Python after a graph break
    error: BaseException | None = None  # while it compiled a frame, which then ran in Python
    calls_autograd_grad: bool = False
    untraceable: str | None = None  # why a graph ended at an operation that no backend can trace
    breaks: list[tuple[str, str]] = field(default_factory=list)  # where (may be "") and why each graph ended early
    limit: str | None = None  # which frame reached the recompile limit and runs in Python from now on, and why


class DynamoMonitor:
    """Observes dynamo during the calls between :meth:`begin` and :meth:`end`, in the thread that makes them.

    Of dynamo's ways to survive an error in a frame, only ``suppress_errors`` never runs a part of the user's code
    twice: the frame that failed to compile has not started to run. Dynamo reports such an error, and a frame that
    reached the recompile limit, only in its log, where a filter reads it. What torch's compiler logs and warns of in
    such a call is for its developers, and goes to our own log at DEBUG; all other messages and warnings stay.

    Several monitors may be active, each in a thread of its own. Dynamo compiles in one thread at a time, its settings
    are per thread, and what it reports is for the monitor of the thread that compiles. But torch 2.13 has one variable
    for the whole process that says whose compiled code is looked up, so such calls of several threads run one by one.
    """

    def __init__(self) -> None:
        self.saw_compile = False  # whether dynamo did anything since the last outcome
        self.other_threads: set[str] = set()  # ids of what was compiled there since then
        self._outcome = Outcome()
        self.by_hand = False  # whether steps call for backward passes themselves
        self.numbers = True  # whether graphs may hold numbers that are made from tensors
        self._graph_breaks: list[tuple[str, Sequence[tuple[str, int]]]] = []  # of this call: reason and frames
        self._settings: Any = None
        # while dynamo compiles: in what context, and how many graph breaks there were in the process
        self._compiling: tuple[AbstractContextManager[None], int] | None = None
        self._last_compilation: Any = None
        self._holds_lock = False

    def install(self) -> None:
        """Register with dynamo; a second call changes nothing."""
        with _monitors_lock:
            _monitors.add(self)
            for callbacks, ours in zip(dynamo.COMPILE_CALLBACKS, _CALLBACKS, strict=True):
                if ours not in callbacks:
                    callbacks.append(ours)
            _filter_loggers()

    def remove(self) -> None:
        """Undo :meth:`install`; a second call changes nothing."""
        with _monitors_lock:
            _monitors.discard(self)
            if _monitors:
                return
            for callbacks, ours in zip(dynamo.COMPILE_CALLBACKS, _CALLBACKS, strict=True):
                if ours in callbacks:
                    callbacks.remove(ours)
            for logger in dynamo_messages.internal_loggers():
                logger.removeFilter(_is_for_others)

    def begin(self) -> None:
        """Observe this thread from now on."""
        if _on_compile_start not in dynamo.COMPILE_CALLBACKS[0]:  # a reset of dynamo removes all callbacks
            self.install()
        if len(_monitors) > 1:
            _call_lock.acquire()
            self._holds_lock = True
        _thread.monitor = self

    def end(self) -> None:
        """Stop observing, and restore dynamo's settings."""
        _thread.monitor = None
        if self._compiling is not None:  # dynamo was reset meanwhile, and has not said that it is over
            self._end_quiet()
        if self._settings is not None:
            self._settings.close()
            self._settings = None
        if self._holds_lock:
            self._holds_lock = False
            _call_lock.release()

    def calls_autograd_grad(self) -> bool:
        """Return whether a graph of this call, compiled now or before, ended at ``torch.autograd.grad``."""
        current = [] if self._compiling is None else dynamo.graph_breaks()[self._compiling[1] :]
        failures = dynamo.failures_since(self._last_compilation, self.other_threads)
        reasons = [*(reason for reason, _ in self._graph_breaks), *current, *failures]
        return any(map(dynamo.is_at_autograd_grad, reasons))

    def outcome(self, code: CodeType | None) -> Outcome:
        """Return what happened since the last time; ``code`` is the step's, to tell its frame from those it calls."""
        outcome, self._outcome, self.saw_compile = self._outcome, Outcome(), False
        outcome.graph_breaks = len(self._graph_breaks)
        outcome.breaks = [
            (dynamo_messages.user_line(frames), dynamo_messages.plain_reason(reason))
            for reason, frames in self._graph_breaks
            if outcome.untraceable is None and not dynamo_messages.is_known(reason)  # which says more
        ]
        outcome.calls_autograd_grad = self.calls_autograd_grad()
        outcome.recompiles, skipped, skipped_rest = dynamo.compilations_since(
            self._last_compilation, code, self.other_threads
        )
        if outcome.limit is None:  # the frame that reached the limit is also skipped, which says nothing more
            outcome.skipped = skipped and (outcome.untraceable or skipped)
            outcome.skipped_rest = skipped_rest and (outcome.untraceable or skipped_rest)
        self._last_compilation = dynamo.last_compilation()
        self.other_threads.clear()
        self._graph_breaks = []
        return outcome

    def read_log(self, record: logging.LogRecord) -> bool:
        """Read a log message of torch's compiler; return whether nobody else needs to."""
        if record.levelno < logging.WARNING:  # somebody has asked for it
            return False
        if (operation := dynamo.untraceable_operation(record)) is not None:  # a page, which blames the backend
            self._outcome.untraceable = f"no graph can hold `{operation}` or its gradient"
        elif (error := dynamo.suppressed_error(record)) is not None:
            self._outcome.error = self._outcome.error or error
        elif (reached := dynamo.recompile_limit(record)) is not None:
            limit, function, reason = reached
            self._outcome.limit = f"{function} was compiled {limit} times; last because {reason}"
        else:
            log.debug("%s: %s", record.name, record.getMessage())
            return True
        self.saw_compile = True
        return True

    def on_compile_start(self) -> None:
        """Prepare for a frame that dynamo compiles in this call."""
        self._compiling = dynamo_messages.without_internal_warnings(), len(dynamo.graph_breaks())
        self._compiling[0].__enter__()
        if self._settings is None:
            self.saw_compile = True
            self._last_compilation = dynamo.last_compilation()
            _filter_loggers()  # of modules that were imported since
            self._settings = ExitStack()
            _enter_settings(self._settings, self.numbers, self.by_hand)

    def on_compile_end(self) -> None:
        """Collect the graph breaks of the frame: dynamo compiles in one thread at a time, so they are all its own."""
        if self._compiling is not None:
            before = self._compiling[1]
            self._end_quiet()
            self._graph_breaks += dynamo.break_frames(before)

    def _end_quiet(self) -> None:
        if self._compiling is not None:
            self._compiling[0].__exit__(None, None, None)
            self._compiling = None


def _enter_settings(stack: ExitStack, numbers: bool, by_hand: bool) -> None:
    """Enter all that dynamo compiles a step within."""
    # first: should another one fail, for want of a name, dynamo leaves the step to Python and says why
    stack.enter_context(dynamo.settings_for_steps(_log_methods_of_transformers(), numbers))
    dynamo.prepare_divergences()
    dynamo.prepare_numbers()
    stack.enter_context(compiled_quickly())
    stack.enter_context(dynamo_repairs.repaired())
    # traced, the copy of an OrderedDict is empty (2.13), and that of a module may hold what we put on it
    stack.enter_context(dynamo.outside_graphs(copy.copy, copy.deepcopy))
    # inductor too: what a backward pass takes to compile is counted, and a failure ends no run
    stack.enter_context(backward_at_once(autocast=by_hand))


def rehearse() -> None:
    """Enter these settings and leave them: raise an error if this torch lacks a name that they need."""
    with ExitStack() as stack:
        _enter_settings(stack, numbers=True, by_hand=False)


class _Thread(threading.local):
    monitor: DynamoMonitor | None = None


# Dynamo's lists of callbacks are the process's, and get one callback for all monitors: a list that one thread iterates
# over while another changes it skips entries.
_monitors_lock = threading.Lock()
_call_lock = threading.RLock()
_monitors: set[DynamoMonitor] = set()
_thread = _Thread()


def _on_compile_start(args: Any) -> None:
    compile_id = dynamo.compile_id(args)
    if compile_id is None:
        return
    if _thread.monitor is not None:
        _thread.monitor.on_compile_start()
    for monitor in tuple(_monitors):
        if monitor is not _thread.monitor:
            monitor.other_threads.add(compile_id)


def _on_compile_end(args: Any) -> None:
    if _thread.monitor is not None and dynamo.compile_id(args) is not None:
        _thread.monitor.on_compile_end()


_CALLBACKS = (_on_compile_start, _on_compile_end)


def _filter_loggers() -> None:
    for logger in dynamo_messages.internal_loggers():
        logger.addFilter(_is_for_others)


def _is_for_others(record: logging.LogRecord) -> bool:
    """Filter out the log messages that the monitor of this thread has read."""
    return _thread.monitor is None or not _thread.monitor.read_log(record)


def _log_methods_of_transformers() -> set[Any]:
    # without them GPT-2, which logs, becomes four graphs
    return {
        getattr(logger, method)
        for name, logger in logging.root.manager.loggerDict.items()
        if name.partition(".")[0] == "transformers" and isinstance(logger, logging.Logger)
        for method in ("debug", "info", "warning", "warning_once", "error")
        if hasattr(logger, method)
    }
