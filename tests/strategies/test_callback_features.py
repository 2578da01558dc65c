"""Callbacks, loggers and tools of the Trainer: under ``ort`` each gives what it gives under the stock strategy."""

import csv
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from features import Trainers, check_feature, feature, features_of, fit
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    DeviceStatsMonitor,
    EarlyStopping,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    LambdaCallback,
    LearningRateMonitor,
    ModelCheckpoint,
    ModelPruning,
    OnExceptionCheckpoint,
    StochasticWeightAveraging,
)
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.tuner import Tuner
from small_modules import Small, loader
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader

from lightning_ort import ORTStrategy

# --- callbacks


class Backbone(Small):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        return self.net(self.backbone(x))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)


@feature("Callbacks", "`ModelCheckpoint`")
def checkpoint(trainers: Trainers) -> Any:
    callback = ModelCheckpoint(trainers.folder, "{epoch}", monitor="val_loss", save_top_k=2, save_last=True)
    kwargs = {"enable_checkpointing": True, "callbacks": callback, "limit_val_batches": 1.0, "max_epochs": 3}
    fitted = fit(Small(), trainers(**kwargs))
    best = torch.load(callback.best_model_path, weights_only=True)
    assert len(list(trainers.folder.glob("epoch*.ckpt"))) == 2
    return fitted, best["state_dict"], callback.best_model_score, best["epoch"]


@feature("Callbacks", "`EarlyStopping`")
def early_stopping(trainers: Trainers) -> Any:
    callback = EarlyStopping("val_loss", patience=1, min_delta=0.01)
    module = Small()
    fitted = fit(module, trainers(callbacks=callback, limit_val_batches=1.0, max_epochs=50))
    assert 0 < callback.stopped_epoch < 49
    return fitted, callback.stopped_epoch, callback.best_score


@feature("Callbacks", "`StochasticWeightAveraging`")
def swa(trainers: Trainers) -> Any:
    callback = StochasticWeightAveraging(0.05, swa_epoch_start=1, annealing_epochs=2)
    return fit(Backbone(), trainers(callbacks=callback, max_epochs=4))


@feature("Callbacks", "`EMAWeightAveraging`")
def ema(trainers: Trainers) -> Any:
    return fit(Backbone(), trainers(callbacks=EMAWeightAveraging(decay=0.9), limit_val_batches=1.0, max_epochs=3))


@feature("Callbacks", "`BackboneFinetuning`")
def finetuning(trainers: Trainers) -> Any:
    callback = BackboneFinetuning(2, backbone_initial_lr=0.01, train_bn=False)
    return fit(Backbone(), trainers(callbacks=callback, max_epochs=4))


@feature("Callbacks", "`ModelPruning`")
def pruning(trainers: Trainers) -> Any:
    callback = ModelPruning("l1_unstructured", amount=0.3, use_lottery_ticket_hypothesis=False)
    return fit(Small(), trainers(callbacks=callback, max_epochs=3))


@feature("Callbacks", "`GradientAccumulationScheduler`")
def accumulation_scheduler(trainers: Trainers) -> Any:
    return fit(Small(), trainers(callbacks=GradientAccumulationScheduler({0: 1, 1: 2, 2: 4}), max_epochs=3))


@feature("Callbacks", "`DeviceStatsMonitor`")
def device_stats(trainers: Trainers) -> Any:
    logger = CSVLogger(trainers.folder, name="csv", version=0)
    module = Small()
    trainer = trainers(callbacks=DeviceStatsMonitor(cpu_stats=True), logger=logger, log_every_n_steps=1)
    trainer.fit(module)
    assert "cpu_percent" in (trainers.folder / "csv" / "version_0" / "metrics.csv").read_text()
    return module.losses, module.state_dict()


class Stop(Exception):
    pass


@feature("Callbacks", "`OnExceptionCheckpoint`")
def on_exception(trainers: Trainers) -> Any:
    class Fails(Small):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            if self.trainer.global_step == 2:
                raise Stop
            return self.loss(batch)

    with pytest.raises(Stop):
        trainers(callbacks=OnExceptionCheckpoint(trainers.folder), enable_checkpointing=True).fit(Fails())
    return fit(Small(), trainers(), ckpt_path=trainers.folder / "on_exception.ckpt")


@feature("Callbacks", "gradients changed in `on_before_optimizer_step`")
def gradients(trainers: Trainers) -> Any:
    def halve(trainer: Any, module: Any, optimizer: Any) -> None:
        for parameter in module.parameters():
            parameter.grad.mul_(0.5)

    return fit(Small(), trainers(callbacks=LambdaCallback(on_before_optimizer_step=halve)))


# --- loggers


class Halves(Small):
    """Halves its learning rate at each epoch."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [lr_scheduler.StepLR(optimizer, 1, 0.5)]


def without_ours(rows: list[dict[str, float]]) -> list[dict[str, float]]:
    """The rows of a log, without the figures of our report, which has steps of its own."""
    rows = [{key: value for key, value in row.items() if not key.startswith("ort/")} for row in rows]
    return [row for row in rows if row.keys() - {"step", "epoch"}]


@feature("Loggers", "`CSVLogger`, `LearningRateMonitor`")
def csv_logger(trainers: Trainers) -> Any:
    logger = CSVLogger(trainers.folder, name="csv", version=0)
    kwargs = {"callbacks": LearningRateMonitor(), "logger": logger, "log_every_n_steps": 1}
    fitted = fit(Halves(), trainers(**kwargs))
    with (trainers.folder / "csv" / "version_0" / "metrics.csv").open() as file:
        rows = [{key: float(value) for key, value in row.items() if value} for row in csv.DictReader(file)]
    assert any("lr-SGD" in row for row in rows)
    return fitted, without_ours(rows)


def read_events(folder: Path) -> list[dict[str, float]]:
    """Read TensorBoard's files: of each record its size, a checksum, an event and a checksum."""
    from tensorboardX.proto.event_pb2 import Event

    rows = []
    for path in sorted(folder.glob("events.out.tfevents.*")):
        data, start = path.read_bytes(), 0
        while start < len(data):
            (size,) = struct.unpack_from("<Q", data, start)
            event = Event.FromString(data[start + 12 : start + 12 + size])
            rows += [{"step": event.step, value.tag: value.simple_value} for value in event.summary.value]
            start += size + 16
    return rows


@feature("Loggers", "`TensorBoardLogger`, with histograms")
def tensorboard_logger(trainers: Trainers) -> Any:
    class Histograms(Halves):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            self.logger.experiment.add_scalar("by_hand", batch_idx, self.global_step)
            return super().training_step(batch, batch_idx)

        def on_train_epoch_end(self) -> None:
            self.logger.experiment.add_histogram("weights", self.net[0].weight, self.current_epoch)

    logger = TensorBoardLogger(trainers.folder, name="board", version=0)
    fitted = fit(Histograms(), trainers(logger=logger, callbacks=LearningRateMonitor(), log_every_n_steps=1))
    rows = read_events(Path(logger.log_dir))
    assert {"by_hand", "lr-SGD", "loss_step", "loss_epoch", "weights"} <= {key for row in rows for key in row}
    return fitted, without_ours(rows)


# --- tools


@feature("Tools", "`Tuner.lr_find`")
def lr_find(trainers: Trainers) -> Any:
    class Rated(Small):
        def __init__(self) -> None:
            super().__init__()
            self.lr = 1e-3

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=self.lr)

    module, trainer = Rated(), trainers()
    found = Tuner(trainer).lr_find(module, num_training=20, min_lr=1e-4)
    module.losses.clear()
    return module.lr, found.results["loss"], fit(module, trainer)


@feature("Tools", "`Tuner.scale_batch_size`")
def scale_batch_size(trainers: Trainers) -> Any:
    class Sized(Small):
        batch_size = 2

        def train_dataloader(self) -> DataLoader:
            return loader(64, self.batch_size)

    module, trainer = Sized(), trainers()
    size = Tuner(trainer).scale_batch_size(module, init_val=2, max_trials=3, steps_per_trial=1)
    module.losses.clear()
    return size, fit(module, trainer)


def _profiler(name: str) -> None:
    @feature("Tools", f'`profiler="{name}"`')
    def profile(trainers: Trainers) -> Any:
        return fit(Small(), trainers(profiler=name, max_epochs=1))


for _name in ("simple", "advanced", "pytorch"):
    _profiler(_name)


@pytest.mark.parametrize("name", features_of(__name__))
def test_feature(name: str, tmp_path: Path) -> None:
    check_feature(name, tmp_path)


def test_figures_of_the_report_in_tensorboard(make_trainer: Callable[..., Any], tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path)
    strategy = ORTStrategy(config={"placement": "always", "report": tmp_path / "run.json"})
    trainer = make_trainer(strategy=strategy, max_epochs=1, logger=logger)
    trainer.fit(Small())
    figures = {key: row for row in read_events(Path(logger.log_dir)) for key in row if key.startswith("ort/")}
    assert set(figures) == {"ort/node_fraction", "ort/runs", "ort/fallbacks", "ort/steps_per_second"}
    assert figures["ort/runs"] == {"step": trainer.global_step, "ort/runs": strategy.report.ort_runs}
    assert strategy.report.ort_runs > 0
