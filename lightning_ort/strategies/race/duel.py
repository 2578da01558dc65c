"""Two ways of a step in turns: :class:`Duel`."""

import statistics
from collections.abc import Iterable

from lightning_ort._busy import LIMITS, is_busy, slowdown
from lightning_ort.strategies.race.terms import Took, Way

CLEAR, LEAST, MOST = 2, 6, 18  # samples of each way in a duel: far apart, usual, close
FAR, CLOSE = 1.5, 1.1  # ratios of times
TOGETHER, MANY = 0.002, 16  # seconds of short steps that are timed as one, and how many these are at most


def steps_of_turn(seconds: float) -> int:
    """Return how many steps that take so long are timed as one."""
    return max(1, min(MANY, int(TOGETHER / seconds))) if seconds > 0 else 1


class Duel:
    """Two ways take turns, A B, B A, A B, so that work that alternates from step to step meets both.

    Working seconds count: those in which other programs had the processor say nothing about a way. The first step of a
    way that has not ``ran`` yet does not count, since it allocates; nor do steps that compile. A turn has several short
    steps, whose mean is a sample. ``memory`` are the bytes that the process used before; 0 if nobody knows. With
    ``waits`` all seconds count.
    """

    def __init__(
        self, challenger: Way, champion: Way, ran: Iterable[Way], memory: float = 0.0, waits: bool = False
    ) -> None:
        self.challenger, self.champion, self.memory, self._waits = challenger, champion, memory, waits
        self.steps: dict[Way, list[Took]] = {challenger: [], champion: []}
        self._fresh = self.steps.keys() - ran

    @property
    def turn(self) -> Way:
        """Whose turn it is."""
        counts = {name: len(steps) - (name in self._fresh) for name, steps in self.steps.items()}
        fewest = min(counts.values())
        behind = [name for name, count in counts.items() if count == fewest]
        return behind[-(fewest % 2)]

    @property
    def length(self) -> int:
        """How many steps it has."""
        known = self.samples(self.turn)
        return steps_of_turn(statistics.median(known)) if known else 1

    def add(self, way: Way, took: Took) -> None:
        """Add a turn."""
        if way in self._fresh:
            self._fresh.discard(way)
        else:
            self.steps[way].append(took)

    def samples(self, way: Way) -> list[float]:
        """Return the seconds of a step in each turn of a way."""
        return [took.seconds if self._waits else took.working for took in self.steps[way]]

    def _total(self, ways: Iterable[Way], beyond: float = 0.0) -> float:
        """Return the seconds of all steps of ways, and of each those ``beyond`` so many."""
        pairs = [pair for way in ways for pair in zip(self.steps[way], self.samples(way), strict=True)]
        return sum(took.steps * max(0.0, seconds - beyond) for took, seconds in pairs)

    @property
    def is_over(self) -> bool:
        """Whether there are enough samples."""
        one, other = map(self.samples, self.steps)
        count = len(one)
        if self._fresh or count < CLEAR or count % 2 or len(other) != count:
            return False
        if self._total(self.steps) < LIMITS.get().duel:
            return False
        fast, slow = sorted((one, other), key=statistics.median)
        if max(fast) * FAR < min(slow) or count >= MOST:
            return True
        return count >= LEAST and statistics.median(slow) > CLOSE * statistics.median(fast)

    @property
    def medians(self) -> dict[Way, float]:
        """The median of each way in seconds."""
        return {way: statistics.median(self.samples(way)) for way in self.steps}

    def saved_by(self, way: Way) -> float:
        """Return the seconds by which a way is faster: the lesser of what medians and lower quartiles say."""
        own, other = (self._quartiles(one) for one in (way, *(self.steps.keys() - {way})))
        return max(0.0, min(other[index] - own[index] for index in (0, 1)))

    @property
    def is_clear(self) -> bool:
        """Whether the medians differ by more than the middle half of the samples of either way."""
        one, other = map(self._quartiles, self.steps)
        return abs(one[1] - other[1]) > max(one[2] - one[0], other[2] - other[0])

    @property
    def slowdown(self) -> dict[Way, float]:
        """How many times as long the steps of each way took as on an idle machine."""
        return {way: slowdown_of(steps) for way, steps in self.steps.items()}

    @property
    def is_busy(self) -> bool:
        """Whether other programs may have decided it."""
        return is_busy(max(self.slowdown.values()))

    def overhead(self, used: Way) -> float:
        """Return the seconds by which steps took longer than the way that was used before usually does."""
        return self._total(self.steps.keys() - {used}, self.medians[used])

    def _quartiles(self, way: Way) -> list[float]:
        return statistics.quantiles(self.samples(way), method="inclusive")


def slowdown_of(steps: Iterable[Took]) -> float:
    """Return how many times as long steps took, together, as on an idle machine."""
    steps = list(steps)
    return slowdown(sum(took.seconds for took in steps), sum(took.waited for took in steps))
