"""What dynamo did during a step, and the settings it needs while it compiles one.

All of the work here happens when dynamo compiles. A step that runs what is compiled already pays for reading one flag:
``torch._dynamo.config.patch`` around every call would cost more than a small model's step.
"""

import logging
import re
from dataclasses import dataclass
from types import CodeType
from typing import Any

from torch._C._dynamo.eval_frame import _get_cache_entries_for_region, reset_code
from torch._dynamo import config as dynamo_config
from torch._dynamo import convert_frame, exc
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


class DynamoWatch(logging.Filter):
    """Watches dynamo during the calls between :meth:`begin` and :meth:`end`.

    Dynamo's own way of surviving an error in a frame (``suppress_errors``) is the only one that never runs a part of
    the user's code twice: the frame that failed to compile has not begun to run. It tells of such an error, and of a
    frame that reached the limit of recompiles, in its log alone: hence a filter, which takes those messages and leaves
    all others.
    """

    def __init__(self) -> None:
        super().__init__()
        self.dirty = False  # dynamo was at work in this call
        self._active = False
        self._outcome = Outcome()
        self._breaks = 0
        self._before: dict[str, Any] = {}
        self._seen: Any = None

    def install(self) -> None:
        """Start to listen; a second call changes nothing."""
        # a reset of dynamo by the user takes all callbacks away
        if self._on_compile_start not in callback_handler.start_callbacks:
            callback_handler.register_start_callback(self._on_compile_start)
            for log in _LOGS:
                log.addFilter(self)

    def remove(self) -> None:
        """Stop listening; a second call changes nothing."""
        if self._on_compile_start in callback_handler.start_callbacks:
            callback_handler.remove_start_callback(self._on_compile_start)
        for log in _LOGS:
            log.removeFilter(self)

    def begin(self) -> None:
        """Listen from now on."""
        if self._on_compile_start not in callback_handler.start_callbacks:
            self.install()
        self._active = True

    def end(self) -> None:
        """Stop listening, and leave dynamo's settings as they were; if :attr:`dirty`, :meth:`outcome` has news."""
        self._active = False
        if self._before:
            for name, value in self._before.items():
                setattr(dynamo_config, name, value)
            self._before = {}

    def met_autograd(self) -> bool:
        """Whether a graph that is compiled now, or one before it in this call, ends at ``torch.autograd.grad``."""
        return bool(self._before) and self._ended_at(_AUTOGRAD)

    def outcome(self, code: CodeType | None) -> Outcome:
        """Return what happened since the last time.

        Args:
            code: The code of the step, to tell its own frame from those it calls.

        """
        outcome, self._outcome, self.dirty = self._outcome, Outcome(), False
        if outcome.compiled:
            outcome.graph_breaks = len(graph_break_reasons) - self._breaks
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
        return outcome

    def filter(self, record: logging.LogRecord) -> bool:
        """Take dynamo's messages about this call; see the class."""
        if not self._active or record.levelno != logging.WARNING:
            return True
        if record.name == exc.__name__:
            # a page that blames the backend, about what torch cannot trace with any
            if (found := _UNTRACEABLE.search(record.getMessage())) is None:
                return True
            self._outcome.untraceable = f"no graph can hold `{found.group(1)}` or its gradient"
        elif record.exc_info and record.exc_info[1] is not None:
            self._outcome.error = self._outcome.error or record.exc_info[1]
        elif isinstance(record.args, tuple) and len(record.args) == 5 and "recompile" in str(record.args[0]):
            _, limit, function, reason, _ = record.args
            self._outcome.limit = f"{function} was compiled {limit} times; last because {reason}"
        else:
            return True
        self.dirty = True
        return False

    def _on_compile_start(self, args: CallbackArgs) -> None:
        if not self._active or args.callback_trigger is not CallbackTrigger.DYNAMO or self._before:
            return
        self.dirty = self._outcome.compiled = True
        self._breaks = len(graph_break_reasons)
        self._seen = _newest_metrics()
        settings = {
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
        self._before = {name: getattr(dynamo_config, name) for name in settings}
        for name, value in settings.items():
            setattr(dynamo_config, name, value)

    def _ended_at(self, what: str) -> bool:
        return any(what in cause.reason for cause in graph_break_reasons[self._breaks :])

    def _new_metrics(self) -> list[Any]:
        metrics = get_compilation_metrics()
        for index, entry in enumerate(metrics):
            if entry is self._seen:
                return metrics[index + 1 :]
        return metrics


def release(regions: list[int]) -> None:
    """Free what dynamo has compiled for functions that nobody will call again, and with it its sessions.

    It keeps all of that for as long as the code of a step lives, which is for the process, and counts it against the
    code's limit of recompiles: a search over hyperparameters would run out of memory or reach the limit.

    Args:
        regions: Of the compiled functions, their ``_isolate_recompiles_id``; emptied.

    """
    released = []
    for code in _living(convert_frame.input_codes) if regions else []:
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
    regions.clear()


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
