"""A LightningModule whose steps are captured: :class:`CapturedModule`, what its four steps share."""

import functools
import gc
import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch

from lightning_ort.compat import dynamo
from lightning_ort.compat.lightning import lightning_optimizers
from lightning_ort.compat.torch_optimizers import drop_gradients
from lightning_ort.compiler.engines import ENGINES, SAVES_MEMORY
from lightning_ort.compiler.executors.inductor import RecordedGradients
from lightning_ort.compiler.reason import ReasonType
from lightning_ort.compiler.request import CompileRequest, weakly
from lightning_ort.config import ORTConfig
from lightning_ort.strategies.capture.direct_gradients import (
    are_gradients_unseen,
    hooks_on_gradients,
    may_drop_gradients,
    may_write_gradients,
    runs_nothing_of_others,
)
from lightning_ort.strategies.capture.dynamo_monitor import DynamoMonitor
from lightning_ort.strategies.capture.room import Room
from lightning_ort.strategies.capture.shims import ModuleShims, StepShims, callable_children, compiled_by_user
from lightning_ort.strategies.race.run_facts import TRAINING, RunFacts

if TYPE_CHECKING:
    import lightning.pytorch as pl
    from lightning.pytorch.strategies import Strategy
    from torch.utils.hooks import RemovableHandle

    from lightning_ort.compiler.backend import ORTBackend
    from lightning_ort.recording.gradients import WaitingGradients

Part = Literal["step", "modules"]

_unused_regions: list[dynamo.Region] = []  # what dynamo has compiled for modules that are gone
_living: "weakref.WeakSet[CapturedModule]" = weakref.WeakSet()
_collect_at = 8  # with this many, most are probably garbage that has not been collected yet


class Runs(Protocol):
    """A step that runs."""

    def request(self) -> CompileRequest:
        """Return what graphs are compiled for in this call."""
        ...

    def engine_failed(self, engine: str, error: Exception) -> None:
        """Take note that a graph of another compiler has failed while it ran."""
        ...


class CapturedModule(RunFacts):
    """A LightningModule whose steps are captured."""

    def __init__(
        self, strategy: "Strategy", module: "pl.LightningModule", config: ORTConfig, backend: "ORTBackend"
    ) -> None:
        super().__init__(strategy, module, config, backend)
        self.monitor = DynamoMonitor()
        self.shims = StepShims(module, self._on_closure)
        self.part: Part | None = None  # what may be captured, if anything
        self.closure_seen = False  # whether an optimizer was given one
        self.room = Room(self)
        self.takes_gradients = False  # whether one of its steps was seen to take gradients itself
        self.running: Runs | None = None  # what is captured in this call, or was in the last
        self.optimizers: Any = None
        self._gradients: tuple[bool, bool, bool, bool] | None = None  # as of may_touch_gradients
        self._gradient_hooks: list[Any] = []  # for which that holds
        self.recorded = RecordedGradients(lambda: self.may_touch_gradients[2], self.drop_gradients)
        self.waiting: WaitingGradients | None = None  # for the backward pass of the step
        self._module_shims: dict[str, ModuleShims] = {}
        self._regions: list[dynamo.Region] = []
        # now, between the Trainer's runs, and not whenever the garbage collector runs
        _collect_garbage()
        dynamo.release_regions(_unused_regions)
        _living.add(self)
        weakref.finalize(self, _unused_regions.extend, self._regions).atexit = False

    def start(self) -> None:
        """Prepare for a run of the Trainer: the module may have changed since the last one."""
        self.optimizers = self._gradients = self._start = None
        if (part := self._choose_part()) != self.part:
            self.part, self._module_shims = part, {}
        if self.config.dropout_masks == "fast" and self.setting == "ort":
            text = f"no other compiler than ONNX Runtime is tried in this run, on {self.device}"
            self.record_choice("dropout_masks", ReasonType.NO_EFFECT, text)
        if self.saves_memory(TRAINING) and self.setting == "auto":
            if obstacle := ENGINES[SAVES_MEMORY].obstacle(self.device.type == "cuda"):
                self.record_choice("activation_memory_budget", ReasonType.NO_EFFECT, obstacle)
        elif self.config.engine == "auto" and not self.is_amortized and torch.are_deterministic_algorithms_enabled():
            self.record_choice("all steps", ReasonType.STATIC_RULE, "nothing is timed, so only ONNX Runtime is tried")
        self.monitor.by_hand = not self.module.automatic_optimization
        self.monitor.install()

    def stop(self) -> None:
        """End a run of the Trainer."""
        self.monitor.remove()
        self.waiting = None

    def _choose_part(self) -> Part | None:
        compiled = compiled_by_user(self.module)
        if compiled is None:
            return "modules" if self.config.debug.capture == "modules" else "step"
        if compiled == "":
            name = type(self.module).__name__
            self.record_choice("module", ReasonType.ALREADY_COMPILED, f"{name} is not captured")
            return None
        self.record_choice(compiled, ReasonType.ALREADY_COMPILED, "it is not captured, the other child modules are")
        return "modules"

    # What its steps call

    def refresh(self) -> None:
        """Update the shims because what they replace has changed; to dynamo an unchanged shim is the same."""
        self.optimizers, self._gradients = lightning_optimizers(self.strategy), None
        # only a strategy that wraps the module in something with hooks has any
        wrapper_hooks: Iterable[RemovableHandle] = getattr(self.strategy, "wrapper_hooks", tuple)()
        manual = [] if self.module.automatic_optimization else self.optimizers
        self.shims.refresh(self.module.trainer, manual, wrapper_hooks)

    def request(self) -> CompileRequest:
        """Return what graphs are compiled for in this call."""
        return CompileRequest() if self.running is None else self.running.request()

    def compile(self, function: Callable[..., Any], engine: str = "ort") -> Callable[..., Any]:
        """Compile a function for an engine; dynamo starts at its first call."""
        backend: Callable[..., Any] = self.backend
        if (make := ENGINES[engine].backend) is not None:
            on_failure = functools.partial(weakly(self._on_failure), engine)
            backend = make(self.config.dropout_masks, on_failure, weakly(self.request, CompileRequest()))
        dynamic = self.config.dynamic
        if dynamic is None and self.config.activation_memory_budget is not None:
            dynamic = False  # torch computes a loss in pieces only where sizes are fixed (2.13)
        compiled = dynamo.compile_isolated(function, backend=backend, dynamic=dynamic)
        dynamo.release_backend(backend)
        self._regions.append(dynamo.region_of(compiled))
        return compiled

    def _on_failure(self, engine: str, error: Exception) -> None:
        if self.running is not None:  # or has run last, so that its backward pass may run now
            self.running.engine_failed(engine, error)

    def runs(self, step: Runs) -> None:
        """Note which step is captured in this call, or was in the last."""
        self.running = step

    def saw_second_gradient(self) -> None:
        """Note that one of its steps takes gradients itself."""
        self.takes_gradients = True

    def compile_without_numbers(self) -> bool:
        """Keep numbers that are made from tensors out of graphs from now on; return whether that is a change.

        Where such a number is a size, a compiler may need to know it, and fails.
        """
        before, self.monitor.numbers = self.monitor.numbers, False
        return before

    def module_shims(self, engine: str) -> ModuleShims:
        """Return the compiled children."""
        if engine not in self._module_shims:
            children = [child for child in callable_children(self.module) if compiled_by_user(child) is None]
            self._module_shims[engine] = ModuleShims(children, functools.partial(self.compile, engine=engine))
        return self._module_shims[engine]

    # Gradients

    @property
    def may_touch_gradients(self) -> tuple[bool, bool, bool, bool]:
        """Whether a step that ran as one graph may write the gradients of parameters itself, and drop the last ones.

        Third, whether nobody but the optimizer sees them at all; fourth, whether nothing of others runs until it does.
        """
        hooks = hooks_on_gradients(self.strategy, self.module)
        if self._gradients is None or hooks != self._gradient_hooks:
            ask, self._gradient_hooks = (self.strategy, self.namespace), hooks
            writes, drops = may_write_gradients(*ask), may_drop_gradients(*ask)
            self._gradients = writes, drops, are_gradients_unseen(*ask), runs_nothing_of_others(*ask)
        return self._gradients

    def writes_gradients(self) -> bool:
        """Return whether a backward pass of the Trainer may write gradients without autograd's engine.

        Not where that looks for the operation that makes a NaN.
        """
        return self.may_touch_gradients[0] and not torch.is_anomaly_enabled()

    def leave_gradients(self, make: Callable[[], "WaitingGradients"]) -> bool:
        """Let the gradients of a step wait for its backward pass, if nothing else takes part in that."""
        if not self.may_touch_gradients[0] or torch.is_anomaly_enabled():  # writes_gradients, without a call
            return False
        self.waiting = make()
        return True

    def let_wait(self, gradients: "WaitingGradients") -> None:
        """Let the gradients of a step wait for its backward pass, where :meth:`writes_gradients` allows that."""
        self.waiting = gradients

    def hand_over_gradients(self, loss: torch.Tensor) -> bool:
        """Do what ``loss.backward()`` does, if gradients wait for that."""
        waiting, self.waiting = self.waiting, None
        if waiting is None or not waiting.are_of(loss):
            return False
        waiting.hand_over()
        return True

    def drop_gradients(self) -> None:
        """Drop the gradients of the last step now, and not right after this one, where nobody sees the difference."""
        if self.may_touch_gradients[1] and self.at_window_start():
            drop_gradients(self.strategy.optimizers[0])

    def _on_closure(self) -> None:
        self.closure_seen = self.monitor.saw_compile = True


def _collect_garbage() -> None:
    """Free modules of earlier runs, with their sessions: each is part of a reference cycle with its Trainer."""
    global _collect_at
    if len(_living) >= _collect_at:
        gc.collect()
        _collect_at = max(8, 2 * len(_living))
