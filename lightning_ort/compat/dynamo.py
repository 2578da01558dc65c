"""All that this package uses of ``torch._dynamo``: private names and undocumented behavior, read in torch 2.13.

``tests/compat/test_dynamo.py`` has a test for each function, which fails when a name or its meaning changes.
"""

import logging
import re
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import CodeType
from typing import Any

from torch import nn
from torch._C._dynamo.eval_frame import _get_cache_entries_for_region, reset_code
from torch._dynamo import OptimizedModule, convert_frame, eval_frame, exc
from torch._dynamo import config as dynamo_config
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.callback import CallbackArgs, CallbackTrigger, callback_handler
from torch._dynamo.resume_execution import TORCH_DYNAMO_RESUME_IN_PREFIX
from torch._dynamo.utils import CleanupManager, get_compilation_metrics, graph_break_reasons, orig_code_map

LOGGERS = (logging.getLogger(convert_frame.__name__), logging.getLogger(exc.__name__))

_UNTRACEABLE = re.compile(r"^Backend compiler exception\n.* failed with (.+?)\. Adding a graph break", re.DOTALL)
_UNSUPPORTED = ("Unsupported", "UserError")  # failures after which dynamo leaves the frame in Python

Callback = Callable[[CallbackArgs], None]


@dataclass(frozen=True)
class CompiledFrame:
    """Dynamo's record of one frame that it compiled or tried to compile.

    Attributes:
        compile_id: The same as :func:`compile_id` returns in a callback.
        filename: Where the frame's function is defined.
        first_line: Its first line.
        name: Its name.
        recompiled: Whether dynamo had compiled the frame before.
        skipped: Why dynamo left the frame in Python; ``None`` if it did not, or because of an error.

    """

    compile_id: str
    filename: str
    first_line: int
    name: str
    recompiled: bool
    skipped: str | None

    def runs(self, code: CodeType) -> bool:
        """Whether this is a frame of ``code``."""
        return (self.filename, self.first_line, self.name) == (code.co_filename, code.co_firstlineno, code.co_name)

    def resumes(self, code: CodeType) -> bool:
        """Whether this is the rest of a frame of ``code`` after a graph break."""
        prefix = f"{TORCH_DYNAMO_RESUME_IN_PREFIX}_{code.co_name}_at_"
        return self.filename == code.co_filename and self.name.startswith(prefix)


def add_compile_callbacks(on_start: Callback, on_end: Callback) -> None:
    """Have dynamo call these before and after each compilation, once even if added twice (torch 2.13)."""
    for callbacks, callback in _callback_lists(on_start, on_end):
        if callback not in callbacks:
            callbacks.append(callback)


def remove_compile_callbacks(on_start: Callback, on_end: Callback) -> None:
    """Undo :func:`add_compile_callbacks`; ``torch._dynamo.reset`` may have done so already (torch 2.13)."""
    for callbacks, callback in _callback_lists(on_start, on_end):
        if callback in callbacks:
            callbacks.remove(callback)


def has_compile_callback(on_start: Callback) -> bool:
    """Whether dynamo still calls ``on_start``; ``torch._dynamo.reset`` removes all callbacks (torch 2.13)."""
    return on_start in callback_handler.start_callbacks


def _callback_lists(on_start: Callback, on_end: Callback) -> Iterable[tuple[list[Callback], Callback]]:
    return (callback_handler.start_callbacks, on_start), (callback_handler.end_callbacks, on_end)


def compile_id(args: CallbackArgs) -> str | None:
    """Return the id of the frame that a callback is about, ``None`` if it is about something else (torch 2.13)."""
    return args.compile_id if args.callback_trigger is CallbackTrigger.DYNAMO else None


def last_compilation() -> Any:
    """Return a marker of dynamo's last compilation, for :func:`compilations_since` (torch 2.13)."""
    metrics = get_compilation_metrics()
    return metrics[-1] if metrics else None


def compilations_since(marker: Any) -> list[CompiledFrame]:
    """Return the compilations after the one marked, in any thread; torch keeps the last 64 (torch 2.13)."""
    metrics = get_compilation_metrics()
    start = next((index + 1 for index, entry in enumerate(metrics) if entry is marker), 0)
    return [
        CompiledFrame(
            str(entry.compile_id),
            entry.co_filename,
            entry.co_firstlineno,
            entry.co_name,
            entry.recompile_reason is not None,
            entry.fail_reason if entry.fail_type in _UNSUPPORTED else None,
        )
        for entry in metrics[start:]
    ]


def num_graph_breaks() -> int:
    """Return how many graph breaks dynamo has met in this process (torch 2.13)."""
    return len(graph_break_reasons)


def graph_breaks_since(number: int) -> list[str]:
    """Return the reasons of the graph breaks after the first ``number`` (torch 2.13)."""
    return [entry.reason for entry in graph_break_reasons[number:]]


def breaks_at_autograd_grad(reason: str) -> bool:
    """Whether the reason of a graph break is a call of ``torch.autograd.grad`` (torch 2.13)."""
    return "`torch.autograd.grad`" in reason


def untraceable_operation(record: logging.LogRecord) -> str | None:
    """Return the operation if a log record says that no backend can trace it and the graph ends there (torch 2.13)."""
    if record.name != exc.__name__ or record.levelno != logging.WARNING:
        return None
    found = _UNTRACEABLE.search(record.getMessage())
    return found and found.group(1)


def suppressed_error(record: logging.LogRecord) -> BaseException | None:
    """Return the error if a log record says that dynamo survived it under ``suppress_errors`` (torch 2.13)."""
    if record.name != convert_frame.__name__ or record.levelno != logging.WARNING or not record.exc_info:
        return None
    return record.exc_info[1]


def recompile_limit(record: logging.LogRecord) -> tuple[str, int, str] | None:
    """Return function, limit and reason if a log record says that the limit of recompiles is reached (torch 2.13)."""
    if record.name != convert_frame.__name__ or record.levelno != logging.WARNING:
        return None
    if not isinstance(record.args, tuple) or len(record.args) != 5 or "recompile" not in str(record.args[0]):
        return None
    _, limit, function, reason, _ = record.args
    return str(function), int(str(limit)), str(reason)


def explanation(message: str) -> str:
    """Return the one sentence of dynamo's page-long messages that explains the failure (torch 2.13)."""
    lines = [line.strip() for line in message.strip().splitlines()] or ["no message"]
    return next((line.removeprefix("Explanation: ") for line in lines if line.startswith("Explanation: ")), lines[0])


def backend_error(error: BaseException | None) -> BaseException | None:
    """Return what a backend raised if dynamo's error is about that, else ``None`` (torch 2.13)."""
    return getattr(error, "inner_exception", None)


def settings_for_steps(log_methods: Iterable[Any]) -> AbstractContextManager[Any]:
    """Return a context with dynamo's settings for this thread while it compiles a step (torch 2.13).

    Args:
        log_methods: Calls to leave out of the graph: for dynamo a call of a logger is a graph break.

    """
    settings = {
        # otherwise counters such as `self.global_step` compile in each step, until dynamo gives up
        "allow_unspec_int_on_nn_module": True,
        "suppress_errors": True,
        # otherwise `np.random` draws from torch's generator, and what is drawn after it differs from eager too
        "use_numpy_random_stream": True,
        # otherwise dynamo gives up the whole function that calls a recurrent layer. With it, only the call is left out,
        # by StepShims
        "allow_rnn": True,
        "ignore_logging_functions": dynamo_config.ignore_logging_functions | set(log_methods),
    }
    return dynamo_config.patch(settings)


def is_wrapped(function: Callable[..., Any]) -> bool:
    """Whether ``torch.compile`` or ``torch.compiler.disable`` returned this function (torch 2.13)."""
    return hasattr(function, "_torchdynamo_orig_callable")


def is_compiled_module(module: nn.Module) -> bool:
    """Whether ``torch.compile`` returned this module (torch 2.13)."""
    return isinstance(module, OptimizedModule)


def region_of(compiled: Any) -> int:
    """Return the id of what dynamo compiles for a function under ``isolate_recompiles=True`` (torch 2.13)."""
    return compiled._isolate_recompiles_id


def release_regions(regions: list[int]) -> None:
    """Free what dynamo has compiled for these ids of :func:`region_of`, and empty the list (torch 2.13).

    Otherwise dynamo keeps it, with its ONNX Runtime sessions, as long as the code of the step lives, which is for the
    process, and counts it against the code's recompile limit.
    """
    if not regions:
        return
    with convert_frame.compile_lock:  # another thread may be compiling
        taken = [regions.pop() for _ in range(len(regions))]
        released = []
        for code in _living(convert_frame.input_codes):
            if any(_get_cache_entries_for_region(code, region) for region in taken):
                reset_code(code)  # others that use it compile again
                released.append(code)
        # That frees the compiled code and its graphs, but not after a graph break: something in torch 2.13 keeps such
        # code for good. So its graphs are removed from the globals now, as would be done when the code is freed.
        for compiled in _living(convert_frame.output_codes) if released else []:
            if any(orig_code_map.get(compiled) is code for code in released):
                for remove_global in CleanupManager.instance.get(compiled, ()):
                    remove_global()
                CleanupManager.instance[compiled] = []


def _living(tracker: convert_frame.Tracker) -> list[CodeType]:
    return [code for reference in tracker.seen if (code := reference()) is not None]


def release_backend(backend: Any) -> None:
    """Remove a backend from the list that dynamo keeps for its reset and never shortens (torch 2.13)."""
    for key, kept in list(eval_frame.cached_backends.items()):
        if getattr(kept, "compiler_fn", kept) is backend:
            eval_frame.cached_backends.pop(key, None)


# The backend


def aot_backend(**options: Any) -> Callable[..., Any]:
    """Return a backend that compiles ATen graphs, forward and backward, with these compilers (torch 2.13)."""
    return aot_autograd(**options)
