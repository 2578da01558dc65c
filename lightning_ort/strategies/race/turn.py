"""One turn of a step: the way that it runs, what it took, and the quiet steps after it: :class:`Turn`."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from lightning_ort._busy import Stopwatch
from lightning_ort.strategies.race.race import Race
from lightning_ort.strategies.race.terms import UNCHANGED, Took, Way


class Turn:
    """The steps from one question to the race to the next: one, or as many as may go on without a question.

    There may be as many as ``quiet``; 0 if the race is to be told how the first, whose time may matter, went.
    ``synchronize`` waits for the device.
    """

    def __init__(
        self,
        way: Way = UNCHANGED,
        quiet: int = 0,
        is_timed: bool = False,
        synchronize: Callable[[], None] = lambda: None,
    ) -> None:
        self.way, self.is_timed, self._synchronize = way, is_timed, synchronize
        self.quiet = max(0, quiet - 1)  # steps that may follow
        self.steps = 0  # that have begun
        self.captured: Any = None  # what to call, and what to install before
        self.counts = True  # whether the time says how fast the way is
        self.seconds = self.waited = 0.0
        self.operations = 0  # in graphs that were compiled
        self.projected = 0.0  # working seconds of compiling in all, if that is why a part was left uncompiled
        self.began_at = 0  # the number of autograd's first node of the call
        self._is_passed = quiet > 0  # whether the race need not know how a step went
        self.compiled = False
        self._watch: Stopwatch | None = None  # within a timed block
        self.call_start = 0.0

    @property
    def since_call(self) -> float:
        """Seconds since the call began; working ones, as far as it is timed."""
        seconds = time.perf_counter() - self.call_start
        return seconds if self._watch is None else max(0.0, seconds - self._watch.read()[1])

    def has_compiled(self) -> None:
        """Note that something was compiled in the call; the race has to know."""
        if not self.is_timed:
            self.seconds = time.perf_counter() - self.call_start
        self.compiled, self._is_passed, self.quiet = True, False, 0

    def may_go_on(self, race: Race, expected: float = 0.0) -> bool:
        """Return whether more may be compiled in the call, of which so many working seconds are expected in all."""
        if not race.may_compile(self.since_call, expected):
            self.projected = race.charged + max(self.since_call, expected)
        return self.projected == 0

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Count the time of the block; a block inside another one counts once."""
        if self._watch is not None:
            yield
            return
        self._synchronize()
        self._watch = Stopwatch()
        try:
            yield
        finally:
            self._synchronize()
            seconds, waited = self._watch.read()
            self.seconds, self.waited = self.seconds + seconds, self.waited + waited
            self._watch = None

    def tell(self, race: Race, memory: Callable[[], float]) -> None:
        """Tell the race how the steps went."""
        if passed := self.steps - (not self._is_passed and self.steps > 0):
            race.pass_by(passed)
        if passed < self.steps:
            used = 0.0 if race.trying is None else memory()
            race.done(Took(self.seconds, self.waited, self.compiled, self.projected, self.counts, used))
