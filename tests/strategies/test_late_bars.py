"""A progress bar reads no value of a step from a GPU before it is there; a stand-in on the CPU counts what it reads."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback, RichProgressBar, TQDMProgressBar
from lightning_utilities.core.imports import RequirementCache
from small_modules import Small, loader
from torch import Tensor

from lightning_ort import ORTStrategy
from lightning_ort.strategies.lean import bars

BATCHES = 40


class Watched(Small):
    """Counts what is read of tensors on the device, in the batches between the first and the last."""

    def __init__(self) -> None:
        super().__init__()
        self.reads = 0
        self.on = False

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("loss", loss, prog_bar=True)
        return loss

    def train_dataloader(self) -> Any:
        return loader(8 * BATCHES)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.on = 3 <= batch_idx < BATCHES - 1
        self.losses.append(0.0)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses[-1] = outputs["loss"]


class Bar(TQDMProgressBar):
    """Keeps what it shows."""

    def __init__(self) -> None:
        super().__init__()
        self.shown: list[float] = []

    def init_train_tqdm(self) -> Any:
        drawn = super().init_train_tqdm()
        drawn.set_postfix = lambda metrics: self.shown.append(metrics["loss"])
        return drawn


class Device:
    """Stands in for a GPU: what is copied is there after a few questions."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, module: Watched) -> None:
        self.copies: list[Tensor] = []
        item = Tensor.item

        def read(tensor: Tensor) -> Any:
            module.reads += module.on and all(tensor.data_ptr() != copy.data_ptr() for copy in self.copies)
            return item(tensor)

        def copy(value: Tensor) -> Tensor:
            self.copies.append(value.clone())
            return self.copies[-1]

        class Event:
            def __init__(self, device: torch.device) -> None:
                self.asked = 0

            def record(self) -> None:
                pass

            def query(self) -> bool:
                self.asked += 1
                return self.asked > 2

        make = bars.Bars.__init__

        def on_gpu(self: Any, *args: Any) -> None:
            make(self, *args)
            self.on_cpu = False

        monkeypatch.setattr(bars.Bars, "__init__", on_gpu)
        monkeypatch.setattr(bars, "copy_to_host", copy)
        monkeypatch.setattr(bars, "PICTURES", 0.0)
        monkeypatch.setattr(torch, "Event", Event)
        monkeypatch.setattr(Tensor, "item", read)


@pytest.mark.parametrize("loop", ["stock", "lean"])
def test_a_bar_waits_for_no_gpu(loop: str, make_trainer: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    module, bar = Watched(), Bar()
    device = Device(monkeypatch, module)
    strategy = ORTStrategy(config={"engine": "torch", "debug": {"trainer_loop": loop}})
    settings: Any = {"enable_progress_bar": True, "callbacks": [bar], "max_epochs": 1, "limit_val_batches": 0}
    make_trainer(strategy=strategy, **settings).fit(module)
    losses = [loss.item() for loss in module.losses]
    if loop == "stock":
        assert module.reads >= BATCHES - 4
        return
    assert module.reads == 0
    places = [losses.index(value) for value in bar.shown]
    assert places == sorted(places)
    assert len(set(places)) > BATCHES / 6  # one of four batches, since a copy takes three
    assert places[-1] == BATCHES - 1  # at the end, as Lightning shows it
    assert device.copies


@pytest.mark.skipif(not RequirementCache("lightning>=2.6"), reason="its bar fails with today's rich")
def test_a_bar_of_a_short_epoch_shows_its_speed(make_trainer: Callable[..., Any]) -> None:
    speeds: list[float | None] = []

    class Seen(Callback):
        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            speeds.extend(task.speed for task in trainer.progress_bar_callback.progress.tasks)

    settings: Any = {"callbacks": [RichProgressBar(), Seen()], "enable_progress_bar": True}
    make_trainer(strategy="ort", max_epochs=2, limit_val_batches=0, **settings).fit(Watched())
    assert speeds
    assert all(speeds)
