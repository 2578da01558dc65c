"""The report says what the time of a step is made of, and what would help."""

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from small_modules import Small
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset

from lightning_ort import CompileReport
from lightning_ort._busy import Stopwatch
from lightning_ort.compiler.run_part import StepTimeReport
from lightning_ort.strategies.advice import advice_on_time, what_would_help

MS = {"loader": 4.0, "Trainer": 3.0, "step": 5.0, "optimizer": 2.0}  # what each takes at least


class Reads(Dataset):
    def __len__(self) -> int:
        return 30

    def __getitem__(self, index: int) -> Any:
        time.sleep(MS["loader"] / 1000)
        return torch.ones(8), torch.tensor(index % 3)


class Slow(Tensor):
    """A value that takes time when it is logged."""

    def detach(self) -> Any:
        time.sleep(MS["Trainer"] / 2000)
        return super().detach()


class Takes(Small):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        time.sleep(MS["step"] / 1000)
        self.log("slow", torch.ones(()).as_subclass(Slow))
        return super().training_step(batch, batch_idx)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        time.sleep(MS["optimizer"] / 1000)

    def train_dataloader(self) -> Any:
        return DataLoader(Reads())


class Watches(Callback):
    """Notes in which steps something of the strategy or the Trainer's fetcher is not as it was."""

    def __init__(self, stop_at: int = -1) -> None:
        self.stop_at = stop_at
        self.changed: list[int] = []
        self.losses: list[float] = []

    def on_train_batch_end(self, trainer: Any, module: LightningModule, outputs: Any, batch: Any, index: int) -> None:
        time.sleep(MS["Trainer"] / 2000)  # the other half is the time of `log`
        self.losses.append(float(outputs["loss"]))
        if self.is_changed(trainer):
            self.changed.append(trainer.global_step)
        if trainer.global_step == self.stop_at:
            raise RuntimeError("stop")

    @staticmethod
    def is_changed(trainer: Any) -> bool:
        fetcher = trainer.fit_loop._data_fetcher
        wrapped = vars(trainer.strategy).keys() & {"training_step", "backward", "optimizer_step"}
        return bool(wrapped) or (fetcher is not None and fetcher.iterator not in (None, fetcher.combined_loader))


def fit(make_trainer: Callable[..., Any], **kwargs: Any) -> tuple[Any, Watches]:
    watches = Watches()
    trainer = make_trainer(
        **{"strategy": "ort", "max_steps": 32, "limit_val_batches": 0, "callbacks": watches, **kwargs}
    )
    trainer.fit(Takes())
    return trainer, watches


def test_each_part_has_its_time(make_trainer: Callable[..., Any]) -> None:
    trainer, watches = fit(make_trainer)
    found = trainer.strategy.report.run.step_time
    assert all(found.ms[part] >= least for part, least in MS.items())
    assert list(found.ms) == list(MS)
    assert len(watches.changed) == 9
    assert "\na training step: " in trainer.strategy.report.to_text()
    again = CompileReport.from_dict(trainer.strategy.report.to_dict())
    assert again.run.step_time == found
    assert fit(make_trainer, strategy="auto")[1].losses == pytest.approx(watches.losses)
    assert not Watches.is_changed(trainer)


def test_steps_of_several_batches_in_short_epochs(
    make_trainer: Callable[..., Any], limits: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    limits(slowdown=1.25)
    monkeypatch.setattr(Stopwatch, "slowdown", 3.0)  # of a busy machine
    trainer, _ = fit(make_trainer, limit_train_batches=12, accumulate_grad_batches=3, max_steps=24)
    found = trainer.strategy.report.run.step_time
    assert all(found.ms[part] >= least for part, least in MS.items())
    assert found.ms["step"] >= 3 * MS["step"]
    assert str(found).endswith("; timed while other programs used the machine")


def test_short_fits_and_short_epochs_are_not_measured(make_trainer: Callable[..., Any]) -> None:
    for kwargs in ({"max_steps": 15}, {"limit_train_batches": 1, "max_steps": 40}):
        trainer, watches = fit(make_trainer, **kwargs)
        assert watches.changed
        assert trainer.strategy.report.run.step_time is None
        assert not Watches.is_changed(trainer)


def test_steps_after_a_fit(make_trainer: Callable[..., Any]) -> None:
    trainer, _ = fit(make_trainer, max_steps=9)
    module, trainer.training = trainer.lightning_module, True  # `log` asks
    batch = next(iter(module.train_dataloader()))
    for index in range(2):
        assert trainer.fit_loop.epoch_loop.automatic_optimization.run(
            trainer.optimizers[0], index, {"batch": batch, "batch_idx": index}
        )["loss"]


def test_an_exception_while_it_is_measured(make_trainer: Callable[..., Any]) -> None:
    trainer = make_trainer(strategy="ort", max_steps=32, callbacks=Watches(stop_at=14))
    with pytest.raises(RuntimeError, match="stop"):
        trainer.fit(Takes())
    assert not Watches.is_changed(trainer)


@pytest.mark.parametrize(
    ("ms", "workers", "of_tensors", "processors", "advice"),
    [
        ((5, 1, 3, 1), 0, False, 2, "a worker would help"),
        ((5, 1, 3, 1), 0, False, 1, "a faster loader"),
        ((5, 1, 3, 1), 0, True, 2, "larger batches"),
        ((5, 1, 3, 1), None, False, 2, "a faster loader"),
        ((5, 1, 3, 1), 2, False, 8, "more than 2 workers"),
        ((0.3, 0.1, 0.1, 0.1), 0, False, 2, "larger batches"),
        ((1, 5, 3, 1), 0, False, 2, "fewer logged values"),
        ((1, 1, 3, 5), 0, False, 2, "accumulate_grad_batches"),
        ((1, 1, 6, 1), 0, False, 2, ""),
    ],
)
def test_what_would_help(ms: Any, workers: Any, of_tensors: bool, processors: int, advice: str) -> None:
    found = what_would_help(dict(zip(MS, ms, strict=True)), workers, of_tensors, processors)
    assert advice in found
    assert bool(advice) == bool(found)


def test_the_loaders_of_a_run_are_looked_at(
    make_trainer: Callable[..., Any], limits: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    ms = {"loader": 5.0, "Trainer": 1.0, "step": 1.0, "optimizer": 1.0}
    module = Small()
    for data, advice in ((Reads(), "worker"), (TensorDataset(torch.ones(4, 8), torch.zeros(4).long()), "batches")):
        trainer = make_trainer(max_steps=1, limit_val_batches=0)
        trainer.fit(module, DataLoader(data, batch_size=2))
        found = advice_on_time(StepTimeReport(ms), module)
        assert found is not None
        assert advice in found.advice
        assert "while other programs" not in str(found)
    assert advice_on_time(None, module) is None
    limits(slowdown=1.25)
    busy = StepTimeReport(ms, slowdown=2.0)
    assert advice_on_time(busy, module) == busy
