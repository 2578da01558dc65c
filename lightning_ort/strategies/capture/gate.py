"""A step that is not compiled until that pays: :class:`StartGate`; what earlier runs found: :class:`History`.

The decision itself is in :mod:`~lightning_ort.strategies.capture.budget`.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from lightning_ort._text import duration
from lightning_ort.compiler.cache import Startup
from lightning_ort.compiler.executors import inductor
from lightning_ort.compiler.fingerprint import digest, program
from lightning_ort.config import DEFAULT_START, ORTConfig
from lightning_ort.strategies.capture import budget, outlook
from lightning_ort.strategies.capture.autotuner import StepAutotuner

if TYPE_CHECKING:
    from lightning_ort.strategies.capture.module import CapturedModule

Stage = Literal["all", "ort", "inductor"]  # what is tried at a time: an engine, or all of them

_SAMPLES = 16  # unchanged steps that are timed; timing waits for a GPU


def is_amortized(config: ORTConfig) -> bool:
    """Return whether steps wait until compiling pays, which no clock may decide in deterministic mode."""
    wants_graphs = config.placement == "always" or config.check_against_eager or config.save_onnx_dir is not None
    start = config.start or ("now" if wants_graphs else DEFAULT_START)
    return start == "amortized" and not torch.are_deterministic_algorithms_enabled()


class StartGate:
    """Decides when to compile one kind of step, for one run of the Trainer, and runs it unchanged until then.

    Args:
        module: The module whose step it is.
        name: The name of the step.
        stages: What waits; each is tried once.
        synchronize: Waits for the device.

    """

    def __init__(
        self, module: "CapturedModule", name: str, stages: Sequence[Stage], synchronize: Callable[[], None]
    ) -> None:
        self.timer: StepAutotuner | None = StepAutotuner(["torch"], synchronize)
        self.decisions = {stage: budget.StartDecision(_key(name, stage), module.budget) for stage in stages}
        self.done = 0  # steps in this run
        self._next: float = budget.FIRST  # when there are this many, something is to be decided
        self.histories: dict[Stage, History] = {}  # read before the first decision
        self._module = module
        self._name = name
        self._seconds = 0.0

    @property
    def step_seconds(self) -> float:
        """Median of the unchanged step, with its backward pass; 0 before there are two."""
        if self.timer is not None:
            self.timer.add_sample()
            if self.timer.rounds > 0:
                self._seconds = self.timer.milliseconds["torch"] / 1000
        return self._seconds

    def opens(self, batch: Any, ms: Mapping[str, float], busy: bool) -> Stage | None:
        """Count a step, and return what to try from it on, if anything; that waits no more.

        Args:
            batch: What the step is called with.
            ms: Times of the step on each engine, if it was tried on any.
            busy: Whether a trial runs.

        """
        trainer = self._module.module.trainer
        if trainer.sanity_checking:
            return None
        self._module.begin_run()
        if self.done == 1 and self._module.outlook(self._name, 1).batches_done == 1:  # not one of a late validation
            self._module.budget.end_first_batch()
        opened = None
        if self.done >= self._next and not busy and outlook.at_window_start(trainer):
            if (opened := self._decide(batch, ms)) is not None:
                del self.decisions[opened]
            self._next = min((decision.next for decision in self.decisions.values()), default=math.inf)
        self.done += 1
        return opened

    def _decide(self, batch: Any, ms: Mapping[str, float]) -> Stage | None:
        if not self.histories:
            self.histories = {stage: History.load(self._module, self._name, stage, batch) for stage in self.decisions}
        seconds = ms["torch"] / 1000 if ms else self.step_seconds
        self._seconds = seconds
        gained = 1 - min(ms.values()) / ms["torch"] if ms else 0.0  # by what was tried before
        module, run = self._module, self._module.backend.report.run
        view = module.outlook(self._name, self.done)
        for stage, decision in self.decisions.items():
            decision.done = self.done
            if not decision.due:
                continue
            history = self.histories[stage]
            fraction = history.fraction
            if fraction is None:
                fraction = budget.INDUCTOR_SAVED if stage == "inductor" else budget.prior_fraction(seconds)
            cost = history.cost(module)
            more = max(0.0, fraction - gained)
            if decision.decide(seconds, more, cost, view, module.backend.agree):
                run.waiting = ""
                return stage
        if run.startup_seconds == 0 and (self._name == outlook.TRAINING or outlook.TRAINING not in run.waiting):
            run.waiting = f"{self._name}: {self.why_closed}"
        return None

    def run(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run the step unchanged."""
        if self._module.module.trainer.sanity_checking or self.timer is None:
            return step(*args, **kwargs)
        self.timer.add_sample()
        if self.timer.rounds >= _SAMPLES:
            self._seconds, self.timer = self.step_seconds, None
            return step(*args, **kwargs)
        self.timer.next_engine()
        with self.timer.timed():
            return step(*args, **kwargs)

    @property
    def why_closed(self) -> str:
        """Say why what comes next is not tried."""
        stage, decision = next(iter(self.decisions.items()))
        if decision.estimate is None:
            return f"too few steps to decide ({self.done})"
        history = self.histories.get(stage)
        if history is not None and history.refused:
            return f"in an earlier run: {history.refused}; ORTConfig(start='now') tries it again"
        if history is not None and (loser := history.loser) is not None:
            return f"in an earlier run the unchanged step was the fastest ({loser})"
        return f"{decision.estimate}; ORTConfig(start='now') compiles at once"


@dataclasses.dataclass
class History:
    """What earlier runs on this machine know of a step of the same module, on batches of the same sizes."""

    step: str
    stage: Stage
    name: str
    startup: Startup | None

    @classmethod
    def load(cls, module: "CapturedModule", step: str, stage: Stage, batch: Any) -> "History":
        """Read it from the cache."""
        cache = module.backend.cache
        key = _key(step, stage)
        name = cache.name(f"{key}\n{_describe(module.module)}\n{_shapes(batch)}", module.settings, "start")
        known = cache.load_startup(name)
        if known is not None and known.refused and known.program != _program(module.module):
            known = None  # it may have been mended
        return cls(step, stage, name, known)

    @property
    def refused(self) -> str:
        """Why the step is for eager alone, if an earlier run of the same program has found that."""
        return "" if self.startup is None else self.startup.refused

    @property
    def fraction(self) -> float | None:
        """The share of the step that compiling it saved, if it was tried: 0 if the unchanged step won."""
        if self.refused:
            return 0.0
        if self.startup is None or "torch" not in self.startup.ms:
            return None
        ms = self.startup.ms
        return 1 - min(ms["torch"], ms.get(self.stage, min(ms.values()))) / ms["torch"]

    @property
    def loser(self) -> str | None:
        """The times, if the unchanged step was the fastest."""
        if self.startup is None or self.fraction != 0:
            return None
        return ", ".join(f"{duration(ms)} {engine}" for engine, ms in self.startup.ms.items())

    def cost(self, module: "CapturedModule") -> float:
        """Return the seconds that starting is expected to take."""
        known = self.startup
        if known is None:
            return self._cost(module)
        if not known.finished:  # it takes more than that
            return max(budget.STOP * known.cold, self._cost(module))
        return self._cost(module, known.cold, known.warm)

    def _cost(self, module: "CapturedModule", cold: float | None = None, warm: float | None = None) -> float:
        operations, seconds = module.operations_of(self.step), module.startup_seconds
        if self.stage == "inductor":
            if cold is not None and not inductor.has_cache():
                return cold
            return budget.inductor_cost(operations, seconds.get((self.step, "ort"), 0.0), cold, warm)
        training = seconds.get((outlook.TRAINING, self.stage))
        cost = budget.expected_cost(operations, training, cold, warm, first=not module.backend.compiled_in_process())
        if self.stage == "all" and cold is warm is training is None:
            cost += module.count_inductors(self.step) * budget.inductor_cost(operations, 0.0)
        return cost

    def store(
        self, module: "CapturedModule", seconds: float, ms: dict[str, float], finished: bool, refused: str
    ) -> None:
        """Write what this run has found."""
        known = self.startup
        if refused:
            found = Startup(seconds, None, ms, False, refused, _program(module.module))
        elif known is not None and known.finished:
            found = dataclasses.replace(known, warm=seconds if finished else known.warm, ms=ms or known.ms)
        else:
            found = Startup(seconds, None, ms, finished)
        module.backend.cache.store_startup(self.name, found)


def _key(step: str, stage: Stage) -> str:
    return f"{step} {stage}"


def _describe(module: nn.Module) -> str:
    """Return a text that is equal for modules of the same structure."""
    classes = [f"{name} {type(child).__module__}.{type(child).__qualname__}" for name, child in module.named_modules()]
    tensors = [f"{name} {p.dtype} {tuple(p.shape)} {p.requires_grad}" for name, p in module.named_parameters()]
    return "\n".join(classes + tensors)


def _program(module: Any) -> str:
    """Return a text that changes with the code of a LightningModule and with its settings."""
    return digest(program(), *(f"{key}={value!r}" for key, value in module.hparams.items()))


def _shapes(value: Any) -> str:
    """Return a text that is equal for batches of the same sizes."""
    if isinstance(value, torch.Tensor):
        return f"{value.dtype}{tuple(value.shape)}{value.device.type}"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}: {_shapes(item)}' for key, item in value.items())}}}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_shapes, value))}]"
    return type(value).__name__
