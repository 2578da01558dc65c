"""A step that stays unchanged until compiling it pays: :class:`StartGate`; what earlier runs found: :class:`History`.

The decision itself is in :mod:`~lightning_ort.strategies.capture.budget`.
"""

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lightning_ort._text import duration
from lightning_ort.compiler.cache import Startup
from lightning_ort.config import DEFAULT_START, ORTConfig
from lightning_ort.strategies.capture import budget, outlook
from lightning_ort.strategies.capture.autotuner import StepAutotuner

if TYPE_CHECKING:
    from lightning_ort.compiler.backend import ORTBackend
    from lightning_ort.strategies.capture.module import CapturedModule

_SAMPLES = 16  # steps as they are that are timed; timing waits for a GPU


def is_amortized(config: ORTConfig) -> bool:
    """Return whether steps wait until compiling pays, which no clock may decide in deterministic mode."""
    wants_graphs = config.placement == "always" or config.check_against_eager or config.save_onnx_dir is not None
    start = config.start or ("now" if wants_graphs else DEFAULT_START)
    return start == "amortized" and not torch.are_deterministic_algorithms_enabled()


class StartGate:
    """Runs one kind of step as it is, and decides when to start to capture it, for one run of the Trainer."""

    def __init__(self, module: "CapturedModule", name: str, synchronize: Callable[[], None]) -> None:
        self.timer: StepAutotuner | None = StepAutotuner(["torch"], synchronize)
        self.history: History | None = None  # read before the first decision
        self.decision = budget.StartDecision(name, module.budget)
        self._module = module
        self._name = name
        self._seconds = 0.0

    @property
    def step_seconds(self) -> float:
        """Median of the step as it is, with its backward pass; 0 before there are two."""
        if self.timer is not None:
            self.timer.add_sample()
            if self.timer.rounds > 0:
                self._seconds = self.timer.milliseconds["torch"] / 1000
        return self._seconds

    def opens(self, batch: Any) -> bool:
        """Return whether to capture the step from now on."""
        trainer = self._module.module.trainer
        if trainer.sanity_checking:
            return False
        self._module.begin_run()
        if not self.decision.due or not outlook.at_window_start(trainer):
            return False
        if self.history is None:
            self.history = History.load(self._module, self._name, batch)
        seconds = self.step_seconds
        fraction = self.history.fraction
        if fraction is None:
            fraction = budget.prior_fraction(seconds)
        backend = self._module.backend
        training = self._module.startup_seconds.get("training_step")
        cost = self.history.cost(self._module.leaf_modules, training, not backend.compiled_in_process())
        view = self._module.outlook(self._name, self.decision.done)
        starts = self.decision.decide(seconds, fraction, cost, view, backend.agree)
        run = backend.report.run
        if starts:
            run.waiting = ""
        elif run.startup_seconds == 0 and (self._name == "training_step" or "training_step" not in run.waiting):
            run.waiting = f"{self._name}: {self.why_closed}"
        return starts

    def run(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run the step as it is."""
        if self._module.module.trainer.sanity_checking:
            return step(*args, **kwargs)
        self.decision.done += 1
        if self.timer is None:
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
        """Say why the step is not compiled."""
        if self.decision.estimate is None:
            return f"after {self.decision.done} steps there is nothing to go by yet"
        if self.history is not None and self.history.loser is not None:
            return f"an earlier run found it slower captured ({self.history.loser})"
        return f"{self.decision.estimate}; ORTConfig(start='now') compiles at once"


@dataclasses.dataclass
class History:
    """What earlier runs on this machine know of a step of the same module, on batches of the same sizes."""

    name: str
    startup: Startup | None

    @classmethod
    def load(cls, module: "CapturedModule", step: str, batch: Any) -> "History":
        """Read it from the cache."""
        cache = module.backend.cache
        name = cache.name(f"{step}\n{_describe(module.module)}\n{_shapes(batch)}", module.settings, "start")
        return cls(name, cache.load_startup(name))

    @property
    def fraction(self) -> float | None:
        """The share of the step that capture saved, if it was tried: none if the step as it is won."""
        if self.startup is None or "torch" not in self.startup.ms:
            return None
        ms = self.startup.ms
        return 1 - min(ms.values()) / ms["torch"]

    @property
    def loser(self) -> str | None:
        """The times, if the step as it is was the fastest."""
        if self.startup is None or self.fraction != 0:
            return None
        return ", ".join(f"{duration(ms)} {engine}" for engine, ms in self.startup.ms.items())

    def cost(self, modules: int, training_seconds: float | None, first: bool) -> float:
        """Return the seconds that starting is expected to take."""
        known = self.startup
        if known is None:
            return budget.expected_cost(modules, training_seconds, first=first)
        if not known.finished:  # it takes more than that
            return max(budget.STOP * known.cold, budget.expected_cost(modules, training_seconds, first=first))
        return budget.expected_cost(modules, training_seconds, known.cold, known.warm)

    def store(self, backend: "ORTBackend", seconds: float, ms: dict[str, float], finished: bool) -> None:
        """Write what this run has found."""
        known = self.startup
        if known is not None and known.finished:
            found = dataclasses.replace(known, warm=seconds if finished else known.warm, ms=ms or known.ms)
        else:
            found = Startup(seconds, None, ms, finished)
        backend.cache.store_startup(self.name, found)


def _describe(module: nn.Module) -> str:
    """Return a text that is equal for modules of the same structure."""
    classes = [f"{name} {type(child).__module__}.{type(child).__qualname__}" for name, child in module.named_modules()]
    tensors = [f"{name} {p.dtype} {tuple(p.shape)} {p.requires_grad}" for name, p in module.named_parameters()]
    return "\n".join(classes + tensors)


def _shapes(value: Any) -> str:
    """Return a text that is equal for batches of the same sizes."""
    if isinstance(value, torch.Tensor):
        return f"{value.dtype}{tuple(value.shape)}{value.device.type}"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}: {_shapes(item)}' for key, item in value.items())}}}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_shapes, value))}]"
    return type(value).__name__
