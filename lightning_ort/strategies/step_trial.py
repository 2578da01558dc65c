"""Time a captured step against the module's own, in turns, on the run's own batches: :class:`StepTrial`."""

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

ROUNDS = 5  # of each; one more of each goes before, which allocates


class StepTrial:
    """Decides whether a step stays captured.

    Regions are timed alone, on made-up inputs and with the processor to themselves. What counts is the whole step, with
    capture's own cost, beside the rest of the program: so steps are done alternately in both ways, and timed with
    their backward passes.

    Args:
        synchronize: Waits for the device.

    """

    def __init__(self, synchronize: Callable[[], None]) -> None:
        self._synchronize = synchronize
        self._samples: dict[bool, list[float]] = {True: [], False: []}
        self._captured = False
        self._seconds = 0.0
        self._counts = False
        self._timing = False

    def next(self) -> bool:
        """Close the last step's sample, and return whether the next step is to be the captured one."""
        if self._counts:
            self._samples[self._captured].append(self._seconds)
            self._captured = not self._captured
        else:  # compiling goes on until a captured step has run without
            self._captured = True
        self._seconds, self._counts = 0.0, True
        return self._captured

    def spoil(self) -> None:
        """Leave out the step that is running: something was compiled in it."""
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
        return all(len(samples) > ROUNDS for samples in self._samples.values())

    @property
    def milliseconds(self) -> tuple[float, float]:
        """Medians, captured and as it is."""
        captured, own = (1000 * statistics.median(self._samples[way][1:]) for way in (True, False))
        return captured, own
