"""Progress bars that are drawn when somebody can see it, and wait for no GPU: :class:`Bars`."""

import functools
import math
from collections.abc import Callable
from time import monotonic
from typing import Any

import torch

from lightning_ort._imports import LightningNamespace
from lightning_ort.compat.lightning import logger_connector
from lightning_ort.compat.lightning_loops import shown

PICTURES = 0.1  # seconds between two of them
_DRAWING = ("on_train_batch_end", "on_validation_batch_end", "on_test_batch_end", "on_predict_batch_end")


class Bars:
    """Lets a bar of Lightning draw the first batch, ten times a second, and the last, where it shows what stock does.

    A bar that draws with methods of its own is called as always. One that waits shows what it would have shown in its
    turn, and nothing that was logged since. Values on a GPU are copied when a picture is due, and drawn with one of the
    next batches, when they are there: to read them at once would wait for all steps that are queued.
    """

    def __init__(self, namespace: LightningNamespace, device: torch.device) -> None:
        self._device = device
        self.on_cpu = device.type == "cpu"
        self._copied: tuple[Any, Any] | None = None  # values for the next picture, and the event of their copies
        self.late: dict[str, Any] | None = None  # what bars show now in place of the values of this moment
        progress = namespace.submodule("callbacks.progress")
        kinds = [progress.TQDMProgressBar, progress.RichProgressBar]
        self.draws = {vars(kind)[name] for kind in kinds for name in _DRAWING}
        self._by_batches = progress.TQDMProgressBar
        self._kinds = tuple(kinds)
        self._drawn_at = 0.0
        self._waiting: dict[Callable[..., Any], tuple[Any, tuple[Any, ...]]] = {}  # what is shown, arguments
        self.must_draw = False  # for this batch: something may happen after it that people see

    def waits(self, bar: Any, draw: Callable[..., Any], trainer: Any, args: tuple[Any, ...]) -> bool:
        """Return whether a bar need not draw this batch, which it is then asked to later."""
        names = _drawn_with(bar.__class__, self._kinds)
        if names is None or not names.isdisjoint(bar.__dict__):
            return False
        if isinstance(bar, self._by_batches) and bar.refresh_rate > 1:
            return False  # it is drawn rarely, in batches that it chooses itself
        now, is_first = monotonic(), args[2] == 0  # from which Rich counts batches a second
        is_due = self.must_draw or is_first or now - self._drawn_at >= PICTURES
        if (is_due and (self.must_draw or self.on_cpu)) or (seen := logger_connector(trainer).seen()) is None:
            self._drawn_at, self._copied = now, None
            self._waiting.pop(draw, None)
            return False
        args = (trainer, trainer.lightning_module, None, None, *args[2:])  # only numbers are shown: the batch may go
        if is_due and (copies := self._copies(*seen)) is not None:
            self._drawn_at = now
            self._waiting.pop(draw, None)
            self._draw(draw, copies, args)
        else:
            self._waiting[draw] = seen, args
        return True

    def idle(self, bar: Any, batches: int) -> tuple[float, float] | None:
        """Return how many batches after so many a bar lets pass, and seconds; ``None`` if only it knows."""
        names = _drawn_with(bar.__class__, self._kinds)
        if names is None or not names.isdisjoint(bar.__dict__):
            return None
        if isinstance(bar, self._by_batches) and bar.refresh_rate > 1:
            return bar.refresh_rate - batches % bar.refresh_rate - 1, math.inf
        return math.inf, self._drawn_at + PICTURES - monotonic()

    def _copies(self, before: dict[str, Any], kept: list[Any]) -> Any:
        """Begin to copy what the batch shows from a GPU, or return what is shown if copies are there."""
        if self._copied is None:
            copies = []
            for metas, values, *rest in kept[-1:]:
                pairs = zip(metas, values, strict=True)
                copies.append((metas, [copy_to_host(one) if meta.prog_bar else one for meta, one in pairs], *rest))
            event = torch.Event(self._device)
            event.record()
            self._copied = copies, event
        elif self._copied[1].query():
            (copies, _), self._copied = self._copied, None
            return before, copies
        return None

    def _draw(self, draw: Callable[..., Any], seen: Any, args: tuple[Any, ...]) -> None:
        metrics, kept = seen
        for values in kept:
            metrics.update(shown(values)["pbar"])
        self.late = metrics
        try:
            draw(*args)
        finally:
            self.late = None

    def catch_up(self) -> None:
        """Draw what waits."""
        waiting, self._waiting, self._copied = self._waiting, {}, None
        for draw, (seen, args) in waiting.items():
            self._draw(draw, seen, args)


@functools.cache
def _drawn_with(kind: type, stock: tuple[type, ...]) -> frozenset[str] | None:
    """Return what a bar of Lightning draws with; ``None`` if a class overrides some of it."""
    base = next((one for one in kind.__mro__ if one in stock), object)
    names = frozenset(name for name in dir(base) if not name.startswith(("__", "on_", "init_")))
    return names if names and all(getattr(kind, name) is getattr(base, name) for name in names) else None


def copy_to_host(value: torch.Tensor) -> torch.Tensor:
    """Return a copy in pinned memory, which is there when the device has come to it."""
    return torch.empty_like(value, device="cpu", pin_memory=True).copy_(value, non_blocking=True)
