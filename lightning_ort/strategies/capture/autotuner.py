"""Time a step on each engine, alternately, on the run's own batches: :class:`StepAutotuner`."""

import statistics
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Literal

from lightning_ort.compiler.timing import CLEAR_ROUNDS, not_far_behind

Engine = Literal["ort", "torch", "inductor", "inductor-graphs"]

ROUNDS = 6  # samples of each engine, after a first one that allocates and does not count
MAX_ROUNDS = 3 * ROUNDS  # if the fastest two are close
# of all samples, or one burst of work elsewhere covers a whole trial of steps of a millisecond
MIN_SECONDS = 0.06
_CLOSE = 1.1
FIRST_CHECK, _CHECKS_GROW = 200, 5


class Checks:
    """When the engine that won a trial is timed against the unchanged step again: after ever more steps.

    Something else may have used the processor during the trial, and later batches may be others.
    """

    def __init__(self) -> None:
        self.after = 0  # steps; 0 before the trial
        self._steps = 0

    def schedule(self) -> None:
        """Plan the next one."""
        self.after = _CHECKS_GROW * self.after or FIRST_CHECK

    def due(self) -> bool:
        """Count a step, and return whether a check begins with it."""
        if not self.after:
            return False
        self._steps += 1
        return self._steps == self.after


class StepAutotuner:
    """Decides which engine runs a step.

    Regions are timed alone, on made-up inputs, with the processor to themselves. What matters is the whole step, with
    the cost of capture, beside the rest of the program: so steps run on each engine alternately, and are timed with
    their backward passes.

    Args:
        engines: The engines, in their order.
        synchronize: Waits for the device.
        last: An engine that is tried after the others.
        worth_trying: Whether it is, by the times of the others in ms.

    """

    def __init__(
        self,
        engines: Sequence[Engine],
        synchronize: Callable[[], None],
        last: Engine | None = None,
        worth_trying: Callable[[Mapping[str, float]], bool] = lambda ms: True,
    ) -> None:
        self._synchronize = synchronize
        self._samples: dict[Engine, list[float]] = {engine: [] for engine in engines}
        self._last, self._worth_trying = last, worth_trying
        self._engine = engines[0]
        self._seconds = 0.0
        self._counts = False
        self._timing = False

    def next_engine(self) -> Engine:
        """Add the last step's sample, and return the engine for the next step: one with the fewest samples."""
        self.add_sample()
        if self._last is not None and self._enough:
            last, self._last = self._last, None
            if self._worth_trying(self.milliseconds):
                self._samples[last] = []
        self._seconds, self._counts = 0.0, True
        fewest = min(map(len, self._samples.values()))
        behind = [engine for engine, samples in self._samples.items() if len(samples) == fewest]
        # A B, B A, A B: what alternates from step to step, as in GANs and with accumulation, meets each engine
        self._engine = behind[-(fewest % 2)]
        return self._engine

    def add_sample(self) -> None:
        """Add the last step's sample; a second call does nothing."""
        if self._counts:
            self._samples[self._engine].append(self._seconds)
        self._counts = False

    def discard_sample(self) -> None:
        """Do not count the current step, because something compiled in it; the next one runs on the same engine."""
        self._counts = False

    def drop(self, engine: Engine) -> None:
        """Stop timing an engine, which cannot run the current step."""
        del self._samples[engine]
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
    def engines(self) -> Collection[Engine]:
        """What is timed."""
        return self._samples.keys()

    @property
    def rounds(self) -> int:
        """How many samples of each engine count."""
        return min(map(len, self._samples.values())) - 1

    def overhead(self, engine: Engine) -> float:
        """Return the seconds by which samples took longer than the median of the engine that was used before."""
        usual = statistics.median(self._samples[engine][1:])
        others = (samples for other, samples in self._samples.items() if other != engine)
        return sum(max(0.0, seconds - usual) for samples in others for seconds in samples)

    def saved_by(self, engine: Engine) -> float:
        """Return the seconds by which a step on an engine is faster than unchanged.

        It is the lesser of what medians and lower quartiles say, since interruptions of either are no saving.
        """
        if not {engine, "torch"} <= self._samples.keys():
            return 0.0
        own, unchanged = (statistics.quantiles(self._samples[one][1:], method="inclusive") for one in (engine, "torch"))
        return max(0.0, min(unchanged[quartile] - own[quartile] for quartile in (0, 1)))

    @property
    def done(self) -> bool:
        """Whether there are enough samples."""
        return self._last is None and self._enough

    @property
    def _enough(self) -> bool:
        rounds = self.rounds
        if any((len(samples) - 1) % 2 for samples in self._samples.values()):
            return False  # an engine may have had more of one kind of work than of another
        if sum(map(sum, self._samples.values())) < MIN_SECONDS:
            return False
        if rounds < ROUNDS:
            samples = {engine: samples[1:] for engine, samples in self._samples.items()}
            return rounds >= CLEAR_ROUNDS and len(not_far_behind(samples)) == 1
        if len(self._samples) == 1:
            return True
        fastest, second = sorted(self.milliseconds.values())[:2]
        return rounds >= MAX_ROUNDS or second > _CLOSE * fastest

    @property
    def is_clear(self) -> bool:
        """Whether the fastest two differ by more than the middle half of the samples of either."""
        if len(self._samples) == 1:
            return True
        fastest, second = sorted(self._samples, key=self.milliseconds.__getitem__)[:2]
        quartiles = [statistics.quantiles(self._samples[one][1:], method="inclusive") for one in (fastest, second)]
        spread = max(high - low for low, _, high in quartiles)
        return quartiles[1][1] - quartiles[0][1] > spread

    @property
    def milliseconds(self) -> dict[str, float]:
        """The median of each engine."""
        return {engine: 1000 * statistics.median(samples[1:]) for engine, samples in self._samples.items()}
