"""Lightning's own callbacks and loggers for a watched Trainer, and unusual data and steps, drawn from a seed."""

import random
import re
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, callbacks
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from torch import nn

UNSTEADY = ("DeviceStats", "train/", "validate/", "test/", "predict/")  # a clock decides their values


def steady(metrics: Any) -> Any:
    """Return metrics without the values that differ from run to run."""
    return {name: "unsteady" if name.startswith(UNSTEADY) else value for name, value in metrics.items()}


class KeepsMean(Callback):
    """Reads metrics after each batch and logs what it makes of them, as third-party callbacks do."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append({name: float(value) for name, value in trainer.callback_metrics.items()})
        if trainer.loggers and batch_idx % 2:
            trainer.logger.log_metrics({"seen": float(len(self.seen))}, step=trainer.global_step)
        module.log("kept", torch.tensor(float(len(self.seen))), on_step=True, on_epoch=True, prog_bar=True)

    def state_dict(self) -> Any:
        return {"seen": list(self.seen)}


class Extras:
    """What a seed says beside :class:`Plan`: nothing for two of three seeds."""

    def __init__(self, plan: Any, folder: Path) -> None:
        draw = self.draw = random.Random(plan.seed + 10**6)
        self.on = plan.seed >= 500 or draw.random() < 0.3
        self.folder = folder
        self.manual = draw.choice(["plain", "closure", "toggle_model", "clip"]) if self.on else "plain"
        self.steps_take_iterators = self.on and draw.random() < 0.1
        self.val_mode = draw.choice([None, None, "sequential", "max_size", "min_size"]) if self.on else None
        self.metric = ""
        self.tunes = plan.seed >= 600 and draw.random() < 0.4
        plan.datamodule |= self.tunes  # loaders that are passed cannot be made again with another batch size
        if self.on:
            self.change(plan)
        rare = random.Random(plan.seed + 2 * 10**6)
        self.forgets = self.on and rare.random() < 0.2  # a hook that moves some batches returns nothing
        self.has_gaps = self.on and rare.random() < 0.2  # a loader gives None in place of some batches
        self.reduce: Any = rare.choice([None, max, min, "max", sum]) if self.on else None
        if self.forgets and "on_after_batch_transfer" not in plan.transfers:
            plan.transfers.append("on_after_batch_transfer")
        if self.reduce is not None:
            how = rare.choice([{"on_step": True, "on_epoch": True}, {"on_epoch": True}, {"batch_size": 3}])
            plan.logs.append(
                (rare.choice(["training_step", "validation_step"]), "changed", {**how, "reduce_fx": self.reduce}, 1)
            )
            plan.logs.append(("training_step", "by place", {}, 1))

    def change(self, plan: Any) -> None:
        """Change the arguments of the Trainer, and have the metric logged that callbacks need."""
        draw = self.draw
        if draw.random() < 0.2:
            plan.trainer["val_check_interval"] = timedelta(
                microseconds=draw.choice([1, 10**9])  # after each batch, or never
            )
            plan.trainer.pop("fast_dev_run", None)
        kwargs = draw.choice([{}, {"on_step": True, "on_epoch": True}, {"on_step": False, "on_epoch": True}])
        self.metric = f"training_step_{len(plan.logs)}" + "_epoch" * (len(kwargs) == 2 and kwargs["on_step"])
        plan.logs.append(("training_step", "tensor", kwargs, 1))
        self.makers = draw.sample(self.all_makers(plan), draw.randrange(4))

    def all_makers(self, plan: Any) -> list[Callable[[], Any]]:
        """Return what makes a callback each."""
        one = self.draw.choice
        every = one([{"every_n_train_steps": 2}, {"every_n_epochs": 1}, {"train_time_interval": timedelta(hours=1)}])
        patience, top, name = one([0, 1]), one([1, 2, -1]), self.metric
        best = {} if "train_time_interval" in every else {"monitor": name, "save_top_k": top}
        makers: list[Callable[[], Any]] = [
            lambda: callbacks.EarlyStopping(name, patience=patience, check_on_train_epoch_end=True, strict=False),
            lambda: callbacks.ModelCheckpoint(self.folder / "kept", save_last=True, **every, **best),
            lambda: callbacks.LearningRateMonitor(one(["step", "epoch", None])),
            lambda: callbacks.DeviceStatsMonitor(cpu_stats=True),
            lambda: callbacks.Timer("00:01:00:00"),
            lambda: callbacks.ThroughputMonitor(batch_size_fn=len, window_size=2),
            lambda: callbacks.EMAWeightAveraging(decay=0.5),
            lambda: callbacks.OnExceptionCheckpoint(self.folder / "failed"),
            lambda: callbacks.SpikeDetection(mode="min", window=2, warmup=1, finite_only=False),
            KeepsMean,
        ]
        if plan.automatic:
            makers += [
                lambda: callbacks.StochasticWeightAveraging(0.05, swa_epoch_start=1),
                lambda: callbacks.GradientAccumulationScheduler({0: 1, 1: 2}),
                lambda: callbacks.LearningRateFinder(1e-4, 1e-1, num_training_steps=5, update_attr=True),
                lambda: callbacks.ModelPruning("l1_unstructured", amount=0.2),
            ]
        if self.tunes:
            mode = one(["power", "binsearch"])
            makers.append(lambda: callbacks.BatchSizeFinder(mode, steps_per_trial=2, init_val=2, max_trials=2))
        return makers

    def callbacks(self) -> list[Any]:
        """Return callbacks."""
        return [make() for make in self.makers] if self.on else []

    def loggers(self) -> list[Any]:
        """Return loggers that write files."""
        if not self.on:
            return []
        return self.draw.choice([[], [CSVLogger(self.folder)], [TensorBoardLogger(self.folder)]])

    def files(self) -> list[Any]:
        """Return the files that a run has left, and what a CSV logger has written."""
        if not self.on:
            return []
        temporary = (".lr_find", ".scale_batch_size")
        found: list[Any] = sorted(
            path.relative_to(self.folder).as_posix()
            for path in self.folder.rglob("*")
            if path.is_file() and "events" not in path.name and not path.name.startswith(temporary)
        )
        for path in sorted(self.folder.rglob("metrics.csv")):
            found.append([[cell for cell in line.split(",") if "." not in cell] for line in path.read_text().split()])
        return found

    def states(self, made: list[Any]) -> list[Any]:
        """Return the states of callbacks."""
        kinds = (callbacks.Timer, callbacks.SpikeDetection)
        states = [each.state_dict() for each in made if not isinstance(each, kinds)]
        folders = f"{re.escape(str(self.folder.parent))}/(resumed )?[a-z]+"  # of both loops: a state may be the other's
        return [re.sub(folders, "", str(state)) for state in states]


def optimize(module: Any, how: str, loss: Any, again: Callable[[], Any]) -> None:
    """Make a step in a manual optimization in another way."""
    first, second = module.optimizers()
    if how == "closure":

        def closure() -> Any:
            first.zero_grad()
            value = again()
            module.manual_backward(value)
            return value

        first.step(closure=closure)
    elif how == "toggle_model":
        with second.toggle_model(sync_grad=True):
            module.manual_backward(again())
            second.step()
            second.zero_grad()
    else:
        first.zero_grad()
        second.zero_grad()
        module.manual_backward(loss)
        module.clip_gradients(first, 0.1, "norm")
        first.step()
        second.step()
        nn.utils.clip_grad_norm_(module.parameters(), 0.1)
