"""How many threads the unchanged step runs on: :class:`Threads`.

What is parallel ends at a barrier, where torch's threads spin until the last one is there. That takes milliseconds
where the machine does not run all of them, for tensors of a few kilobytes too, and on many cores longer than the work.
So all threads and one take turns, which compiles nothing, and the faster goes on until the question is asked again.
They begin once steps have settled: the first ones of a fit beside other programs may take ten times as long as later.

All seconds count, not only working ones: to wait for a processor is what threads cost. As in a race, nothing here
knows of torch or clocks. *All* threads are as many as torch has been told to use.
"""

import math

from lightning_ort._busy import LIMITS, WHILE_BUSY, is_busy
from lightning_ort._text import duration
from lightning_ort.config import DEFAULT_BUDGET
from lightning_ort.strategies.race.duel import LEAST, MOST, Duel
from lightning_ort.strategies.race.terms import ON_ONE_THREAD, UNCHANGED, Took, Way

BETTER = 0.95  # what goes on may take so much of the time of the other at most
SETTLED, SAME = 3, 1.5  # steps have settled if so many take less than so many times as long as each other
PATIENCE = 20  # steps after which a duel begins where they do not
LOST = 2.0  # one turn that takes so many times as long as each of the other ends the duel
AGAIN, GROWTH = 200, 2  # steps until the question is asked again, and how many times more each time after that
SOON = 20  # the same where a duel has changed the way on a busy machine, which may still be settling
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
        self._way = UNCHANGED
        self._took = Took()  # since the optimizer's last step
        self._worst = min(number, cores)  # times as long as on all threads a step takes on one
        self.steps, self._gap = 0, AGAIN
        self._next = 1.0 if number > 1 else math.inf  # the step before which a duel may begin
        self._soonest = self._look = math.inf  # the same where steps became slower; and before which one is timed
        self._slow = 0  # steps of those that were timed last

    def next(self, left: float | None, may_try: bool) -> Way:
        """Return how the next step runs; ``left`` are the steps to come, if known, otherwise as many as were done.

        A duel begins, if it ``may_try``, after steps that have settled, the last of which ended with the optimizer's.
        """
        if self._duel is None and may_try and self.steps >= self._next:
            if self._worst - 1 > DEFAULT_BUDGET * (self.steps if left is None else left):
                self._wait()
            elif self._before is None:
                self._before = []
            elif self._has_settled(self._before):
                other = ON_ONE_THREAD if self.kept == UNCHANGED else UNCHANGED
                self._duel, self._before = Duel(self.kept, other, (self.kept, other), waits=True), None
        self._way = self.kept if self._duel is None else self._duel.turn
        return self._way

    @property
    def is_trying(self) -> bool:
        """Whether there is a duel, or one waits for steps to settle."""
        return self._duel is not None or self._before is not None

    @property
    def wants_time(self) -> bool:
        """Whether the time of the next step matters."""
        return self.is_trying or self.steps >= self._look

    @property
    def quiet_steps(self) -> int:
        """For how many more steps nobody has to ask; :meth:`pass_by` tells of them."""
        return 0 if self.wants_time else int(min(self._next, self._look, 1 << 30)) - self.steps

    @property
    def longest(self) -> float:
        """Seconds after which the rest of a turn runs as the other one, since it has lost."""
        if self._duel is None or self._way == self.kept:
            return math.inf
        return LOST * max(self._duel.samples(self.kept), default=math.inf)

    def pass_by(self, steps: int) -> None:
        """Say that so many steps went without their time."""
        self._took = Took()
        self.steps += steps

    def done(self, took: Took, ends: bool = True) -> None:
        """Say how a step went; a turn goes on until the optimizer's step, which ``ends`` it."""
        self.steps += 1
        self._took = took = Took(self._took.seconds + took.seconds, self._took.waited + took.waited)
        if not ends:
            return
        self._took = Took()
        if self._before is not None:
            self._before.append(took.seconds)
        if (duel := self._duel) is None:
            self._see(took.seconds)
            return
        tries_next = self._way == self.kept == UNCHANGED and not duel.samples(UNCHANGED)
        lost, most = took.seconds > self.longest, MOST if self.found else LEAST  # the race waits for the first duel
        duel.add(self._way, took)
        if tries_next and (self._worst - 1) * took.seconds > LIMITS.get().one_thread:
            self._duel = None
            self._wait()
        elif lost or duel.is_over or min(map(len, duel.steps.values())) >= most:
            self._settle(duel)

    def _wait(self) -> None:
        """Begin no duel now, and ask soon whether one may cost less then."""
        self._before = None
        self._next = 1.5 * self.steps + 1

    @staticmethod
    def _has_settled(steps: list[float]) -> bool:
        last = steps[-SETTLED:]
        return len(steps) >= PATIENCE or (len(last) == SETTLED and max(last) < SAME * min(last))

    def _see(self, seconds: float) -> None:
        """Look at a step without a duel."""
        if self.steps <= self._look:
            return
        self._slow = self._slow + 1 if seconds > SLOWER * self.found[self.kept] else 0
        if self._slow == SLOW:
            self._next = min(self._next, self._soonest)
        if self._slow in (0, SLOW):
            self._slow, self._look = 0, self.steps + LOOK

    def _settle(self, duel: Duel) -> None:
        before, (other,) = self.kept, duel.steps.keys() - {self.kept}
        self._duel, self.found, self.was_busy = None, duel.medians, is_busy(duel.slowdown[ON_ONE_THREAD])
        lost = duel.overhead(before) / self.found[before]  # steps
        changes = self.found[other] < BETTER * self.found[before]
        if changes:
            self.kept, self._gap = other, AGAIN
        self._soonest = self.steps + lost / DEFAULT_BUDGET
        if changes and self.was_busy:
            self._next = self.steps + SOON
        else:
            self._next = max(self.steps + self._gap, self._soonest)
            self._gap *= GROWTH
        self._look = self.steps + LOOK

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
