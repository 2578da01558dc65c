"""The Trainer's features: under ``ort`` each gives what it gives under the stock strategy, and ONNX Runtime runs it."""

import gc
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from features import QUIET, Trainers, check_feature, feature, features_of, fit
from lightning.pytorch import Trainer
from lightning.pytorch.utilities import CombinedLoader
from small_modules import Small, loader
from torch import Tensor
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, IterableDataset

from lightning_ort import ORTStrategy
from lightning_ort.compiler.executors.ort.binding import BoundSession

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


OTHER_SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.5, 2), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, 0.5, 2),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 4),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, 3),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.5),
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, 0.1, total_iters=4),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [1, 3], 0.5),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda step: 0.9),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 5, 2.0),
    "SWALR": lambda o: torch.optim.swa_utils.SWALR(o, 0.01, 2),
}


@feature("Optimizers", "all other schedules of torch", slow=True)
def other_schedules(trainers: Trainers) -> Any:
    results = []
    for make in OTHER_SCHEDULES.values():
        module = Scheduled(lambda o, make=make: {"scheduler": make(o), "interval": "step"})
        results.append((fit(module, trainers(max_epochs=1)), module.rates))
        assert len(set(module.rates)) > 1
    return results


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


@pytest.mark.parametrize("name", features_of(__name__))
def test_feature(name: str, tmp_path: Path) -> None:
    check_feature(name, tmp_path)


def test_every_schedule_of_torch_is_there() -> None:
    kinds = [torch.optim.swa_utils.SWALR, *vars(lr_scheduler).values()]
    base = lr_scheduler.LRScheduler
    names = {kind.__name__ for kind in kinds if isinstance(kind, type) and issubclass(kind, base)} - {"_LRScheduler"}
    assert names - {base.__name__} == {*SCHEDULES, *OTHER_SCHEDULES}


# --- many runs in one process


class Breaks(Small):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        if loss > 0.3:
            loss = loss * 2
        return loss + self.net[0].weight.square().sum() * 1e-2


def bound_sessions() -> list[BoundSession]:
    """All that are alive."""
    return [thing for thing in gc.get_objects() if type(thing) is BoundSession]


@pytest.mark.parametrize(
    ("module_class", "capture"),
    [
        (Small, "step"),
        pytest.param(Small, "modules", marks=pytest.mark.slow),
        *(pytest.param(Breaks, capture, marks=pytest.mark.slow) for capture in ("step", "modules")),
    ],
)
@torch._dynamo.config.patch(accumulated_recompile_limit=3)
def test_trials_of_a_search_free_what_they_compiled(module_class: type[Small], capture: Any, tmp_path: Path) -> None:
    """As Optuna does: in each trial a new Trainer and a new module of the same class."""
    modules, sessions, graphs = [], [], []
    others = bound_sessions()  # which live on as long as this test, so that only its own are counted
    for _ in range(4):
        module, strategy = module_class(), ORTStrategy(config={"placement": "always", "debug": {"capture": capture}})
        Trainer(**{**QUIET, "strategy": strategy, "default_root_dir": tmp_path, "limit_val_batches": 1.0}).fit(module)
        assert strategy.report.ort_runs > 0
        assert not strategy.report.fallbacks
        assert (strategy.report.graph_breaks > 0) == (module_class is Breaks and capture == "step")
        graphs.append([graph.name for graph in strategy.report.graphs])
        modules.append(weakref.ref(module))
        del module, strategy
        gc.collect()
        sessions.append(len(bound_sessions()) - len(others))
    assert all(names == graphs[0] for names in graphs)
    assert sum(module() is not None for module in modules) <= 1
    assert sessions[0] > 0
    # what a trial compiled goes when a next one begins after its end; the first one's may live for one more
    assert sessions[2:] == [sessions[0]] * 2


def test_evaluation_reads_the_weights_of_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    addresses: dict[int, set[int]] = {}
    bind = BoundSession._bind_input

    def note(session: BoundSession, binding: Any, index: int, size: tuple[int, ...], address: int) -> None:
        addresses.setdefault(id(session), set()).add(address)
        bind(session, binding, index, size, address)

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
