"""What stands in for parts of a LightningModule while dynamo captures one of its steps.

Lightning's helpers are Python that a graph cannot hold (``self.log`` makes dynamo fail outright in Lightning 2.6), and
torchmetrics counts its updates in attributes, which would compile again each step. So for the length of a captured call

- ``log`` and ``log_dict`` only note what was logged; the notes are read to Lightning after the call,
- helpers, metrics, recurrent layers and, under manual optimization, the optimizers run as they are, outside of any
  graph. Torch has a kernel for a whole recurrent layer; traced, it would be taken apart into every step in time.

All of it is put into instance dictionaries and taken out again, so that nobody outside of the call sees it.
"""

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch._dynamo import OptimizedModule
from torch.utils.hooks import RemovableHandle
from torchmetrics import Metric, MetricCollection

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


class DeferredLogger:
    """Takes the place of ``LightningModule.log`` and ``log_dict`` in a captured step, in a way a graph can hold.

    Args:
        module: The LightningModule.

    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._calls: list[tuple[str, tuple[Any, ...], Any, tuple[Any, ...], dict[str, Any]]] = []

    def log(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        """Note a call of ``log``."""
        self._note("log", (name,), value, args, kwargs)

    def log_dict(self, dictionary: Any, *args: Any, **kwargs: Any) -> None:
        """Note a call of ``log_dict``."""
        self._note("log_dict", (), dictionary, args, kwargs)

    def _note(
        self, method: str, names: tuple[Any, ...], value: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        values = value.values() if isinstance(value, dict) else (value,)
        for item in values:
            if isinstance(item, _METRICS):
                # Lightning reads the metric's last batch value now; later is another batch
                self._log_now(method, names, value, args, kwargs)
                return
        if not kwargs.get("enable_graph", False):
            if isinstance(value, dict):
                value = {key: _snapshot(item) for key, item in value.items()}
            else:
                value = _snapshot(value)
        self._calls.append((method, names, value, args, kwargs))

    def replay(self) -> None:
        """Make the calls that were noted."""
        if not self._calls:
            return
        # cleared in place, not replaced: a captured step appends to this very list, and is guarded on it being empty
        calls = self._calls[:]
        self._calls.clear()
        for method, names, value, args, kwargs in calls:
            getattr(self._module, method)(*names, value, *args, **kwargs)

    def discard(self) -> None:
        """Forget what was noted."""
        self._calls.clear()

    @torch.compiler.disable
    def _log_now(
        self, method: str, names: tuple[Any, ...], value: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        attributes = vars(self._module)
        own = {key: attributes.pop(key) for key in ("log", "log_dict")}
        try:
            self.replay()
            getattr(self._module, method)(*names, value, *args, **kwargs)
        finally:
            attributes.update(own)


def _snapshot(value: Any) -> Any:
    # a copy: the step may change the tensor in place after logging it
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


class StepPatches:
    """The stand-ins for one module, made once and put in place for every captured call.

    Args:
        module: The LightningModule.
        on_closure: Called when an optimizer is given a closure, which then runs outside of any graph.

    """

    def __init__(self, module: nn.Module, on_closure: Callable[[], None]) -> None:
        self.recorder = DeferredLogger(module)
        self._module = module
        self._on_closure = on_closure
        # dictionary, key, what stands in, what was there before
        self._patches: list[tuple[dict[str, Any], str, Any, Any]] = []
        # dynamo knows a stand-in by its identity: a new one for the same method would compile everything again
        self._made: dict[tuple[int, str], tuple[Any, Any, Any]] = {}

    def refresh(self, optimizers: Iterable[Any], wrapper_hooks: Iterable[RemovableHandle] = ()) -> None:
        """Look again at what the module has, before a run.

        Args:
            optimizers: The LightningOptimizers that the step drives itself: none under automatic optimization.
            wrapper_hooks: On the module, by what wraps it: they have run for the step, and would again for a call of
                the module within it.

        """
        module, known, self._made = self._module, self._made, {}
        self._patches.clear()

        def add(owner: Any, name: str, make: Callable[[Callable[..., Any]], Any] = _opaque) -> None:
            attributes = vars(owner)
            before = attributes.get(name, MISSING)
            if owner is module and before is not MISSING:
                return  # what a user put on the instance, such as a mock, stays
            owner_then, before_then, stand_in = known.get((id(owner), name), (None, None, None))
            if owner_then is not owner or before_then is not before:
                stand_in = make(getattr(owner, name))
            self._made[id(owner), name] = owner, before, stand_in
            self._patches.append((attributes, name, stand_in, before))

        module_type: Any = type(module)
        if _is_lightning(module_type.log) and _is_lightning(module_type.log_dict):
            add(module, "log", lambda _: self.recorder.log)
            add(module, "log_dict", lambda _: self.recorder.log_dict)
        else:
            add(module, "log")
            add(module, "log_dict")
        for name in _HELPERS:
            add(module, name)
        for child in module.modules():
            if isinstance(child, _METRICS):
                for name in _METRIC_METHODS:
                    add(child, name)
            elif isinstance(child, nn.RNNBase):
                add(child, "forward")
        for optimizer in optimizers:
            add(optimizer, "step", lambda step: _opaque(_watch_closure(step, self._on_closure)))
            add(optimizer.optimizer, "step")  # what `self.optimizers(use_pl_optimizer=False)` gives
            add(optimizer, "zero_grad")
            add(optimizer.optimizer, "zero_grad")
        hidden = {handle.id for handle in wrapper_hooks}
        for name in ("_forward_pre_hooks", "_forward_hooks"):
            hooks = vars(module)[name]
            if hidden & hooks.keys():
                others = type(hooks)((key, hook) for key, hook in hooks.items() if key not in hidden)
                self._patches.append((vars(module), name, others, hooks))

    def apply(self) -> None:
        """Put the stand-ins in place."""
        for attributes, name, stand_in, _ in self._patches:
            attributes[name] = stand_in

    def undo(self) -> None:
        """Take the stand-ins out."""
        for attributes, name, _, before in self._patches:
            put_back(attributes, name, before)


def put_back(attributes: dict[str, Any], name: str, before: Any) -> None:
    """Give an instance's dictionary the entry that it had before, or none if that was :data:`MISSING`."""
    if before is MISSING:
        attributes.pop(name, None)
    else:
        attributes[name] = before


class ModulePatches:
    """Compiled children in place of a module's own, for the steps whose own code is better left alone.

    ``nn.Module.compile`` compiles nothing for the classes of ``torch.nn``, whose frames dynamo skips: hence a frame of
    our own around each child. The class default of the attribute is ``None``, and pickling drops it.

    Args:
        children: The modules to compile.
        compile_fn: Compiles a function.

    """

    def __init__(self, children: Iterable[nn.Module], compile_fn: Callable[[Callable[..., Any]], Any]) -> None:
        self._patches = [(vars(child), compile_fn(_frame_around(child))) for child in children]

    def apply(self) -> None:
        """Put the compiled calls in place."""
        for attributes, call in self._patches:
            attributes["_compiled_call_impl"] = call

    def undo(self) -> None:
        """Take the compiled calls out."""
        for attributes, _ in self._patches:
            attributes.pop("_compiled_call_impl", None)


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
        compiled = isinstance(submodule, OptimizedModule) or submodule._compiled_call_impl is not None
        if compiled or getattr(submodule, "_compiler_ctx", None) is not None:  # Lightning's mark of a compiled module
            return name
    return None


def _is_lightning(method: Callable[..., Any]) -> bool:
    return method.__module__.partition(".")[0] in ("lightning", "pytorch_lightning")


def _opaque(method: Callable[..., Any]) -> Callable[..., Any]:
    # keeps the signature, which Lightning and torchmetrics inspect
    name = getattr(method, "__name__", "it")
    return torch.compiler.disable(method, reason=f"{name} runs outside of graphs")


def _watch_closure(step: Callable[..., Any], on_closure: Callable[[], None]) -> Callable[..., Any]:
    @functools.wraps(step)  # torch marks the step of an optimizer that has a scheduler
    def watched(closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        if closure is not None:
            on_closure()
        return step(closure, **kwargs)

    return watched


def _frame_around(child: nn.Module) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        return child._call_impl(*args, **kwargs)

    return call
