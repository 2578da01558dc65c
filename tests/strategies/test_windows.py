"""Windows, in which nothing runs between two replayed steps: whoever may look sees what he sees without them."""

import random
import signal
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint, TQDMProgressBar
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.plugins import Precision
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset
from torchmetrics import MeanMetric

from lightning_ort import ORTStrategy
from lightning_ort.strategies.race.race import Race

SIZE, ROWS, BATCH = 8, 400, 8


pytestmark = pytest.mark.usefixtures("recordings_win")


class Net(pl.LightningModule):
    """A step that may be recorded, and what is drawn for its fit."""

    def __init__(self, draw: random.Random | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        draw = draw or random.Random(0)
        middle = draw.choice([nn.Dropout(0.2), nn.BatchNorm1d(16), nn.Identity()])
        self.net = nn.Sequential(nn.Linear(SIZE, 16), middle, nn.ReLU(), nn.Linear(16, 4))
        self.logs = draw.choice([{}, {}, {"on_step": True}, {"on_step": True, "on_epoch": True}, {"on_epoch": True}])
        self.optimizer = draw.choice(["Adam", "AdamW", "SGD", "Adagrad"])
        self.schedule = draw.choice([None, None, "step", "epoch"])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch.values() if isinstance(batch, dict) else batch
        loss = F.cross_entropy(self.net(x), y)
        if self.logs:
            self.log("loss", loss, **self.logs)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("val", F.cross_entropy(self.net(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        settings = {"momentum": 0.9} if self.optimizer == "SGD" else {}
        optimizer = getattr(torch.optim, self.optimizer)(self.parameters(), 0.01, **settings)
        if self.schedule is None:
            return optimizer
        schedule = {"scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99), "interval": self.schedule}
        return {"optimizer": optimizer, "lr_scheduler": schedule}


class Rows(Dataset[Any]):
    """A data set of a user's."""

    def __init__(self, dataset: TensorDataset, act: Callable[[int], None] = lambda index: None) -> None:
        self.rows, self.act, self.fetched = dataset, act, 0

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        self.fetched += 1
        self.act(self.fetched)
        x, y = self.rows[index]
        return {"x": x, "y": y}


class Stream(IterableDataset[Any]):
    """Batches of an unknown number, the third of another size."""

    def __init__(self, dataset: TensorDataset) -> None:
        self.rows = dataset

    def __iter__(self) -> Iterator[Any]:
        x, y = self.rows.tensors
        for at in range(0, ROWS, BATCH):
            yield (x[at : at + BATCH - (at == 2 * BATCH)], y[at : at + BATCH - (at == 2 * BATCH)])


def data(rows: int = ROWS) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(rows, SIZE, generator=generator), torch.randint(0, 4, (rows,), generator=generator)
    return TensorDataset(x, y)


def loader_of(kind: str) -> Any:
    rows = data(ROWS - 3)
    if kind == "stream":
        return DataLoader(Stream(data()), batch_size=None)
    return DataLoader(rows if kind == "tensors" else Rows(rows), batch_size=BATCH, shuffle=kind != "ordered")


def plain(value: Any) -> Any:
    """Something that can be compared."""
    if isinstance(value, Tensor):
        return tuple(value.shape), value.detach().double().sum().item(), value.detach().flatten()[:4].tolist()
    if isinstance(value, dict):
        return {key: plain(one) for key, one in value.items()}
    return [*map(plain, value)] if isinstance(value, (list, tuple)) else value


def state_of(trainer: Any) -> Any:
    """What can be seen of a fit."""
    module, loop = trainer.lightning_module, trainer.fit_loop
    gradients = [None if p.grad is None else p.grad.clone() for p in module.parameters()]
    optimizer = trainer.optimizers[0]
    return plain(
        {
            "loops": loop.state_dict(),
            "global_step": trainer.global_step,
            "stepped": loop.epoch_loop._batches_that_stepped,
            "metrics": [trainer.callback_metrics, trainer.logged_metrics],
            "module": module.state_dict(),
            "gradients": gradients,
            "states": [*optimizer.state_dict()["state"].values()],
            "lr": [group["lr"] for group in optimizer.param_groups],
            "random": torch.get_rng_state().double().sum(),
        }
    )


class Seen(pl.Callback):
    """Looks where a hook ends a window anyway."""

    def __init__(self) -> None:
        self.record: list[Any] = []

    def see(self, trainer: Any, *_: Any) -> None:
        self.record.append(state_of(trainer))

    on_train_epoch_start = on_train_epoch_end = on_validation_start = on_validation_end = see
    on_train_end = on_exception = see


class Writes(Logger):
    """A logger in memory."""

    def __init__(self, seen: Seen) -> None:
        self.seen = seen

    name, version = "memory", 0

    def log_metrics(self, metrics: Any, step: Any = None) -> None:
        self.seen.record.append((metrics, step))

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        pass


def fit(module: Net, engine: str, loader: Any, **settings: Any) -> Any:
    torch.manual_seed(2)
    trainer: Any = pl.Trainer(
        strategy=ORTStrategy(config={"engine": engine, **({"start": "now"} if engine == "recorded" else {})}),
        **{
            **{"accelerator": "cpu", "devices": 1, "max_epochs": 3, "logger": False, "enable_checkpointing": False},
            **{"enable_progress_bar": False, "enable_model_summary": False, "num_sanity_val_steps": 0},
            **settings,
        },
    )
    trainer.fit(module, loader, DataLoader(data(30), batch_size=BATCH))
    return trainer


def in_windows(trainer: Any, step: str = "training_step") -> int:
    text = trainer.strategy.report.run.recorded.get(step, "")
    return int(text.split(" of them in windows")[0].split()[-1]) if "windows" in text else 0


def run(seed: int, engine: str, folder: Path) -> tuple[list[Any], int]:
    """Everything that somebody sees of a fit that is drawn, and the steps in windows."""
    draw = random.Random(seed)
    module, seen = Net(draw), Seen()
    settings: dict[str, Any] = {"callbacks": [seen]}
    if draw.random() < 0.5:
        settings |= {"logger": Writes(seen), "log_every_n_steps": draw.choice([1, 3, 7, 50])}
        if draw.random() < 0.3:
            settings["callbacks"].append(LearningRateMonitor())
    if draw.random() < 0.3:
        every = draw.choice([5, 11])
        saves = ModelCheckpoint(folder, every_n_train_steps=every, save_top_k=-1, filename="{step}")
        settings["callbacks"].append(saves)
        settings["enable_checkpointing"] = True
    settings["enable_progress_bar"] = draw.random() < 0.2
    settings["gradient_clip_val"] = draw.choice([None, None, 0.5])
    settings["gradient_clip_algorithm"] = draw.choice(["norm", "value"]) if settings["gradient_clip_val"] else None
    settings["val_check_interval"] = draw.choice([1.0, 1.0, 10, 7])
    settings["max_steps"] = draw.choice([-1, -1, 60, 77])
    kind = draw.choice(["tensors", "tensors", "rows", "ordered", "stream"])
    settings["accumulate_grad_batches"] = draw.choice([1, 1, 2, 3])
    trainer = fit(module, engine, loader_of(kind), **settings)
    seen.record.append(state_of(trainer))
    for path in sorted(folder.glob("*.ckpt"), key=lambda path: path.name):
        saved = torch.load(path, weights_only=False)
        seen.record.append((path.name, plain({name: saved[name] for name in ("state_dict", "loops", "global_step")})))
    return seen.record, in_windows(trainer)


def check(seed: int, folder: Path) -> int:
    (folder / "expected").mkdir()
    (folder / "found").mkdir()
    expected, _ = run(seed, "torch", folder / "expected")
    found, steps = run(seed, "recorded", folder / "found")
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert one == other
    return steps


@pytest.mark.parametrize("seed", range(12))
def test_what_is_seen_is_what_is_seen_without(seed: int, tmp_path: Path) -> None:
    check(seed, tmp_path)


@pytest.mark.parametrize("accumulated", [1, 4])
def test_most_steps_of_a_plain_fit_run_in_windows(accumulated: int) -> None:
    trainer = fit(Net(), "recorded", loader_of("tensors"), max_epochs=6, accumulate_grad_batches=accumulated)
    assert in_windows(trainer) > 150
    assert trainer.global_step == 6 * -(-trainer.num_training_batches // accumulated)


def test_a_callback_changes_how_many_batches_an_update_has() -> None:
    """What was recorded with another share of the loss has no windows; updates are those of stock."""
    states = []
    for engine in ("torch", "recorded"):
        callbacks = [pl.callbacks.GradientAccumulationScheduler({2: 3, 4: 2})]
        trainer = fit(Net(), engine, loader_of("tensors"), max_epochs=6, callbacks=callbacks)
        states.append(state_of(trainer))
    assert in_windows(trainer) > 50
    assert states[0] == states[1]


def test_duels_of_short_steps_leave_windows(
    monkeypatch: pytest.MonkeyPatch, limits: Callable[..., None], recordings_win: dict[str, float]
) -> None:
    """Each way takes turns of several steps, for as long as ever: a question ends a window."""
    limits(duel=0.06)
    recordings_win |= {"recorded": 2e-4, "other": 5e-4}
    ask, questions = Race.next, list[Any]()

    def counted(self: Race, *args: Any) -> Any:
        questions.append(ask(self, *args))
        return questions[-1]

    monkeypatch.setattr(Race, "next", counted)
    module = Net()
    module.logs = {}
    trainer = fit(
        module, "recorded", DataLoader(data(3000 * BATCH), batch_size=BATCH), max_epochs=1, limit_val_batches=0
    )
    assert trainer.global_step == 3000
    assert in_windows(trainer) > 2850
    assert len(questions) < 130


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 300, 20))
def test_many(first: int, tmp_path: Path) -> None:
    steps = []
    for seed in range(first, first + 20):
        (folder := tmp_path / str(seed)).mkdir()
        steps.append(check(seed + 1000, folder))
    assert sum(map(bool, steps)) > 10


class Ends(pl.Callback):
    def on_train_batch_end(self, *args: Any) -> None:
        pass


class Draws(TQDMProgressBar):
    def get_metrics(self, *args: Any) -> Any:
        return super().get_metrics(*args)


@pytest.mark.parametrize("callback", [Ends(), Draws()])
def test_a_hook_in_each_batch_leaves_no_windows_and_the_report_names_it(callback: Any) -> None:
    settings = {"enable_progress_bar": isinstance(callback, Draws), "callbacks": [callback]}
    trainer = fit(Net(), "recorded", loader_of("tensors"), **settings)
    assert in_windows(trainer) == 0
    assert f"{type(callback).__name__}.on_train_batch_end" in str(trainer.strategy.report)


class Hooked(Net):
    """Has a hook in each step that is no hook of batches."""

    def __init__(self, name: str) -> None:
        super().__init__(random.Random(3))
        self.schedule, self.called = "step", 0
        own = getattr(self, name)

        def hook(*args: Any, **kwargs: Any) -> Any:
            self.called += 1
            return own(*args, **kwargs)

        vars(self)[name] = hook


@pytest.mark.parametrize(
    "name",
    [
        *("lr_scheduler_step", "optimizer_step", "optimizer_zero_grad", "on_before_zero_grad", "on_before_backward"),
        *("on_after_backward", "on_before_optimizer_step", "configure_gradient_clipping", "transfer_batch_to_device"),
        *("on_before_batch_transfer", "on_after_batch_transfer", "on_train_batch_start", "on_train_batch_end"),
    ],
)
def test_each_hook_is_called_as_often(name: str) -> None:
    modules = [Hooked(name), Hooked(name)]
    for module, engine in zip(modules, ("torch", "recorded"), strict=True):
        fit(module, engine, loader_of("tensors"))
    one, other = modules
    assert one.called == other.called > 50
    for own, theirs in zip(one.state_dict().values(), other.state_dict().values(), strict=True):
        assert torch.equal(own, theirs)


def test_what_the_data_set_changes_counts_at_once() -> None:
    """Its code runs within windows."""
    modules = []
    for engine in ("torch", "recorded"):
        module = Net(random.Random(4))
        module.gain = 1.0
        module.training_step = lambda batch, batch_idx, m=module: (
            F.cross_entropy(m.net(batch["x"]), batch["y"]) * m.gain
        )

        def act(number: int, module: Any = module) -> None:
            if number in (600, 905):
                module.gain += 0.5

        fit(module, engine, DataLoader(Rows(data(), act), batch_size=BATCH))
        modules.append(module)
    for one, other in zip(*(module.state_dict().values() for module in modules), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("at", [403, 790, 1005])
def test_an_error_of_the_loader_comes_at_its_batch(at: int) -> None:
    def act(number: int) -> None:
        if number == at:
            raise OSError("no such row")

    records = []
    for engine in ("torch", "recorded"):
        seen = Seen()
        with pytest.raises(OSError, match="no such row"):
            fit(Net(), engine, DataLoader(Rows(data(), act), batch_size=BATCH), callbacks=[seen])
        records.append(seen.record)
    assert records[0] == records[1]


def test_a_handler_of_a_signal_sees_one_step() -> None:
    """It is called from the loader here, and at any moment below."""
    records = []
    for engine in ("torch", "recorded"):
        seen, module = Seen(), Net()

        def act(number: int) -> None:
            if number % 150 == 0:
                signal.raise_signal(signal.SIGUSR1)

        before = signal.signal(signal.SIGUSR1, lambda *_, s=seen, m=module: s.see(m.trainer))
        try:
            fit(module, engine, DataLoader(Rows(data(), act), batch_size=BATCH), callbacks=[seen])
        finally:
            signal.signal(signal.SIGUSR1, before)
        records.append(seen.record)
    assert records[0] == records[1]


class Stopped(BaseException):
    pass


@pytest.mark.parametrize("number", range(6))
def test_an_interrupt_at_any_moment_leaves_one_step(number: int) -> None:
    """All that is left belongs to the same step, which is one of those of a fit without an interrupt.

    The loader runs between steps; else the handler waits until a step has ended.
    """
    states: dict[int, Any] = {}

    class Each(pl.Callback):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            states[trainer.global_step] = plain(trainer.lightning_module.state_dict())

    fit(Net(), "torch", loader_of("tensors"), callbacks=[Each()], max_epochs=8)

    def stop(_: int, frame: Any) -> None:
        files = [frame.f_code.co_filename for frame, _ in traceback.walk_stack(frame)]
        if any(file.endswith("windows.py") and "tests" not in file for file in files):
            raise Stopped
        signal.setitimer(signal.ITIMER_REAL, 0.0003)  # an unchanged step is Lightning's

    class Timed(pl.Callback):
        def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
            if trainer.current_epoch == 1:
                signal.setitimer(signal.ITIMER_REAL, 0.0005 + 0.0017 * number)

    seen, before = Seen(), signal.signal(signal.SIGALRM, stop)
    try:
        with pytest.raises(Stopped):
            fit(Net(), "recorded", loader_of("tensors"), callbacks=[Timed(), seen], max_epochs=8)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    last = seen.record[-1]
    assert last["module"] == states[last["global_step"]]
    progress = last["loops"]["epoch_loop.batch_progress"]["total"]
    assert progress["completed"] == last["global_step"]
    assert {int(state["step"][1]) for state in last["states"]} == {last["global_step"]}


# Evaluations


class Judged(Net):
    """A step of each kind that may be recorded, which logs, counts and returns as is drawn."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__(draw)
        self.metric = MeanMetric() if draw.random() < 0.3 else None
        self.kept = draw.choice([{}, {"on_step": True, "on_epoch": True}, {"on_step": True}, {"prog_bar": True}])
        self.reads_loader, self.logs_nothing = draw.random() < 0.3, draw.random() < 0.2
        self.as_dictionary = draw.random() < 0.5

    def judge(self, name: str, batch: Any, loader: int) -> Any:
        x, y = batch.values() if isinstance(batch, dict) else batch
        loss = F.cross_entropy(self.net(x), y, reduction="none")
        if self.reads_loader:
            loss = loss * (loader + 1)
        if self.metric is not None:
            self.metric.update(loss)
            self.log(f"{name}/metric", self.metric)
        if not self.logs_nothing:
            self.log(f"{name}/loss", loss.mean(), **self.kept)
            if self.as_dictionary:
                self.log_dict({f"{name}/most": loss.max()}, on_epoch=True, reduce_fx="max")
        return {"loss": loss.mean(), "rest": loss} if self.as_dictionary else loss.mean()

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return self.judge("val", batch, dataloader_idx)

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return self.judge("test", batch, dataloader_idx)

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        x, _ = batch.values() if isinstance(batch, dict) else batch
        return {"logits": self.net(x), "number": 3} if self.as_dictionary else self.net(x)


class Judge(pl.Callback):
    """Looks where an evaluation begins and ends."""

    def __init__(self) -> None:
        self.record: list[Any] = []

    def see(self, trainer: Any, *_: Any) -> None:
        loop, bar = trainer._active_loop, trainer.progress_bar_callback
        drawn = [getattr(bar, f"_{name}_progress_bar", None) for name in ("val", "test", "predict")]
        found = {
            "progress": vars(loop.batch_progress) if hasattr(loop, "batch_progress") else None,
            "metrics": [trainer.callback_metrics, trainer.logged_metrics, trainer.progress_bar_metrics],
            "seen": dict(getattr(loop, "_seen_batches_per_dataloader", {})),
            "bars": [None if one is None else (one.n, one.total) for one in drawn],
            "random": torch.get_rng_state().double().sum(),
        }
        progress = found["progress"]
        found["progress"] = progress and {name: getattr(one, "__dict__", one) for name, one in progress.items()}
        self.record.append(plain(found))

    on_validation_start = on_validation_epoch_end = on_validation_end = on_test_epoch_end = on_test_end = see
    on_predict_epoch_end = on_predict_end = on_train_epoch_end = on_exception = see


def judge(seed: int, engine: str) -> tuple[list[Any], dict[str, int]]:
    """Everything that somebody sees of evaluations that are drawn, and the steps of each in windows."""
    draw = random.Random(seed)
    module, judge, seen = Judged(draw), Judge(), Seen()
    kinds = [draw.choice(["tensors", "tensors", "rows", "ordered", "stream"]) for _ in range(draw.choice([1, 1, 2, 3]))]
    limit = draw.choice([1.0, 1.0, 30, 0.5 * ("stream" not in kinds) or 20])
    settings: dict[str, Any] = {f"limit_{name}_batches": limit for name in ("val", "test", "predict")}
    settings |= {"num_sanity_val_steps": draw.choice([0, 2]), "max_epochs": 2, "limit_train_batches": 25}
    callbacks = [judge]
    if draw.random() < 0.5:
        settings |= {"enable_progress_bar": True}
        callbacks.append(TQDMProgressBar(draw.choice([1, 1, 7])))
    if draw.random() < 0.3:
        settings |= {"logger": Writes(seen)}
    torch.manual_seed(2)
    config = {"engine": engine, **({"start": "now"} if engine == "recorded" else {})}
    quiet: dict[str, Any] = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar"), False)
    quiet |= {"accelerator": "cpu", "devices": 1, "enable_model_summary": False, "callbacks": callbacks}
    trainer: Any = pl.Trainer(strategy=ORTStrategy(config=config), **{**quiet, **settings})
    loaders = [loader_of(kind) for kind in kinds]
    trainer.fit(module, loader_of("tensors"), loaders)
    steps = {"validation_step": in_windows(trainer, "validation_step")}
    judge.record.append(plain(trainer.validate(module, loaders, verbose=False)))
    judge.record.append(plain(trainer.test(module, loaders, verbose=False)))
    steps["test_step"] = in_windows(trainer, "test_step")
    judge.record.append(plain(trainer.predict(module, loaders, return_predictions=draw.choice([None, True, False]))))
    steps["predict_step"] = in_windows(trainer, "predict_step")
    return judge.record + seen.record, steps


def check_evaluation(seed: int) -> dict[str, int]:
    expected, _ = judge(seed, "torch")
    found, steps = judge(seed, "recorded")
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert one == other
    return steps


@pytest.mark.parametrize("seed", range(12))
def test_what_is_seen_of_evaluations_is_what_is_seen_without(seed: int) -> None:
    check_evaluation(seed)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 300, 20))
def test_many_evaluations(first: int) -> None:
    steps = [check_evaluation(1000 + seed) for seed in range(first, first + 20)]
    for name in ("validation_step", "test_step", "predict_step"):
        assert sum(bool(found[name]) for found in steps) > 1


def test_most_steps_of_plain_evaluations_run_in_windows() -> None:
    module = Judged(random.Random(1))
    trainer = fit(module, "recorded", loader_of("tensors"), limit_train_batches=2)
    loaders = [DataLoader(data(200 * BATCH), batch_size=BATCH), DataLoader(data(100 * BATCH), batch_size=BATCH)]
    trainer.test(module, loaders, verbose=False)
    assert in_windows(trainer, "test_step") > 200
    trainer.predict(module, loaders)
    assert in_windows(trainer, "predict_step") > 200


_STAGES = ("validation", "test", "predict")


@pytest.mark.parametrize("name", [f"on_{stage}_batch_{at}" for stage in _STAGES for at in ("start", "end")])
@pytest.mark.parametrize("owner", ["module", "callback"])
def test_each_hook_of_an_evaluation_is_called_as_often(name: str, owner: str) -> None:
    calls = []
    for engine in ("torch", "recorded"):
        called: list[int] = []
        module, callback = Judged(random.Random(1)), pl.Callback()
        setattr(module if owner == "module" else callback, name, lambda *args, n=called: n.append(len(args)))
        trainer = fit(module, engine, loader_of("tensors"), limit_train_batches=2, callbacks=[callback])
        trainer.validate(module, loader_of("tensors"), verbose=False)
        trainer.test(module, loader_of("tensors"), verbose=False)
        trainer.predict(module, loader_of("tensors"))
        calls.append(called)
        assert in_windows(trainer, f"{name.split('_')[1]}_step") == 0
    assert calls[0] == calls[1]
    assert len(calls[0]) >= 50


class OwnStep(ORTStrategy):
    """Counts steps of a validation."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.called = 0

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        self.called += 1
        return super().validation_step(*args, **kwargs)


class OwnPrecision(Precision):
    """Counts contexts of steps of a validation."""

    def __init__(self) -> None:
        self.called = 0

    @contextmanager
    def val_step_context(self) -> Iterator[None]:
        self.called += 1
        yield


@pytest.mark.parametrize("kind", ["strategy", "precision", "function of the precision"])
def test_what_others_have_around_a_step_of_an_evaluation_is_called(kind: str) -> None:
    called = []
    for engine in ("torch", "recorded"):
        strategy = (OwnStep if kind == "strategy" else ORTStrategy)(config={"engine": engine, "start": "now"})
        plugin = OwnPrecision() if kind == "precision" else Precision()
        if kind == "function of the precision":
            plugin.called, context = 0, plugin.val_step_context

            def counts(plugin: Any = plugin, context: Any = context) -> Any:
                plugin.called += 1
                return context()

            plugin.val_step_context = counts
        quiet: dict[str, Any] = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False)
        trainer: Any = pl.Trainer(strategy=strategy, plugins=[plugin], accelerator="cpu", devices=1, **quiet)
        trainer.validate(Judged(random.Random(1)), loader_of("tensors"), verbose=False)
        called.append((strategy if kind == "strategy" else plugin).called)
    assert called == [50, 50]


@pytest.mark.parametrize("at", [203, 360])
def test_an_error_of_the_loader_of_an_evaluation_comes_at_its_batch(at: int) -> None:
    def act(number: int) -> None:
        if number == at:
            raise OSError("no such row")

    records = []
    for engine in ("torch", "recorded"):
        judge, module = Judge(), Judged(random.Random(1))
        trainer = fit(module, engine, loader_of("tensors"), limit_train_batches=2, callbacks=[judge])
        with pytest.raises(OSError, match="no such row"):
            trainer.test(module, DataLoader(Rows(data(), act), batch_size=BATCH), verbose=False)
        records.append([judge.record, plain(vars(trainer.test_loop.batch_progress.total))])
    assert records[0] == records[1]


class Long(IterableDataset[Any]):
    """Says that it has more batches than it has."""

    def __len__(self) -> int:
        return 60

    def __iter__(self) -> Iterator[Any]:
        x, y = data().tensors
        for at in range(0, ROWS, BATCH):
            yield (x[at : at + BATCH], y[at : at + BATCH])


def test_a_loader_that_ends_early_is_followed_by_the_next() -> None:
    found = []
    for engine in ("torch", "recorded"):
        module, loaders = Judged(random.Random(1)), [DataLoader(Long(), batch_size=None), loader_of("tensors")]
        trainer = fit(module, engine, loader_of("tensors"), limit_train_batches=2)
        found.append([plain(trainer.test(module, loaders, verbose=False)), len(trainer.predict(module, loaders)[0])])
        found[-1].append(plain(vars(trainer.test_loop.batch_progress.total)))
        assert in_windows(trainer, "test_step") > 0 or engine == "torch"
    assert found[0] == found[1]


class HandsOn(Net):
    """Numbers that a step hands on are those of its own time."""

    def __init__(self) -> None:
        super().__init__()
        self.history: list[Any] = []
        self.schedule = None  # so that nobody looks at counters between the steps of a window

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        number = loss.item()
        self.log("number", number)
        self.log("epoch", self.current_epoch, on_step=False, on_epoch=True)
        self.history.append((self.global_step, self.trainer.current_epoch, number))
        return loss


def test_what_is_handed_on_is_of_its_step() -> None:
    expected, module = HandsOn(), HandsOn()
    fit(expected, "torch", loader_of("tensors"), max_epochs=6)
    trainer = fit(module, "recorded", loader_of("tensors"), max_epochs=6)
    assert module.history == expected.history
    assert in_windows(trainer) > 150
