"""What dynamo did during a step, and the settings it needs while it compiles one.

All of the work here happens when dynamo compiles. A step that runs what is compiled already pays for reading one flag:
``torch._dynamo.config.patch`` around every call would cost more than a small model's step.
"""

import logging
import re
import threading
from dataclasses import dataclass
from types import CodeType
from typing import Any

from torch._C._dynamo.eval_frame import _get_cache_entries_for_region, reset_code
from torch._dynamo import config as dynamo_config
from torch._dynamo import convert_frame, eval_frame, exc
from torch._dynamo.callback import CallbackArgs, CallbackTrigger, callback_handler
from torch._dynamo.resume_execution import TORCH_DYNAMO_RESUME_IN_PREFIX
from torch._dynamo.utils import CleanupManager, get_compilation_metrics, graph_break_reasons, orig_code_map

_SOFT_FAILURES = ("Unsupported", "UserError")  # dynamo leaves the frame in Python without calling it an error
_LOGS = tuple(logging.getLogger(module.__name__) for module in (convert_frame, exc))
_UNTRACEABLE = re.compile(r"^Backend compiler exception\n.* failed with (.+?)\. Adding a graph break", re.DOTALL)
_AUTOGRAD = "`torch.autograd.grad`"  # in the reason why a graph ends there


@dataclass
class Outcome:
    """What dynamo did during one call.

    Attributes:
        compiled: Whether it compiled anything.
        recompiles: Frames that it had compiled before and compiled again.
        graph_breaks: Graphs that it had to end early.
        skipped: Why it left the step's own frame in Python, if it did.
        skipped_rest: Why it left the rest of that frame in Python after the end of a graph, if it did.
        error: An error it met while compiling; the frame concerned ran in Python.
        met_autograd: Whether a graph ended at ``torch.autograd.grad``.
        untraceable: Why a graph ended at an operation that torch traces for no backend, if one did.
        limit: The frame that reached the limit of recompiles and runs in Python from now on, and why.

    """

    compiled: bool = False
    recompiles: int = 0
    graph_breaks: int = 0
    skipped: str | None = None
    skipped_rest: str | None = None
    error: BaseException | None = None
    met_autograd: bool = False
    untraceable: str | None = None
    limit: str | None = None


class DynamoMonitor:
    """Watches dynamo during the calls between :meth:`begin` and :meth:`end`, in the thread that makes them.

    Dynamo's own way of surviving an error in a frame (``suppress_errors``) is the only one that never runs a part of
    the user's code twice: the frame that failed to compile has not begun to run. It tells of such an error, and of a
    frame that reached the limit of recompiles, in its log alone: hence a filter, which takes those messages and leaves
    all others.

    Several may watch at once, each in a thread of its own. Dynamo compiles in one thread at a time, its settings are
    each thread's own, and what it tells is for the watch of the thread that compiles. But torch (2.13) has one number
    for the whole process that says whose compiled code is looked for, so that several threads take turns in such calls.
    """

    def __init__(self) -> None:
        self.dirty = False  # dynamo was at work in this call
        self._outcome = Outcome()
        self._breaks: list[Any] = []  # why graphs ended in this call
        self._breaks_before: int | None = None  # while dynamo compiles: how many there were in all
        self._settings: Any = None
        self._seen: Any = None
        self._others: set[str] = set()  # what was compiled in other threads meanwhile
        self._has_turn = False

    def install(self) -> None:
        """Start to listen; a second call changes nothing."""
        with _lock:
            _watches.add(self)
            _listen()

    def remove(self) -> None:
        """Stop listening; a second call changes nothing."""
        with _lock:
            _watches.discard(self)
            if not _watches:
                _do_not_listen()

    def begin(self) -> None:
        """Listen from now on."""
        if _on_compile_start not in callback_handler.start_callbacks:  # a reset of dynamo takes all callbacks away
            self.install()
        if len(_watches) > 1:
            _turn.acquire()
            self._has_turn = True
        _thread.watch = self

    def end(self) -> None:
        """Stop listening, and leave dynamo's settings as they were; if :attr:`dirty`, :meth:`outcome` has news."""
        _thread.watch = None
        if self._settings is not None:
            self._settings.__exit__(None, None, None)
            self._settings = None
        if self._has_turn:
            self._has_turn = False
            _turn.release()

    def met_autograd(self) -> bool:
        """Whether a graph that is compiled now, or one before it in this call, ends at ``torch.autograd.grad``."""
        return self._settings is not None and self._ended_at(_AUTOGRAD)

    def outcome(self, code: CodeType | None) -> Outcome:
        """Return what happened since the last time.

        Args:
            code: The code of the step, to tell its own frame from those it calls.

        """
        outcome, self._outcome, self.dirty = self._outcome, Outcome(), False
        outcome.graph_breaks = len(self._breaks)
        outcome.met_autograd = self._ended_at(_AUTOGRAD)
        for metrics in self._new_metrics():
            outcome.recompiles += metrics.recompile_reason is not None
            if code is None or metrics.co_filename != code.co_filename or metrics.fail_type not in _SOFT_FAILURES:
                continue
            if metrics.co_name == code.co_name and metrics.co_firstlineno == code.co_firstlineno:
                outcome.skipped = metrics.fail_reason
            elif metrics.co_name.startswith(f"{TORCH_DYNAMO_RESUME_IN_PREFIX}_{code.co_name}_at_"):
                outcome.skipped_rest = metrics.fail_reason
        if outcome.untraceable is not None:
            outcome.skipped = outcome.skipped and outcome.untraceable
            outcome.skipped_rest = outcome.skipped_rest and outcome.untraceable
        if outcome.limit is not None:  # such a frame is skipped as well, and that is no news
            outcome.skipped = outcome.skipped_rest = None
        self._seen = _newest_metrics()
        self._others.clear()
        self._breaks = []
        return outcome

    def take(self, record: logging.LogRecord) -> bool:
        """Take a message of dynamo's about this call; see the class.

        Returns:
            Whether it was one.

        """
        if record.levelno != logging.WARNING:
            return False
        if record.name == exc.__name__:
            # a page that blames the backend, about what torch cannot trace with any
            if (found := _UNTRACEABLE.search(record.getMessage())) is None:
                return False
            self._outcome.untraceable = f"no graph can hold `{found.group(1)}` or its gradient"
        elif record.exc_info and record.exc_info[1] is not None:
            self._outcome.error = self._outcome.error or record.exc_info[1]
        elif isinstance(record.args, tuple) and len(record.args) == 5 and "recompile" in str(record.args[0]):
            _, limit, function, reason, _ = record.args
            self._outcome.limit = f"{function} was compiled {limit} times; last because {reason}"
        else:
            return False
        self.dirty = True
        return True

    def on_compile_start(self) -> None:
        """Prepare for a frame that dynamo compiles in this call."""
        self._breaks_before = len(graph_break_reasons)
        if self._settings is not None:
            return
        self.dirty = self._outcome.compiled = True
        self._seen = _newest_metrics()
        self._settings = dynamo_config.patch(
            {
                # counters such as `self.global_step` would compile each step, until dynamo gives up
                "allow_unspec_int_on_nn_module": True,
                "suppress_errors": True,
                # else `np.random` draws from torch's generator, and what is drawn after it differs from eager too
                "use_numpy_random_stream": True,
                # else dynamo gives up all of a function that calls a recurrent layer, and not just the call, which
                # StepPatches keeps out of the graph
                "allow_rnn": True,
                # to dynamo a call of a logger is the end of a graph; GPT-2 in transformers would break into four
                "ignore_logging_functions": dynamo_config.ignore_logging_functions | _transformers_log_methods(),
            }
        )
        self._settings.__enter__()

    def on_compile_end(self) -> None:
        """Note what became of the frame."""
        self._breaks += self._breaks_now()
        self._breaks_before = None

    def on_compile_elsewhere(self, compile_id: str) -> None:
        """Leave out what another thread compiles."""
        self._others.add(compile_id)

    def _breaks_now(self) -> list[Any]:
        # no other thread adds to them: dynamo compiles in one at a time
        return [] if self._breaks_before is None else graph_break_reasons[self._breaks_before :]

    def _ended_at(self, what: str) -> bool:
        return any(what in cause.reason for cause in (*self._breaks, *self._breaks_now()))

    def _new_metrics(self) -> list[Any]:
        metrics = get_compilation_metrics()
        for index, entry in enumerate(metrics):
            if entry is self._seen:
                metrics = metrics[index + 1 :]
                break
        return [entry for entry in metrics if str(entry.compile_id) not in self._others]


# what dynamo has for the whole process has one listener, whatever the number of watches: lists that are gone through in
# one thread while another changes them lose entries
_lock = threading.Lock()
_turn = threading.RLock()
_watches: set[DynamoMonitor] = set()
_thread = threading.local()


def _watch_of_this_thread() -> DynamoMonitor | None:
    return getattr(_thread, "watch", None)


def _listen() -> None:
    if _on_compile_start not in callback_handler.start_callbacks:
        callback_handler.register_start_callback(_on_compile_start)
    if _on_compile_end not in callback_handler.end_callbacks:
        callback_handler.register_end_callback(_on_compile_end)
    for log in _LOGS:
        log.addFilter(_passes)


def _do_not_listen() -> None:
    if _on_compile_start in callback_handler.start_callbacks:
        callback_handler.remove_start_callback(_on_compile_start)
    if _on_compile_end in callback_handler.end_callbacks:
        callback_handler.remove_end_callback(_on_compile_end)
    for log in _LOGS:
        log.removeFilter(_passes)


def _on_compile_start(args: CallbackArgs) -> None:
    if args.callback_trigger is not CallbackTrigger.DYNAMO:
        return
    mine = _watch_of_this_thread()
    if mine is not None:
        mine.on_compile_start()
    for watch in tuple(_watches):
        if watch is not mine:
            watch.on_compile_elsewhere(args.compile_id)


def _on_compile_end(args: CallbackArgs) -> None:
    mine = _watch_of_this_thread()
    if mine is not None and args.callback_trigger is CallbackTrigger.DYNAMO:
        mine.on_compile_end()


def _passes(record: logging.LogRecord) -> bool:
    """Whether a message of dynamo's is for anybody else than the watch of the thread that it comes from."""
    mine = _watch_of_this_thread()
    return mine is None or not mine.take(record)


def forget_backend(backend: Any) -> None:
    """Take a backend out of dynamo's list for its reset, which nothing else ever leaves, and of which it needs none.

    Args:
        backend: That functions have been compiled with.

    """
    for key, kept in list(eval_frame.cached_backends.items()):
        if getattr(kept, "compiler_fn", kept) is backend:
            eval_frame.cached_backends.pop(key, None)


def release(regions: list[int]) -> None:
    """Free what dynamo has compiled for functions that nobody will call again, and with it its sessions.

    It keeps all of that for as long as the code of a step lives, which is for the process, and counts it against the
    code's limit of recompiles: a search over hyperparameters would run out of memory or reach the limit.

    Args:
        regions: Of the compiled functions, their ``_isolate_recompiles_id``; emptied.

    """
    if not regions:
        return
    with convert_frame.compile_lock:  # another thread may be at it
        _release([regions.pop() for _ in range(len(regions))])


def _release(regions: list[int]) -> None:
    released = []
    for code in _living(convert_frame.input_codes):
        if any(_get_cache_entries_for_region(code, region) for region in regions):
            reset_code(code)  # others that use it compile again
            released.append(code)
    # that frees what dynamo made of the code, and its graphs, but not where a graph ends early: something in torch 2.13
    # holds such code for good; so what would be done at its end is done now: its graphs are taken out of the globals
    for compiled in _living(convert_frame.output_codes) if released else []:
        if any(orig_code_map.get(compiled) is code for code in released):
            for take_out in CleanupManager.instance.get(compiled, ()):
                take_out()
            CleanupManager.instance[compiled] = []


def _living(tracker: convert_frame.Tracker) -> list[CodeType]:
    return [code for reference in tracker.seen if (code := reference()) is not None]


def _newest_metrics() -> Any:
    metrics = get_compilation_metrics()
    return metrics[-1] if metrics else None


def _transformers_log_methods() -> set[Any]:
    loggers = logging.root.manager.loggerDict.items()
    return {
        getattr(logger, method)
        for name, logger in loggers
        if name.partition(".")[0] == "transformers" and isinstance(logger, logging.Logger)
        for method in ("debug", "info", "warning", "warning_once", "error")
        if hasattr(logger, method)
    }
