"""What the time of a training step is made of, measured in a few steps: :class:`StepTime`."""

import functools
from collections.abc import Callable, Iterator
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch

from lightning_ort._busy import Stopwatch
from lightning_ort.compat.lightning import train_fetcher
from lightning_ort.compiler.run_part import STEP_PARTS, StepTimeReport
from lightning_ort.strategies.lean.log import LeanLog, is_lean

if TYPE_CHECKING:
    import lightning.pytorch as pl

LOADER, TRAINER, STEP, OPTIMIZER = STEP_PARTS
_FIRST, _RARER = 10, 4  # the step where it is measured first, and how many times as many pass before the next time
_MEASURED, _TRIED = 8, 24  # steps of the optimizer: so many are measured, or none if so many were of no use
_LARGEST = 1.5  # of the median: a step that takes longer has done something else, such as a validation


class StepTime:
    """Watches a few steps of a fit, ever more rarely; what it found last is in :attr:`found`.

    While it watches, the strategy calls methods that are :meth:`timed`, and what the Trainer fetches batches from is
    wrapped. In all other steps the strategy counts :attr:`steps`, and calls :meth:`look` when they reach
    :attr:`next_look`.
    """

    def __init__(self) -> None:
        self.found: StepTimeReport | None = None
        self.steps = 0
        self.next_look = _FIRST
        self._watch: _Watch | None = None

    def setup(self) -> None:
        """Begin a run."""
        self.teardown()
        self.found, self.steps, self.next_look = None, 0, _FIRST

    def look(self, trainer: "pl.Trainer") -> None:
        """Begin to watch, or go on; at the end the Trainer's next steps are as they were."""
        if self._watch is None:
            if train_fetcher(trainer) is not None:  # else somebody runs a step, and no fit
                self._watch = _Watch(trainer)
        elif self._watch.next_step():
            self.found = self._watch.found or self.found
            self.teardown()
            self.next_look = _RARER * self.steps

    def timed(self, part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return a method, whose time is that of a part of the step while somebody watches."""
        return call if self._watch is None else self._watch.timed(part, call)

    def teardown(self) -> None:
        """Stop to watch; a second call does nothing."""
        if self._watch is not None:
            self._watch.stop()
            self._watch = None


class _Watch:
    """Attributes the time to the parts of a step; what is none of the others is the Trainer's."""

    def __init__(self, trainer: "pl.Trainer") -> None:
        self._trainer, self._device = trainer, trainer.strategy.root_device
        self._batches = trainer.accumulate_grad_batches
        self._within = [TRAINER]
        self._parts = dict.fromkeys(STEP_PARTS, 0.0)
        self._steps: list[dict[str, float]] = []
        self._batch, self._tried = -1, 0  # the one in which it begins is not seen from its start
        # a step that logs calls the Trainer; captured steps know the attribute `log` as it is
        log: Any = vars(trainer.lightning_module).get("log")
        self._log: LeanLog | None = log.__self__ if is_lean(log) else None
        if self._log is not None:
            self._log.timed = self.timed(TRAINER, self._untimed_log)
        self._iterator = self._timed_iterator()
        self._since, self._stopwatch = self._now(), Stopwatch()

    def next_step(self) -> bool:
        """Note that a step begins; return whether it is the last one to watch."""
        self._batch += 1
        if self._batch % self._batches == 0:
            self._charge()
            parts, self._parts = self._parts, dict.fromkeys(STEP_PARTS, 0.0)
            self._tried += 1
            if train_fetcher(self._trainer).iterator is not self._iterator:  # another epoch has begun
                self._iterator = self._timed_iterator()
            elif self._batch > 0:
                self._steps.append(parts)
        return len(self._steps) == _MEASURED or self._tried == _TRIED

    def stop(self) -> None:
        if self._log is not None:
            self._log.timed = None
        fetcher = train_fetcher(self._trainer)
        if fetcher is not None and fetcher.iterator is self._iterator:
            fetcher.iterator = self._iterator.iterator

    def _untimed_log(self, *args: Any, **kwargs: Any) -> None:
        assert self._log is not None
        timed, self._log.timed = self._log.timed, None
        try:
            self._log.log(*args, **kwargs)
        finally:
            self._log.timed = timed

    @property
    def found(self) -> StepTimeReport | None:
        """Mean time of each part in a step of the optimizer; ``None`` if too few were measured."""
        totals = [sum(parts.values()) for parts in self._steps]
        limit = _LARGEST * sorted(totals)[len(totals) // 2] if len(totals) == _MEASURED else 0.0
        usual = [parts for parts, total in zip(self._steps, totals, strict=True) if total <= limit]
        if not usual:
            return None
        ms = {part: 1e3 * sum(parts[part] for parts in usual) / len(usual) for part in STEP_PARTS}
        return StepTimeReport(ms, slowdown=self._stopwatch.slowdown)

    def timed(self, part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function whose time is that of a part."""

        @functools.wraps(call)
        def timed(*args: Any, **kwargs: Any) -> Any:
            self._charge()
            self._within.append(part)
            try:
                return call(*args, **kwargs)
            finally:
                self._charge()
                self._within.pop()

        return timed

    def _timed_iterator(self) -> "_TimedIterator":
        fetcher = train_fetcher(self._trainer)
        fetcher.iterator = timed = _TimedIterator(fetcher.iterator, self.timed)
        return timed

    def _charge(self) -> None:
        now = self._now()
        self._parts[self._within[-1]] += now - self._since
        self._since = now

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return perf_counter()


class _TimedIterator:
    """Stands for the iterator that the Trainer fetches batches from."""

    def __init__(self, iterator: Iterator[Any], timed: Callable[[str, Callable[..., Any]], Callable[..., Any]]) -> None:
        self.iterator = iterator
        self._next = timed(LOADER, iterator.__next__)

    def __iter__(self) -> "_TimedIterator":
        return self

    def __next__(self) -> Any:
        return self._next()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.iterator, name)
