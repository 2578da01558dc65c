"""One turn of a step: the way that it runs, what it took, and the quiet steps after it: :class:`Turn`."""

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from time import perf_counter
from typing import Any

from lightning_ort._busy import Stopwatch
from lightning_ort.compiler.engines import TORCH
from lightning_ort.compiler.machine.openmp import OneThreadInAll
from lightning_ort.strategies.race.race import Race
from lightning_ort.strategies.race.terms import ON_ONE_THREAD, UNCHANGED, Took, Way
from lightning_ort.strategies.race.threads import Threads

NO_CONTEXT = nullcontext()


class Turn:
    """The steps from one question to the race to the next: one, or as many as may go on without a question.

    There may be as many as ``quiet``; if their time matters, the race is told how each went on average.
    ``synchronize`` waits for the device. ``threads`` is the unchanged step on as many threads as this way runs on, by
    default as many as it names.
    """

    def __init__(
        self,
        way: Way = UNCHANGED,
        quiet: int = 0,
        is_timed: bool = False,
        synchronize: Callable[[], None] = lambda: None,
        threads: Way | None = None,
    ) -> None:
        self.way, self.is_timed, self._synchronize = way, is_timed, synchronize
        self.is_unchanged = way.engine == TORCH
        self.threads = threads or way  # on how many, as the unchanged step on as many
        self.is_plain = not is_timed and self.threads is not ON_ONE_THREAD  # whether nothing is around its parts
        self.longest, self.otherwise = math.inf, way  # after so many seconds in all the rest runs in another way
        self.quiet = max(0, quiet - 1)  # steps that may follow
        self.steps = 0  # that have begun
        self.is_new = False  # whether it was asked for, and no step of it has begun
        self.captured: Any = None  # what to call, and what to install before
        self.counts_for_threads = True  # whether the time says how fast it is on so many threads
        self.counts = True  # whether the time says how fast the way is
        self.seconds = self.waited = 0.0
        self.update = Took()  # the optimizer's
        self.operations = 0  # in graphs that were compiled
        self.projected = 0.0  # working seconds of compiling in all, if that is why a part was left uncompiled
        self.began_at = 0  # the number of autograd's first node of the call
        self._is_passed = not is_timed  # whether the race need not know how steps went
        self.compiled = False
        self._watch: Stopwatch | None = None  # within a timed block
        self.call_start = 0.0

    @property
    def since_call(self) -> float:
        """Seconds since the call began; working ones, as far as it is timed."""
        seconds = perf_counter() - self.call_start
        return seconds if self._watch is None else max(0.0, seconds - self._watch.read()[1])

    def has_compiled(self) -> None:
        """Note that something was compiled in the call; the race has to know."""
        if not self.is_timed:
            self.seconds = perf_counter() - self.call_start
        self.compiled, self._is_passed, self.quiet = True, False, 0

    def is_spoiled(self) -> None:
        """Note that the time of a step says nothing of its way; if times matter, the next one is of another turn."""
        self.counts, self.quiet = False, 0 if self.is_timed else self.quiet

    def may_go_on(self, race: Race, expected: float = 0.0) -> bool:
        """Return whether more may be compiled in the call, of which so many working seconds are expected in all."""
        if not race.may_compile(self.since_call, expected):
            self.projected = race.charged + max(self.since_call, expected)
        return self.projected == 0

    def around(self) -> AbstractContextManager[None]:
        """Return the context of each part of a step that is not plain."""
        return self.timed() if self.is_timed else OneThreadInAll() if self.threads is ON_ONE_THREAD else NO_CONTEXT

    def around_update(self) -> AbstractContextManager[None]:
        """Return that of the optimizer's step, which no compiler is credited with."""
        return self._timed_update() if self.is_timed else self.around()

    @contextmanager
    def _timed_update(self) -> Iterator[None]:
        before = self.seconds, self.waited
        with self.timed():
            yield
        update = self.update
        self.update = Took(update.seconds + self.seconds - before[0], update.waited + self.waited - before[1])
        self.seconds, self.waited = before

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Count the time of the block; a block inside another one counts once."""
        if self._watch is not None:
            yield
            return
        self._synchronize()
        self._watch = Stopwatch()
        try:
            with OneThreadInAll() if self.threads is ON_ONE_THREAD else NO_CONTEXT:
                yield
        finally:
            self._synchronize()
            seconds, waited = self._watch.read()
            self.seconds, self.waited = self.seconds + seconds, self.waited + waited
            self._watch = None
            if self.seconds > self.longest:
                self.threads, self.counts = self.otherwise, False
                self.way = self.otherwise if self.is_unchanged else self.way

    def tell_threads(self, threads: Threads, ends: bool) -> None:
        """Tell who chooses the threads how the steps went; ``ends`` is for the next one."""
        if not self.is_timed or not self.counts_for_threads:
            threads.pass_by(self.steps)
        elif steps := self.steps:
            seconds, waited = self.seconds + self.update.seconds, self.waited + self.update.waited
            threads.done(Took(seconds / steps, waited / steps, steps=steps), ends)

    def tell(self, race: Race, memory: Callable[[], float]) -> None:
        """Tell the race how the steps went."""
        steps = 0 if self._is_passed else min(1, self.steps) if self.compiled else self.steps
        if passed := self.steps - steps:
            race.pass_by(passed)
        if steps:
            used = 0.0 if race.trying is None else memory()
            seconds, waited = self.seconds / steps, self.waited / steps
            race.done(Took(seconds, waited, self.compiled, self.projected, self.counts, used, steps))
