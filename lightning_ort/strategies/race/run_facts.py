"""What all steps of a module know of its run, what is to come of it, and what its config says: :class:`RunFacts`."""

import functools
import logging
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_only

from lightning_ort._busy import LIMITS
from lightning_ort._imports import LightningNamespace, namespace_of
from lightning_ort.compiler import engines
from lightning_ort.compiler.reason import Reason, ReasonType
from lightning_ort.config import DEFAULT_BUDGET, DEFAULT_START, EngineSetting, ORTConfig
from lightning_ort.strategies.race.race import NO_LIMIT, Race

if TYPE_CHECKING:
    import lightning.pytorch as pl
    from lightning.pytorch.strategies import Strategy

    from lightning_ort.compiler.backend import ORTBackend


log = logging.getLogger(__name__)

TRAINING = "training_step"
STEPS = (TRAINING, "validation_step", "test_step", "predict_step")


@dataclass(frozen=True)
class Outlook:
    """What is known about the rest of a run of the Trainer, with ``None`` for what is unknown."""

    steps: float | None  # steps of one kind that are to come
    seconds: float | None = None  # until a limit of time ends the run

    def steps_left(self, done: int, working: float) -> float | None:
        """Return how many steps of the kind are to come, after so many, and working seconds without compiling."""
        known = [] if self.steps is None else [self.steps]
        if self.seconds is not None and working > 0:
            known.append(done * self.seconds / working)
        return max(0.0, min(known)) if known else None


def outlook_of(trainer: "pl.Trainer", namespace: LightningNamespace, name: str, done: int, first_batch: int) -> Outlook:
    """Return what is known about the rest of a run, after so many of its steps of a name are done.

    ``first_batch`` is the fit loop's count of batches when the run began, which is not 0 after a checkpoint.
    """
    if trainer.state.fn != "fit":
        batches = {
            "validation_step": lambda: trainer.num_val_batches,
            "test_step": lambda: trainer.num_test_batches,
            "predict_step": lambda: trainer.num_predict_batches,
        }.get(name, lambda: [])()  # none of another run's steps, as of the fit before
        return Outlook(_known(sum(batches) - done))
    batches_done = trainer.fit_loop.total_batch_idx - first_batch
    batches_left = _training_batches(trainer)
    steps: float | None
    if name == TRAINING:
        # an optimizer that takes a closure runs the step several times for a batch
        steps = None if batches_left is None else batches_left * max(1.0, done / max(batches_done, 1))
    else:
        steps = _validation_batches(trainer, batches_left, done)
    return Outlook(steps, _seconds(trainer, namespace))


def at_window_start(trainer: "pl.Trainer") -> bool:
    """Return whether no gradients are accumulated now."""
    # within a batch and between two
    current: Any = trainer.fit_loop.epoch_loop.batch_progress.current
    return not trainer.training or current.processed % trainer.accumulate_grad_batches == 0


def _training_batches(trainer: "pl.Trainer") -> float | None:
    """Return how many batches are to be trained on, from the current one."""
    left = math.inf
    if trainer.max_epochs is not None and trainer.max_epochs >= 0:
        left = trainer.num_training_batches * (trainer.max_epochs - trainer.current_epoch) - trainer.fit_loop.batch_idx
    if trainer.max_steps >= 0:
        batches_per_step = float(trainer.accumulate_grad_batches)
        if not trainer.lightning_module.automatic_optimization and trainer.global_step > 0:
            batches_per_step = trainer.fit_loop.total_batch_idx / trainer.global_step
        left = min(left, (trainer.max_steps - trainer.global_step) * batches_per_step)
    return _known(left)


def _validation_batches(trainer: "pl.Trainer", training_batches: float | None, done: int) -> float | None:
    """Return how many batches are to be validated on, those of the current validation included."""
    each = _known(sum(trainer.num_val_batches))
    interval = trainer.val_check_batch  # None if it is a time
    if each is None or each == 0 or training_batches is None or interval is None:
        return None
    epoch, every = trainer.num_training_batches, trainer.check_val_every_n_epoch
    if every is None:  # the interval goes on over epochs
        validations = training_batches // interval
    elif math.isinf(epoch):
        validations = 0.0 if math.isinf(interval) else training_batches // interval
    else:
        in_epoch = max(1.0, epoch // interval)
        validations = in_epoch * (training_batches / epoch) // every
    return each * validations + each - done % each


def _seconds(trainer: "pl.Trainer", namespace: LightningNamespace) -> float | None:
    """Return the seconds until ``max_time``, or a ``Timer`` with a duration, ends the run."""
    timer = namespace.submodule("callbacks").Timer
    callbacks = trainer.callbacks  # type: ignore[attr-defined]
    left = [callback.time_remaining() for callback in callbacks if isinstance(callback, timer)]
    return min((max(0.0, seconds) for seconds in left if seconds is not None), default=None)


def _known(count: float) -> float | None:
    return max(0.0, count) if math.isfinite(count) else None


def is_amortized(config: ORTConfig) -> bool:
    """Return whether steps wait until compiling pays."""
    wants_graphs = (
        config.placement == "always" or config.debug.check_against_eager or config.debug.save_onnx_dir is not None
    )
    return (config.start or ("now" if wants_graphs else DEFAULT_START)) == "amortized"


def setting_for(config: ORTConfig, device: torch.device) -> EngineSetting:
    """Return the engine that a config asks for.

    By default it is ``"auto"`` if timing decides: on a GPU; on a CPU where steps wait.
    """
    if config.engine is not None:
        return config.engine
    if config.placement != "measured":
        return "ort"
    saves_memory = config.activation_memory_budget is not None
    tries_others = engines.others_on_cpu() if saves_memory else is_amortized(config)
    return "auto" if device.type == "cuda" or tries_others else "ort"


def share_for(config: ORTConfig, device: torch.device) -> float:
    """Return the share of a run's steps that compiling may take; on a GPU, by default, the stake alone decides."""
    if not is_amortized(config):
        return NO_LIMIT
    if config.compile_budget is not None:
        return config.compile_budget
    return 1.0 if device.type == "cuda" else DEFAULT_BUDGET


class RunFacts:
    """What is asked of a run of the Trainer by the races, audits and views of its steps.

    ``races`` and ``operations``, those with a gradient that unchanged steps call, are by the name of the step.
    """

    def __init__(
        self, strategy: "Strategy", module: "pl.LightningModule", config: ORTConfig, backend: "ORTBackend"
    ) -> None:
        self.strategy, self.module, self.config, self.backend = strategy, module, config, backend
        self.races: dict[str, Race] = {}
        self.operations: dict[str, int] = {}
        self._start: tuple[float, int] | None = None  # of the run: the time, and the fit loop's count of batches

    @property
    def device(self) -> torch.device:
        """Where the module computes."""
        return self.strategy.root_device

    @property
    def is_amortized(self) -> bool:
        """Whether steps wait until compiling pays."""
        return is_amortized(self.config)

    def stays_unchanged(self, name: str) -> bool:
        """Return whether a step is never compiled: in deterministic mode no time may tell whether that pays."""
        return self.is_amortized and torch.are_deterministic_algorithms_enabled() and not self.saves_memory(name)

    @property
    def is_measured(self) -> bool:
        """Whether times decide how a step runs."""
        return self.config.placement == "measured" and not torch.are_deterministic_algorithms_enabled()

    def saves_memory(self, name: str) -> bool:
        """Return whether memory is the aim of a step, and not time."""
        return self.memory_budget(name) is not None

    def memory_budget(self, name: str) -> float | None:
        """Return the share of activations to keep in a step of which memory is the aim."""
        return self.config.activation_memory_budget if name == TRAINING else None

    @functools.cached_property
    def setting(self) -> str:
        """The engines that may run a step."""
        return setting_for(self.config, self.device)

    def settings(self, engine: str) -> tuple[str, ...]:
        """Return what else than the module and its batches decides how long a step takes on an engine."""
        trainer, strategy = self.module.trainer, type(self.strategy).__name__
        config = self.config.key("steps", engine=engine)
        return (*config, str(trainer.precision), str(trainer.world_size), strategy)

    @property
    def agree(self) -> Callable[[str, dict[str, Any]], dict[str, Any]] | None:
        """What makes the processes of a run decide alike, if there are several."""
        return getattr(self.strategy, "agree", None)

    @property
    def is_alone(self) -> bool:
        """Whether the Trainer calls the module itself, and not a wrapper that takes part in backward passes."""
        return self.strategy.model is self.module

    def begin_run(self) -> None:
        """Note the first step of a run, which may continue a checkpoint; later calls change nothing."""
        if self._start is None and not self.module.trainer.sanity_checking:
            self._start = perf_counter(), self.module.trainer.fit_loop.total_batch_idx

    def enters(self, name: str, race: Race) -> None:
        """Note the race of a step."""
        self.races[name] = race

    def saw_operations(self, name: str, number: int) -> None:
        """Note how many operations an unchanged step calls."""
        self.operations[name] = number

    @property
    def elapsed(self) -> float:
        """Seconds since the first step of the run."""
        return 0.0 if self._start is None else perf_counter() - self._start[0]

    @property
    def spent(self) -> float:
        """Seconds that this run has spent on compiling and trying."""
        return sum(race.spent for race in self.races.values())

    def batches_done(self, name: str, done: int) -> int:
        """Return how many batches of a fit, or of what else runs, are done after so many steps of a name."""
        if self.module.trainer.state.fn != "fit":
            return done
        return self._first_batch + done if name == TRAINING else self.module.trainer.fit_loop.total_batch_idx + 1

    @property
    def _first_batch(self) -> int:
        """The fit loop's count of batches when the run began, which is not 0 after a checkpoint."""
        return 0 if self._start is None else self._start[1]

    def steps_left(self, name: str, done: int) -> float | None:
        """Return how many steps of this name are to come, if that is known; on a GPU they are else taken to be many."""
        outlook = outlook_of(self.module.trainer, self.namespace, name, done, self._first_batch)
        left = outlook.steps_left(done, self.elapsed - self.spent)
        return math.inf if left is None and self.device.type == "cuda" else left

    def at_window_start(self) -> bool:
        """Return whether no gradients are accumulated now."""
        return at_window_start(self.module.trainer)

    @property
    def threads(self) -> int:
        """How many threads of torch a step may do without: 1 if none, or if no time may tell."""
        alone = self.device.type == "cpu" and self.module.trainer.world_size == 1
        return torch.get_num_threads() if alone and self.is_measured and LIMITS.get().one_thread else 1

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def may_record(self, name: str) -> bool:
        """Return whether a step may be a recording: not where its gradients are a part of what others add up to."""
        module = self.module
        return name != TRAINING or (module.automatic_optimization and module.trainer.accumulate_grad_batches == 1)

    @property
    def may_join(self) -> bool:
        """Whether a step may be one graph, with all gradients at its end.

        Not where processes add up gradients of GPUs, which overlaps with a backward pass, and not where the engine
        looks for the operation that makes a NaN, since all gradients come from one.
        """
        alone = self.device.type != "cuda" or self.module.trainer.world_size == 1
        return alone and self.module.automatic_optimization and not torch.is_anomaly_enabled()

    @property
    def compiles_recordings(self) -> bool:
        """Whether engines compile what was recorded: by default on a CPU. What is not recorded stays unchanged then."""
        alone = self.device.type == "cpu" and self.module.trainer.world_size == 1
        return alone and self.is_amortized and self.setting == "auto" and self.config.dropout_masks == "exact"

    @property
    def captures_on_cpu(self) -> bool:
        """Whether dynamo may capture steps on a CPU, which finds what it reads only where the world is closed."""
        return self.device.type == "cpu" and not self.compiles_recordings

    @property
    def asks_to_compile(self) -> bool:
        """Whether somebody has asked to compile steps, closed or not."""
        config = self.config
        asks = config.engine is not None or config.placement == "always" or config.activation_memory_budget is not None
        return asks or not self.is_amortized

    @property
    def may_replay_calls(self) -> bool:
        """Whether steps may be recorded and replayed: in one process, with the backward pass that the Trainer calls."""
        alone = self.is_alone and self.module.trainer.world_size == 1
        return alone and self.module.automatic_optimization and self.device.type == "cpu"

    def record_choice(
        self, where: str, kind: ReasonType, text: str, announced: bool = False, warns: bool = False
    ) -> None:
        """Report a choice that was made for the user, once; the console may have told an announced one already."""
        reason = Reason(kind, text)
        is_new = self.backend.report.record_choice(where, reason)
        if is_new and warns:
            rank_zero_only(log.warning)("lightning-ort: %s: %s", where, reason)
        elif is_new and not (announced and is_announced(self.module.trainer)):
            rank_zero_info("lightning-ort: %s: %s", where, reason)

    @property
    def namespace(self) -> LightningNamespace:
        """That of the strategy."""
        namespace = namespace_of(type(self.strategy))
        assert namespace is not None
        return namespace


def processors() -> int:
    """Return how many processors may run this process."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def is_announced(trainer: "pl.Trainer") -> bool:
    """Return whether a run shows a progress bar here, and so gets the lines."""
    bar = trainer.progress_bar_callback
    return bar is not None and getattr(bar, "is_enabled", True) and trainer.is_global_zero
