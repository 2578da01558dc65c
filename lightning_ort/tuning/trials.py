"""What was measured of a candidate, :class:`Trial`, and how two are compared: :func:`speed`."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from lightning_ort.tuning.candidate import Candidate

Verdict = Literal["measured", "won", "refused", "failed", "skipped"]
# of Student's t, two-sided 90 %, by degrees of freedom
_T = (6.31, 2.92, 2.35, 2.13, 2.02, 1.94, 1.89, 1.86, 1.83, 1.81)


@dataclass(frozen=True)
class Speed:
    """How many times as fast one is as another: the median over rounds, and a 90 % interval of the mean around it."""

    median: float
    low: float
    high: float
    rounds: int

    @property
    def is_clear(self) -> bool:
        """Whether one of the two is faster, and not only by chance."""
        return self.low > 1 or self.high < 1


@dataclass
class Trial:
    """A candidate, why it was tried, and what came of it."""

    candidate: Candidate
    stage: str
    reason: str
    batch_size: int
    accumulate: int
    processes: int = 1
    verdict: Verdict = "measured"
    why: str = ""  # the verdict
    rounds: dict[int, float] = field(default_factory=dict)  # seconds per example, by the number of the round
    step_seconds: float = 0.0  # of the last sample
    untimed: int = 0  # batches that it trained on before the clock started
    startup: float | None = None  # seconds until steps take what they take later, beyond the steps themselves
    peak: int | None = None  # bytes
    predicted_peak: int | None = None
    losses: list[float] = field(default_factory=list)  # of each batch from the first one on
    loss_difference: float | None = None  # relative, to float32 under Lightning's own strategy

    @property
    def effective_batch(self) -> int:
        """Examples between two steps of the optimizer."""
        return self.batch_size * self.accumulate * self.processes

    @property
    def seconds_per_example(self) -> float | None:
        """The median over all rounds."""
        return statistics.median(self.rounds.values()) if self.rounds else None

    @property
    def curve(self) -> list[float]:
        """The mean loss between two steps of the optimizer, from the first one on."""
        ends = range(self.accumulate, len(self.losses) + 1, self.accumulate)
        return [statistics.fmean(self.losses[end - self.accumulate : end]) for end in ends]

    def to_dict(self, own: "Trial") -> dict[str, Any]:
        """Return plain types for JSON."""
        found = speed(self, own)
        return {
            "candidate": str(self.candidate),
            "settings": self.candidate.settings,
            "stage": self.stage,
            "reason": self.reason,
            "verdict": self.verdict,
            "why": self.why,
            "batch_size": self.batch_size,
            "accumulate": self.accumulate,
            "seconds_per_example": self.seconds_per_example,
            "speed": found and [found.median, found.low, found.high],
            "rounds": {str(number): seconds for number, seconds in self.rounds.items()},
            "startup_seconds": self.startup,
            "break_even_steps": break_even(self, own),
            "peak_bytes": self.peak,
            "predicted_peak_bytes": self.predicted_peak,
            "loss_difference": self.loss_difference,
            "losses": self.curve,
        }


def speed(trial: Trial, other: Trial) -> Speed | None:
    """Return how many times as fast a trial is as another, from the rounds that both took part in; ``None`` if none."""
    logs = [math.log(other.rounds[n] / seconds) for n, seconds in trial.rounds.items() if n in other.rounds]
    if not logs:
        return None
    center = statistics.median(logs)
    if len(logs) == 1:
        return Speed(math.exp(center), 0.0, math.inf, 1)
    mean = statistics.fmean(logs)
    freedom = min(len(logs) - 1, len(_T))
    half = _T[freedom - 1] * statistics.stdev(logs) / math.sqrt(len(logs))
    low, high = min(mean - half, center), max(mean + half, center)
    return Speed(math.exp(center), math.exp(low), math.exp(high), len(logs))


def break_even(trial: Trial, own: Trial) -> int | None:
    """Return after how many steps of the user's effective batch the longer start is won back; ``None`` if never."""
    mine, theirs = trial.seconds_per_example, own.seconds_per_example
    if mine is None or theirs is None or trial.startup is None or own.startup is None:
        return None
    spent = trial.startup - own.startup
    if spent <= 0:
        return 0
    found = speed(trial, own)
    saved = theirs * (1 - 1 / found.median) * own.effective_batch if found else 0.0
    return math.ceil(spent / saved) if saved > 0 else None


def fastest(trials: Sequence[Trial], baseline: Trial) -> list[Trial]:
    """Return trials in the order of their speed over a baseline, the fastest first."""
    return sorted(trials, key=lambda trial: found.median if (found := speed(trial, baseline)) else 0.0, reverse=True)


def nothing_faster(measured: bool) -> str:
    """Say that nothing else was chosen, ``measured`` or not."""
    if measured:
        return "Nothing was clearly faster than what you have."
    return "Nothing but what you have was measured: there was no time, or nothing else could run; --time allows more."
