"""Progress bars that are drawn when somebody can see it: :class:`Bars`."""

import time
from collections.abc import Callable
from typing import Any

from lightning_ort._imports import LightningNamespace

PICTURES = 0.1  # seconds between two of them
_DRAWING = ("on_train_batch_end", "on_validation_batch_end", "on_test_batch_end", "on_predict_batch_end")


class Bars:
    """Lets a bar of Lightning draw ten times a second, and when a loop ends, where it shows what stock does.

    A bar with methods of its own is called as always.
    """

    def __init__(self, namespace: LightningNamespace) -> None:
        progress = namespace.submodule("callbacks.progress")
        kinds = [progress.TQDMProgressBar, progress.RichProgressBar]
        self.draws = {vars(kind)[name] for kind in kinds for name in _DRAWING}
        self._by_batches = progress.TQDMProgressBar
        self._get_metrics = {kind.get_metrics for kind in kinds}
        self._drawn_at = 0.0
        self._waiting: dict[Callable[..., Any], Callable[[], Any]] = {}
        self.must_draw = False  # for this batch: something may happen after it that people see

    def waits(self, bar: Any, draw: Callable[..., Any], trainer: Any, args: tuple[Any, ...]) -> bool:
        """Return whether a bar need not draw this batch, which it is then asked to later."""
        if getattr(bar.get_metrics, "__func__", None) not in self._get_metrics:
            return False
        if isinstance(bar, self._by_batches) and bar.refresh_rate > 1:
            return False  # it is drawn rarely, in batches that it chooses itself
        now = time.monotonic()
        if self.must_draw or now - self._drawn_at >= PICTURES:
            self._drawn_at = now
            self._waiting.pop(draw, None)
            return False
        self._waiting[draw] = lambda: draw(trainer, trainer.lightning_module, *args)
        return True

    def catch_up(self) -> None:
        """Draw what waits."""
        waiting, self._waiting = self._waiting, {}
        for draw in waiting.values():
            draw()
