"""The Trainer's features: under ``ort`` each gives what it gives under the stock strategy, and ONNX Runtime runs it."""

import gc
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from features import FEATURES, Trainers, assert_same, feature, features_of, fit, how_it_ran, run_feature
from lightning.pytorch import Trainer
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
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.tuner import Tuner
from lightning.pytorch.utilities import CombinedLoader
from small_modules import Small, loader
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, IterableDataset

from lightning_ort import ORTStrategy
from lightning_ort.compiler.runtime import BoundSession

# --- the loop


@feature("Trainer", "`accumulate_grad_batches`")
def accumulation(trainers: Trainers) -> Any:
    return fit(Small(), trainers(accumulate_grad_batches=3))


@feature("Trainer", "`gradient_clip_val`, by norm")
def clip_norm(trainers: Trainers) -> Any:
    return fit(Small(), trainers(gradient_clip_val=0.01))


@feature("Trainer", "`gradient_clip_val`, by value")
def clip_value(trainers: Trainers) -> Any:
    return fit(Small(), trainers(gradient_clip_val=0.001, gradient_clip_algorithm="value"))


@feature("Trainer", "sanity check, `check_val_every_n_epoch`")
def sanity(trainers: Trainers) -> Any:
    trainer = trainers(num_sanity_val_steps=2, limit_val_batches=1.0, check_val_every_n_epoch=2, max_epochs=4)
    return fit(Small(), trainer)


@feature("Trainer", "`fast_dev_run`")
def fast_dev_run(trainers: Trainers) -> Any:
    return fit(Small(), trainers(fast_dev_run=2))


@feature("Trainer", "`overfit_batches`")
def overfit(trainers: Trainers) -> Any:
    return fit(Small(), trainers(overfit_batches=2, limit_val_batches=1.0))


@feature("Trainer", "`limit_*_batches`, `val_check_interval`, `max_steps`")
def limits(trainers: Trainers) -> Any:
    limits = {"limit_train_batches": 0.75, "limit_val_batches": 1, "limit_test_batches": 1, "limit_predict_batches": 1}
    module, trainer = Small(), trainers(val_check_interval=2, max_steps=5, max_epochs=-1, **limits)
    fitted = fit(module, trainer)
    return fitted, trainer.test(module, verbose=False), trainer.predict(module)


@feature("Trainer", "`barebones`")
def barebones(trainers: Trainers) -> Any:
    class NoLog(Small):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self.loss(batch)

    left_out = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"))
    return fit(NoLog(), trainers(barebones=True, **left_out))


@feature("Trainer", "`inference_mode=False`")
def no_inference_mode(trainers: Trainers) -> Any:
    module, trainer = Small(), trainers(inference_mode=False, limit_val_batches=1.0)
    return fit(module, trainer), trainer.validate(module, verbose=False), trainer.predict(module)


@feature("Trainer", "`detect_anomaly`")
def anomaly(trainers: Trainers) -> Any:
    return fit(Small(), trainers(detect_anomaly=True))


@feature("Trainer", "`use_distributed_sampler=False`, `reload_dataloaders_every_n_epochs`")
def reload(trainers: Trainers) -> Any:
    return fit(Small(), trainers(use_distributed_sampler=False, reload_dataloaders_every_n_epochs=1))


@feature("Trainer", "a new Trainer for the same module")
def new_trainer(trainers: Trainers) -> Any:
    module = Small()
    return [fit(module, trainers(max_epochs=1)) for _ in range(3)]


@feature("Trainer", "`ckpt_path` of a run that was stopped")
def resume(trainers: Trainers) -> Any:
    trainer = trainers(max_epochs=1)
    fit(Small(), trainer)
    trainer.save_checkpoint(path := trainers.folder / "stopped.ckpt")
    return fit(Small(), trainers(max_epochs=3), ckpt_path=path)


# --- data


@feature("Data", "`CombinedLoader`", slow=True)
def combined(trainers: Trainers) -> Any:
    class Both(Small):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return torch.stack([self.loss(part) for part in batch.values() if part is not None]).sum()

        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            self.log("val_loss", self.loss(batch))

    def loaders(mode: str) -> CombinedLoader:
        return CombinedLoader({"a": loader(32), "b": loader(16)}, mode)

    modes = ("min_size", "max_size_cycle", "max_size")
    fitted = [fit(Both(), trainers(), train_dataloaders=loaders(mode)) for mode in modes]
    return fitted, trainers(limit_val_batches=1.0).validate(Both(), loaders("sequential"), verbose=False)


@feature("Data", "a dictionary of loaders")
def dictionary(trainers: Trainers) -> Any:
    class Both(Small):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self.loss(batch["a"]) + self.loss(batch["b"])

    return fit(Both(), trainers(), train_dataloaders={"a": loader(32), "b": loader(16)})


@feature("Data", "several validation loaders")
def several_validation(trainers: Trainers) -> Any:
    class Several(Small):
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            self.log("val_loss", self.loss(batch) * (1 + dataloader_idx))

        def val_dataloader(self) -> Any:
            return [loader(16), loader(12, 4), loader(24)]

    return fit(Several(), trainers(limit_val_batches=1.0))


@feature("Data", "iterable data of unknown length")
def iterable(trainers: Trainers) -> Any:
    class Stream(IterableDataset):
        def __iter__(self) -> Iterator[Any]:
            yield from loader(44).dataset

    return fit(Small(), trainers(), train_dataloaders=DataLoader(Stream(), batch_size=8))


# --- optimizers and schedules

SCHEDULES: dict[str, Callable[[Any], dict[str, Any]]] = {
    "StepLR": lambda o: {"scheduler": lr_scheduler.StepLR(o, 1, 0.5)},
    "OneCycleLR": lambda o: {"scheduler": lr_scheduler.OneCycleLR(o, 0.2, total_steps=20), "interval": "step"},
    "CosineAnnealingWarmRestarts": lambda o: {
        "scheduler": lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
        "interval": "step",
        "frequency": 2,
    },
    "ReduceLROnPlateau": lambda o: {
        "scheduler": lr_scheduler.ReduceLROnPlateau(o, factor=0.5, patience=0, threshold=1.0),
        "monitor": "val_loss",
    },
    "SequentialLR": lambda o: {
        "scheduler": lr_scheduler.SequentialLR(
            o, [lr_scheduler.LinearLR(o, 0.1, total_iters=2), lr_scheduler.ExponentialLR(o, 0.5)], [2]
        ),
        "interval": "step",
    },
}


class Scheduled(Small):
    def __init__(self, make: Callable[[Any], dict[str, Any]]) -> None:
        super().__init__()
        self.make = make
        self.rates: list[float] = []

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        return {"optimizer": optimizer, "lr_scheduler": self.make(optimizer)}

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.rates.append(self.optimizers().param_groups[0]["lr"])


def _schedule(name: str) -> None:
    @feature("Optimizers", f"`{name}`")
    def schedule(trainers: Trainers) -> Any:
        module = Scheduled(SCHEDULES[name])
        fitted = fit(module, trainers(max_epochs=4, limit_val_batches=1.0))
        assert len(set(module.rates)) > 1
        return fitted, module.rates


for _name in SCHEDULES:
    _schedule(_name)


@feature("Optimizers", "`lr_scheduler_step` overridden")
def scheduler_step(trainers: Trainers) -> Any:
    class Steps(Scheduled):
        def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
            scheduler.step(epoch=self.current_epoch + 1)

    module = Steps(SCHEDULES["CosineAnnealingWarmRestarts"])
    return fit(module, trainers()), module.rates


@feature("Optimizers", "`LBFGS`, which calls the step many times")
def lbfgs(trainers: Trainers) -> Any:
    class LBFGS(Small):
        def configure_optimizers(self) -> Any:
            return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)

    return fit(LBFGS(), trainers())


@feature("Optimizers", "`optimizer_step` and `backward` overridden")
def own_optimizer_step(trainers: Trainers) -> Any:
    class Own(Small):
        def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
            for group in optimizer.param_groups:
                group["lr"] = 0.1 * (batch_idx + 1) / 4
            super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)

        def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
            (loss * 2).backward(*args, **kwargs)

    return fit(Own(), trainers())


@feature("Optimizers", "no optimizer")
def no_optimizer(trainers: Trainers) -> Any:
    class Looks(Small):
        def configure_optimizers(self) -> None:
            return None

    return fit(Looks(), trainers())


@feature("Optimizers", "`ReduceLROnPlateau` by hand")
def manual_plateau(trainers: Trainers) -> Any:
    class Manual(Scheduled):
        def __init__(self) -> None:
            super().__init__(SCHEDULES["ReduceLROnPlateau"])
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            optimizer = self.optimizers()
            loss = self.loss(batch)
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            return loss

        def on_train_epoch_end(self) -> None:
            self.lr_schedulers().step(self.losses[-1])

    module = Manual()
    return fit(module, trainers(max_epochs=3)), module.rates


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


@feature("Callbacks", "`LearningRateMonitor`, `CSVLogger`")
def monitor(trainers: Trainers) -> Any:
    logger = CSVLogger(trainers.folder, name="csv", version=0)
    kwargs = {"callbacks": LearningRateMonitor(), "logger": logger, "log_every_n_steps": 1}
    fitted = fit(Scheduled(SCHEDULES["StepLR"]), trainers(**kwargs))
    lines = (trainers.folder / "csv" / "version_0" / "metrics.csv").read_text().splitlines()
    rows = [dict(zip(lines[0].split(","), line.split(","), strict=True)) for line in lines[1:]]
    # without the figures of our report
    logged = [{key: float(value) for key, value in row.items() if value and "ort/" not in key} for row in rows]
    return fitted, [row for row in logged if row.keys() - {"step", "epoch"}]


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
    stock, _ = run_feature(name, False, tmp_path / "stock")
    ours, reports = run_feature(name, True, tmp_path / "ort")
    assert_same(ours, stock)
    assert how_it_ran(reports) == FEATURES[name].how
    assert not [entry for report in reports for entry in report.fallbacks]


# --- many runs in one process


@torch._dynamo.config.patch(accumulated_recompile_limit=3)
def test_trials_of_a_search_free_what_they_compiled(tmp_path: Path) -> None:
    """As Optuna does: in each trial a new Trainer and a new module of the same class."""
    modules, sessions, graphs = [], [], []
    for _ in range(4):
        module, trainers = Small(), Trainers(True, tmp_path)
        fit(module, trainers(max_epochs=1, limit_val_batches=1.0))
        (report,) = trainers.reports
        assert report.ort_runs > 0
        assert not report.fallbacks
        graphs.append([graph.name for graph in report.graphs])
        modules.append(weakref.ref(module))
        del module, trainers, report
        gc.collect()
        sessions.append(sum(isinstance(thing, BoundSession) for thing in gc.get_objects()))
    assert all(names == graphs[0] for names in graphs)
    assert sum(module() is not None for module in modules) <= 1
    assert sessions[0] > 0
    assert sessions[-1] <= 2 * sessions[0]  # what the last trial compiled goes when the next one begins


def test_evaluation_reads_the_weights_of_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    addresses: dict[int, set[int]] = {}
    bind = BoundSession._bind_input

    def note(session: BoundSession, index: int, tensor: Tensor, address: int) -> None:
        addresses.setdefault(id(session), set()).add(address)
        bind(session, index, tensor, address)

    monkeypatch.setattr(BoundSession, "_bind_input", note)
    module, trainers = Small(), Trainers(True, tmp_path)
    trainer = trainers(limit_val_batches=1.0)
    trainer.fit(module)
    trainer.predict(module)
    expected = torch.cat([module(x) for x, _ in loader(16)])
    torch.testing.assert_close(torch.cat(trainer.predict(module)), expected, rtol=1e-4, atol=1e-5)
    (report,) = trainers.reports
    labels = {graph.name.split("/")[0] for graph in report.graphs if graph.num_ort_nodes}
    assert labels == {"training_step", "validation_step", "predict_step"}
    for parameter in module.parameters():
        readers = [session for session, seen in addresses.items() if parameter.data_ptr() in seen]
        assert len(readers) >= len(labels)


def test_the_other_lightning_is_refused(tmp_path: Path) -> None:
    pl = pytest.importorskip("pytorch_lightning")
    from lightning_ort.pytorch_lightning.strategies import ORTStrategy as OtherStrategy

    with pytest.raises(ValueError, match=r"instance of `lightning\.pytorch\.strategies\.Strategy`"):
        Trainer(strategy=OtherStrategy(), accelerator="cpu")
    with pytest.raises(ValueError, match=r"instance of `pytorch_lightning\.strategies\.Strategy`"):
        pl.Trainer(strategy=ORTStrategy(), accelerator="cpu")
    with pytest.raises(TypeError, match="`model` must be a `LightningModule`"):
        pl.Trainer(strategy="ort", accelerator="cpu", default_root_dir=tmp_path, logger=False).fit(Small())
