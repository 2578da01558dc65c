"""What torch would load and search without need when it compiles for the first time, longer than a small step takes.

All of it was read in torch 2.13; a version without a name that is replaced here is left as it is.
"""

import dataclasses
import functools
import gc
import importlib
import logging
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType, ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch._export.utils as export_utils
from torch._decomp import core_aten_decompositions
from torch._dynamo import config as dynamo_config
from torch._dynamo import eval_frame, graph_region_tracker, guards, output_graph, symbolic_convert
from torch._dynamo.variables import higher_order_ops
from torch._logging._internal import trace_log
from torch._ops import OpOverload
from torch._subclasses import fake_tensor
from torch.utils import _traceback as captured_traceback

_FUNC_MAP = "torch.distributed.tensor.experimental._func_map"
# Dynamo loads these to list their files, and to ask for objects of a class that there are none of then: 0.15 s.
_NAMED: dict[str, dict[str, Any]] = {
    "torch._inductor.sizevars": {},
    "torch.export._trace": {"_ExportModuleSpecTrackerDict": type("_ExportModuleSpecTrackerDict", (dict,), {})},
}


@contextmanager
def without_collections() -> Iterator[None]:
    """Within the block the garbage collector waits: a look at all objects of torch and Lightning takes 0.1 s."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


@contextmanager
def compiled_quickly() -> Iterator[None]:
    """Within the block dynamo looks at no garbage, and does nothing of what :func:`_shortcuts` leaves out."""
    with ExitStack() as stack:
        stack.enter_context(without_collections())
        for name, known in _NAMED.items():
            if name not in sys.modules:
                stack.callback(_Later(name, known).is_found)
        for owner, name, instead in _shortcuts():
            stack.enter_context(patch.object(owner, name, instead))
        yield


def _shortcuts() -> Iterator[tuple[Any, str, Any]]:
    """What a small step does not need: whose it is, its name, and what is done instead."""
    owner = getattr(higher_order_ops, "LocalMapWrappedHigherOrderVariable", None)
    if (knows := getattr(owner, "should_wrap_in_hop", None)) is not None:
        # nobody has a function of a module that is not loaded: 50 ms
        yield owner, "should_wrap_in_hop", staticmethod(lambda value: _FUNC_MAP in sys.modules and knows(value))
    if not (dynamo_config.use_graph_deduplication or dynamo_config.track_nodes_for_deduplication):
        yield graph_region_tracker, "InputPickler", lambda: None  # it loads inductor's cache: 50 ms
    # the text of each line of a stack, for messages that few see: 2 MB of torch's sources, which stay in memory
    if getattr(fake_tensor, "traceback", None) is traceback:
        yield fake_tensor, "traceback", SimpleNamespace(**vars(traceback) | {"extract_stack": _unread_stack})
    if hasattr(captured_traceback, "_extract_symbolized_tb"):
        yield captured_traceback, "_extract_symbolized_tb", _unread_summary
    translator = symbolic_convert.InstructionTranslator
    if (throws := getattr(translator, "_throw_if_in_functorch", None)) is not None:
        # it loads all backends to compare one with another, for calls within torch.func: 90 ms
        within = torch._C._functorch.peek_interpreter_stack
        yield translator, "_throw_if_in_functorch", lambda self: None if within() is None else throws(self)
    if not any(log.isEnabledFor(logging.DEBUG) for log in _logs()):
        if hasattr(symbolic_convert, "get_funcname"):  # it reads each file that a step calls into: 30 ms
            yield symbolic_convert, "get_funcname", lambda *args: None
        if hasattr(guards, "profile_guard_manager"):  # with empty caches: 14 ms
            yield guards, "profile_guard_manager", lambda *args: 0.0


def _unread_stack(frame: FrameType | None = None, limit: int | None = None) -> traceback.StackSummary:
    """Return what ``traceback.extract_stack`` does; the text of a line is read when somebody asks for it."""
    frames = traceback.walk_stack(frame or sys._getframe(1))
    stack = traceback.StackSummary.extract(frames, limit=limit, lookup_lines=False)
    stack.reverse()
    return stack


def _unread_summary(frames: Sequence[Mapping[str, Any]], skip: int) -> traceback.StackSummary:
    """Return a stack that torch has captured, as torch does; here too a line is read when somebody asks for it."""
    kept = [(one["filename"], one["line"], one["name"]) for one in reversed(frames[skip:])]
    return traceback.StackSummary(traceback.FrameSummary(*one, lookup_line=False) for one in kept)


def _logs() -> Iterator[logging.Logger]:
    for module, name in ((output_graph, "trace_call_log"), (guards, "guards_log")):
        if (log := getattr(module, name, None)) is not None:
            yield log


@contextmanager
def without_debugger() -> Iterator[None]:
    """Within the block torch.compile wraps no backend to debug it, which loads AOTAutograd and networkx: 0.15 s."""
    if not hasattr(eval_frame, "get_compiler_fn") or dynamo_config.repro_after is not None:
        yield
        return
    with patch.object(eval_frame, "get_compiler_fn", _as_wrapped):
        yield


def _as_wrapped(backend: Any) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        return backend(*args, **kwargs)

    run.__name__ = getattr(backend, "compiler_name", run.__name__)
    run._torchdynamo_orig_backend = backend  # type: ignore[attr-defined]
    return run


def load_autograd() -> None:
    """Load AOTAutograd, and networkx not before something of that is used: 60 ms and 300 modules."""
    if "networkx" in sys.modules or "torch._functorch.partitioners" in sys.modules:
        return
    later = _Later("networkx", annotates=True)
    try:
        importlib.import_module("torch._functorch.aot_autograd")
    finally:
        later.is_found()


class _Later(ModuleType):
    """A module in place of one that is loaded when something of it is used that is not ``known``.

    ``annotates``: whether what this thread loads meanwhile names it in annotations alone.
    """

    def __init__(self, name: str, known: Mapping[str, Any] | None = None, annotates: bool = False) -> None:
        super().__init__(name)
        vars(self).update(known or {})
        self._annotates = threading.get_ident() if annotates else None
        parent, _, self._own_name = name.rpartition(".")
        self._parent = sys.modules.get(parent)
        if self._parent is not None:
            self.__file__ = str(Path(self._parent.__path__[0], f"{self._own_name}.py"))
            setattr(self._parent, self._own_name, self)
        sys.modules[name] = self

    def is_found(self) -> None:
        """From now on whoever imports it gets the module itself."""
        self._annotates = None
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        if self._parent is not None and vars(self._parent).get(self._own_name) is self:
            delattr(self._parent, self._own_name)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if threading.get_ident() == self._annotates:
            return name
        self.is_found()
        return getattr(importlib.import_module(self.__name__), name)


@contextmanager
def without_texts() -> Iterator[None]:
    """Within the block AOTAutograd writes no texts of its graphs that nobody reads: 4 % of compiling a small GPT."""
    graphs = sys.modules.get("torch._functorch._aot_autograd.graph_compile")
    with ExitStack() as stack:
        if not trace_log.handlers:  # of `TORCH_TRACE`
            for log, name in (("aot_joint_log", "_log_joint_graph"), ("aot_graphs_log", "_log_fw_bw_graphs")):
                reader, write = getattr(graphs, log, None), getattr(graphs, name, None)
                if reader is not None and write is not None and not reader.isEnabledFor(logging.INFO):
                    stack.enter_context(patch.object(graphs, name, functools.partial(_unlogged, write)))
        yield


def _unlogged(write: Callable[..., Any], *args: Any) -> Any:
    *graphs, config = args
    return write(*graphs, dataclasses.replace(config, enable_log=False))


def core_decompositions() -> dict[OpOverload, Callable[..., Any]]:
    """Return torch's decompositions to core ATen ops; it lists the ops of C++ once, and not for each library: 70 ms."""
    listed = getattr(export_utils, "_materialize_cpp_cia_ops", None)
    if listed is None:
        return dict(core_aten_decompositions())
    with patch.object(export_utils, "_materialize_cpp_cia_ops", functools.cache(listed)):
        return dict(core_aten_decompositions())
