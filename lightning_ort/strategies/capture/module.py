"""A LightningModule whose steps are captured: :class:`CapturedModule`, what its four steps share."""

import functools
import gc
import weakref
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Literal

import torch
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import fx

from lightning_ort._imports import LightningNamespace, namespace_of
from lightning_ort.compat import dynamo
from lightning_ort.compat.lightning import lightning_optimizers
from lightning_ort.compiler.executors import inductor
from lightning_ort.compiler.nodes import num_operations
from lightning_ort.compiler.report import Reason, ReasonType
from lightning_ort.config import ORTConfig
from lightning_ort.strategies.audit.step_audit import AuditBudget
from lightning_ort.strategies.capture.account import StepAccount
from lightning_ort.strategies.capture.announcements import is_announced
from lightning_ort.strategies.capture.autotuner import Engine, StepAutotuner
from lightning_ort.strategies.capture.budget import EVALUATION, PER_LAYER, CompileBudget, Outlook
from lightning_ort.strategies.capture.direct_gradients import may_drop_gradients, may_write_gradients
from lightning_ort.strategies.capture.dynamo_monitor import DynamoMonitor
from lightning_ort.strategies.capture.engines import engines_for, setting_for, stages_for
from lightning_ort.strategies.capture.gate import Stage, StartGate, is_amortized
from lightning_ort.strategies.capture.outlook import TRAINING, at_window_start, outlook_of
from lightning_ort.strategies.capture.shims import ModuleShims, StepShims, callable_children, compiled_by_user

if TYPE_CHECKING:
    import lightning.pytorch as pl
    from lightning.pytorch.strategies import Strategy
    from torch.utils.hooks import RemovableHandle

    from lightning_ort.compiler.backend import ORTBackend

_NO_CONTEXT = nullcontext()
Mode = Literal["step", "modules", "off"]

_unused_regions: list[dynamo.Region] = []  # what dynamo has compiled for modules that are gone
_living: "weakref.WeakSet[CapturedModule]" = weakref.WeakSet()
_collect_at = 8  # with this many, most are probably garbage that has not been collected yet


class CapturedModule:
    """A LightningModule whose steps are captured."""

    def __init__(
        self, strategy: "Strategy", module: "pl.LightningModule", config: ORTConfig, backend: "ORTBackend"
    ) -> None:
        self.module = module
        self.config = config
        self.backend = backend
        self.monitor = DynamoMonitor()
        self.shims = StepShims(module, self._on_closure)
        self.mode: Mode = "off"
        self.closure_seen = False  # whether an optimizer was given one
        self.operations: dict[str, int] = {}  # with a gradient, that unchanged steps call
        self.takes_gradients = False  # whether one of its steps was seen to take gradients itself
        self.budget = CompileBudget(config.compile_budget)  # of the current run
        self.startup_seconds: dict[tuple[str, Stage], float] = {}  # of each step and what was tried
        self.audits = AuditBudget(self.budget, backend.report.run)
        self.amortized = False  # whether steps wait, and have a budget
        self.account: StepAccount | None = None  # of the captured step that runs
        self._first_batch: int | None = None
        self._strategy = strategy
        self._optimizers: Any = None
        self._writes_gradients: bool | None = None
        self._drops_gradients: bool | None = None
        self._is_recorded = False  # whether the last step is a recording of inductor's
        self._module_shims: dict[Engine, ModuleShims] = {}
        self._regions: list[dynamo.Region] = []
        # now, between the Trainer's runs, and not whenever the garbage collector runs
        _collect_garbage()
        dynamo.release_regions(_unused_regions)
        _living.add(self)
        weakref.finalize(self, _unused_regions.extend, self._regions).atexit = False

    def start(self) -> None:
        """Prepare for a run of the Trainer: the module may have changed since the last one."""
        self._optimizers = self._writes_gradients = self._drops_gradients = None
        self._is_recorded = False
        self.budget, self._first_batch = CompileBudget(self.config.compile_budget), None
        self.audits = AuditBudget(self.budget, self.backend.report.run)
        self.amortized = is_amortized(self.config)
        if (mode := self._choose_mode()) != self.mode:
            self.mode, self._module_shims = mode, {}
        device = self._strategy.root_device
        if self.config.dropout_masks == "fast" and setting_for(self.config, device) == "ort":
            self.record_choice("dropout_masks", ReasonType.NO_EFFECT, f"inductor is not tried in this run, on {device}")
        if self.config.engine == "auto" and torch.are_deterministic_algorithms_enabled():
            self.record_choice("all steps", ReasonType.STATIC_RULE, "nothing is timed, so inductor is not tried")
        self.monitor.install()
        self.backend.logs_graphs = not is_announced(self.module.trainer)
        # AOTAutograd's graphs have no second gradient, and say so only when the loss is back-propagated, which is too
        # late. What a call of `torch.autograd.grad` is for cannot be known before.
        self.backend.leave = lambda gm: self.monitor.calls_autograd_grad() or self._stops_compiling(gm)
        self.backend.drop_gradients = self.drop_gradients
        self.backend.by_hand = self.monitor.by_hand = not self.module.automatic_optimization

    def stop(self) -> None:
        """End a run of the Trainer."""
        self.backend.leave = self.backend.drop_gradients = None
        self.monitor.remove()

    def refresh(self) -> None:
        """Update the shims before a step if what they replace has changed; to dynamo an unchanged shim is the same."""
        optimizers = lightning_optimizers(self._strategy)
        if self._optimizers is optimizers and self.shims.are_current():
            return
        self._optimizers, self._drops_gradients = optimizers, None
        # only a strategy that wraps the module in something with hooks has any
        wrapper_hooks: Iterable[RemovableHandle] = getattr(self._strategy, "wrapper_hooks", tuple)()
        manual = [] if self.module.automatic_optimization else optimizers
        self.shims.refresh(manual, wrapper_hooks, self.module.trainer.loggers)

    def _choose_mode(self) -> Mode:
        compiled = compiled_by_user(self.module)
        if compiled is None:
            return "modules" if self.config.capture == "modules" else "step"
        if compiled == "":
            name = type(self.module).__name__
            self.record_choice("module", ReasonType.ALREADY_COMPILED, f"{name} is not captured")
            return "off"
        self.record_choice(compiled, ReasonType.ALREADY_COMPILED, "it is not captured, the other child modules are")
        return "modules"

    def compile_without_numbers(self) -> bool:
        """Keep numbers that are made from tensors out of graphs from now on; return whether that is a change.

        Where such a number is a size, a compiler may need to know it, and fails.
        """
        before, self.monitor.numbers = self.monitor.numbers, False
        return before

    @property
    def times_steps(self) -> bool:
        """Whether timing decides which engine runs a step."""
        return self.config.placement == "measured" and not torch.are_deterministic_algorithms_enabled()

    def new_autotuner(self, name: str, without: Container[Engine]) -> StepAutotuner | None:
        """Return an autotuner for a step without some engines, or ``None`` if timing does not decide."""
        if not self.times_steps:
            return None
        found = engines_for(self.config, self._strategy.root_device, name, self.may_record(name))
        engines = [engine for engine in found.engines if engine not in without]
        return StepAutotuner(engines, self._synchronize(), found.last, found.worth_trying)

    def count_inductors(self, name: str) -> int:
        """Return how many of the engines that a step is tried on are inductor's."""
        found = engines_for(self.config, self._strategy.root_device, name, self.may_record(name))
        return sum(engine in inductor.ENGINES for engine in found.engines)

    def may_record(self, name: str) -> bool:
        """Return whether a step may be a recording: not where its gradients are a part of what others add up to."""
        module = self.module
        return name != TRAINING or (module.automatic_optimization and module.trainer.accumulate_grad_batches == 1)

    def new_check(self, engine: Engine) -> StepAutotuner:
        """Return what times the engine that won an earlier trial against the unchanged step."""
        return StepAutotuner([engine, "torch"], self._synchronize())

    @property
    def stages(self) -> tuple[Stage, ...]:
        """What waits to be tried; nothing if all is tried at once."""
        return stages_for(self.config, self._strategy.root_device) if self.amortized else ()

    def new_gate(self, name: str, stages: Sequence[Stage]) -> StartGate:
        """Return what decides when each of the stages of a step is tried."""
        return StartGate(self, name, stages, self._synchronize())

    def _synchronize(self) -> Callable[[], None]:
        device = self._strategy.root_device
        return functools.partial(torch.cuda.synchronize, device) if device.type == "cuda" else lambda: None

    def waits_for_first(self, name: str) -> bool:
        """Return whether a step that does not wait runs unchanged once, so that errors come before any compiling."""
        left = self.outlook(name, 0).steps
        return left is None or left > 1 or self.takes_gradients

    def operations_of(self, name: str) -> float:
        """Return how many operations a step calls, as far as unchanged steps or else the number of layers tell."""
        if seen := self.operations.get(name):
            return seen
        training = self.operations.get(TRAINING) or PER_LAYER * self._layers
        return training if name == TRAINING else EVALUATION * training

    @functools.cached_property
    def _layers(self) -> int:
        return sum(next(child.children(), None) is None for child in self.module.modules())

    @property
    def settings(self) -> tuple[str, ...]:
        """What else than the module and its batches decides how long a step takes."""
        trainer, others = self.module.trainer, ("start", "compile_budget", "cache_dir", "fallback")
        fields = {key: value for key, value in vars(self.config).items() if key not in others}
        fields["engine"] = setting_for(self.config, self._strategy.root_device)
        strategy = type(self._strategy).__name__
        return tuple(map(str, (fields, trainer.precision, trainer.world_size, strategy, torch.get_num_threads())))

    def begin_run(self) -> None:
        """Note the first step of a run, which may continue a checkpoint; later calls change nothing."""
        if self._first_batch is None and not self.module.trainer.sanity_checking:
            self._first_batch = self.module.trainer.fit_loop.total_batch_idx
            self.budget.begin()

    def outlook(self, name: str, done: int) -> Outlook:
        """Return what is known about the rest of the run, after so many steps of this name."""
        return outlook_of(self.module.trainer, self._namespace, name, done, self._first_batch or 0)

    @property
    def may_join(self) -> bool:
        """Whether a step may be one graph, with all gradients at its end.

        Not where processes add up gradients of GPUs, which overlaps with a backward pass.
        """
        alone = self._strategy.root_device.type != "cuda" or self.module.trainer.world_size == 1
        return alone and self.module.automatic_optimization

    def begin_step(self, engine: Engine) -> None:
        """Note which engine runs the next step."""
        self._is_recorded = engine == inductor.GRAPHS
        if self._is_recorded:
            inductor.begin_recorded_step()

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Within the block a step that ran as one graph may write the gradients of parameters itself.

        Those of a recording are copied at its end: people read them in the next step, or add to them.
        """
        if self._writes_gradients is None:
            self._writes_gradients = may_write_gradients(self._strategy, self._namespace)
        # the engine looks for the operation that makes a NaN
        self.backend.writes_gradients = self._writes_gradients and not torch.is_anomaly_enabled()
        new = [p for p in self.module.parameters() if p.grad is None] if self._is_recorded else []
        try:
            yield
        finally:
            self.backend.writes_gradients = False
        inductor.own_gradients(new)

    def drop_gradients(self) -> None:
        """Drop the gradients of the last step now, and not right after this one, where nobody sees the difference."""
        if self._drops_gradients is None:
            self._drops_gradients = may_drop_gradients(self._strategy, self._namespace)
        if self._drops_gradients and self.at_window_start():
            self._strategy.optimizers[0].zero_grad()

    @property
    def _namespace(self) -> LightningNamespace:
        namespace = namespace_of(type(self._strategy))
        assert namespace is not None
        return namespace

    @property
    def epoch(self) -> int:
        """The epoch of training."""
        return self.module.trainer.current_epoch

    @property
    def is_alone(self) -> bool:
        """Whether the Trainer calls the module itself, and not a wrapper that takes part in backward passes."""
        return self._strategy.model is self.module

    def not_audited(self, name: str) -> str:
        """Say why the steps of a name are not audited; nothing if they may be."""
        if self._strategy.root_device.type != "cpu":
            return f"a process that uses {self._strategy.root_device.type} cannot be copied"
        if self.config.dropout_masks == "fast":
            return "dropout_masks='fast' draws other masks than eager"
        if not self.is_alone and name == TRAINING and not self.module.automatic_optimization:
            return "it exchanges gradients with other processes"
        return ""

    def _stops_compiling(self, gm: fx.GraphModule) -> bool:
        return self.account is not None and self.account.stops_compiling(num_operations(gm))

    def at_window_start(self) -> bool:
        """Return whether no gradients are accumulated now."""
        return at_window_start(self.module.trainer)

    def compile(self, function: Callable[..., Any], engine: Engine = "ort") -> Callable[..., Any]:
        """Compile a function for an engine; dynamo starts at its first call."""
        backend: Callable[..., Any] = self.backend
        if engine in inductor.ENGINES:
            backend = inductor.backend_for(
                engine, self.config.dropout_masks, functools.partial(self._note_failure, engine)
            )
        compiled = dynamo.compile_isolated(function, backend=backend, dynamic=self.config.dynamic)
        dynamo.release_backend(backend)
        self._regions.append(dynamo.region_of(compiled))
        return compiled

    def _note_failure(self, engine: Engine, error: Exception) -> None:
        if self.account is not None:  # of the step that has run last, whose backward pass may run now
            self.account.failures[engine] = f"{type(error).__name__}: {error}".splitlines()[0]

    def stance(self, keeps: bool) -> AbstractContextManager[Any]:
        """Return a context in which, if wanted, what would have to be compiled again runs unchanged.

        Of inductor's steps these are the last batches of epochs, which are smaller: they are few, and compiling for
        them takes as long as the first time.
        """
        return torch.compiler.set_stance("eager_on_recompile") if keeps else _NO_CONTEXT

    def module_shims(self, engine: Engine) -> ModuleShims:
        """Return the compiled children, for module mode."""
        if engine not in self._module_shims:
            children = [child for child in callable_children(self.module) if compiled_by_user(child) is None]
            self._module_shims[engine] = ModuleShims(children, functools.partial(self.compile, engine=engine))
        return self._module_shims[engine]

    def forget_children(self) -> None:
        """Compile the children again, for module mode."""
        dynamo.release_regions([*self._regions])  # before torch 2.12 what is compiled anew would not be looked up
        self._module_shims = {}

    def record_choice(self, where: str, kind: ReasonType, text: str, announced: bool = False) -> None:
        """Report a choice that was made for the user, once; the console may have told an announced one already."""
        reason = Reason(kind, text)
        is_new = self.backend.report.record_choice(where, reason)
        if is_new and not (announced and is_announced(self.module.trainer)):
            rank_zero_info("lightning-ort: %s: %s", where, reason)

    def _on_closure(self) -> None:
        self.closure_seen = self.monitor.saw_compile = True


def _collect_garbage() -> None:
    """Free modules of earlier runs, with their sessions: each is part of a reference cycle with its Trainer."""
    global _collect_at
    if len(_living) >= _collect_at:
        gc.collect()
        _collect_at = max(8, 2 * len(_living))
