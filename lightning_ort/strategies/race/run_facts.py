"""What all steps of a module know of its run: :class:`RunFacts`."""

import math
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_info

from lightning_ort._imports import LightningNamespace, namespace_of
from lightning_ort.compiler.reason import Reason, ReasonType
from lightning_ort.config import ORTConfig
from lightning_ort.strategies.race.outlook import TRAINING, Outlook, at_window_start, outlook_of
from lightning_ort.strategies.race.race import Race
from lightning_ort.strategies.race.settings import is_amortized, setting_for

if TYPE_CHECKING:
    import lightning.pytorch as pl
    from lightning.pytorch.strategies import Strategy

    from lightning_ort.compiler.backend import ORTBackend


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
        """Return whether a step stays as it is: in deterministic mode no time may tell whether compiling pays."""
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

    @property
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
            self._start = time.perf_counter(), self.module.trainer.fit_loop.total_batch_idx

    def enters(self, name: str, race: Race) -> None:
        """Note the race of a step."""
        self.races[name] = race

    def saw_operations(self, name: str, number: int) -> None:
        """Note how many operations an unchanged step calls."""
        self.operations[name] = number

    @property
    def elapsed(self) -> float:
        """Seconds since the first step of the run."""
        return 0.0 if self._start is None else time.perf_counter() - self._start[0]

    @property
    def spent(self) -> float:
        """Seconds that this run has spent on compiling and trying."""
        return sum(race.spent for race in self.races.values())

    def batches_done(self, name: str, done: int) -> int:
        """Return how many batches of a fit, or of what else runs, are done after so many steps of a name."""
        if self.module.trainer.state.fn != "fit":
            return done
        return self._first_batch + done if name == TRAINING else self.module.trainer.fit_loop.total_batch_idx + 1

    def outlook(self, name: str, done: int) -> Outlook:
        """Return what is known about the rest of the run, after so many steps of this name."""
        return outlook_of(self.module.trainer, self.namespace, name, done, self._first_batch)

    @property
    def _first_batch(self) -> int:
        """The fit loop's count of batches when the run began, which is not 0 after a checkpoint."""
        return 0 if self._start is None else self._start[1]

    def steps_left(self, name: str, done: int) -> float | None:
        """Return how many steps of this name are to come, if that is known; on a GPU they are else taken to be many."""
        left = self.outlook(name, done).steps_left(done, self.elapsed - self.spent)
        return math.inf if left is None and self.device.type == "cuda" else left

    def at_window_start(self) -> bool:
        """Return whether no gradients are accumulated now."""
        return at_window_start(self.module.trainer)

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

    def record_choice(self, where: str, kind: ReasonType, text: str, announced: bool = False) -> None:
        """Report a choice that was made for the user, once; the console may have told an announced one already."""
        reason = Reason(kind, text)
        is_new = self.backend.report.record_choice(where, reason)
        if is_new and not (announced and is_announced(self.module.trainer)):
            rank_zero_info("lightning-ort: %s: %s", where, reason)

    @property
    def namespace(self) -> LightningNamespace:
        """That of the strategy."""
        namespace = namespace_of(type(self.strategy))
        assert namespace is not None
        return namespace


def is_announced(trainer: "pl.Trainer") -> bool:
    """Return whether a run shows a progress bar here, and so gets the lines."""
    bar = trainer.progress_bar_callback
    return bar is not None and getattr(bar, "is_enabled", True) and trainer.is_global_zero
