"""What the console says while a step is compiled: one line at the start, one when the verdict is known.

The lines go where the progress bar is, by its own ``print``, so that neither breaks the other. A run without a progress
bar, and a process that is not the first, says nothing.
"""

import os
import sys
from typing import TYPE_CHECKING

from lightning_ort._text import duration, plain
from lightning_ort.compiler.run_part import LABELS
from lightning_ort.strategies.capture.budget import seconds_text

if TYPE_CHECKING:
    import lightning.pytorch as pl

_GREEN, _YELLOW, _DIM, _RESET = "\x1b[32m", "\x1b[33m", "\x1b[2m", "\x1b[0m"


def is_announced(trainer: "pl.Trainer") -> bool:
    """Return whether a run shows a progress bar here, and so gets the lines."""
    bar = trainer.progress_bar_callback
    return bar is not None and getattr(bar, "is_enabled", True) and trainer.is_global_zero


class Announcement:
    """The two lines about one step; a new one for each time that it is compiled from the beginning."""

    def __init__(self, step: str) -> None:
        self._step = step
        self._seconds = 0.0
        self._started = False
        self._ended = False
        self._verdict_given = False

    @property
    def started(self) -> bool:
        """Whether the step is being compiled, or has been."""
        return self._started

    def start(self, trainer: "pl.Trainer", engine: str) -> None:
        """Say that compiling for an engine starts."""
        self._started = True
        text = f"lightning-ort: compiling {self._step} for {LABELS[engine]}; the first batches take longer ..."
        _print(trainer, text, _DIM)

    def add(self, seconds: float) -> None:
        """Count the seconds of a call that compiled something."""
        self._seconds += seconds

    def verdict(self, trainer: "pl.Trainer", ms: dict[str, float], is_clear: bool = True) -> None:
        """Say who runs the step from now on, by its times on each engine; a second call says nothing.

        Without a clear difference it says no more than that.
        """
        if self._verdict_given:
            return
        self._verdict_given, self._ended = True, False  # an earlier run may have ended before
        fastest = min(ms, key=ms.__getitem__)
        others = {engine: each for engine, each in ms.items() if engine != fastest}
        rivals = ", ".join(f"{duration(each)} in {LABELS.get(engine, engine)}" for engine, each in others.items())
        name = LABELS.get(fastest, fastest)
        outcome = "wins" if is_clear else "goes on, without a clear difference"
        text = f"{name} {outcome}, {duration(ms[fastest])} a step ({rivals})"
        if fastest == "torch":
            self._end(trainer, f"{text}; the step stays in PyTorch", _YELLOW)
        elif is_clear:
            self._end(trainer, f"{text}, {ms['torch'] / ms[fastest]:.2f}x as fast as before", _GREEN)
        else:
            self._end(trainer, f"{text}; the machine may be busy", _YELLOW)

    def end(self, trainer: "pl.Trainer", why: str) -> None:
        """Say that compiling has ended without a verdict; a second call, or one before the start, says nothing."""
        self._end(trainer, why, _DIM)

    def say(self, trainer: "pl.Trainer", text: str) -> None:
        """Say what has changed since the verdict."""
        _print(trainer, f"lightning-ort: {self._step}: {text}", _YELLOW)

    def _end(self, trainer: "pl.Trainer", text: str, colour: str) -> None:
        if self._started and not self._ended:
            self._ended = True
            _print(trainer, f"lightning-ort: {self._step} compiled in {seconds_text(self._seconds)}: {text}", colour)


def _print(trainer: "pl.Trainer", text: str, colour: str) -> None:
    if is_announced(trainer):
        bar = trainer.progress_bar_callback
        assert bar is not None
        shows_colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"
        bar.print(f"{colour}{plain(text)}{_RESET}" if shows_colour else plain(text))
