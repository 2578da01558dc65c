"""Shims: replacements for methods of a LightningModule while one of its captured steps runs.

A graph cannot hold Lightning's helpers (dynamo fails on ``self.log`` of Lightning 2.6), and torchmetrics counts its
updates in attributes, which would recompile each step. So during a captured call

- ``log`` and ``log_dict`` only record what was logged, and Lightning is called with it afterwards,
- helpers, metrics, recurrent layers and, under manual optimization, the optimizers run as they are, outside of any
  graph. Torch has one kernel for a whole recurrent layer; traced, the layer would become one op for each time step.

Shims are entries of instance dictionaries, removed after the call, so that nothing outside of it sees them. Dynamo
traces functions of this file as source, so that coverage tools must not instrument it.
"""

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle
from torchmetrics import Metric, MetricCollection

from lightning_ort.compat.dynamo import is_compiled_module
from lightning_ort.compat.lightning import is_compiled_by_lightning
from lightning_ort.compat.torch import COMPILED_CALL, forward_hooks_without, has_compiled_call, uncompiled_call

_HELPERS = (
    "all_gather",
    "clip_gradients",
    "lr_schedulers",
    "manual_backward",
    "optimizers",
    "print",
    "toggle_optimizer",
    "untoggle_optimizer",
)
_METRIC_METHODS = ("forward", "update", "compute", "reset")
_METRICS = (Metric, MetricCollection)
MISSING = object()

_Args = tuple[Any, ...]
_Call = tuple[str, _Args, Any, _Args, dict[str, Any]]  # method, name, value, further arguments


class DeferredLogger:
    """Replaces ``LightningModule.log`` and ``log_dict`` in a captured step, in a way that a graph can hold.

    Args:
        module: The LightningModule.

    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._calls: list[_Call] = []

    def log(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        """Record a call of ``log``."""
        self._defer("log", (name,), value, args, kwargs)

    def log_dict(self, dictionary: Any, *args: Any, **kwargs: Any) -> None:
        """Record a call of ``log_dict``."""
        self._defer("log_dict", (), dictionary, args, kwargs)

    def _defer(self, method: str, names: _Args, value: Any, args: _Args, kwargs: dict[str, Any]) -> None:
        values = value.values() if isinstance(value, dict) else (value,)
        for item in values:
            if isinstance(item, _METRICS):
                # Lightning reads the metric's value for this batch; later it has that of another one
                self._log_now((method, names, value, args, kwargs))
                return
        if not kwargs.get("enable_graph", False):
            if isinstance(value, dict):
                value = {key: _snapshot(item) for key, item in value.items()}
            else:
                value = _snapshot(value)
        self._calls.append((method, names, value, args, kwargs))

    def replay(self) -> None:
        """Make the calls that were recorded."""
        if not self._calls:
            return
        # cleared in place, not replaced: a captured step appends to this very list, and is guarded on it being empty
        calls = self._calls[:]
        self._calls.clear()
        for method, names, value, args, kwargs in calls:
            getattr(self._module, method)(*names, value, *args, **kwargs)

    def discard(self) -> None:
        """Forget the calls that were recorded."""
        self._calls.clear()

    @torch.compiler.disable
    def _log_now(self, call: _Call) -> None:
        attributes = vars(self._module)
        own = {key: attributes.pop(key) for key in ("log", "log_dict")}
        try:
            self._calls.append(call)
            self.replay()
        finally:
            attributes.update(own)


def _snapshot(value: Any) -> Any:
    # a copy: the step may change the tensor in place after logging it
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


class StepShims:
    """The shims of one module, created once and installed for each captured call.

    Args:
        module: The LightningModule.
        on_closure: Called when an optimizer is given a closure, which then runs outside of any graph.

    """

    def __init__(self, module: nn.Module, on_closure: Callable[[], None]) -> None:
        self.logger = DeferredLogger(module)
        self._module = module
        self._on_closure = on_closure
        self._shims: list[tuple[dict[str, Any], str, Any, Any]] = []  # dictionary, key, shim, entry before
        # dynamo knows a shim by its identity: a new one for the same method would compile everything again
        self._known: dict[tuple[int, str], tuple[Any, Any, Any]] = {}  # owner, entry before, shim

    def refresh(self, optimizers: Iterable[Any], wrapper_hooks: Iterable[RemovableHandle] = ()) -> None:
        """Create the shims for what the module has now, before a run.

        Args:
            optimizers: The LightningOptimizers that the step itself calls: none under automatic optimization.
            wrapper_hooks: On the module, by what wraps it: they have run for the step, and would run again for a call
                of the module within it.

        """
        module, known, self._known = self._module, self._known, {}
        self._shims.clear()

        def add(owner: Any, name: str, make: Callable[[Callable[..., Any]], Any] = _outside_graphs) -> None:
            attributes = vars(owner)
            before = attributes.get(name, MISSING)
            if owner is module and before is not MISSING:
                return  # what a user put on the instance, such as a mock, stays
            known_owner, known_before, shim = known.get((id(owner), name), (None, None, None))
            if known_owner is not owner or known_before is not before:
                shim = make(getattr(owner, name))
            self._known[id(owner), name] = owner, before, shim
            self._shims.append((attributes, name, shim, before))

        module_type: Any = type(module)
        deferred = _is_of_lightning(module_type.log) and _is_of_lightning(module_type.log_dict)
        add(module, "log", (lambda _: self.logger.log) if deferred else _outside_graphs)
        add(module, "log_dict", (lambda _: self.logger.log_dict) if deferred else _outside_graphs)
        for name in _HELPERS:
            add(module, name)
        for child in module.modules():
            if isinstance(child, _METRICS):
                for name in _METRIC_METHODS:
                    add(child, name)
            elif isinstance(child, nn.RNNBase):
                add(child, "forward")
        for optimizer in optimizers:
            add(optimizer, "step", lambda step: _outside_graphs(_with_closure_seen(step, self._on_closure)))
            add(optimizer.optimizer, "step")  # what `self.optimizers(use_pl_optimizer=False)` returns
            add(optimizer, "zero_grad")
            add(optimizer.optimizer, "zero_grad")
        for name, hooks, others in forward_hooks_without(module, {handle.id for handle in wrapper_hooks}):
            self._shims.append((vars(module), name, others, hooks))

    def install(self) -> None:
        """Put the shims into the instance dictionaries."""
        for attributes, name, shim, _ in self._shims:
            attributes[name] = shim

    def remove(self) -> None:
        """Restore the instance dictionaries."""
        for attributes, name, _, before in self._shims:
            restore_attribute(attributes, name, before)


def restore_attribute(attributes: dict[str, Any], name: str, before: Any) -> None:
    """Give an instance dictionary the entry that it had before, or none if that was :data:`MISSING`."""
    if before is MISSING:
        attributes.pop(name, None)
    else:
        attributes[name] = before


class ModuleShims:
    """Compiled calls of child modules, for a step that is not compiled itself.

    ``nn.Module.compile`` compiles nothing for the classes of ``torch.nn``, whose frames dynamo skips: hence a frame of
    our own around each child.

    Args:
        children: The modules to compile.
        compile_fn: Compiles a function.

    """

    def __init__(self, children: Iterable[nn.Module], compile_fn: Callable[[Callable[..., Any]], Any]) -> None:
        self._shims = [(vars(child), compile_fn(_frame_around(uncompiled_call(child)))) for child in children]

    def install(self) -> None:
        """Make the children's calls the compiled ones."""
        for attributes, call in self._shims:
            attributes[COMPILED_CALL] = call

    def remove(self) -> None:
        """Undo :meth:`install`."""
        for attributes, _ in self._shims:
            attributes.pop(COMPILED_CALL, None)


def callable_children(module: nn.Module) -> Iterator[nn.Module]:
    """Find the largest submodules that a step may call, in the order in which they were assigned."""
    for child in module.children():
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield from callable_children(child)  # containers that cannot be called
        elif not isinstance(child, _METRICS):
            yield child


def compiled_by_user(module: nn.Module) -> str | None:
    """Return the name of the first module that the user compiled already ("" is the module itself), or ``None``."""
    for name, submodule in module.named_modules():
        if is_compiled_module(submodule) or has_compiled_call(submodule) or is_compiled_by_lightning(submodule):
            return name
    return None


def _is_of_lightning(method: Callable[..., Any]) -> bool:
    return method.__module__.partition(".")[0] in ("lightning", "pytorch_lightning")


def _outside_graphs(method: Callable[..., Any]) -> Callable[..., Any]:
    # keeps the signature, which Lightning and torchmetrics inspect
    name = getattr(method, "__name__", "it")
    return torch.compiler.disable(method, reason=f"{name} runs outside of graphs")


def _with_closure_seen(step: Callable[..., Any], on_closure: Callable[[], None]) -> Callable[..., Any]:
    @functools.wraps(step)  # torch marks the step of an optimizer that has a scheduler
    def wrapper(closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        if closure is not None:
            on_closure()
        return step(closure, **kwargs)

    return wrapper


def _frame_around(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return call
