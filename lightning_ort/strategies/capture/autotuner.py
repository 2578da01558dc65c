"""Time a step on each engine, alternately, on the run's own batches: :class:`StepAutotuner`."""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

Engine = Literal["ort", "torch", "inductor"]

ROUNDS = 5  # samples of each engine, after a first one that allocates and does not count
MAX_ROUNDS = 3 * ROUNDS  # if the fastest two are close
_CLOSE = 1.1


class StepAutotuner:
    """Decides which engine runs a step.

    Regions are timed alone, on made-up inputs, with the processor to themselves. What matters is the whole step, with
    the cost of capture, beside the rest of the program: so steps run on each engine alternately, and are timed with
    their backward passes.

    Args:
        engines: To choose from.
        synchronize: Waits for the device.

    """

    def __init__(self, engines: Sequence[Engine], synchronize: Callable[[], None]) -> None:
        self._synchronize = synchronize
        self._samples: dict[Engine, list[float]] = {engine: [] for engine in engines}
        self._index = 0
        self._seconds = 0.0
        self._counts = False
        self._timing = False

    def next_engine(self) -> Engine:
        """Add the last step's sample, and return the engine for the next step."""
        if self._counts:
            self._samples[self._engine].append(self._seconds)
            self._index = (self._index + 1) % len(self._samples)
        self._seconds, self._counts = 0.0, True
        return self._engine

    @property
    def _engine(self) -> Engine:
        return list(self._samples)[self._index]

    def discard_sample(self) -> None:
        """Do not count the current step, because something compiled in it; the next one runs on the same engine."""
        self._counts = False

    def drop(self, engine: Engine) -> None:
        """Stop timing an engine, which cannot run the current step."""
        del self._samples[engine]
        self._index %= len(self._samples)
        self._counts = False

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Add the block's time to the current step; a block inside another one counts once."""
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
    def done(self) -> bool:
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
