"""How many threads the unchanged step runs on: :class:`Threads`.

What is parallel ends at a barrier, where torch's threads spin until the last one is there. That takes milliseconds
where the machine does not run all of them, for tensors of a few kilobytes too, and on many cores longer than the work.
So all threads and one take turns, which compiles nothing, and the faster goes on until the question is asked again.
They begin once steps have settled: the first ones of a fit beside other programs may take ten times as long as later.
A single step on all threads costs no more than stock: on one thread it is run now and then, in each few steps where the
duel was a disturbed one, and what it contradicts is taken back at once.

All seconds count, not only working ones: to wait for a processor is what threads cost. As in a race, nothing here
knows of torch or clocks. *All* threads are as many as torch has been told to use.
"""

import math

from lightning_ort._busy import LIMITS, WHILE_BUSY, is_busy
from lightning_ort._text import duration
from lightning_ort.config import DEFAULT_BUDGET
from lightning_ort.strategies.race.duel import LEAST, MOST, Duel, steps_of_turn
from lightning_ort.strategies.race.terms import ON_ONE_THREAD, UNCHANGED, Took, Way

BETTER = 0.95  # what goes on may take so much of the time of the other at most
SETTLED, SAME = 3, 1.5  # steps have settled if so many take less than so many times as long as each other
PATIENCE = 20  # steps after which a duel begins where they do not
LOST, WON = 2.0, 5.0  # one turn that takes so many times as long as each of the other, or as short, ends the duel
AGAIN, GROWTH = 200, 2  # steps until the question is asked again, and how many times more each time after that
SOON = 20  # the same after a change that a single step has decided
WATCHED = 40  # steps on one thread, after a change to it, each of which is timed
PROBE, RARER = 10, 1.5  # steps on one thread until one is run on all, and how many times more each time after that
LOOK, SLOWER, SLOW = 128, 2.0, 3  # steps until one is timed; so many times as slow, so often: the question comes sooner


class Threads:
    """The state of one kind of step in one run.

    Args:
        number: All threads.
        cores: Processors that may run them.

    Attributes:
        kept: How the step runs where there is no duel.
        steps: How many steps are done.
        found: The medians of the last duel in seconds; empty before.
        was_busy: Whether other programs used the machine meanwhile.
    """

    def __init__(self, number: int, cores: int) -> None:
        self.number = number
        self.kept = UNCHANGED
        self.found: dict[Way, float] = {}
        self.was_busy = False
        self._duel: Duel | None = None
        self._before: list[float] | None = None  # seconds of steps, where a duel waits until they have settled
        self._usual = 0.0  # their least
        self._way = UNCHANGED
        self._took = Took()  # since the optimizer's last step
        self._worst = min(number, cores)  # times as long as on all threads a step takes on one
        self.steps, self._gap = 0, AGAIN
        self._next = 1.0 if number > 1 else math.inf  # the step before which a duel may begin
        self._soonest = self._look = math.inf  # the same where steps became slower; and before which one is timed
        self._slow = 0  # steps of those that were timed last
        self._last: dict[Way, float] = {}  # seconds of each way's last timed step
        self._probes = False  # whether the next step is a single one in the other way
        self._wins_by = 1.0  # what is kept changes if that takes so many times as short
        self._probe, self._rest = math.inf, 1.0  # the step before which there is one; steps until another
        self._sure = 0.0  # until this step each is timed, since the duel was disturbed

    @property
    def _other(self) -> Way:
        return ON_ONE_THREAD if self.kept == UNCHANGED else UNCHANGED

    def next(self, left: float | None, may_try: bool) -> Way:
        """Return how the next step runs; ``left`` are the steps to come, if known, otherwise as many as were done.

        A duel begins, if it ``may_try``, after steps that have settled, the last of which ended with the optimizer's.
        """
        left = self.steps if left is None else left
        self._probes = self._probes and may_try and left > 1
        if self._duel is None and not self._probes and may_try and self.steps >= self._next:
            self._try(left)
        self._way = self._other if self._probes else self.kept if self._duel is None else self._duel.turn
        return self._way

    def _try(self, left: float) -> None:
        """Begin a duel where that may cost what it may: only one thread can be dearer than stock."""
        before, more = self._before, self._worst - 1
        is_dear = more > DEFAULT_BUDGET * left or (before and more * before[-1] > LIMITS.get().one_thread)
        if is_dear and self.kept == UNCHANGED:
            self._before = None
            self._next = 1.5 * self.steps + 1
        elif before is None:
            self._before = []
        elif self._has_settled(before):
            self._usual = min(before)
            self._duel, self._before = Duel(self.kept, self._other, (UNCHANGED, ON_ONE_THREAD), waits=True), None
        elif len(before) >= SETTLED and not self._last:
            self._probes, self._wins_by, self._last[self.kept] = True, WON, min(before[-SETTLED:])

    @property
    def is_trying(self) -> bool:
        """Whether there is a duel or a probe, or a duel waits for steps to settle."""
        return self._probes or self._duel is not None or self._before is not None

    @property
    def wants_time(self) -> bool:
        """Whether the time of the next step matters."""
        return self.is_trying or self.steps >= min(self._look, self._probe) or self.steps < self._sure

    @property
    def quiet_steps(self) -> int:
        """For how many steps nobody has to ask: they are timed as one, or :meth:`pass_by` tells of them."""
        if self._duel is not None:
            return self._duel.length
        if self.wants_time:
            return steps_of_turn(self._last.get(self._way, self._before[-1] if self._before else 0.0))
        return int(min(self._next, self._look, self._probe, 1 << 30)) - self.steps

    def _after(self, turns: float) -> float:
        """Return the step before which so many turns of what is kept are over."""
        return self.steps + turns * steps_of_turn(self._last[self.kept])

    @property
    def longest(self) -> float:
        """Seconds after which the rest of a turn runs as the other one, since it has lost."""
        return LOST * max(self._to_beat, default=math.inf)

    @property
    def _to_beat(self) -> list[float]:
        """The seconds of the steps that the one in the other way is compared with."""
        if self._way == self.kept:
            return []
        return [self._last[self.kept]] if self._duel is None else self._duel.samples(self.kept)

    def pass_by(self, steps: int) -> None:
        """Say that so many steps went without their time."""
        self._took = Took()
        self.steps += steps

    def done(self, took: Took, ends: bool = True) -> None:
        """Say how a step went; a turn goes on until the optimizer's step, which ``ends`` it."""
        self.steps += took.steps
        before = self._took
        self._took = took = Took(before.seconds + took.seconds, before.waited + took.waited, steps=took.steps)
        if not ends:
            return
        self._took = Took()
        if self._probes:
            self._compare(took.seconds)
        elif (duel := self._duel) is None:
            if self._before is not None:
                self._before.append(took.seconds)
            self._see(took.seconds)
        else:
            clear = took.seconds > self.longest or WON * took.seconds < min(self._to_beat, default=0.0)
            duel.add(self._way, took)
            most = MOST if self.found else LEAST  # the race waits for the first duel
            if clear or duel.is_over or min(map(len, duel.steps.values())) >= most:
                self._settle(duel)

    @staticmethod
    def _has_settled(steps: list[float]) -> bool:
        last = steps[-SETTLED:]
        return len(steps) >= PATIENCE or (len(last) == SETTLED and max(last) < SAME * min(last))

    def _see(self, seconds: float) -> None:
        """Look at a step without a duel."""
        if self.steps <= min(self._look, self._probe) and self.steps > self._sure:
            return
        before, other = self._last[self.kept], self._last[self._other]
        contradicts = self.steps <= self._sure and (SAME * seconds < before or seconds > other)
        if contradicts or self.steps > self._probe:
            self._probes, self._wins_by, self._last[self.kept] = True, 1.0, seconds
        if self.steps <= self._look:
            return
        self._slow = self._slow + 1 if seconds > SLOWER * self.found[self.kept] else 0
        if self._slow == SLOW:
            self._next = min(self._next, self._soonest)
        if self._slow in (0, SLOW):
            self._slow, self._look = 0, self._after(LOOK)

    def _compare(self, seconds: float) -> None:
        """Change to the other way if its single step was faster."""
        self._probes, self._last[self._other] = False, seconds
        if self._wins_by * seconds < self._last[self.kept]:
            self.kept, self.found, self._before = self._other, dict(self._last), None
            self._next, self._look = self._after(SOON), self._after(LOOK)
            self._watch(self._after(WATCHED if self.kept == ON_ONE_THREAD else SETTLED))
        else:
            self._rest *= max(RARER, seconds / self._last[self.kept])  # what has lost by much is run less often
            self._watch(self._sure)

    def _watch(self, until: float) -> None:
        """Look at all steps until one, and now and then at some on all threads, which is for one thread alone."""
        self._sure = until
        self._probe = self._after(self._rest) if self.kept == ON_ONE_THREAD else math.inf

    def _settle(self, duel: Duel) -> None:
        before, (other,) = self.kept, duel.steps.keys() - {self.kept}
        self._duel, self.found, self.was_busy = None, duel.medians, is_busy(duel.slowdown[ON_ONE_THREAD])
        lost = duel.overhead(before) / self.found[before]  # steps
        self._last, self._rest = dict(self.found), PROBE
        if changes := self.found[other] < BETTER * self.found[before]:
            self.kept, self._gap = other, AGAIN
            if self.was_busy or not self._usual < SAME * self.found[before] < SAME**2 * self._usual:
                self._rest = 1.0
        self._watch(self._after(WATCHED if changes else 0))
        self._soonest = self.steps + lost / DEFAULT_BUDGET
        self._next = max(self._after(self._gap), self._soonest)
        self._gap *= GROWTH
        self._look = self._after(LOOK)

    def __str__(self) -> str:
        """Say what was found, for people; nothing before that."""
        if not self.found:
            return ""
        times = {way: duration(1000 * seconds) for way, seconds in self.found.items()}
        all_of_them, one = f"{self.number} threads", "one thread"
        names = (all_of_them, one) if self.kept == UNCHANGED else (one, all_of_them)
        kept, other = times.pop(self.kept), *times.values()
        text = f"{names[0]}, {kept} a step (with {names[1]}: {other})"
        return text + WHILE_BUSY * self.was_busy
