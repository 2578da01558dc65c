"""Time a step on one engine against another, in turns, on the run's own batches: :class:`StepAutotuner`."""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

Engine = Literal["ort", "torch", "inductor"]

ROUNDS = 5  # of each; one more of each goes before, which allocates
MAX_ROUNDS = 3 * ROUNDS  # where the fastest two are close
_CLOSE = 1.1


class StepAutotuner:
    """Decides which engine keeps a step.

    Regions are timed alone, on made-up inputs and with the processor to themselves. What counts is the whole step, with
    capture's own cost, beside the rest of the program: so steps are done on each engine in turns, and timed with their
    backward passes.

    Args:
        engines: To choose from.
        synchronize: Waits for the device.

    """

    def __init__(self, engines: Sequence[Engine], synchronize: Callable[[], None]) -> None:
        self._synchronize = synchronize
        self._samples: dict[Engine, list[float]] = {engine: [] for engine in engines}
        self._turn = 0
        self._seconds = 0.0
        self._counts = False
        self._timing = False

    def next(self) -> Engine:
        """Close the last step's sample, and return which engine is to run the next step."""
        if self._counts:
            self._samples[self._engine].append(self._seconds)
            self._turn = (self._turn + 1) % len(self._samples)
        self._seconds, self._counts = 0.0, True
        return self._engine

    @property
    def _engine(self) -> Engine:
        return list(self._samples)[self._turn]

    def spoil(self) -> None:
        """Leave out the step that is running, and do the next one alike: something was compiled in it."""
        self._counts = False

    def drop(self, engine: Engine) -> None:
        """Go on without an engine, which cannot run the step that is running."""
        del self._samples[engine]
        self._turn %= len(self._samples)
        self._counts = False

    @contextmanager
    def clock(self) -> Iterator[None]:
        """Add the block's time to the step that is running; a block inside another one counts once."""
        if self._timing:
            yield
            return
        self._timing = True
        self._synchronize()
        start = time.perf_counter()
        try:
            yield
        finally:
            self._synchronize()
            self._seconds += time.perf_counter() - start
            self._timing = False

    @property
    def over(self) -> bool:
        """Whether there are enough samples."""
        rounds = min(map(len, self._samples.values())) - 1
        if rounds < ROUNDS:
            return False
        fastest, second = sorted(self.milliseconds.values())[:2]
        return rounds >= MAX_ROUNDS or second > _CLOSE * fastest

    @property
    def milliseconds(self) -> dict[str, float]:
        """The median of each engine."""
        return {engine: 1000 * statistics.median(samples[1:]) for engine, samples in self._samples.items()}
