"""Steps of a loop between which nobody but the loader runs: :class:`Windows`.

A window begins with a batch and ends before the next one at which anybody may look or act: a hook, a logger, the end of
an epoch or of a loader, a validation, a limit, a question of the race. That one is run as always. Counters are brought
up to date when a window ends, whatever ends it, and handlers of signals wait for the end of a step.
"""

import _signal
import signal
import threading
from collections.abc import Callable
from time import monotonic
from typing import Any

from lightning_ort.compat.lightning import logger_connector, optimizers_of, precision_of
from lightning_ort.compat.lightning_loops import after_closure, current_results, only_loader, step_schedulers
from lightning_ort.compat.torch import made_by_torch
from lightning_ort.strategies.race.run_facts import TRAINING
from lightning_ort.strategies.whole_batches import is_made_of_tensors


class Windows:
    """Runs windows of a :class:`~.run.LeanRun`."""

    def __init__(self, lean: Any) -> None:
        self._lean = lean
        self._ended_by: list[str] = []  # who has something to do in each batch

    def run(self, loop: Any, fetcher: Any, name: str, done: int, loader: int = 0) -> Any:
        """Run windows, as long as one can begin; return the next item of the fetcher if that was taken from it.

        ``name`` is that of the step, and ``done`` are the batches of the ``loader`` before.
        """
        lean, strategy = self._lean, self._lean.strategy
        while strategy.may_have_window(name):
            optimizer = optimizers_of(strategy)[0] if name == TRAINING else None
            steps, seconds = self._room(loop, fetcher, name, done, loader)
            if steps < 1 or not self._calls_nothing(name, optimizer):
                return None
            if (window := strategy.begin_window(name, loader, optimizer)) is None:
                return None
            schedules = name == TRAINING and bool(step_schedulers(strategy))
            cycle = only_loader(fetcher, lean.loaders)
            is_pure = cycle is not None and made_by_torch(cycle.iterators[0], is_made_of_tensors)
            window.is_pure = is_pure and not schedules
            if name == TRAINING:
                window.accumulated, window.begun = lean.trainer.accumulate_grad_batches, done
            running = _Running(lean, loop, name, loader, window, schedules)
            item = running.run(fetcher, min(steps, window.steps), seconds)
            if item is not None or not window.done:
                return item
            done += window.done
        return None

    def _room(self, loop: Any, fetcher: Any, name: str, done: int, loader: int) -> tuple[float, float]:
        """Return how many batches may pass, and seconds."""
        lean = self._lean
        is_first = current_results(lean.trainer) is not None and not logger_connector(lean.trainer).knows_names
        if is_first or (left := loop.batches_to_event(fetcher, done, loader) - 1) < 1:
            return 0, 0.0
        stage = "train" if name == TRAINING else name.removesuffix("_step")
        names = f"on_{stage}_batch_start", f"on_{stage}_batch_end"
        steps, seconds, ended_by = lean.hooks.idle(lean.trainer, lean.module, names, done)
        if ended_by and ended_by not in self._ended_by:
            self._ended_by.append(ended_by)
            report: Any = lean.strategy.report
            report.run.trainer_loop = f"lean; each step ends a window: {', '.join(self._ended_by)}"
        return min(left, steps), seconds

    def _calls_nothing(self, name: str, optimizer: Any) -> bool:
        """Return whether nobody is called when a batch is moved and around a step, and by schedulers after it."""
        lean, datamodule = self._lean, self._lean.trainer.datamodule
        if lean.how_to_transfer() != (False, True) or not (datamodule is None or lean.hooks.only_moves(datamodule)):
            return False
        if name != TRAINING:
            return bool(lean.direct.may_evaluate(name))
        return (
            lean.module.automatic_optimization
            and lean.direct.may_run(optimizer)
            and not lean.tells_strategy
            and all(step_schedulers(lean.strategy))
            and lean.hooks.is_stock(lean.module, "lr_scheduler_step")
        )


class _Running:
    """One window."""

    def __init__(self, lean: Any, loop: Any, name: str, loader: int, window: Any, schedules: bool) -> None:
        self._lean, self._loop, self._window, self._name, self._loader = lean, loop, window, name, loader
        self._counted = 0  # steps that counters know of
        self._schedules = schedules
        self._results = current_results(lean.trainer) if window.has_effects else None
        self._keep = getattr(loop, "keep", None)  # what the step returns
        self._clip: Callable[[], None] | None = None
        if name == TRAINING and lean.clips_gradients():
            optimizer = optimizers_of(lean.strategy)[0]
            self._clip = lambda: after_closure(precision_of(lean.strategy), lean.module, optimizer)

    def run(self, fetcher: Any, steps: float, seconds: float) -> Any:
        """Run it; return the item that was fetched last, if it was not used."""
        window, now = self._window, monotonic()
        end, took = now + seconds, 0.0
        with _Signals(self._show) as signals:
            try:
                while window.done < steps and not signals.came and now + took < end:
                    item = next(fetcher)
                    batch = item[0]
                    ends = fetcher.done or batch is None or item[2] != self._loader or signals.came
                    if ends or (tensors := window.takes(batch)) is None:
                        return item
                    signals.wait = True
                    if not self._step(batch, tensors):
                        return item
                    signals.wait = False
                    took, now = monotonic() - now, monotonic()
            finally:
                signals.wait = True
                self._show()
                self._end()
        return None

    def _step(self, batch: Any, tensors: Any) -> bool:
        window, lean = self._window, self._lean
        if (results := self._results) is None:
            ran = window.step(tensors, self._clip)
        else:
            logger_connector(lean.trainer).begin_batch(results, batch, results.dataloader_idx)
            ran = lean.call(self._name, window.step, tensors, self._clip)
        if ran and self._keep is not None:
            self._keep(window.output, self._loader)
        if ran and self._schedules:
            self._count()
            for is_plateau in (False, True):
                self._loop.update_lr_schedulers("step", update_plateau_schedulers=is_plateau)
        elif ran and (not window.is_pure or window.reads_counters):
            self._count()
        return bool(ran)

    def _show(self) -> None:
        """Show what is seen after a step."""
        self._count()
        self._window.leave()

    def _count(self) -> None:
        """Bring the counters of Lightning's loops up to date."""
        steps, self._counted = self._window.done - self._counted, self._window.done
        self._loop.count_batches(steps, self._loader)

    def _end(self) -> None:
        lean, window = self._lean, self._window
        if window.done and self._results is not None:
            logger_connector(lean.trainer).on_batch_end()
        lean.strategy.end_window(self._name, window)


class _Signals:
    """In a ``with`` block, handlers of signals that are Python's are called between two steps.

    Args:
        show: Called before, to show what is seen then.

    Attributes:
        wait: Whether handlers wait, until the end of the block.
        came: Signals that came.
    """

    def __init__(self, show: Callable[[], None]) -> None:
        self.wait, self.came = False, list[int]()
        self._show, self._waiting = show, list[int]()
        self._handlers: dict[int, Any] = {}

    def __enter__(self) -> "_Signals":
        if threading.current_thread() is threading.main_thread():
            handlers = {number: _get(number) for number in _SIGNALS}
            self._handlers = {number: handler for number, handler in handlers.items() if callable(handler)}
        for number in self._handlers:
            _put(number, self._note)
        return self

    def _note(self, number: int, frame: Any) -> None:
        self.came.append(number)
        if self.wait:
            self._waiting.append(number)
        else:
            self._show()
            self._handlers[number](number, frame)

    def __exit__(self, *exc_info: object) -> None:
        for number, handler in self._handlers.items():
            if _get(number) == self._note:  # else somebody has put another one there
                _put(number, handler)
        for number in self._waiting:
            signal.raise_signal(number)


# those of `signal` make an object of each number
_get, _put, _SIGNALS = _signal.getsignal, _signal.signal, [*map(int, signal.valid_signals())]
