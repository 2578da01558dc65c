"""Progress bars that are drawn when somebody can see it, and wait for no GPU: :class:`Bars`."""

from collections.abc import Callable
from time import monotonic
from typing import Any

import torch

from lightning_ort._imports import LightningNamespace
from lightning_ort.compat.lightning_loops import shown, step_values

PICTURES = 0.1  # seconds between two of them
_DRAWING = ("on_train_batch_end", "on_validation_batch_end", "on_test_batch_end", "on_predict_batch_end")


class Bars:
    """Lets a bar of Lightning draw ten times a second, and when a loop ends, where it shows what stock does.

    A bar with methods of its own is called as always. Values on a GPU are copied when a picture is due, and drawn with
    one of the next batches, when they are there: to read them at once would wait for all steps that are queued.
    ``results`` returns what the loop that runs has logged.
    """

    def __init__(self, namespace: LightningNamespace, device: torch.device, results: Callable[[], Any]) -> None:
        self._device, self._results = device, results
        self.on_cpu = device.type == "cpu"
        self._copied: tuple[Any, Any] | None = None  # values for the next picture, and the event of their copies
        self.late: dict[str, Any] | None = None  # what is drawn now in place of the batch's own values
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
        now = monotonic()
        if self.must_draw or now - self._drawn_at >= PICTURES:
            if self.must_draw or not self._copies():
                self._drawn_at, self._copied = now, None
                self._waiting.pop(draw, None)
                return False
            if self.late is not None:
                self._drawn_at = now
                self._waiting.pop(draw, None)
                try:
                    draw(trainer, trainer.lightning_module, *args)
                finally:
                    self.late = None
                return True
        self._waiting[draw] = lambda: draw(trainer, trainer.lightning_module, *args)
        return True

    def _copies(self) -> bool:
        """Copy what the batch shows from a GPU, or find :attr:`late` in copies; return whether there is a GPU."""
        if self.on_cpu:
            return False
        if self._copied is None:
            if (results := self._results()) is None or (found := step_values(results)) is None:
                return False
            metas, values, *rest = found
            copies = [
                copy_to_host(value) if meta.prog_bar else value for meta, value in zip(metas, values, strict=True)
            ]
            event = torch.Event(self._device)
            event.record()
            self._copied = (metas, copies, *rest), event
        elif self._copied[1].query():
            (kept, _), self._copied = self._copied, None
            self.late = shown(kept)["pbar"]
        return True

    def catch_up(self) -> None:
        """Draw what waits."""
        waiting, self._waiting, self._copied = self._waiting, {}, None
        for draw in waiting.values():
            draw()


def copy_to_host(value: torch.Tensor) -> torch.Tensor:
    """Return a copy in pinned memory, which is there when the device has come to it."""
    return torch.empty_like(value, device="cpu", pin_memory=True).copy_(value, non_blocking=True)
