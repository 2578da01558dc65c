"""Which way the next step runs: :class:`Race`.

A step can run in several ways: unchanged, captured for ONNX Runtime as one graph or as two, with its child modules
captured instead, compiled by inductor, recorded by inductor. One kind of step has one race. Its champion is the
unchanged step at first. Challengers are tried in their order, one at a time: each starts when the rule to start
(:meth:`Race._may_cost`) allows it, then takes turns with the champion (:class:`Duel`), and the faster one is the next
champion. One other than the unchanged step has to meet that one again, after ever more steps.

Nothing here knows of torch, Lightning, clocks or files: whoever runs the steps asks :meth:`Race.next` and says
:meth:`Race.done`. All that has happened is in :attr:`Race.events`; what people read is made from these
(:mod:`~lightning_ort.strategies.race.view`).
"""

import math
import statistics
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

FIRST, GROWTH = 3, 1.5  # the rule to start is asked before steps 3, 5, 8, 12, ... of a run
SAMPLES = 16  # unchanged steps that are timed
CLEAR, LEAST, MOST = 2, 6, 18  # samples of each way in a duel: far apart, usual, close
FAR, CLOSE = 1.5, 1.1  # ratios of times
# seconds of all samples of a duel, or one burst of work elsewhere covers a whole duel of steps of a millisecond
MIN_SECONDS = 0.06
RECHECK, RARER = 200, 5  # steps until the champion meets the unchanged step again, and how many times more after that
# times what may be spent: with so much spent, or so much expected, nothing more is compiled, even in the same call
STOP, GRACE = 2.0, 1.5
# a way that takes so much more memory has to be so much faster, as shares
MEMORY, WORTH = 0.1, 0.03
NO_LIMIT = math.inf  # as a share: everything starts at once

Agree = Callable[[str, Mapping[str, float]], Mapping[str, float]]


@dataclass(frozen=True)
class Way:
    """One way to run a step.

    Args:
        engine: What runs it, of :data:`~lightning_ort.compiler.engines.ENGINES`; ``"torch"`` is the unchanged step.
        part: What is compiled: the step, or its child modules.
        graphs: Of a captured step on ONNX Runtime: 1 if forward and backward pass are one graph, else 2.

    """

    engine: str
    part: Literal["step", "modules"] = "step"
    graphs: int = 2

    def __str__(self) -> str:
        return f"{self.engine}/{self.part}/{self.graphs}"


UNCHANGED = Way("torch")


@dataclass(frozen=True)
class Expected:
    """What is expected of a way that has not been tried in this run.

    Args:
        cost: Seconds until it runs.
        saves: The share of the unchanged step that it saves at most: 1 if nobody knows, 0 if it has lost before.
        why: Where that is from, for people; may be empty.

    """

    cost: float
    saves: float = 1.0
    why: str = ""


@dataclass(frozen=True)
class Waiting:
    """Why a way waits: what it is expected to cost, and what may be spent, in seconds."""

    cost: float
    allowed: float


@dataclass(frozen=True)
class Verdict:
    """How a duel ended, beside its times."""

    after: int = 0  # so many steps the champion met the unchanged step again; 0 if the challenger was new
    more_memory: float = 0.0  # the share that the challenger takes more, if it lost for that
    is_clear: bool = True  # whether the times differ by more than the samples do


@dataclass(frozen=True)
class Failure:
    """Why a way cannot go on.

    Args:
        why: For people; nothing here reads it.
        instead: What is tried in its place, if anything.
        final: Whether nothing else can go on either: the step is for eager alone.

    """

    why: Any
    instead: Way | None = None
    final: bool = False


@dataclass(frozen=True)
class Event:
    """What happened to a way.

    Args:
        way: Which one.
        what: ``"waits"`` (the rule to start says no), ``"starts"``, ``"compiles"``, ``"wins"``, ``"loses"``,
            ``"fails"``, ``"refused"`` (the step is for eager alone), ``"costs too much"``, or ``"pays"`` (more is saved
            than was spent).
        step: How many steps of the run were done.
        why: For people; a :class:`Waiting` or :class:`Verdict` where that says it.
        seconds: Of compiling, or the medians of a duel, by way.

    """

    way: Way
    what: str
    step: int
    why: Any = ""
    seconds: Mapping[Way, float] = field(default_factory=dict)


class Duel:
    """Two ways take turns, A B, B A, A B, so that work that alternates from step to step meets both.

    The first step of a way that has not run yet does not count, since it allocates; nor do steps that compile.

    Args:
        challenger: One of them.
        champion: The other one.
        ran: The ways that have run before.
        memory: Bytes that the process used before it began; 0 if nobody knows.

    """

    def __init__(self, challenger: Way, champion: Way, ran: Iterable[Way], memory: float = 0.0) -> None:
        self.challenger, self.champion, self.memory = challenger, champion, memory
        self.samples: dict[Way, list[float]] = {challenger: [], champion: []}
        self._fresh = self.samples.keys() - ran

    @property
    def turn(self) -> Way:
        """Whose turn it is."""
        counts = {name: len(samples) - (name in self._fresh) for name, samples in self.samples.items()}
        fewest = min(counts.values())
        behind = [name for name, count in counts.items() if count == fewest]
        return behind[-(fewest % 2)]

    def add(self, way: Way, seconds: float) -> None:
        """Add a sample."""
        if way in self._fresh:
            self._fresh.discard(way)
        else:
            self.samples[way].append(seconds)

    @property
    def is_over(self) -> bool:
        """Whether there are enough samples."""
        one, other = self.samples.values()
        count = len(one)
        if self._fresh or count != len(other) or count < CLEAR or count % 2 or sum(one) + sum(other) < MIN_SECONDS:
            return False
        fast, slow = sorted((one, other), key=statistics.median)
        if max(fast) * FAR < min(slow) or count >= MOST:
            return True
        return count >= LEAST and statistics.median(slow) > CLOSE * statistics.median(fast)

    @property
    def medians(self) -> dict[Way, float]:
        """The median of each way in seconds."""
        return {name: statistics.median(samples) for name, samples in self.samples.items()}

    def saved_by(self, way: Way) -> float:
        """Return the seconds by which a way is faster: the lesser of what medians and lower quartiles say."""
        own, other = (self._quartiles(one) for one in (way, *(self.samples.keys() - {way})))
        return max(0.0, min(other[index] - own[index] for index in (0, 1)))

    @property
    def is_clear(self) -> bool:
        """Whether the medians differ by more than the middle half of the samples of either way."""
        one, other = map(self._quartiles, self.samples)
        return abs(one[1] - other[1]) > max(one[2] - one[0], other[2] - other[0])

    def overhead(self, used: Way) -> float:
        """Return the seconds by which steps took longer than the way that was used before usually does."""
        usual = self.medians[used]
        others = (samples for way, samples in self.samples.items() if way != used)
        return sum(max(0.0, seconds - usual) for samples in others for seconds in samples)

    def _quartiles(self, way: Way) -> list[float]:
        return statistics.quantiles(self.samples[way], method="inclusive")


class Race:
    """The state of one kind of step.

    Args:
        challengers: The ways beside the unchanged step, in the order in which they are tried.
        share: Of the time that the step takes in a run, what may be spent on compiling and trying; with
            :data:`NO_LIMIT` everything starts at once.
        expect: Returns what is expected of a way now.
        measured: Whether times decide; if not, the first challenger that runs is the champion.
        agree: Takes a key and figures; returns those of the process of the run that was the first to ask.
        first: Of :meth:`begin_run`.

    Attributes:
        champion: The way that runs where there is no duel.
        events: What has happened, over all runs.
        steps: How many steps of this run are done.
        spent: Seconds that this run has spent on compiling and trying.
        tried: Of these, what the steps of duels took longer.
        saved: Seconds that this run has saved, as duels measured it.

    """

    def __init__(
        self,
        challengers: Iterable[Way],
        share: float,
        expect: Callable[[Way], Expected],
        measured: bool = True,
        agree: Agree = lambda key, figures: figures,
        first: int = FIRST,
    ) -> None:
        self.champion = UNCHANGED
        self.events: list[Event] = []
        self._duel: Duel | None = None
        self._challengers = deque(challengers)
        self.share, self.measured, self._expect, self._agree = share, measured, expect, agree
        self._ran = {UNCHANGED}
        self._dear: list[Way] = []  # what cost too much in this run
        self._saving = 0.0  # in each step of the champion
        self.begin_run(first)

    def begin_run(self, first: int = FIRST) -> None:
        """Begin a run of the Trainer, which has a budget of its own: what cost too much may be tried again.

        Args:
            first: How many steps run before anything is tried.

        """
        self._challengers.extendleft(reversed(self._dear))
        if (trying := self.trying) is not None:  # it was not timed to the end
            self._challengers.appendleft(trying)
        self._dear, self._begun = [], len(self.events)
        self.steps, self.spent, self.tried, self.saved = 0, 0.0, 0.0, 0.0
        self._usual: list[float] = []  # seconds of the unchanged step
        self._left, self._next = 0.0, first  # steps
        self._recheck, self._interval, self._saved_before = RECHECK, RECHECK, 0.0
        self._duel = None
        self._way = self.champion

    # Questions

    def next(
        self,
        steps_left: float | None = None,
        may_change: bool = True,
        obstacle: Callable[[Way], str] = lambda way: "",
        memory: Callable[[], float] = lambda: 0.0,
    ) -> Way:
        """Return which way the next step runs.

        Args:
            steps_left: How many steps are to come; ``None`` if nobody knows: then as many as were done.
            may_change: Whether another way may begin here, and not within a window of accumulated gradients.
            obstacle: Returns why a way may not run now beside the champion; may be empty.
            memory: Returns the bytes that the process uses; 0 if nobody knows.

        """
        self._left = self.steps if steps_left is None else steps_left
        if self._duel is None and may_change:
            if self.measured and self.champion != UNCHANGED and self.steps >= self._recheck:
                fits = self._agree(f"recheck/{self._recheck}", {"fits": float(not obstacle(UNCHANGED))})["fits"]
                self._duel = Duel(self.champion, UNCHANGED, self._ran) if fits else None
                self._recheck += 0 if fits else self._interval
            elif self.has_challengers and self.steps >= self._next:
                self._next = max(self.steps + 1, math.ceil(GROWTH * self.steps))
                self._consider(obstacle, memory)
        self._way = self.champion if self._duel is None else self._duel.turn
        return self._way

    @property
    def wants_time(self) -> bool:
        """Whether the time of the next step matters."""
        return self._duel is not None or (self._way == UNCHANGED and len(self._usual) < SAMPLES)

    @property
    def quiet_steps(self) -> int:
        """For how many more steps the champion runs and nobody has to ask; :meth:`pass_by` tells of them."""
        if self.wants_time:
            return 0
        ends = [self._next] if self.has_challengers else []
        if self.measured and self.champion != UNCHANGED:
            ends.append(self._recheck)
        return max(0, min(ends, default=1 << 30) - self.steps)

    def may_compile(self, seconds: float, expected: float = 0.0) -> bool:
        """Return whether more may be compiled in a call, by the seconds that it has taken, and that are expected."""
        return self.spent + seconds <= STOP * self._allowed and self.spent + expected <= GRACE * self._allowed

    @property
    def trying(self) -> Way | None:
        """The challenger that takes turns with the champion now."""
        challenger = None if self._duel is None else self._duel.challenger
        return None if challenger == self.champion else challenger

    @property
    def waiting(self) -> Event | None:
        """Why the next challenger waits, if it does."""
        first = self._challengers[0] if self.has_challengers else None
        return next((event for event in reversed(self.of_run) if event.what == "waits" and event.way == first), None)

    @property
    def of_run(self) -> list[Event]:
        """What has happened in this run."""
        return self.events[self._begun :]

    @property
    def living(self) -> set[Way]:
        """The ways that may run in the next step."""
        return {self.champion} | (self._duel.samples.keys() if self._duel is not None else set())

    @property
    def usual(self) -> float:
        """The seconds of the unchanged step; 0 if they are not known."""
        return statistics.median(self._usual) if self._usual else 0.0

    # Answers

    def done(
        self,
        seconds: float = 0.0,
        compiled: bool = False,
        projected: float = 0.0,
        counts: bool = True,
        memory: float = 0.0,
    ) -> None:
        """Say how the step went.

        Args:
            seconds: What it took, with its backward pass; it matters if :attr:`wants_time` or something was compiled.
            compiled: Whether something was compiled in it.
            projected: Seconds that compiling would have taken, if :meth:`may_compile` has left a part uncompiled.
            counts: Whether the time says how fast the way is.
            memory: Bytes that the process uses; it matters in duels.

        """
        way = self._way
        self.steps, self._left = self.steps + 1, max(0.0, self._left - 1)
        if compiled:
            self.spend(max(0.0, seconds - self.usual), way)
            if self._is_too_dear(way, projected):
                self._dear.append(way)
                self._drop(way, "costs too much", Waiting(max(projected, self.spent), self._allowed))
            self._ran.add(way)
        elif self._duel is not None:
            if counts:
                self._duel.add(way, seconds)
            if self._duel.is_over:
                self._settle(self._duel, memory)
        else:
            if way is UNCHANGED and counts and len(self._usual) < SAMPLES:
                self._usual.append(seconds)
            self._save(1)

    def spend(self, seconds: float, way: Way | None = None) -> None:
        """Count seconds that were spent, on compiling a way if one is named."""
        self.spent += seconds
        if way is not None:
            self._note(way, "compiles", seconds={way: seconds})

    def pass_by(self, steps: int) -> None:
        """Say that so many steps went as :attr:`quiet_steps` allows."""
        self.steps, self._left = self.steps + steps, max(0.0, self._left - steps)
        self._save(steps)

    def fail(self, way: Way, failure: Failure) -> None:
        """Say that a way cannot go on, between two steps."""
        if failure.final:
            self._challengers.clear()
            self._dear.clear()
            self._duel = None
            self.champion, self._saving = UNCHANGED, 0.0
        elif way in self._challengers:
            self._challengers.remove(way)
        elif way not in self.living:
            return  # it has lost since
        self._drop(way, "refused" if failure.final else "fails", failure.why, failure.instead)

    # What follows

    def _may_cost(self, expected: Expected) -> float:
        """The rule to start: a way may cost less than this, a share of what the step itself has still to take.

        Of a way that saves less than the share at most, the share is what it saves more than the champion does. The
        share is ``compile_budget``; ``usual`` is measured in unchanged steps; how many are left the Trainer knows, or
        as many as were done. Of what a way costs and saves :mod:`.ways` knows what earlier runs have found, or else
        the estimate of its engine. What has started stops by ``_allowed``, the same share of the whole run.
        """
        gained = self._saving / self.usual if self.usual > 0 else 0.0
        share = min(self.share, expected.saves - gained)
        if share <= 0:
            return 0.0
        return math.inf if self.share == NO_LIMIT else max(0.0, share * self.usual * self._left - self.spent)

    def _consider(self, obstacle: Callable[[Way], str], memory: Callable[[], float]) -> None:
        for way in [*self._challengers]:
            expected, why = self._expect(way), obstacle(way)
            allowed = self._may_cost(expected)
            pays = not why and expected.cost < allowed
            # counted in questions, since duels are not equally long in all processes
            if self._agree(f"start/{way}/{self._count(way, 'waits')}", {"starts": float(pays)})["starts"]:
                self._challengers.remove(way)
                self._note(way, "starts")
                if self.measured:
                    self._duel = Duel(way, self.champion, self._ran, memory())
                else:
                    self.champion = way
                return
            self._note(way, "waits", why or expected.why or Waiting(expected.cost, allowed))

    def _settle(self, duel: Duel, memory: float) -> None:
        """Keep the faster way; all processes go by the times of the one that was done first."""
        self._duel = None
        checked = duel.challenger == self.champion  # by the unchanged step
        number = sum(event.what in ("wins", "loses") for event in self.events)
        own = {str(way): seconds for way, seconds in duel.medians.items()}
        more = 0.0 if checked or not duel.memory else max(0.0, memory / duel.memory - 1)
        agreed = self._agree(f"duel/{number}/{'/'.join(own)}", {**own, "memory": more})
        medians = {way: agreed.get(str(way), own[str(way)]) for way in duel.samples}
        overhead = duel.overhead(self.champion)
        self.tried, self.spent = self.tried + overhead, self.spent + overhead
        takes_more = agreed.get("memory", more) > MEMORY
        wins = medians[duel.challenger] < (1 - WORTH * takes_more) * medians[duel.champion]
        before, self.champion = self._saving, duel.challenger if wins else duel.champion
        if duel.champion == UNCHANGED:
            self._saving = duel.saved_by(self.champion) if wins else 0.0
            self._usual = duel.samples[UNCHANGED][-SAMPLES:]
        elif wins:
            self._saving += duel.saved_by(self.champion)
        if checked and self._saving < before:  # nobody knows since when
            self.saved -= (self.saved - self._saved_before) * (1 - self._saving / before)
        self._saved_before = self.saved
        lost_for_it = takes_more and not wins and medians[duel.challenger] < medians[duel.champion]
        verdict = Verdict(self._interval * checked, more * lost_for_it, duel.is_clear)
        self._interval = RARER * self._interval if checked else RECHECK
        self._recheck = self.steps + self._interval
        self._note(duel.challenger, "wins" if wins else "loses", verdict, medians)

    def _drop(self, way: Way, what: str, why: Any, instead: Way | None = None) -> None:
        self._note(way, what, why)
        if self._duel is not None and way in self._duel.samples:
            if (trying := self.trying) not in (None, way):  # it has still to meet a champion
                self._challengers.appendleft(trying)
            self._duel = None
        if self.champion == way:
            self.champion, self._saving = UNCHANGED, 0.0
        if instead is not None:
            self._challengers.appendleft(instead)
            self._next = self.steps

    def _save(self, steps: int) -> None:
        before, self.saved = self.saved, self.saved + steps * self._saving
        if before < self.spent <= self.saved:
            self._note(self.champion, "pays")

    @property
    def saving(self) -> float:
        """The seconds that each step of the champion saves."""
        return self._saving if self._duel is None else 0.0

    @property
    def has_challengers(self) -> bool:
        """Whether something is left to try: without measuring, the first that runs stays."""
        return bool(self._challengers) and (self.measured or self.champion == UNCHANGED)

    @property
    def _allowed(self) -> float:
        return self.share * self.usual * (self.steps + self._left) if self.share < NO_LIMIT else math.inf

    def _is_too_dear(self, way: Way, projected: float) -> bool:
        # what has run for the first time is not thrown away, since to time it is cheap
        exceeded = (projected > 0 or way in self._ran) and max(projected, self.spent) > self._allowed
        return self._agree(f"stop/{way}/{self._count(way, 'compiles')}", {"stops": float(exceeded)})["stops"] > 0

    def _count(self, way: Way, what: str) -> int:
        return sum(event.way == way and event.what == what for event in self.of_run)

    def _note(self, way: Way, what: str, why: Any = "", seconds: Mapping[Way, float] | None = None) -> None:
        self.events.append(Event(way, what, self.steps, why, dict(seconds or {})))
