"""One turn of a step: the way that it runs, what it took, and the quiet steps after it: :class:`Turn`."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from lightning_ort.strategies.race.race import UNCHANGED, Race, Way


class Turn:
    """The steps from one question to the race to the next: one, or as many as may go on without a question.

    Args:
        way: How they run.
        quiet: How many there may be; 0 if the race is to be told how the first went.
        is_timed: Whether the time of the first matters.
        synchronize: Waits for the device.

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
        self.seconds = 0.0
        self.operations = 0  # in graphs that were compiled
        self.projected = 0.0  # seconds of compiling in all, if that is why a part was left uncompiled
        self.began_at = 0  # the number of autograd's first node of the call
        self._is_passed = quiet > 0  # whether the race need not know how a step went
        self.compiled = self._within = False
        self.call_start = 0.0

    @property
    def since_call(self) -> float:
        """Seconds since the call began."""
        return time.perf_counter() - self.call_start

    def has_compiled(self) -> None:
        """Note that something was compiled in the call; the race has to know."""
        if not self.is_timed:
            self.seconds = self.since_call
        self.compiled, self._is_passed, self.quiet = True, False, 0

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Count the time of the block; a block inside another one counts once."""
        if self._within:
            yield
            return
        self._within = True
        self._synchronize()
        start = time.perf_counter()
        try:
            yield
        finally:
            self._synchronize()
            self.seconds += time.perf_counter() - start
            self._within = False

    def tell(self, race: Race, memory: Callable[[], float]) -> None:
        """Tell the race how the steps went."""
        if passed := self.steps - (not self._is_passed and self.steps > 0):
            race.pass_by(passed)
        if passed < self.steps:
            used = 0.0 if race.trying is None else memory()
            race.done(self.seconds, self.compiled, self.projected, self.counts, used)
