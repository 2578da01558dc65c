"""Which way the next step runs: :class:`Race`.

A step can run in several ways: unchanged, captured for ONNX Runtime as one graph or as two, with its child modules
captured instead, compiled by inductor, recorded by inductor. One kind of step has one race. Its champion is the
unchanged step at first. Challengers are tried in their order, one at a time: each starts when the rule to start
(:meth:`Race._may_cost`) allows it, then takes turns with the champion (:class:`~.duel.Duel`), and the faster one is the
next champion. One other than the unchanged step has to meet that one again, after ever more steps; one that fails gives
way to the one that it has beaten.

Budgets and times are in *working seconds*, without those in which other programs had the processors: a busy machine
makes no step worth more. Verdicts that were taken on a busy machine are taken again.

Nothing here knows of torch, Lightning, clocks or files: whoever runs the steps asks :meth:`Race.next` and says
:meth:`Race.done`. All that has happened is in :attr:`Race.events`; what people read is made from these
(:mod:`~lightning_ort.strategies.race.view`).
"""

import math
import statistics
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from lightning_ort._busy import is_busy
from lightning_ort.strategies.race.duel import MOST, Duel, slowdown_of
from lightning_ort.strategies.race.terms import (
    RECORDING,
    UNCHANGED,
    Event,
    Expected,
    Failure,
    Now,
    Took,
    Verdict,
    Waiting,
    Way,
)

FIRST, GROWTH = 3, 1.5  # the rule to start is asked before steps 3, 5, 8, 12, ... of a run
SAMPLES = 16  # unchanged steps that are timed
RECHECK, RARER = 200, 5  # steps until the champion meets the unchanged step again, and how many times more after that
DUELS = 50  # times as many as a duel took more than usual, at least: those of short steps have many
# times what may be spent: with so much spent, or so much expected, nothing more is compiled, even in the same call
STOP, GRACE = 2.0, 1.5
# a way that takes so much more memory has to be so much faster, as shares
MEMORY, WORTH = 0.1, 0.03
NO_LIMIT = math.inf  # as a share: everything starts at once

Agree = Callable[[str, Mapping[str, float]], Mapping[str, float]]


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
        charged: The same in working seconds, which the budget counts.
        tried: Of these, what the steps of duels took longer.
        saved: Working seconds that this run has saved, as duels measured it.
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
        self._asked: Counter[str] = Counter()
        self._ran = {UNCHANGED}
        self._dear: list[Way] = []  # what cost too much in this run
        self._doubtful: list[Way] = []  # what has lost on a busy machine
        self._beaten: list[tuple[Way, float]] = []  # champions before this one, and what each step of them saves
        self._saving = 0.0  # in each step of the champion
        self.begin_run(first)

    def begin_run(self, first: int = FIRST) -> None:
        """Begin a run of the Trainer, with a budget of its own; the ``first`` steps run before anything is tried."""
        self._challengers.extendleft(reversed(self._dear))
        if (trying := self.trying) is not None:  # it was not timed to the end
            self._challengers.appendleft(trying)
        self._challengers.extend(self._doubtful)
        self._dear, self._doubtful, self._begun = [], [], len(self.events)
        self.steps, self.spent, self.charged, self.tried, self.saved = 0, 0.0, 0.0, 0.0, 0.0
        self._usual: list[Took] = []  # unchanged steps
        self._to_time = SAMPLES  # so many more of them are timed
        self._limit = self.share  # of what was started last
        self._next = first
        self._recheck, self._interval, self._saved_before = RECHECK, RECHECK, 0.0
        self._duel = None
        self._way = self.champion

    # Questions

    def next(self, now: Now) -> Way:
        """Return which way the next step runs."""
        self._left = self.steps if now.steps_left is None else now.steps_left
        if self._duel is None and now.may_change:
            if self._doubtful and self.champion == UNCHANGED and self.steps >= self._recheck:
                self._to_time = SAMPLES  # which tell whether the machine is still busy
                self._interval *= RARER
                self._recheck = self.steps + self._interval
            if self.measured and self.champion != UNCHANGED and self.steps >= self._recheck:
                if self._agreed("recheck", not now.obstacle(UNCHANGED)):
                    self._duel = Duel(self.champion, UNCHANGED, self._ran)
                else:
                    self._recheck += self._interval
            elif self.has_challengers and self.steps >= self._next:
                self._next = math.ceil(GROWTH * self.steps)
                self._consider(now)
        self._way = self.champion if self._duel is None else self._duel.turn
        return self._way

    @property
    def wants_time(self) -> bool:
        """Whether the time of the next step matters."""
        return self._duel is not None or (self._way == UNCHANGED and self._to_time > 0)

    @property
    def quiet_steps(self) -> int:
        """For how many steps nobody has to ask: they are timed as one, or :meth:`pass_by` tells of them."""
        if self.wants_time:
            return 1 if self._duel is None else self._duel.length
        ends = [self._next] if self.has_challengers else []
        if self.measured and (self.champion != UNCHANGED or self._doubtful):
            ends.append(self._recheck)
        return max(0, min(ends, default=1 << 30) - self.steps)

    def may_compile(self, seconds: float, expected: float = 0.0) -> bool:
        """Return whether more may be compiled in a call, by the working seconds so far, and those expected in all."""
        return self.charged + seconds <= STOP * self._allowed and self.charged + expected <= GRACE * self._allowed

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
        return {self.champion} | (self._duel.steps.keys() if self._duel is not None else set())

    @property
    def kept(self) -> set[Way]:
        """The ways that may run in a later step without another start: the living, and those that the champion beat."""
        return self.living | {way for way, _ in self._beaten}

    @property
    def usual(self) -> float:
        """The working seconds of the unchanged step; 0 if they are not known."""
        return statistics.median(took.working for took in self._usual) if self._usual else 0.0

    @property
    def slowdown(self) -> float:
        """How many times as long unchanged steps take as on an idle machine."""
        return slowdown_of(self._usual)

    # Answers

    def done(self, took: Took) -> None:
        """Say how the step went, or each of those that were timed as one."""
        way = self._way
        self.steps, self._left = self.steps + took.steps, max(0.0, self._left - took.steps)
        if took.compiled:
            # on a busy machine, compiling is no slower than steps, or it costs more of them
            working = took.seconds / min(took.slowdown, self.slowdown)
            self.spend(max(0.0, took.seconds - self.usual), way, max(0.0, working - self.usual))
            if self._is_too_dear(way, took.projected):
                self._dear.append(way)
                cost = Waiting(max(took.projected, self.charged), self._allowed, self.slowdown)
                self._drop(way, "costs too much", cost)
            self._ran.add(way)
        elif self._duel is not None:
            if took.counts:
                self._duel.add(way, took)
            if self._duel.is_over:
                self._settle(self._duel, took.memory)
        else:
            if way == UNCHANGED and took.counts and self._to_time > 0:
                self._usual = [*self._usual, took][-SAMPLES:]
                self._to_time -= 1
                if self._to_time == 0 and self._doubtful and self._agreed("quiet", not is_busy(self.slowdown)):
                    self._try_doubtful()
            self._save(took.steps)

    def spend(self, seconds: float, way: Way | None = None, working: float | None = None) -> None:
        """Count seconds that were spent, on compiling a way if one is named.

        ``working``: the same without what other programs took; ``None`` if only the steps tell.
        """
        self.spent += seconds
        self.charged += seconds / self.slowdown if working is None else working
        if way is not None:
            self._note(way, "compiles", seconds={way: seconds})

    def time_again(self) -> None:
        """Time unchanged steps anew, since they run otherwise from now on."""
        self._usual, self._to_time = [], SAMPLES

    def pass_by(self, steps: int) -> None:
        """Say that so many steps went as :attr:`quiet_steps` allows."""
        self.steps, self._left = self.steps + steps, max(0.0, self._left - steps)
        self._save(steps)

    def fail(self, way: Way, failure: Failure) -> None:
        """Say that a way cannot go on, between two steps."""
        if failure.final:
            for ways in (self._challengers, self._dear, self._doubtful, self._beaten):
                ways.clear()
            self._duel = None
            self.champion, self._saving = UNCHANGED, 0.0
        elif way == RECORDING:  # nor is it recorded for another engine
            self._challengers = deque(one for one in self._challengers if not one.replays)
        elif way in self._challengers:
            self._challengers.remove(way)
        elif way not in self.living:
            return  # it has lost since
        self._drop(way, "refused" if failure.final else "fails", failure.why, failure.instead)

    # What follows

    def _may_cost(self, expected: Expected) -> float:
        """The rule to start: a way may cost less than this, a share of what the step itself has still to take.

        The share is a part, the stake, of what the way saves more than the champion does, and where nothing of that was
        measured no more than ``compile_budget``. ``usual`` is measured in unchanged steps; how many are left the
        Trainer knows, or as many as were done. Of what a way costs and saves :mod:`.ways` knows what earlier runs have
        found, or else the estimate of its engine. All are working seconds. What has started stops by ``_allowed``, the
        same share of the whole run.
        """
        share = self._share_of(expected, self.gained)
        if share <= 0:
            return 0.0
        return math.inf if self.share == NO_LIMIT else max(0.0, share * self._ahead - self.charged)

    def _share_of(self, expected: Expected, gained: float = 0.0) -> float:
        share = self._stake_in(expected, gained)
        return share if expected.measured else min(self.share, share)

    @staticmethod
    def _stake_in(expected: Expected, gained: float) -> float:
        return expected.stake * (expected.saves - gained)

    @property
    def gained(self) -> float:
        """The share of the unchanged step that the champion saves."""
        return self._saving / self.usual if self.usual > 0 else 0.0

    def _consider(self, now: Now) -> None:
        for way in [*self._challengers]:
            expected = self._expect(way)
            allowed = self._may_cost(expected)
            pays = expected.cost < allowed
            why = now.obstacle(way) if pays else ""  # asked last: to look at free memory takes a millisecond
            pays = pays and not why
            if self._agreed(f"start/{way}", pays):
                self._challengers.remove(way)
                self._limit = NO_LIMIT if self.share == NO_LIMIT else self._share_of(expected)
                self._note(way, "starts")
                if self.measured:
                    self._duel = Duel(way, self.champion, self._ran, now.memory())
                else:
                    self.champion = way
                return
            by_budget = not expected.measured and self._stake_in(expected, self.gained) >= self.share
            waiting = Waiting(expected.cost, allowed, self.slowdown, expected.earlier, by_budget)
            self._note(way, "waits", why or expected.why or waiting)

    def _settle(self, duel: Duel, memory: float) -> None:
        """Keep the faster way; all processes go by the times of the one that was done first."""
        self._duel = None
        checked = duel.challenger == self.champion  # by the unchanged step
        number = sum(event.what in ("wins", "loses") for event in self.events)
        more = 0.0 if not duel.memory else max(0.0, memory / duel.memory - 1)
        own = {str(way): seconds for way, seconds in duel.medians.items()}
        facts = {**own, "memory": more, "busy": float(duel.is_busy)}
        agreed = facts | dict(self._agree(f"duel/{number}/{'/'.join(own)}", facts))
        medians = {way: agreed[str(way)] for way in duel.steps}
        overhead = duel.overhead(self.champion)
        self.tried, self.spent, self.charged = self.tried + overhead, self.spent + overhead, self.charged + overhead
        takes_more, busy = agreed["memory"] > MEMORY, agreed["busy"] > 0
        wins = medians[duel.challenger] < (1 - WORTH * takes_more) * medians[duel.champion]
        self._crown(duel, wins)
        lost_for_it = takes_more and not wins and medians[duel.challenger] < medians[duel.champion]
        after = self._interval * checked
        verdict = Verdict(after, agreed["memory"] * lost_for_it, duel.is_clear, duel.slowdown, busy)
        self._interval = RARER * self._interval if checked and not busy else RECHECK
        more_steps = sum(took.steps for turns in duel.steps.values() for took in turns) - 2 * MOST
        self._recheck = self.steps + max(self._interval, DUELS * more_steps)
        self._note(duel.challenger, "wins" if wins else "loses", verdict, medians)
        if not busy:
            self._try_doubtful()
        elif not wins:
            self._doubtful.append(duel.challenger)

    def _crown(self, duel: Duel, wins: bool) -> None:
        before, self.champion = self._saving, duel.challenger if wins else duel.champion
        if duel.champion == UNCHANGED:
            self._saving = duel.saved_by(self.champion) if wins else 0.0
            self._usual = duel.steps[UNCHANGED][-SAMPLES:]
            self._to_time = SAMPLES - len(self._usual)
            if not wins:
                self._beaten.clear()
        elif wins:
            self._beaten.append((duel.champion, before))
            self._saving += duel.saved_by(self.champion)
        if self._saving < before:  # nobody knows since when
            self.saved -= (self.saved - self._saved_before) * (1 - self._saving / before)
        self._saved_before = self.saved

    def _try_doubtful(self) -> None:
        """Let what has lost on a busy machine challenge the champion again."""
        if self._doubtful:
            self._challengers.extend(self._doubtful)
            self._doubtful = []
            self._next = self.steps

    def _agreed(self, question: str, answer: bool) -> bool:
        """Return the answer of the process that is the first to ask; questions are counted, as steps may not agree."""
        self._asked[question] += 1
        return self._agree(f"{question}/{self._asked[question]}", {"answer": float(answer)})["answer"] > 0

    def _drop(self, way: Way, what: str, why: Any, instead: Way | None = None) -> None:
        self._note(way, what, why)
        if self._duel is not None and way in self._duel.steps:
            if (trying := self.trying) not in (None, way):  # it has still to meet a champion
                self._challengers.appendleft(trying)
            self._duel = None
        if self.champion == way:
            # what was compiled before is not compiled again where there is nothing left to spend
            runner_up = self._beaten.pop() if what == "fails" and self._beaten else (UNCHANGED, 0.0)
            self.champion, self._saving = runner_up
            self._interval, self._recheck = RECHECK, self.steps + RECHECK
        if instead is not None:
            self._challengers.appendleft(instead)
            self._next = self.steps

    def _save(self, steps: int) -> None:
        before, self.saved = self.saved, self.saved + steps * self._saving
        if before < self.charged <= self.saved:
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
    def at_stake(self) -> float:
        """The working seconds of which something may be saved or spent; infinite if nobody knows."""
        return math.inf if self.share == NO_LIMIT or self.usual <= 0 else self._ahead

    @property
    def _ahead(self) -> float:
        """The working seconds of the steps that are left, if they run unchanged; 0 if nobody knows what one takes."""
        return self.usual * self._left if self.usual > 0 else 0.0

    @property
    def _allowed(self) -> float:
        if self._limit == NO_LIMIT:
            return math.inf
        return self._limit * (self.usual * self.steps + self._ahead)

    def _is_too_dear(self, way: Way, projected: float) -> bool:
        # what has run for the first time is not thrown away, since to time it is cheap
        exceeded = (projected > 0 or way in self._ran) and max(projected, self.charged) > self._allowed
        return self._agreed(f"stop/{way}", exceeded)

    def _note(self, way: Way, what: str, why: Any = "", seconds: Mapping[Way, float] | None = None) -> None:
        self.events.append(Event(way, what, self.steps, why, dict(seconds or {})))
