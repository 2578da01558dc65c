"""What was measured of a candidate, :class:`Trial`, and how two are compared: :func:`speed`, :func:`departure`."""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from lightning_ort._busy import is_busy
from lightning_ort.tuning.candidate import Candidate
from lightning_ort.tuning.trainer_process import Sample

Verdict = Literal["measured", "won", "refused", "failed", "skipped"]
# of Student's t, two-sided 90 %, by degrees of freedom
_T = (6.31, 2.92, 2.35, 2.13, 2.02, 1.94, 1.89, 1.86, 1.83, 1.81)


@dataclass(frozen=True)
class Speed:
    """How many times as fast one is as another: the median over rounds, and a 90 % interval of the mean around it."""

    median: float
    low: float
    high: float


@dataclass
class Trial:
    """A candidate, why it was tried, and what came of it."""

    candidate: Candidate
    reason: str = ""
    batch_size: int = 1
    accumulate: int = 1
    name: str = ""  # that the user has for it
    verdict: Verdict = "measured"
    why: str = ""  # the verdict
    rounds: dict[int, float] = field(default_factory=dict)  # seconds per example, by the number of the round
    samples: list[Sample] = field(default_factory=list)  # of the rounds
    step_seconds: float = 0.0  # of the last sample
    untimed: int = 0  # batches that it trained on before the clock started
    startup: float | None = None  # seconds until steps take what they take later, beyond the steps themselves
    peak: int | None = None  # bytes
    losses: list[float] = field(default_factory=list)  # of each batch from the first one on
    loss_difference: float | None = None  # relative, to float32 under Lightning's own strategy
    summary: Any = None  # of its strategy, if it was trained to the end

    def note(self, sample: Sample) -> None:
        """Keep what a sample shows, timed or not."""
        self.step_seconds, self.untimed = max(sample.step_seconds, 1e-9), sample.untimed
        self.losses += sample.losses
        if sample.peak_bytes is not None:
            self.peak = max(self.peak or 0, sample.peak_bytes)

    def count(self, number: int, sample: Sample, examples: float = 1) -> None:
        """Count a sample of so many examples a batch as a round."""
        self.samples.append(sample)
        self.rounds[number] = sample.step_seconds / examples

    @property
    def effective_batch(self) -> int:
        """Examples between two steps of the optimizer."""
        return self.batch_size * self.accumulate

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
            "reason": self.reason,
            "verdict": self.verdict,
            "why": self.why,
            "batch_size": self.batch_size,
            "accumulate": self.accumulate,
            "seconds_per_example": self.seconds_per_example,
            "speed": found and [found.median, found.low, found.high],
            "rounds": {str(number): seconds for number, seconds in self.rounds.items()},
            "startup_seconds": self.startup,
            "break_even_steps": break_even(self, own, found.median if found else None),
            "peak_bytes": self.peak,
            "loss_difference": self.loss_difference,
            "losses": self.curve,
        }


@dataclass
class Outcome:
    """What a search found."""

    own: Trial
    best: Trial
    trials: list[Trial]
    notes: list[str] = field(default_factory=list)


def ratios(trial: Trial, other: Trial) -> list[float]:
    """Return how many times as fast a trial was as another in each of the rounds that both took part in."""
    return [other.rounds[number] / seconds for number, seconds in trial.rounds.items() if number in other.rounds]


def times(trial: Trial, other: Trial) -> float | None:
    """Return how many times as fast a trial is as another by the times of all their rounds, if both were measured."""
    mine, theirs = trial.seconds_per_example, other.seconds_per_example
    return None if mine is None or theirs is None else theirs / mine


def speed(trial: Trial, other: Trial) -> Speed | None:
    """Return how many times as fast a trial is as another, from the rounds that both took part in; ``None`` if none."""
    logs = [math.log(ratio) for ratio in ratios(trial, other)]
    if not logs:
        return None
    center = statistics.median(logs)
    if len(logs) == 1:
        return Speed(math.exp(center), 0.0, math.inf)
    mean = statistics.fmean(logs)
    freedom = min(len(logs) - 1, len(_T))
    half = _T[freedom - 1] * statistics.stdev(logs) / math.sqrt(len(logs))
    low, high = min(mean - half, center), max(mean + half, center)
    return Speed(math.exp(center), math.exp(low), math.exp(high))


def break_even(trial: Trial, own: Trial, times: float | None) -> int | None:
    """Return after how many steps of the user's effective batch the longer start is won back; ``None`` if never."""
    if times is None or trial.startup is None or own.startup is None or own.seconds_per_example is None:
        return None
    saved = own.seconds_per_example * (1 - 1 / times) * own.effective_batch
    return math.ceil(max(0.0, trial.startup - own.startup) / saved) if saved > 0 else None


def in_turns(trials: Sequence[Trial], number: int) -> list[Trial]:
    """Return trials in the order of a round, which changes: what else the machine does shall hit all of them."""
    shift = number % len(trials)
    return [*trials[shift:], *trials[:shift]]


def in_words(machine: Mapping[str, str]) -> str:
    """Return in a line what measurements depend on."""
    return ", ".join(f"{name} {value}" for name, value in machine.items())


def while_busy(trials: Sequence[Trial]) -> list[str]:
    """Return a note if other programs used the machine while these were timed."""
    slowed = [sample.slowdown for trial in trials for sample in trial.samples]
    if not slowed or not is_busy(middle := statistics.median(slowed)):
        return []
    return [
        f"other programs used the machine (steps took {middle:.1f} times as long): what is fastest, the number of"
        " threads above all, may be another when it is idle"
    ]


def not_measured(found: Iterable[tuple[str, str, str]]) -> list[str]:
    """Return a line for each verdict and reason why something was not measured; a table's cells are too narrow.

    ``found``: name, verdict and reason of each.
    """
    names: dict[str, list[str]] = {}
    for name, verdict, why in found:
        names.setdefault(f"{verdict}: {why}", []).append(name)
    return [f"{', '.join(each)}: {reason}" for reason, each in names.items()]


LEAST = 16  # steps of the optimizer, before a curve tells anything
_SMALL = 0.05  # a loss that has fallen to less than this share of the first one is compared with that share
_ERRORS = 2.0  # standard errors that may be chance


@dataclass(frozen=True)
class Departure:
    """How far one loss curve is from another at the end, both relative to the loss."""

    difference: float
    noise: float  # what the difference may be by chance: large where examples come in another order

    def exceeds(self, tolerance: float) -> bool:
        """Return whether more than the tolerance is not by chance."""
        return self.difference - self.noise > tolerance


def departure(curve: Sequence[float], reference: Sequence[float]) -> Departure | None:
    """Return how far two curves are apart at their end, or ``None`` if they are too short or the reference diverges.

    Both start from the same weights and see the same examples. The end is the last quarter of the steps that both have
    done: a mean, since single steps differ by chance.
    """
    length = min(len(curve), len(reference))
    if length < LEAST:
        return None
    part = max(4, length // 4)
    mine, theirs = curve[length - part : length], reference[length - part : length]
    if not all(map(math.isfinite, (reference[0], *theirs))):
        return None
    apart = [one - other for one, other in zip(mine, theirs, strict=True)]
    if not all(map(math.isfinite, mine)):
        return Departure(math.inf, 0.0)
    scale = max(abs(statistics.fmean(theirs)), _SMALL * abs(reference[0]), 1e-12)
    noise = _ERRORS * statistics.stdev(apart) / part**0.5
    return Departure(abs(statistics.fmean(apart)) / scale, noise / scale)
