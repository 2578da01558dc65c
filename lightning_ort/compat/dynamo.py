"""Private and undocumented names of ``torch._dynamo``, and the parsing of its messages."""

import inspect
import logging
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import CodeType, FunctionType
from typing import Any, NoReturn, TypeVar
from unittest.mock import patch

import torch
from torch import nn
from torch._C._dynamo.eval_frame import _get_cache_entries_for_region, reset_code
from torch._dynamo import OptimizedModule, convert_frame, eval_frame, exc
from torch._dynamo import config as dynamo_config
from torch._dynamo.callback import CallbackArgs, CallbackTrigger, callback_handler
from torch._dynamo.convert_frame import Tracker, compile_lock, input_codes, output_codes
from torch._dynamo.eval_frame import cached_backends, skip_code
from torch._dynamo.exc import SkipFrame
from torch._dynamo.resume_execution import TORCH_DYNAMO_RESUME_IN_PREFIX
from torch._dynamo.trace_rules import _disallowed_callable_ids
from torch._dynamo.utils import CleanupManager, get_compilation_metrics, graph_break_reasons, orig_code_map
from torch._guards import TracingContext
from torch.distributions import kl

from lightning_ort.compat.first_compilation import load_autograd, without_collections, without_debugger, without_texts

# Of one frame; the default of 8 is for one model, not for four steps with their partial batches and epochs.
RECOMPILE_LIMIT = 32
_F = TypeVar("_F", bound=Callable[..., Any])

# what dynamo compiles


# what dynamo calls before and after each compilation; its reset empties both lists (torch 2.13)
COMPILE_CALLBACKS: tuple[list[Callable[[CallbackArgs], None]], list[Callable[[CallbackArgs], None]]] = (
    callback_handler.start_callbacks,
    callback_handler.end_callbacks,
)


def compile_id(args: CallbackArgs) -> str | None:
    """Return the id of the frame that a callback is about, ``None`` if it is about something else (torch 2.13)."""
    return args.compile_id if args.callback_trigger is CallbackTrigger.DYNAMO else None


def last_compilation() -> Any:
    """Return a marker for :func:`compilations_since` (torch 2.13)."""
    metrics = get_compilation_metrics()
    return metrics[-1] if metrics else None


def compilations_since(
    marker: Any, code: CodeType | None, ignored: Collection[str]
) -> tuple[int, str | None, str | None]:
    """Count frames that compiled again, without these compile ids; say why frames stayed in Python (torch 2.13).

    The second item is the reason for a frame of ``code``, the third for the rest of such a frame after a graph break.
    """
    recompiles, skipped, skipped_rest = 0, None, None
    for entry in _compilations_since(marker, ignored):
        # another backend for the same code, which nothing isolates
        recompiles += entry.recompile_reason is not None and "BACKEND_MATCH" not in entry.recompile_reason
        if code is None or entry.co_filename != code.co_filename or entry.fail_type not in ("Unsupported", "UserError"):
            continue
        reason = f'{entry.fail_reason}\nfrom user code:\n File "{entry.fail_user_frame_filename}", line '
        reason += str(entry.fail_user_frame_lineno)
        if (entry.co_name, entry.co_firstlineno) == (code.co_name, code.co_firstlineno):
            skipped = reason
        elif (entry.co_name or "").startswith(f"{TORCH_DYNAMO_RESUME_IN_PREFIX}_{code.co_name}_at_"):
            skipped_rest = reason
    return recompiles, skipped, skipped_rest


def failures_since(marker: Any, ignored: Collection[str]) -> list[str]:
    """Return why frames stayed in Python, whichever they were, without these compile ids (torch 2.13)."""
    return [entry.fail_reason for entry in _compilations_since(marker, ignored) if entry.fail_reason]


def _compilations_since(marker: Any, ignored: Collection[str]) -> list[Any]:
    metrics = get_compilation_metrics()
    start = next((index + 1 for index, entry in enumerate(metrics) if entry is marker), 0)
    return [entry for entry in metrics[start:] if str(entry.compile_id) not in ignored]


def graph_breaks() -> list[str]:
    """Return the reasons of all graph breaks in this process so far (torch 2.13)."""
    return [entry.reason for entry in graph_break_reasons]


def break_frames(start: int) -> list[tuple[str, list[tuple[str, int]]]]:
    """Return reason and frames (file and line, outermost first) of the graph breaks from one on (torch 2.13)."""
    return [
        (entry.reason, [(frame.filename, frame.lineno or 0) for frame in entry.user_stack])
        for entry in graph_break_reasons[start:]
    ]


def is_at_autograd_grad(graph_break: str) -> bool:
    """Return whether a graph ended at a call of ``torch.autograd.grad`` (2.13), or was not made for one (2.15)."""
    return "`torch.autograd.grad`" in graph_break


# what dynamo says

_UNTRACEABLE = re.compile(
    r"^Backend compiler exception\n.* failed with ([\w.]+?)\.?\s.*Adding a graph break", re.DOTALL
)


def untraceable_operation(record: logging.LogRecord) -> str | None:
    """Return the operation where a graph ends because no backend can trace it, if the record says so (torch 2.13)."""
    found = _UNTRACEABLE.search(record.getMessage()) if record.name == exc.__name__ else None
    return found and found.group(1)


def suppressed_error(record: logging.LogRecord) -> BaseException | None:
    """Return the error that ``suppress_errors`` suppressed, if the record says so (torch 2.13)."""
    return record.exc_info[1] if record.exc_info and record.name == convert_frame.__name__ else None


def recompile_limit(record: logging.LogRecord) -> tuple[Any, Any, Any] | None:
    """Return limit, function and reason if the record says that a function reached its limit (torch 2.13)."""
    args = record.args if isinstance(record.args, tuple) and record.name == convert_frame.__name__ else ()
    return args[1:4] if len(args) == 5 and "recompile" in str(args[0]) else None


def explanation(message: str) -> str:
    """Return the sentence of one of dynamo's long messages that explains it (torch 2.13)."""
    lines = [line.strip() for line in message.strip().splitlines()] or ["no message"]
    return next((line.removeprefix("Explanation: ") for line in lines if line.startswith("Explanation: ")), lines[0])


def backend_error(error: BaseException | None) -> BaseException | None:
    """Return what a backend raised, if dynamo's error is about that (torch 2.13)."""
    return getattr(error, "inner_exception", None)


# how dynamo compiles


def settings_for_steps(ignored_calls: Iterable[Any], numbers: bool = False) -> AbstractContextManager[Any]:
    """Within the block this thread has the settings under which steps are compiled (torch 2.13).

    ``numbers``: whether a graph may hold a number that a tensor's value becomes, as by ``.item()``.
    """
    # a look at garbage, and one at all backends that are installed: 20 and 40 ms
    unneeded = ("run_gc_after_compile", "invalidate_compile_context_weakrefs")
    settings: dict[str, Any] = {name: False for name in unneeded if hasattr(dynamo_config, name)}
    settings |= {
        # a call of a logger is otherwise a graph break
        "ignore_logging_functions": dynamo_config.ignore_logging_functions | set(ignored_calls),
        # otherwise counters such as `self.global_step` compile in each step, until dynamo gives up
        "allow_unspec_int_on_nn_module": True,
        "suppress_errors": True,
        # otherwise hooks that come later, or with another module, do not run
        "skip_nnmodule_hook_guards": False,
        # otherwise each `.item()`, which people log, ends a graph
        "capture_scalar_outputs": numbers,
        # dynamo computes with tensors what NumPy does, and then dtypes, roundings and types of results differ
        "trace_numpy": False,
        # otherwise an `assert` of a tensor is a RuntimeError
        "rewrite_assert_with_torch_assert": False,
        # otherwise each call of a graph has two more, for torch's profiler
        "record_runtime_overhead": False,
        # otherwise dynamo gives up any function that calls a recurrent layer; StepShims keeps it out
        "allow_rnn": True,
        "use_lamba_guard_for_object_aliasing": True,  # otherwise guards that repairs add are left out (torch 2.15)
    }
    patched: AbstractContextManager[Any] = dynamo_config.patch(settings)
    return patched


@contextmanager
def outside_graphs(*functions: Callable[..., Any]) -> Iterator[None]:
    """Within the block dynamo traces no calls of these functions (torch 2.13)."""
    new = [id(function) for function in functions if id(function) not in _disallowed_callable_ids]
    try:
        for function in new:
            _disallowed_callable_ids.add(function)
        yield
    finally:
        for function in new:
            _disallowed_callable_ids.remove(function)


def only_within(function: _F) -> _F:
    """Have dynamo trace a function where another one calls it, and not when Python calls it (torch 2.13)."""
    skip_code(function.__code__)
    return function


def prepare_divergences() -> None:
    """Enter what ``kl_divergence`` would look up at its first call, a search that no graph can hold (torch 2.13)."""
    for kinds, function in kl._KL_REGISTRY.items():
        kl._KL_MEMOIZE.setdefault(kinds, function)


def prepare_numbers() -> None:
    """Keep a number out of graphs where torch lacks its operation on tensors, instead of failing (torch 2.13)."""
    from torch.utils._sympy.interp import handlers  # not at the top: only what compiles needs it
    from torch.utils._sympy.reference import TensorReferenceAnalysis

    for name in {*handlers().values()}:
        if not hasattr(TensorReferenceAnalysis, name):  # such as `python_mod`: `%` of an int that changes
            setattr(TensorReferenceAnalysis, name, staticmethod(_not_implemented))


def _not_implemented(*args: Any) -> None:
    raise NotImplementedError


def is_compiled_module(module: nn.Module) -> bool:
    """Return whether ``torch.compile`` made this module (torch 2.13)."""
    return isinstance(module, OptimizedModule)


# what dynamo keeps

Region = int  # the id of what dynamo compiles for one function


def compile_isolated(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """Compile a function as ``torch.compile`` does, with a recompile limit of its own (torch 2.13).

    Otherwise the limit counts for all modules of its class, and for all of our frames around children.
    """
    options |= {"recompile_limit": RECOMPILE_LIMIT, "isolate_recompiles": True}
    checks = torch.distributions.Distribution._validate_args
    # the first one turns these checks off for good
    keeps_checks = patch.object(torch.distributions.Distribution, "_validate_args", checks)
    with without_collections(), without_debugger(), keeps_checks:
        return torch.compile(function, **options)


def region_of(compiled: Any) -> Region:
    """Return what tells apart what dynamo compiles for a function of :func:`compile_isolated` (torch 2.13)."""
    region: Region = compiled._isolate_recompiles_id
    return region


_NO_STANCE = type(eval_frame._stance)().stance  # where `torch.compiler.set_stance` was not called
_NO_PLAIN_CALL = inspect.CO_VARARGS | inspect.CO_VARKEYWORDS | inspect.CO_GENERATOR | inspect.CO_COROUTINE


class WithoutWrapper:
    """A method of :func:`compile_isolated`, now that it is compiled, without dynamo's wrapper (torch 2.13).

    Where the guards of what dynamo has compiled hold, that is called at once: dynamo's wrapper around each call takes
    30 microseconds, the guards of a small module 3. Elsewhere the compiled method of ``owner`` is called.
    """

    def __init__(self, compiled: Callable[..., Any], owner: Any, names: tuple[str, ...], found: list[Any]) -> None:
        self.owner = owner
        self._compiled, self._names, self._found = compiled, names, found

    def find(self, args: tuple[Any, ...]) -> FunctionType | None:
        """Return what dynamo has compiled for a call with these arguments; it takes the method's owner before them."""
        if len(args) + 1 == len(self._names) and eval_frame._stance.stance == _NO_STANCE:
            variables = dict(zip(self._names, (self.owner, *args), strict=True))
            for guards, run in self._found:
                if guards.cache_entry is not None and guards.check(variables):  # none: what it guards is gone
                    return run
        return None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call it."""
        if not kwargs and (run := self.find(args)) is not None:
            return run(self.owner, *args)
        return self._compiled(*args, **kwargs)


def without_wrapper(compiled: Callable[..., Any], method: Any) -> Callable[..., Any]:
    """Return a :class:`WithoutWrapper` of a method, or, after a graph break, the compiled method itself (torch 2.13).

    Without dynamo's wrapper the functions that go on after a break, and what they call, would run uncompiled.
    """
    function, region = getattr(method, "__func__", None), getattr(compiled, "_isolate_recompiles_id", None)
    if region is None or not isinstance(function, FunctionType):
        return compiled
    code = function.__code__
    # its arguments are all that guards look up
    if code.co_flags & _NO_PLAIN_CALL or code.co_freevars or code.co_cellvars or code.co_kwonlyargcount:
        return compiled
    found = []
    for entry in _get_cache_entries_for_region(code, region):
        own = entry.code
        if own.co_freevars or any(name.startswith("__resume_at") for name in own.co_names):
            return compiled
        run = FunctionType(own, function.__globals__, function.__name__, function.__defaults__)
        found.append((entry.guard_manager, run))
    names = code.co_varnames[: code.co_argcount]
    return WithoutWrapper(compiled, method.__self__, names, found) if found else compiled


def release_regions(regions: list[Region]) -> None:
    """Free what dynamo has compiled for these functions, which are gone, and empty the list (torch 2.13).

    Dynamo keeps it, with its graphs, as long as the code of a step lives, which is for the process, and counts it
    against the code's recompile limit: a hyperparameter search would run out of memory or reach the limit.
    """
    if not regions:
        return
    with compile_lock:  # another thread may be compiling
        ids = [regions.pop() for _ in range(len(regions))]
        codes = [
            code for code in _living(input_codes) if any(_get_cache_entries_for_region(code, region) for region in ids)
        ]
        for code in codes:
            reset_code(code)  # others that use it compile again
        # That frees the compiled code and its graphs, except after a graph break: something in torch 2.13 keeps such
        # code for good. So remove its graphs from the globals now, as dynamo would when the code is freed.
        for compiled in _living(output_codes) if codes else []:
            if any(orig_code_map.get(compiled) is code for code in codes):
                for remove_global in CleanupManager.instance.get(compiled, ()):
                    remove_global()
                CleanupManager.instance[compiled] = []


def _living(tracker: Tracker) -> list[CodeType]:
    return [code for reference in tracker.seen if (code := reference()) is not None]


def release_backend(backend: Any) -> None:
    """Remove a backend from the list that dynamo keeps for its reset and never shortens (torch 2.13)."""
    for key, kept in list(cached_backends.items()):
        if getattr(kept, "compiler_fn", kept) is backend:
            cached_backends.pop(key, None)


# The backend


def leave_frame(why: str) -> NoReturn:
    """Leave the function that is being traced to Python, from within a backend (torch 2.13)."""
    raise SkipFrame(why)


def is_last_graph(gm: Any) -> bool:
    """Whether a captured graph ends where its function returns, and not at a graph break (torch 2.13)."""
    reason = getattr(gm, "compile_subgraph_reason", None)
    return reason is not None and not reason.graph_break


def hooks_a_result(gm: Any) -> bool:
    """Whether a captured graph registers a hook of the gradient of one of its results (torch 2.13).

    AOTAutograd runs the hook inside the backward graph, so that the result's own gradient, as ``retain_grad`` keeps it,
    is the one before the hook.
    """
    return any(str(node.target) == "register_hook" for node in gm.graph.output_node().all_input_nodes)


get_data: Any = getattr(torch._C._autograd, "_get_data_attr", None)  # what `x.data` is in a captured graph (torch 2.13)


def is_variable(placeholder: Any) -> bool:
    """Whether an input of a captured graph is a variable of the function, not an attribute or an item (torch 2.13)."""
    return re.fullmatch(r"L\['\w+'\]", _source_of(placeholder)) is not None


def input_name(placeholder: Any) -> str:
    """What an input of a captured graph is in the program, such as ``self.net.0.weight`` (torch 2.13)."""
    parts = re.findall(r"(?<=\[)'?(\w+)'?(?=\])|\.(\w+)", _source_of(placeholder))
    names = [quoted or plain for quoted, plain in parts]
    return ".".join(name for name in names if name not in _TABLES_OF_MODULES) or str(placeholder)


_TABLES_OF_MODULES = ("_modules", "_parameters", "_buffers")


def _source_of(placeholder: Any) -> str:
    name = getattr(getattr(placeholder, "_dynamo_source", None), "name", "")
    return name() if callable(name) else str(name)


def reads_gradients() -> bool:
    """Whether the function that is being traced reads ``.grad`` of anything, as far as its guards tell (torch 2.13)."""
    context = TracingContext.try_get()
    return context is None or any(re.search(r"\.grad\b", guard.name) for guard in context.guards_context.dynamo_guards)


def aot_backend(**compilers: Any) -> Callable[..., Any]:
    """Return a backend that compiles ATen graphs, forward and backward, with these compilers (torch 2.13).

    It does what torch's own :func:`aot_autograd` does, which loads all of inductor to find out that nobody debugs it.
    """

    def backend(gm: Any, inputs: Any) -> Callable[..., Any]:
        if os.environ.get("TORCH_COMPILE_DEBUG") == "1" or any(isinstance(one, (list, tuple, dict)) for one in inputs):
            from torch._dynamo.backends.common import aot_autograd

            return aot_autograd(**compilers)(gm, inputs)
        load_autograd()
        from torch._functorch.aot_autograd import aot_module_simplified

        with without_texts():
            run = aot_module_simplified(gm, inputs, **compilers | {"bw_compiler": compile_backward})
        return _not_traced(run)

    @_not_traced
    def compile_backward(*args: Any) -> Callable[..., Any]:
        return _not_traced(compilers["bw_compiler"](*args))

    return backend


def _not_traced(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compiler.disable(function, reason="part of a compiler")
