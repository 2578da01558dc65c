"""When it pays to compile a step, and how much may be spent on it: :class:`CompileBudget`, :class:`StartDecision`.

Nothing here knows of torch or Lightning, and the clock is an argument, so that tests can simulate a run.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

Agree = Callable[[str, dict[str, float]], dict[str, float]]

FIRST = 3  # steps before the first decision: the first is slower than others, two are a median
GROWTH = 1.5  # from one decision to the next
GRACE = 1.5  # a compilation that ends with a bit more than what is allowed is not thrown away: its trial is cheap
STOP = 2.0  # with this many times what is allowed, nothing more is compiled, not even in the same call

_DISPATCH_BOUND = 0.005  # seconds of a step that is mostly Python and launches of small kernels
_SAVED_DISPATCH, _SAVED = 0.3, 0.1  # shares of a step that capture saves
# Seconds, and seconds for each operation with a gradient that an unchanged step calls. With one thread 1.4 for an
# MLP (62 operations), 1.0 for a convolutional network (20), 3.9 for four encoder layers (255), 8.7 for a Bayesian loss
# (616).
_COST, _COST_PER_OPERATION = 0.5, 0.015
PER_LAYER = 10  # operations, where no step with gradients was seen
_FIRST_COMPILATION = 1.0  # of a process, more seconds: imports, and what torch prepares once
_WARM = 0.7  # of the cold start-up's seconds, until a warm one has been seen
EVALUATION = 0.5  # of what the training step takes: there is no backward graph
INDUCTOR_SAVED = 0.1  # a share of the step, before anything was tried; it was 0.06 to 0.2 where inductor won
_INDUCTOR_COST, _INDUCTOR_COST_PER_OPERATION = 15.0, 0.01  # seconds
_INDUCTOR_WARM = 0.2  # of the cold start-up's seconds: torch keeps what the C++ compiler made
_INDUCTOR_TO_ORT = 2.0  # times as long as compiling the same graphs for ONNX Runtime, at least


@dataclass(frozen=True)
class Outlook:
    """What is known about the rest of a run of the Trainer, with ``None`` for what is unknown.

    Args:
        steps: Steps of one kind that are to come.
        batches_done: Batches of the run's own loop (of training in a fit) so far, without those of a checkpoint.
        batches: Batches of that loop that are to come.
        seconds: Until a limit of time ends the run.

    """

    steps: float | None
    batches_done: int
    batches: float | None
    seconds: float | None = None


@dataclass(frozen=True)
class Estimate:
    """What is expected of compiling one kind of step, in seconds.

    Args:
        saving: Over the steps that are to come.
        cost: Of compiling and trying it.
        allowed: What the budget of the run has left.

    """

    saving: float
    cost: float
    allowed: float

    @property
    def pays(self) -> bool:
        """Whether to start."""
        return self.saving > self.cost <= self.allowed

    def __str__(self) -> str:
        text = f"{seconds_text(self.saving)} expected to be saved, about {seconds_text(self.cost)} to compile"
        return text if self.saving <= self.cost else f"{text}, compile_budget allows {seconds_text(self.allowed)}"


class CompileBudget:
    """What one run of the Trainer may spend on compiling and trying, and has spent, all steps together.

    Args:
        share: Of the time that the run has taken and, where that is known, will take.
        clock: Returns seconds.

    """

    def __init__(self, share: float, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        self.spent = 0.0
        self.exempt = 0.0  # of these seconds, those that nobody is blamed for
        self._share = share
        self._start: float | None = None
        self._first: float | None = None  # seconds of the first batch, which takes longer than others

    def begin(self) -> None:
        """Start the clock at the first step of the run; a second call changes nothing."""
        if self._start is None:
            self._start = self.clock()

    def end_first_batch(self) -> None:
        """Note that the first batch of the run is done; a second call changes nothing."""
        if self._first is None:
            self._first = self._working

    def spend(self, seconds: float) -> None:
        """Add what was spent."""
        self.spent += max(0.0, seconds)

    @property
    def charged(self) -> float:
        """The seconds that count against what is allowed."""
        return self.spent - self.exempt

    @property
    def elapsed(self) -> float:
        """Seconds since the first step."""
        return 0.0 if self._start is None else self.clock() - self._start

    def allowed(self, outlook: Outlook) -> float:
        """Return what the run may spend in all; a run of unknown length is expected to take as long again."""
        left = self._seconds_left(outlook)
        return self._share * (self.elapsed + (self.elapsed if left is None else left))

    def steps_left(self, done: int, outlook: Outlook) -> float:
        """Return how many steps of a kind are expected: as many as were done, if nothing is known."""
        known = [] if outlook.steps is None else [outlook.steps]
        if outlook.seconds is not None and self._working > 0:
            known.append(done * outlook.seconds / self._working)
        return max(0.0, min(known, default=done))

    @property
    def _working(self) -> float:
        return self.elapsed - self.spent

    def _seconds_left(self, outlook: Outlook) -> float | None:
        known = [] if outlook.seconds is None else [outlook.seconds]
        if outlook.batches is not None and outlook.batches_done > 0:
            done, working = outlook.batches_done, self._working
            if done > 1 and self._first is not None:
                done, working = done - 1, working - self._first
            known.append(outlook.batches * working / done)
        return max(0.0, min(known)) if known else None


class StartDecision:
    """Decides for one kind of step in one run when to start to capture it.

    It decides before steps of a geometric series only, which costs the others nothing. Several processes ask at the
    same steps, and do what the first of them to ask has found.
    """

    def __init__(self, name: str, budget: CompileBudget) -> None:
        self.done = 0  # steps in this run
        self.estimate: Estimate | None = None  # the best one: near its end no run has much to save
        self._name = name
        self._budget = budget
        self.next = FIRST  # when so many steps are done
        self._decisions = 0

    @property
    def due(self) -> bool:
        """Whether to decide before the next step."""
        return self.done >= self.next

    def decide(
        self, step_seconds: float, fraction: float, cost: float, outlook: Outlook, agree: Agree | None = None
    ) -> bool:
        """Return whether to start now.

        Args:
            step_seconds: Of the unchanged step.
            fraction: Which share of them capture is expected to save.
            cost: Expected seconds of compiling and trying.
            outlook: What is known about the rest of the run.
            agree: Takes a key and what was found here; returns what all processes of the run use.

        """
        self.next = max(self.done + 1, math.ceil(GROWTH * self.done))
        saving = fraction * step_seconds * self._budget.steps_left(self.done, outlook)
        estimate = Estimate(saving, cost, self._budget.allowed(outlook) - self._budget.charged)
        if self.estimate is None or estimate.saving > self.estimate.saving:
            self.estimate = estimate
        starts = estimate.pays
        if agree is not None:
            # counted in decisions, since trials, in which none is made, are not equally long in all processes
            self._decisions += 1
            starts = agree(f"start/{self._name}/{self._decisions}", {"starts": float(starts)})["starts"] > 0
        return starts


def prior_fraction(step_seconds: float) -> float:
    """Return which share of a step capture may save, before anything was tried."""
    return _SAVED_DISPATCH if step_seconds < _DISPATCH_BOUND else _SAVED


def expected_cost(
    operations: float,
    training_seconds: float | None = None,
    cold: float | None = None,
    warm: float | None = None,
    first: bool = False,
) -> float:
    """Return how many seconds compiling a step is expected to take.

    Args:
        operations: How many the step calls.
        training_seconds: What the training step of this run took.
        cold: What an earlier run took with an empty cache.
        warm: What an earlier run took with the cache that it found.
        first: Whether nothing was compiled in this process before.

    """
    if warm is not None:
        return warm
    if cold is not None:
        return _WARM * cold
    if training_seconds is not None:
        return EVALUATION * training_seconds
    return _fixed_cost(first) + _COST_PER_OPERATION * operations


def _fixed_cost(first: bool) -> float:
    return _COST + first * _FIRST_COMPILATION


def projected_cost(seconds: float, done: float, operations: float, first: bool) -> float:
    """Return how many seconds compiling a step will take in all, by what its first graphs took.

    Args:
        seconds: What they took.
        done: How many operations they hold.
        operations: How many the step calls.
        first: Whether nothing was compiled in this process before.

    """
    fixed = _fixed_cost(first)
    return seconds if done <= 0 or seconds <= fixed else fixed + (seconds - fixed) * max(1.0, operations / done)


def inductor_cost(operations: float, ort_seconds: float, cold: float | None = None, warm: float | None = None) -> float:
    """Return how many seconds compiling a step with inductor is expected to take.

    Args:
        operations: How many the step calls.
        ort_seconds: What compiling the step for ONNX Runtime took in this run; 0 if that was not done.
        cold: What an earlier run took with an empty cache.
        warm: What an earlier run took with the cache that it found.

    """
    if warm is not None:
        return warm
    if cold is not None:
        return _INDUCTOR_WARM * cold
    # a step of a hundred graphs has no more operations than one of two
    return max(_INDUCTOR_COST + _INDUCTOR_COST_PER_OPERATION * operations, _INDUCTOR_TO_ORT * ort_seconds)


def seconds_text(seconds: float) -> str:
    """Return a duration for a message."""
    if seconds < 0.05:
        return "less than 0.1 s" if seconds > 0 else "0 s"
    return f"{seconds:.1f} s" if seconds < 100 else f"{seconds:.0f} s"
