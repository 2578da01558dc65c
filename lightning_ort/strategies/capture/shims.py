"""Shims: replacements for methods of a LightningModule while one of its captured steps runs.

A graph cannot hold Lightning's helpers (dynamo fails on ``self.log`` of Lightning 2.6), and torchmetrics counts its
updates in attributes, which would recompile each step. So during a captured call

- ``log``, ``log_dict`` and the loggers' ``log_metrics`` only record in graphs what was logged, and get it afterwards,
- helpers, metrics, recurrent layers and, under manual optimization, the optimizers run as they are, outside of any
  graph. Torch has one kernel for a whole recurrent layer; traced, the layer would become one op for each time step.
- what may look at logged values gets those of the step so far: the Trainer's ``callback_metrics`` and such, and the
  hooks that helpers and optimizers call, which run without shims.

Shims are entries of instance dictionaries, removed after the call, so that nothing outside of it sees them. Dynamo
traces functions of this file as source, so that coverage tools must not instrument it.
"""

import copy
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle
from torchmetrics import Metric, MetricCollection

from lightning_ort._imports import is_inherited
from lightning_ort._shims import MISSING, Shims
from lightning_ort.compat.dynamo import is_compiled_module, only_within
from lightning_ort.compat.dynamo_left_out import RUNS_OUTSIDE, late_reader, late_readers
from lightning_ort.compat.lightning import LOGGED, is_compiled_by_lightning, with_reads
from lightning_ort.compat.lightning_loops import CURRENT_HOOK, current_batch
from lightning_ort.compat.torch import COMPILED_CALL, forward_hooks_without, has_compiled_call, uncompiled_call
from lightning_ort.compat.torchmetrics import set_value_of_batch, value_of_batch
from lightning_ort.strategies.lean.log import is_lean
from lightning_ort.strategies.race.run_facts import TRAINING
from lightning_ort.world.snapshot import is_one, items_of

_HELPERS = (
    "all_gather",
    "clip_gradients",
    "manual_backward",
    "optimizers",
    "print",
    "toggle_optimizer",
    "untoggle_optimizer",
)
_OF_TORCH = vars(nn.Module())  # attributes that every module has
_METRIC_METHODS = ("forward", "update", "compute", "reset")
_REDUCTIONS = ("mean", "min", "max", "sum")
_METRICS = (Metric, MetricCollection)
_Args = tuple[Any, ...]
# owner, method, name, value, further arguments, metrics with their values
_Call = tuple[Any, str, _Args, Any, _Args, dict[str, Any], list[tuple[Metric, Any]]]


class DeferredLogger:
    """Replaces ``LightningModule.log`` and ``log_dict`` in a captured step, in a way that a graph can hold.

    What runs in Python, and what Lightning refuses, is logged at once. ``outside`` makes a method one that runs outside
    of graphs, after what was logged before.
    """

    def __init__(self, module: nn.Module, outside: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        self._module = module
        self._log_now, self.read_now = outside(self._call), outside(lambda: None)
        self._averages = _averages(module)
        late_readers.add(self)
        self.calls: list[_Call] = []
        self.reads_later = False  # whether such a call is recorded
        self.at_once = False  # whether to log at once what Lightning weights by the size of the batch

    @only_within
    def log(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        """Record a call of ``log``."""
        self._defer(self._module, "log", (name,), value, args, kwargs)

    @only_within
    def log_dict(self, dictionary: Any, *args: Any, **kwargs: Any) -> None:
        """Record a call of ``log_dict``."""
        self._defer(self._module, "log_dict", (), dictionary, args, kwargs)

    def log_metrics_of(self, logger: Any, _: Any) -> Callable[..., None]:
        """Return a shim that records calls of a logger's ``log_metrics``."""

        @only_within
        def log_metrics(metrics: Any, *args: Any, **kwargs: Any) -> None:
            self._defer(logger, "log_metrics", (), metrics, args, kwargs)

        return log_metrics

    @late_reader
    @only_within
    def _weight_later(self) -> None:
        """Note that a call is recorded for which Lightning reads the size of the batch."""
        self.reads_later = True

    @only_within
    def _defer(self, owner: Any, method: str, names: _Args, value: Any, args: _Args, kwargs: dict[str, Any]) -> None:
        is_dict = isinstance(value, Mapping)
        allowed = all(map(_can_be_logged, value.values() if is_dict else (value,)))
        if torch.compiler.is_compiling() and owner is self._module:
            plain = tuple((key, given) for key, given in (*enumerate(args), *kwargs.items()) if _is_plain(given))
            averages = self._averages(tuple(value) if is_dict else names, plain)
            weights = averages and kwargs.get("batch_size") is None and not isinstance(value, _METRICS)
            allowed = allowed and averages is not None and not (weights and self.at_once)
            if allowed and weights:
                self._weight_later()
        if not allowed or not torch.compiler.is_compiling():
            self._log_now(owner, method, names, value, args, kwargs)
            return
        metrics: list[tuple[Any, Any]] = []  # Lightning reads their values for this batch, which may not be the last
        for item in value.values() if is_dict else (value,):
            if isinstance(item, Metric):
                metrics.append((item, value_of_batch(item)))
            elif isinstance(item, MetricCollection):
                for metric in item.children():
                    metrics.append((metric, value_of_batch(metric)))
        value = {key: _snapshot(item) for key, item in value.items()} if is_dict else _snapshot(value)
        self.calls.append((owner, method, names, value, args, kwargs, metrics))

    def _call(self, owner: Any, method: str, names: _Args, value: Any, args: _Args, kwargs: dict[str, Any]) -> None:
        getattr(owner, method)(*names, value, *args, **kwargs)

    def replay(self) -> None:
        """Make the calls that were recorded since the last time."""
        # cleared in place, not replaced: a captured step appends to this very list, and is guarded on it being empty
        calls, self.reads_later = self.calls[:], False
        self.calls.clear()
        for owner, method, names, value, args, kwargs, metrics in calls:
            after = [(metric, value_of_batch(metric)) for metric, _ in metrics]
            for metric, of_batch in metrics:
                set_value_of_batch(metric, of_batch)
            try:
                getattr(owner, method)(*names, value, *args, **kwargs)
            finally:
                for metric, of_batch in after:
                    set_value_of_batch(metric, of_batch)

    def reads(self, value: Any) -> bool:
        """Return whether an object is the batch, whose size Lightning looks up when a value is logged, or in it."""
        batch = current_batch(self._module.trainer)
        return any(value is one for one in _objects_in([batch], lambda one: [*items_of(one), *_attributes(one)]))

    def end_step(self) -> None:
        """Make the calls that are left."""
        if self.calls:
            self.replay()


def _can_be_logged(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.numel() == 1
    return isinstance(value, (int, float, Metric, MetricCollection))


def _is_plain(value: Any) -> bool:
    return value is None or type(value) is bool or type(value) is str


def _averages(module: Any) -> Callable[[_Args, _Args], bool | None]:
    """Return what a graph asks, while it is traced, of names and plain arguments.

    That is whether values become the mean of an epoch, ``None`` if Lightning may refuse them.
    """
    attributes, parameters = vars(module), inspect.signature(type(module).log).parameters.values()
    defaults = {one.name: one.default for one in [*parameters][3:]}  # of what follows the name and the value
    known: dict[tuple[str, str], dict[str, Any]] = {}  # arguments of each name in each hook

    def averages(names: _Args, arguments: _Args) -> bool | None:
        hook, order = attributes[CURRENT_HOOK], [*defaults]
        in_effect = {**defaults, **{key if isinstance(key, str) else order[key]: value for key, value in arguments}}
        for name, value in (("logger", True), ("on_step", hook == TRAINING), ("on_epoch", hook != TRAINING)):
            in_effect[name] = value if in_effect[name] is None else in_effect[name]
        is_accepted = (
            in_effect.keys() == defaults.keys()
            and in_effect["reduce_fx"] in _REDUCTIONS
            and (in_effect["on_step"] or in_effect["on_epoch"])
            and all(
                isinstance(name, str)
                and "/dataloader_idx_" not in name
                and known.setdefault((hook, name), in_effect) == in_effect
                for name in names
            )
        )
        return in_effect["on_epoch"] and in_effect["reduce_fx"] == "mean" if is_accepted else None

    return torch.compiler.assume_constant_result(averages)


def _snapshot(value: Any) -> Any:
    # a copy: the step may change the tensor in place after logging it
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


class StepShims(Shims):
    """The shims of one LightningModule, created once and installed for each captured call."""

    def __init__(self, module: nn.Module, on_closure: Callable[[], None]) -> None:
        super().__init__()
        self.logger = DeferredLogger(module, self._as_it_is)
        self._module = module
        self._on_closure = on_closure  # called when an optimizer is given a closure, which then runs outside of graphs
        # dynamo knows a shim by its identity: a new one for the same method would compile everything again
        self._known: dict[tuple[int, str], tuple[Any, Any, Any]] = {}  # owner, value before, shim

    def refresh(self, trainer: Any, optimizers: Iterable[Any], wrapper_hooks: Iterable[RemovableHandle] = ()) -> None:
        """Create the shims for what the module has now, and for the LightningOptimizers that the step itself calls.

        ``wrapper_hooks``, which something that wraps the module has put on it, have run for the step: a call of the
        module within the step must not run them again.
        """
        module, known, self._known = self._module, self._known, {}
        self._entries.clear()

        def add(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
            before = vars(owner).get(name, MISSING)
            known_owner, known_before, shim = known.get((id(owner), name), (None, None, None))
            if known_owner is not owner or known_before is not before:
                shim = make(getattr(owner, name))
            self._known[id(owner), name] = owner, before, shim
            self.add(owner, name, shim)

        def replace(owner: Any, name: str, make: Callable[[Callable[..., Any]], Any] = _outside_graphs) -> None:
            mocked = not isinstance(getattr(owner, name), (FunctionType, MethodType))
            if not mocked and (owner is not module or name not in vars(owner) or is_lean(vars(owner)[name])):
                add(owner, name, make)  # what a user put on the instance stays

        overridden = not all(is_inherited(getattr(type(module), name)) for name in ("log", "log_dict"))
        replace(module, "log", self._as_it_is if overridden else lambda _: self.logger.log)
        replace(module, "log_dict", self._as_it_is if overridden else lambda _: self.logger.log_dict)
        for name in _HELPERS:
            replace(module, name, self._as_it_is)
        for logger in trainer.loggers:
            replace(logger, "log_metrics", functools.partial(self.logger.log_metrics_of, logger))
        add(trainer, LOGGED, functools.partial(with_reads, wrap=self._as_it_is))
        for child in (*module.modules(), *_metrics_in_containers(module)):
            if isinstance(child, _METRICS):
                for name in _METRIC_METHODS:
                    replace(child, name)
            elif isinstance(child, nn.RNNBase):
                replace(child, "forward")
        for optimizer in optimizers:
            replace(optimizer, "step", lambda step: self._as_it_is(_noticing_closure(step, self._on_closure)))
            replace(optimizer.optimizer, "step", self._as_it_is)  # what `optimizers(use_pl_optimizer=False)` returns
            replace(optimizer, "zero_grad", self._as_it_is)
            replace(optimizer.optimizer, "zero_grad", self._as_it_is)
        for owner in {id(owner): owner for owner, *_ in self._known.values() if isinstance(owner, nn.Module)}.values():
            self.add(owner, "__deepcopy__", functools.partial(self._deepcopy, owner))
            self.add(owner, "__reduce_ex__", functools.partial(self._reduce, owner))
        for name, others in forward_hooks_without(module, {handle.id for handle in wrapper_hooks}):
            self.add(module, name, others)

    def _as_it_is(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """Run a method outside of graphs and without shims: it, or a hook that it calls, may read what is logged."""

        @functools.wraps(method)
        def run(*args: Any, **kwargs: Any) -> Any:
            with self.removed():
                self.logger.replay()
                return method(*args, **kwargs)

        return _outside_graphs(run)

    # copies get no shims, which would call the original

    def _deepcopy(self, owner: nn.Module, memo: dict[int, Any]) -> Any:
        with self.removed():
            return copy.deepcopy(owner, memo)

    def _reduce(self, owner: nn.Module, protocol: Any) -> Any:
        with self.removed():
            return owner.__reduce_ex__(protocol)  # its state is a copy of the dictionary


class ModuleShims(Shims):
    """Compiled calls of child modules, for a step that is not compiled itself.

    ``nn.Module.compile`` compiles nothing for the classes of ``torch.nn``, whose frames dynamo skips: hence a frame of
    our own around each child.
    """

    def __init__(self, children: Iterable[nn.Module], compile_fn: Callable[[Callable[..., Any]], Any]) -> None:
        super().__init__()
        for child in children:
            self.add(child, COMPILED_CALL, compile_fn(_frame_around(uncompiled_call(child))))
            for layer in child.modules():
                if isinstance(layer, nn.RNNBase):
                    self.add(layer, "forward", _outside_graphs(layer.forward))


def callable_children(module: nn.Module) -> Iterator[nn.Module]:
    """Find the largest submodules that a step may call, in the order in which they were assigned."""
    for child in module.children():
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield from callable_children(child)  # containers that cannot be called
        elif not isinstance(child, _METRICS):
            yield child


def _metrics_in_containers(module: nn.Module) -> Iterator[nn.Module]:
    """Find the metrics in plain containers among the attributes of modules, which are no submodules."""
    own = [value for child in module.modules() for name, value in vars(child).items() if name not in _OF_TORCH]
    return (one for one in _objects_in(own, items_of) if is_one(one, nn.Module) and isinstance(one, _METRICS))


def _objects_in(todo: list[Any], items: Callable[[Any], list[Any]]) -> Iterator[Any]:
    """Yield objects, and those in them, each once."""
    seen: dict[int, Any] = {}
    while todo:
        if id(value := todo.pop()) not in seen:
            seen[id(value)] = value
            yield value
            todo += items(value)


def _attributes(value: Any) -> Iterable[Any]:
    return getattr(value, "__dict__", {}).values()


def compiled_by_user(module: nn.Module) -> str | None:
    """Return the name of the first module that the user compiled already ("" is the module itself), or ``None``."""
    for name, submodule in module.named_modules():
        if is_compiled_module(submodule) or has_compiled_call(submodule) or is_compiled_by_lightning(submodule):
            return name
    return None


def given_iterator(args: Iterable[Any]) -> bool:
    """Return whether a step is given an iterator, such as a ``dataloader_iter``: who repeats it would read on."""
    return any(isinstance(value, Iterator) for value in args)


def _outside_graphs(method: Callable[..., Any]) -> Callable[..., Any]:
    # keeps the signature, which Lightning and torchmetrics inspect
    name, owner = getattr(method, "__name__", "it"), getattr(method, "__self__", None)
    name = name if owner is None else f"{type(owner).__name__}.{name}"
    return torch.compiler.disable(method, reason=f"{name} {RUNS_OUTSIDE}")


def _noticing_closure(step: Callable[..., Any], on_closure: Callable[[], None]) -> Callable[..., Any]:
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
