"""Stand-ins for the search: facts of a made-up module, and a machine whose clock and times are written down."""

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from lightning_ort.tuning.candidate import Candidate
from lightning_ort.tuning.probe import Facts
from lightning_ort.tuning.trainer_process import Sample, TimeIsUp, VariantFailed

STEP = 0.01  # seconds of the user's own way, for 32 examples
LOSSES = [1.0 / (1 + number / 10) for number in range(100_000)]


def facts(**changes: Any) -> Facts:
    usual: dict[str, Any] = {
        "module": "Made",
        "device": "cpu",
        "batch_size": 32,
        "accumulate": 1,
        "counts_examples": True,
        "stream": False,
        "made_of_tensors": True,
        "num_workers": 0,
        "fusable": True,
        "batch_norm": False,
        "convolutions": True,
        "threads": 2,
        "precision": "32-true",
        "bfloat16": 2.0,
    }
    return Facts(**usual | changes)


@dataclass
class Machine:
    """Trains nothing: each setting makes a candidate so many times as fast, and all times have some noise."""

    gains: Mapping[tuple[str, Any], float] = field(default_factory=dict)
    fails: Mapping[tuple[str, Any], str] = field(default_factory=dict)
    peak: Callable[[Candidate], int] = lambda candidate: 100
    loss: Callable[[Candidate], float] = lambda candidate: 1.0  # times the usual losses
    examples: Callable[[int], int] = lambda size: size  # that a batch of so many seems to have
    step: float = STEP
    startup: float = 1.0
    now: float = 0.0
    running: dict[Candidate, int] = field(default_factory=dict)
    started: list[Candidate] = field(default_factory=list)
    noise: random.Random = field(default_factory=lambda: random.Random(0))

    def clock(self) -> float:
        return self.now

    def sample(self, candidate: Candidate, steps: int, timeout: float) -> Sample:
        spent = 0.0
        if candidate not in self.running:
            self.started.append(candidate)
            self.running[candidate] = 0
            spent = self.startup
        for setting in candidate.settings.items():
            if setting in self.fails:
                raise VariantFailed(self.fails[setting])
        gain = 1.0
        for setting in candidate.settings.items():
            gain *= self.gains.get(setting, 1.0)
        size = candidate.batch_size or 32
        step = self.step * size / 32 / gain * self.noise.uniform(0.97, 1.03)
        spent += steps * step
        if spent > timeout:
            self.now += timeout
            raise TimeIsUp("too long")
        self.now += spent
        done = self.running[candidate]
        self.running[candidate] = done + steps
        each = candidate.accumulate or 1
        losses = [self.loss(candidate) * LOSSES[number // each] for number in range(done, done + steps)]
        return Sample(step, losses, self.peak(candidate), steps * self.examples(size))

    def stop(self, candidate: Candidate) -> None:
        self.running.pop(candidate, None)
