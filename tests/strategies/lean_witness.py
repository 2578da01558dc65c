"""A Trainer that is watched: callbacks, loggers, modules and data modules record each call and all that they can read.

:func:`witness` makes everything from a seed, and returns the record of a run with Lightning's own loop or the lean one.
"""

import contextlib
import io
import random
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torchmetrics
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint, RichProgressBar, TQDMProgressBar
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.loops.optimization.automatic import Closure
from lightning.pytorch.tuner import Tuner
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from lightning_ort import ORTStrategy
from tests.strategies.lean_callbacks import Extras, optimize, steady

Record = list[Any]
PAIRS = [("train", ""), ("validation", ""), ("test", ""), ("predict", "")]
BATCH_HOOKS = [f"on_{stage}_batch_{when}" for stage, _ in PAIRS for when in ("start", "end")]
EPOCH_HOOKS = [f"on_{stage}_{what}" for stage, _ in PAIRS for what in ("start", "end", "epoch_start", "epoch_end")]
STEP_HOOKS = ["on_before_zero_grad", "on_before_backward", "on_after_backward", "on_before_optimizer_step"]
SHARED = [*BATCH_HOOKS, *EPOCH_HOOKS, *STEP_HOOKS]
MODULE_ONLY = ["optimizer_step", "optimizer_zero_grad", "configure_gradient_clipping", "backward", "lr_scheduler_step"]
MODULE_ONLY += ["on_validation_model_zero_grad"]
TRANSFERS = ["on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer"]
STEPS = ["training_step", "validation_step", "test_step", "predict_step"]


def plain(value: Any) -> Any:
    """Return something that can be compared."""
    if isinstance(value, Tensor):
        return (
            "tensor",
            tuple(value.shape),
            str(value.dtype),
            value.requires_grad,
            repr(value.detach().double().sum().item()),
        )
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [type(value).__name__, *map(plain, value)]
    if isinstance(value, bool | int | float | str | None):
        return repr(value)
    return type(value).__name__


class Witness:
    """Writes down what is called, and what can be read then."""

    def __init__(self, draw: random.Random) -> None:
        self.record: Record = []
        self.counts: dict[str, int] = {}
        self.trainer: Any = None
        self.reads_metrics = draw.choice([0.0, 0.0, 0.1, 0.5])
        self.raises = draw.choice([None] * 6 + [draw.choice([*SHARED, *MODULE_ONLY, *STEPS])])
        self.raises_at = draw.randrange(1, 6)
        self.held: list[Any] = []
        self._draw = random.Random(draw.random())

    def see(self, who: str, name: str, *args: Any, **kwargs: Any) -> int:
        """Record a call; return how often there was one."""
        number = self.counts[who + name] = self.counts.get(who + name, 0) + 1
        self.record.append((who, name, number, plain(args), plain(kwargs), self.state()))
        if self._draw.random() < self.reads_metrics:
            self.record.append(self.metrics())
        if name == self.raises and number == self.raises_at:
            raise RuntimeError(f"{who} {name} {number}")
        return number

    def metrics(self) -> Any:
        """Return what was logged."""
        trainer = self.trainer
        return [plain(steady(getattr(trainer, f"{kind}_metrics"))) for kind in ("callback", "logged", "progress_bar")]

    def state(self) -> Any:
        """Return the rest."""
        trainer = self.trainer
        module = trainer.lightning_module
        optimizers = trainer.optimizers if trainer.state.fn == "fit" else []
        return (
            trainer.global_step,
            trainer.current_epoch,
            trainer.fit_loop.batch_idx,
            trainer.is_last_batch,
            trainer.should_stop,
            str(trainer.state.stage),
            trainer.fit_loop.state_dict() if trainer.state.fn == "fit" else trainer.validate_loop.state_dict(),
            module._current_fx_name,
            [repr(p.detach().double().sum().item()) for p in module.parameters()],
            [None if p.grad is None else repr(p.grad.double().sum().item()) for p in module.parameters()],
            [repr(group["lr"]) for optimizer in optimizers for group in optimizer.param_groups],
            len(self.held) and plain(self.held[0]),
        )


class RecordingLogger(Logger):
    """Records."""

    def __init__(self, witness: Witness, name: str) -> None:
        super().__init__()
        self.witness, self._name = witness, name

    @property
    def name(self) -> str:
        return self._name

    @property
    def version(self) -> int:
        return 3

    def log_metrics(self, metrics: Any, step: Any = None) -> None:
        self.witness.see(self._name, "log_metrics", steady(metrics), step)

    def log_hyperparams(self, params: Any) -> None:
        self.witness.record.append((self._name, "log_hyperparams"))

    def save(self) -> None:
        self.witness.record.append((self._name, "save"))

    def finalize(self, status: str) -> None:
        self.witness.record.append((self._name, "finalize", status))


class Unsized(IterableDataset[Any]):
    """Batches of nobody knows how many."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)


class Base(LightningModule):
    """What every watched module has."""

    def __init__(self, witness: Witness, plan: "Plan") -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Dropout(plan.dropout), nn.Linear(4, 1))
        self.other = nn.Linear(3, 1)
        self.mean_metric = torchmetrics.MeanMetric()
        self.mse = torchmetrics.MeanSquaredError()
        self.plan = [plan]
        self.witness = [witness]
        self.automatic_optimization = plan.automatic
        self.lr, self.batch_size = 0.1, 4

    def loss(self, batch: Any) -> Tensor:
        while isinstance(batch, list | tuple | dict):
            batch = next(item for item in (batch.values() if isinstance(batch, dict) else batch) if item is not None)
        return (self.layers(batch) - 1).square().mean() + self.other(batch).square().mean()

    def note(self, hook: str, number: int, value: Any) -> None:
        """Log what the plan says."""
        for index, (where, kind, kwargs, every) in enumerate(self.plan[0].logs):
            if where != hook or number % every:
                continue
            name = f"{hook}_{index}"
            if kind == "dict":
                self.log_dict({f"{name}a": value * 2, f"{name}b": value + 1}, **kwargs)
            elif kind == "metric":
                self.mean_metric(value.detach())
                self.log(name, self.mean_metric, **{**kwargs, "reduce_fx": "mean"})
            elif kind == "mse":
                self.mse(value.detach().reshape(1), torch.zeros(1))
                self.log(name, self.mse, **{**kwargs, "reduce_fx": "mean"})
            elif kind == "changed":
                place = value.detach().clone()
                self.log(name, place, **kwargs)
                place.fill_(100.0)
            elif kind == "by place":
                self.log(name, value, True, None, True, True, "mean", False, False, None, True, 1 + number % 2)
            else:
                self.log(
                    name,
                    {"tensor": value, "float": float(value.detach()), "int": number, "flat": value.reshape(1)}[kind],
                    **kwargs,
                )

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        number = self.witness[0].see("module", "training_step", batch, batch_idx)
        loss = self.loss(batch)
        self.note("training_step", number, loss)
        plan = self.plan[0]
        if not plan.automatic:
            return self.optimize(loss, batch, batch_idx)
        if plan.returns == "none" and number % 3 == 0:
            return None
        return {"loss": loss, "extra": batch_idx} if plan.returns == "dict" else loss

    def optimize(self, loss: Tensor, batch: Any, batch_idx: int) -> Any:
        if (how := self.plan[0].extras.manual) != "plain":
            return optimize(self, how, loss, lambda: self.loss(batch))
        first, second = self.optimizers()  # type: ignore[misc]
        self.toggle_optimizer(first)
        first.zero_grad()
        self.manual_backward(loss)
        first.step()
        self.untoggle_optimizer(first)
        if batch_idx % 2:
            second.zero_grad()
            self.manual_backward(self.loss(batch))
            second.step()
            self.lr_schedulers().step()  # type: ignore[union-attr,call-arg]
        return {"anything": loss.detach()} if self.plan[0].returns == "dict" else None

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return self.evaluate("validation_step", batch, batch_idx, dataloader_idx)

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return self.evaluate("test_step", batch, batch_idx, dataloader_idx)

    def evaluate(self, name: str, batch: Any, *args: Any) -> Any:
        number = self.witness[0].see("module", name, batch, *args)
        loss = self.loss(batch)
        self.note(name, number, loss)
        return loss

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        self.witness[0].see("module", "predict_step", batch, batch_idx, dataloader_idx)
        return self.layers(batch)

    def configure_optimizers(self) -> Any:
        plan = self.plan[0]
        if not plan.automatic:
            first = torch.optim.SGD(self.layers.parameters(), 0.1)
            second = torch.optim.Adam(self.other.parameters(), 0.01)
            return [first, second], [torch.optim.lr_scheduler.StepLR(first, 2)]
        optimizer = plan.optimizer(self.parameters())
        if plan.scheduler is None:
            return optimizer
        if plan.scheduler == "plateau":
            scheduler: Any = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
            more = {"monitor": "plateau", "interval": plan.interval, "strict": False}
        else:
            scheduler, more = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5), {"interval": plan.interval}
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "frequency": plan.frequency, **more}}


def hook_of_module(name: str) -> Callable[..., Any]:
    """Return an override that records."""

    def hook(self: Any, *args: Any, **kwargs: Any) -> Any:
        plan = self.plan[0]
        number = self.witness[0].see("module", name, *args, **kwargs)
        self.note(name, number, torch.tensor(float(number)))
        if name == "on_train_batch_start" and plan.skips_at == number:
            return -1
        if name == "on_train_batch_end" and plan.stops_at == number:
            self.trainer.should_stop = True
        if name == "on_train_batch_end" and plan.replaces_at == number:
            replace(self, plan)
        if name == "on_after_batch_transfer" and plan.extras.forgets and self.trainer.training and number % 4 == 2:
            return None
        return getattr(Base, name)(self, *args, **kwargs) if name not in SHARED else None

    return hook


def replace(module: Any, plan: "Plan") -> None:
    """Replace methods while the Trainer runs."""
    witness = module.witness[0]
    module.on_train_batch_start = lambda *args: witness.see("replaced", "on_train_batch_start", *args) and None
    module.on_after_backward = None  # Lightning calls what can be called
    for callback in module.trainer.callbacks:
        if isinstance(callback, Watching):
            callback.on_train_batch_end = lambda *args: witness.see("replaced", "on_train_batch_end", *args[2:])  # type: ignore[assignment]
            type(callback).on_before_zero_grad = lambda self, *args: witness.see(
                "class", "on_before_zero_grad", *args[2:]
            )  # type: ignore[assignment]


class Watching(Callback):
    """The base of the callbacks."""

    def __init__(self, witness: Witness, number: int) -> None:
        self.witness, self.number = witness, number


def hook_of_callback(name: str) -> Callable[..., Any]:
    """Return an override that records."""

    def hook(self: Any, trainer: Any, module: Any, *args: Any, **kwargs: Any) -> None:
        plan = module.plan[0]
        number = self.witness.see(f"callback {self.number}", name, *args, **kwargs)
        if self.number == 0:
            if name in plan.callback_logs:
                module.log(f"from_callback_{name}", float(number))
            if name == "on_train_batch_end" and plan.saves_at == number:
                trainer.save_checkpoint(plan.checkpoint)
            if name == "on_train_batch_start" and plan.holds_at == number:
                self.witness.held.append(trainer.callback_metrics)

    return hook


class Plan:
    """What a seed says."""

    def __init__(self, seed: int, folder: Path) -> None:
        draw = self.draw = random.Random(seed)
        one = draw.choice
        self.seed, self.checkpoint = seed, folder / "mid.ckpt"
        self.automatic = one([True, True, True, False])
        self.returns = one(["tensor", "tensor", "dict", "none"])
        self.dropout = one([0.0, 0.3])
        self.optimizer = one(
            [lambda p: torch.optim.SGD(p, 0.1), lambda p: torch.optim.Adam(p, 0.05)] * 3
            + [lambda p: torch.optim.LBFGS(p, 0.1, max_iter=3)]
        )
        self.scheduler, self.interval = one([None, "step", "step", "plateau"]), one(["step", "epoch"])
        self.frequency = one([1, 1, 2])
        self.batches = draw.randrange(1, 8)
        self.skips_at, self.stops_at = one([0, 0, 0, draw.randrange(1, 9)]), one([0, 0, 0, draw.randrange(1, 9)])
        self.replaces_at, self.saves_at = one([0, 0, draw.randrange(1, 5)]), one([0, 0, draw.randrange(1, 8)])
        self.holds_at = one([0, 0, 0, 2])
        self.hooks = [name for name in (*SHARED, *MODULE_ONLY) if draw.random() < one([0.1, 0.5])]
        if self.skips_at or self.replaces_at or self.stops_at:
            self.hooks += ["on_train_batch_start", "on_train_batch_end"]
        self.transfers = [name for name in TRANSFERS if draw.random() < 0.2]
        self.callbacks = [
            [name for name in SHARED if draw.random() < share] for share in one([[], [0.2], [0.5, 0.1], [1.0]])
        ]
        self.callback_logs = [name for name in ("on_train_batch_end", "on_validation_batch_end") if draw.random() < 0.3]
        wheres = [
            *STEPS[:3],
            *(
                name
                for name in self.hooks
                if name
                in (
                    "on_train_batch_end",
                    "on_train_epoch_end",
                    "on_validation_epoch_end",
                    "on_before_zero_grad",
                    "on_train_batch_start",
                )
            ),
        ]
        self.logs = [self.draw_log(one(wheres)) for _ in range(draw.randrange(6))]
        if self.scheduler == "plateau":
            self.logs.append(("training_step", "tensor", {}, 1))
        self.kind = one(["loader", "loader", "list", "unsized", "combined"])
        self.mode = one(["min_size", "max_size_cycle", "max_size"])
        self.vals = one([0, 1, 1, 2])
        self.datamodule = one([False, False, True])
        self.loggers = one([0, 1, 1, 2])
        self.bar = one([None, TQDMProgressBar, TQDMProgressBar, RichProgressBar])
        self.trainer = self.trainer_arguments()
        self.extras = Extras(self, folder)

    def draw_log(self, where: str) -> Any:
        draw = self.draw
        kinds = ["tensor", "tensor", "float", "int", "dict", "flat"] + ["metric", "mse"] * where.endswith("step")
        kwargs: dict[str, Any] = {}
        if draw.random() < 0.5 and "epoch" not in where:
            kwargs["on_step"], kwargs["on_epoch"] = draw.choice([(True, True), (False, True), (True, False)])
        for name, values in {
            "prog_bar": [True, False],
            "logger": [True, False],
            "reduce_fx": ["mean", "max", "sum", "min"],
            "batch_size": [3, 5],
            "sync_dist": [True],
        }.items():
            if draw.random() < 0.3:
                kwargs[name] = draw.choice(values)
        return where, draw.choice(kinds), kwargs, draw.choice([1, 1, 2])

    def trainer_arguments(self) -> dict[str, Any]:
        draw = self.draw
        one = draw.choice
        found: dict[str, Any] = {
            "max_epochs": one([1, 2, 3]),
            "log_every_n_steps": one([1, 2, 3]),
            "num_sanity_val_steps": one([0, 1, 2]),
            "accumulate_grad_batches": one([1, 1, 2, 3]) if self.automatic else 1,
            "check_val_every_n_epoch": one([1, 1, 2]),
        }
        if draw.random() < 0.3:
            found["max_steps"] = draw.randrange(1, 12)
        if draw.random() < 0.3:
            found["limit_train_batches"] = draw.randrange(1, 6)
        if draw.random() < 0.3:
            found["limit_val_batches"] = draw.randrange(0, 3)
        if draw.random() < 0.2:
            found["max_time"] = "00:01:00:00"
        if draw.random() < 0.2:
            found["min_epochs"] = 2
        if self.automatic and draw.random() < 0.3:
            found |= {"gradient_clip_val": 0.1, "gradient_clip_algorithm": one(["norm", "value"])}
        if draw.random() < 0.4:
            found["val_check_interval"] = 1 if self.kind == "unsized" else one([1, 0.5, 1.0])
        if draw.random() < 0.1:
            found["fast_dev_run"] = one([1, 2])
        return found

    def batch_list(self, generator: torch.Generator, more: int = 0) -> Any:
        return [torch.randn(4 - (index == 2), 3, generator=generator) for index in range(self.batches + more)]

    def train_loader(self, generator: torch.Generator, batch_size: int = 4) -> Any:
        batches = self.batch_list(generator)
        if self.extras.has_gaps and self.kind == "unsized":
            batches.insert(1, None)
        if self.kind == "list":
            return [[batch, {"x": batch}] for batch in batches]
        if self.kind == "unsized":
            return DataLoader(Unsized(batches), batch_size=None)
        if self.kind == "combined":
            return CombinedLoader({"a": batches, "b": self.batch_list(generator, 2)}, self.mode)
        data = TensorDataset(torch.cat(batches))
        return DataLoader(data, batch_size=batch_size, shuffle=True, generator=generator)

    def val_loaders(self, generator: torch.Generator, count: int) -> Any:
        loaders = [DataLoader(torch.cat(self.batch_list(generator, number)), batch_size=4) for number in range(count)]
        if self.extras.val_mode is not None:
            return CombinedLoader(loaders, self.extras.val_mode)
        return loaders[0] if count == 1 else loaders


def data_of(plan: Plan, witness: Witness) -> dict[str, Any]:
    """Return the arguments of ``fit`` with the data."""
    generator = torch.Generator().manual_seed(plan.seed)
    train, val = plan.train_loader(generator), plan.val_loaders(generator, plan.vals) if plan.vals else None
    if not plan.datamodule:
        return {"train_dataloaders": train, "val_dataloaders": val}

    def transfer(name: str) -> Callable[..., Any]:
        def hook(self: Any, *args: Any) -> Any:
            number = witness.see("datamodule", name, *args)
            if plan.extras.forgets and self.trainer.training and name == "on_after_batch_transfer" and number % 4 == 2:
                return None
            return getattr(LightningDataModule, name)(self, *args)

        return hook

    own = {name: transfer(name) for name in plan.transfers}
    module: Any = type("Data", (LightningDataModule,), own)()
    module.batch_size = 4
    again = lambda: train if module.batch_size == 4 else plan.train_loader(generator, module.batch_size)  # noqa: E731
    module.train_dataloader = again
    if val is not None:
        module.val_dataloader = lambda: val
    return {"datamodule": module}


def step_of_iterator(name: str) -> Callable[..., Any]:
    """Return a step that fetches its batch itself."""

    def step(self: Any, dataloader_iter: Any) -> Any:
        batch, batch_idx, dataloader_idx = next(dataloader_iter)
        return getattr(Base, name)(self, batch, batch_idx, *([] if name == "training_step" else [dataloader_idx]))

    return step


def module_of(plan: Plan, witness: Witness) -> Base:
    """Return the module."""
    torch.manual_seed(plan.seed)
    own = {name: hook_of_module(name) for name in plan.hooks}
    if not plan.datamodule:
        own |= {name: hook_of_module(name) for name in plan.transfers}
    if plan.extras.steps_take_iterators:
        own |= {name: step_of_iterator(name) for name in STEPS[:2]}
    return type("Watched", (Base,), own)(witness, plan)


def trainer_of(plan: Plan, witness: Witness, loop: str) -> Trainer:
    """Return the Trainer."""
    callbacks: list[Any] = []
    for number, names in enumerate(plan.callbacks):
        own = {name: hook_of_callback(name) for name in names}
        callbacks.append(type("Callback", (Watching,), own)(witness, number))
    if plan.bar is not None:
        callbacks.append(plan.bar())
    callbacks += plan.extras.callbacks()
    trainer = Trainer(
        strategy=ORTStrategy(
            config={"engine": "torch", "cache_dir": None, "debug": {"trainer_loop": loop}},
            optim="keep",
            host_memory="default",
        ),  # type: ignore[dict-item,arg-type]
        accelerator="cpu",
        logger=[RecordingLogger(witness, f"logger {number}") for number in range(plan.loggers)] + plan.extras.loggers(),
        default_root_dir=plan.extras.folder,
        callbacks=callbacks,
        enable_progress_bar=plan.bar is not None,
        enable_checkpointing=any(isinstance(each, Checkpoint) for each in callbacks),
        enable_model_summary=False,
        **plan.trainer,
    )
    witness.trainer = trainer
    return trainer


def ends_of_bar(trainer: Trainer) -> Any:
    """Return the numbers that a bar ends with."""
    bar = trainer.progress_bar_callback
    if isinstance(bar, TQDMProgressBar) and bar._train_progress_bar is not None:
        train = bar._train_progress_bar
        names = ("n", "total", "postfix", "desc")
        return [getattr(each, name, None) for each in (train, bar._val_progress_bar) for name in names]
    if isinstance(bar, RichProgressBar) and bar.progress is not None:
        return [
            (task.description, task.completed, task.total) for task in bar.progress.tasks
        ], bar._metric_component and bar._metric_component._metrics
    return None


def forget_warnings() -> None:
    """Let Lightning warn again of what it warns of once in a process."""
    for name, module in list(sys.modules.items()):
        if name.startswith("lightning.") and isinstance(cache := getattr(module, "warning_cache", None), set):
            cache.clear()
    Closure.warning_cache.clear()


def witness(seed: int, loop: str, folder: Path, resume_from: Path | None = None) -> tuple[Record, Plan]:
    """Run what a seed says; return its record."""
    plan = Plan(seed, folder)
    watching = Witness(plan.draw)
    record = watching.record
    forget_warnings()
    with warnings.catch_warnings(record=True) as caught, contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("always")
        data, module = data_of(plan, watching), module_of(plan, watching)
        trainer = trainer_of(plan, watching, loop)
        torch.manual_seed(plan.seed)
        runs: list[tuple[str, Any]] = [
            ("fit", {**data, "ckpt_path": resume_from, "weights_only": False} if resume_from else data)
        ]
        if resume_from is None:
            generator = torch.Generator().manual_seed(1)
            for name in ("validate", "test", "predict"):
                runs.append((name, {"dataloaders": plan.val_loaders(generator, max(plan.vals, 1))}))
            if plan.extras.tunes:
                runs += [("scale_batch_size", {**data, "max_trials": 2}), ("lr_find", {**data, "num_training": 5})]
        for name, arguments in runs:
            try:
                result = getattr(trainer if hasattr(trainer, name) else Tuner(trainer), name)(module, **arguments)
            except Exception as error:
                record.append(("raised", type(error).__name__, str(error)))
                result = None
            record.append((name, plain(result), module._current_fx_name, watching.metrics(), ends_of_bar(trainer)))
            record.append(trainer.fit_loop.state_dict())
            record.append((plan.extras.states(trainer.callbacks), plan.extras.files()))  # type: ignore[attr-defined]
            watching.raises = None
        expected = "lean" if loop == "lean" else "Lightning's own: trainer_loop='stock'"
        if watching.counts:  # else the run ended before it began: a checkpoint that Lightning cannot load
            assert trainer.strategy.report.run.trainer_loop == expected  # type: ignore[attr-defined]
        assert "log" not in vars(module)
    # the folders of both loops: one resumes from the other's file
    places = f"0x[0-9a-f]+|{re.escape(str(folder.parent))}/(resumed )?[a-z]+"
    texts = [re.sub(places, "", str(each.message)) for each in caught]
    record += [("warning", text) for text in texts]
    return record, plan
