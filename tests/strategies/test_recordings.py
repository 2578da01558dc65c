"""Fits whose steps are recorded: bit by bit what they are without, whatever a step does, and with a line where not."""

import copy
import os
import random
import warnings
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torchmetrics
from lightning.pytorch.demos.boring_classes import BoringModel
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset

from lightning_ort import ORTStrategy
from lightning_ort.recording.replay import Replay
from lightning_ort.strategies.race.terms import ON_ONE_THREAD
from lightning_ort.strategies.race.turn import Turn

SIZE = 8


pytestmark = pytest.mark.usefixtures("recordings_win")


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(SIZE, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 4))


class Plain(pl.LightningModule):
    """A step that may be recorded."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = mlp()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), 0.01)


def data(rows: int = 100, size: int = SIZE) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(
        torch.randn(rows, size, generator=generator), torch.randint(0, 4, (rows,), generator=generator)
    )


def fit(module: pl.LightningModule, engine: str, dataset: Any = None, validate: bool = False, **settings: Any) -> Any:
    torch.manual_seed(2)
    trainer: Any = pl.Trainer(
        strategy=ORTStrategy(config={"engine": engine, **({"start": "now"} if engine == "recorded" else {})}),
        **{
            **{"accelerator": "cpu", "devices": 1, "max_epochs": 6, "logger": False, "enable_checkpointing": False},
            **{"enable_progress_bar": False, "enable_model_summary": False},
            **settings,
        },
    )
    loader = DataLoader(dataset or data(), 8, shuffle=True)
    trainer.fit(module, loader, DataLoader(data(30), 8) if validate else None)
    return trainer


def replayed(trainer: Any, step: str = "training_step") -> int:
    text = trainer.strategy.report.run.recorded.get(step, "0")
    return int(text.split()[0])


def notes(trainer: Any) -> str:
    return "\n".join(str(note) for note in trainer.strategy.report.notes)


def assert_same(one: pl.LightningModule, other: pl.LightningModule) -> None:
    for (name, own), theirs in zip(one.state_dict().items(), other.state_dict().values(), strict=True):
        assert torch.equal(own, theirs), name


class BatchNorm(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(SIZE, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))


class Logs(Plain):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        scores = self.net(batch[0])
        loss = F.cross_entropy(scores, batch[1])
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log_dict({"largest": scores.max(), "number": 3.0}, on_step=False, on_epoch=True)
        return {"loss": loss, "scores": scores.detach()}


class Metrics(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.accuracy = torchmetrics.Accuracy("multiclass", num_classes=4)
        self.mean = torchmetrics.MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        scores = self.net(batch[0])
        loss = F.cross_entropy(scores, batch[1])
        self.log("accuracy of batch", self.accuracy(scores, batch[1]))
        self.log("accuracy", self.accuracy, on_step=False, on_epoch=True)
        self.mean.update(loss)
        self.log("mean", self.mean, on_step=False, on_epoch=True)
        return loss


class Kept(Plain):
    """Appends a result to a list that was there before, and empties it at the end of the epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Tensor] = []
        self.sums: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.kept.append(loss.detach())
        return loss

    def on_train_epoch_end(self) -> None:
        self.sums.append(float(torch.stack(self.kept).sum()))
        self.kept.clear()


class KeptWithNumbers(Plain):
    rows: list[Any]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.rows.append({"loss": loss.detach(), "size": len(batch[0])})
        return loss

    def on_train_epoch_start(self) -> None:
        self.rows = []

    def on_train_epoch_end(self) -> None:
        self.log("sum", sum(float(row["loss"]) * row["size"] for row in self.rows))
        assert sum(row["size"] for row in self.rows) == len(data())


class KeptWithGraph(Plain):
    """Keeps a part of its loss, as some keep the weights of their attention."""

    scores: Tensor | None = None

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.scores = self.net(batch[0])
        return F.cross_entropy(self.scores, batch[1])

    def on_train_batch_end(self, *_: Any) -> None:
        assert self.scores is not None
        assert self.scores.requires_grad
        with pytest.raises(RuntimeError, match="second time"):
            self.scores.sum().backward()
        self.total = getattr(self, "total", 0.0) + float(self.scores.detach().sum())


class AfterBackward(Plain):
    """Its hook changes the gradients."""

    def on_after_backward(self) -> None:
        for parameter in self.parameters():
            assert parameter.grad is not None
            parameter.grad.mul_(0.5).clamp_(-0.01, 0.01)


class FirstTime(Plain):
    """Warns once."""

    has_warned = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if not self.has_warned:
            self.has_warned = True
            warnings.warn("once", stacklevel=1)
        return super().training_step(batch, batch_idx)


class WritesLists(Plain):
    """A slower copy of the network follows it, and is a part of the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.slow = copy.deepcopy(self.net).requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        with torch.no_grad():
            slow = list(self.slow.parameters())
            torch._foreach_mul_(slow, 0.9)
            torch._foreach_add_(slow, list(self.net.parameters()), alpha=0.1)
        return super().training_step(batch, batch_idx) + F.mse_loss(self.net(batch[0]), self.slow(batch[0]))


@dataclass(slots=True)
class Slotted:
    x: Tensor
    y: Tensor
    _: KW_ONLY
    size: int = field(init=False)

    def __post_init__(self) -> None:
        self.size = len(self.x)


class OfSlots(Plain):
    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return Slotted(*batch)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.cross_entropy(self.net(batch.x), batch.y) * batch.size


@dataclass
class Settings:
    gain: float = 1.5
    names: tuple[str, ...] = ("a", "b")


class Configured(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.save_hyperparameters({"gain": 2.0})
        self.settings = Settings()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return loss * self.settings.gain * self.hparams["gain"] * len(self.settings.names)


class Sums(Plain):
    """Results in a dictionary, and a loss of several parts."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        decay = sum((p.square().sum() for p in self.parameters()), torch.zeros(()))
        return {"loss": loss + 0.01 * decay, "parts": [loss.detach(), decay.detach()], "name": "sum"}


class Schedule(Plain):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), 0.05, momentum=0.9)
        return [optimizer], [
            {"scheduler": torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 50), "interval": "step"}
        ]


class Rows(Dataset[dict[str, Any]]):
    """Items of dictionaries, with a name that is the same in each."""

    def __init__(self) -> None:
        self.x, self.y = data().tensors

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": self.x[index], "y": self.y[index], "name": "row"}


class OfRows(Plain):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.cross_entropy(self.net(batch["x"]), batch["y"])


class Hidden(Plain):
    """A recurrent state from batch to batch, begun anew where the size differs, and two past ones."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(SIZE, 16)
        self.out = nn.Linear(16, 4)
        self.state: Any = torch.zeros(8, 16)
        self.past = {"one": torch.zeros(8, 16), "two": torch.zeros(8, 16)}

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        before = self.state if len(batch[0]) == 8 else self.state[: len(batch[0])]
        state = self.cell(batch[0], before)
        if len(batch[0]) == 8:
            self.past["two"], self.past["one"] = self.past["one"], before
            self.state = state.detach()
        loss = F.cross_entropy(self.out(state), batch[1])
        return loss + 0.01 * (self.past["two"] - self.past["one"]).square().mean()

    def on_train_epoch_end(self) -> None:
        if self.current_epoch == 3:
            self.state = torch.ones(8, 16)


RECORDED: dict[str, tuple[Callable[[], Plain], dict[str, Any]]] = {
    "plain": (Plain, {}),
    "batch norm": (BatchNorm, {}),
    "logs": (Logs, {}),
    "metrics": (Metrics, {}),
    "kept results": (Kept, {}),
    "results with numbers": (KeptWithNumbers, {}),
    "results with graphs": (KeptWithGraph, {}),
    "a hook after the backward pass": (AfterBackward, {}),
    "a warning of the first step": (FirstTime, {}),
    "slots": (OfSlots, {}),
    "lists that are written": (WritesLists, {}),
    "settings": (Configured, {}),
    "sums": (Sums, {}),
    "hidden": (Hidden, {}),
    "schedule": (Schedule, {}),
    "rows": (OfRows, {"dataset": Rows()}),
    "clipping": (Plain, {"gradient_clip_val": 0.1}),
    "accumulation": (Plain, {"accumulate_grad_batches": 3}),
    "bfloat16": (Plain, {"precision": "bf16-mixed"}),
    "validation": (Logs, {"validate": True, "val_check_interval": 5}),
}


@pytest.mark.parametrize("name", RECORDED)
def test_a_recorded_fit_has_the_bits_of_one_without(name: str) -> None:
    make, settings = RECORDED[name]
    plain, recorded = make(), make()
    one, other = fit(plain, "torch", **settings), fit(recorded, "recorded", **settings)
    state = torch.get_rng_state()
    fit(make(), "torch", **settings)
    assert torch.equal(torch.get_rng_state(), state), "random numbers after the fit"
    assert replayed(other) > 10, notes(other)
    assert_same(plain, recorded)
    assert one.callback_metrics.keys() == other.callback_metrics.keys()
    for key, value in one.callback_metrics.items():
        assert torch.equal(value, other.callback_metrics[key]), key
    if isinstance(plain, Hidden) and isinstance(recorded, Hidden):
        assert torch.equal(plain.state, recorded.state)
        assert all(map(torch.equal, plain.past.values(), recorded.past.values()))
    if isinstance(plain, Kept) and isinstance(recorded, Kept):
        assert plain.sums == recorded.sums
    assert "differs" not in notes(other)


def test_a_deterministic_run_is_recorded_too() -> None:
    recorded = Plain()
    try:
        other = fit(recorded, "auto", data(4000), deterministic=True, max_epochs=2)
        fit(again := Plain(), "torch", data(4000), deterministic=True, max_epochs=2)
    finally:
        torch.use_deterministic_algorithms(False)
    assert replayed(other) > 10, notes(other)
    assert_same(again, recorded)


class Evaluates(Plain):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", F.cross_entropy(self.net(batch[0]), batch[1]))

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(batch[0])


def test_steps_without_a_backward_pass_are_recorded_too() -> None:
    plain, recorded = Evaluates(), Evaluates()
    loader = DataLoader(data(400), 8)
    one, other = (
        fit(module, engine, validate=True, max_epochs=8)
        for module, engine in ((plain, "torch"), (recorded, "recorded"))
    )
    assert_same(plain, recorded)
    assert torch.equal(one.callback_metrics["val"], other.callback_metrics["val"])
    assert replayed(other, "validation_step") > 5
    for own, theirs in zip(one.predict(plain, loader), other.predict(recorded, loader), strict=True):
        assert torch.equal(own, theirs)
    assert replayed(other, "predict_step") > 5


GAIN = 1.0


class Changes:
    """Steps that read what changes while they train: seen at the very step."""

    class Attribute(Plain):
        gain = 1.0

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step(batch, batch_idx) * self.gain

        def on_train_epoch_start(self) -> None:
            self.gain = 1.0 + self.current_epoch // 2

    class Of_class(Attribute):
        def on_train_epoch_start(self) -> None:
            type(self).gain = 1.0 + self.current_epoch // 2

    class Global(Plain):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step(batch, batch_idx) * GAIN

        def on_train_epoch_start(self) -> None:
            global GAIN
            GAIN = 1.0 + self.current_epoch // 2

    class Frozen(Plain):
        def on_train_epoch_start(self) -> None:
            self.net[0].requires_grad_(self.current_epoch < 3)

    class Evaluation(Plain):
        def on_train_epoch_start(self) -> None:
            self.net.train(self.current_epoch < 3)

    class Layer(Plain):
        def on_train_epoch_start(self) -> None:
            if self.current_epoch == 3:
                self.net[1] = nn.Tanh()

    class Data(Plain):
        def on_train_epoch_start(self) -> None:
            if self.current_epoch == 3:
                self.net[0].weight.data = self.net[0].weight.data.clone() * 0.5

    class Hook(Plain):
        def on_train_epoch_start(self) -> None:
            if self.current_epoch == 3:
                self.net[0].register_forward_hook(lambda module, args, output: output * 2)

    class Epoch(Plain):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step(batch, batch_idx) * (1 + self.current_epoch // 3)

    class Method(Plain):
        def on_train_epoch_start(self) -> None:
            if self.current_epoch == 3:
                stock = self.net.forward
                self.net.forward = lambda x: stock(x) * 2  # type: ignore[method-assign]


@pytest.mark.parametrize("kind", [name for name in vars(Changes) if not name.startswith("_")])
def test_what_changes_between_steps_is_seen_at_once(kind: str) -> None:
    global GAIN
    modules = []
    for engine in ("torch", "recorded"):
        GAIN, Changes.Attribute.gain, Changes.Of_class.gain = 1.0, 1.0, 1.0
        module = getattr(Changes, kind)()
        trainer = fit(module, engine, max_epochs=7)
        modules.append(module)
    assert_same(*modules)
    assert replayed(trainer) > 5, notes(trainer)
    assert "differs" not in notes(trainer)


class Open:
    """Steps whose world is open: they run as they are, and the report says why."""

    class Environment(Plain):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step(batch, batch_idx) * float(os.getenv("NO_SUCH_GAIN", "1"))

    class Random(Plain):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step(batch, batch_idx) * (1 + random.random())

    class Counter(Plain):
        count = 0

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.count += 1
            return super().training_step(batch, batch_idx) * self.count

    class Number_of_batch(Plain):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step(batch, batch_idx) * (1 + batch_idx)

    class Item(Plain):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            return loss * loss.item()

    class Written_lists(Plain):
        """By an operation that no operation of one tensor stands for."""

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            kept = [batch[0].clone(), batch[0].clone()]
            torch._foreach_addcmul_(kept, kept, kept, [0.5, 0.25])
            return super().training_step((kept[0] + kept[1], batch[1]), batch_idx)

    class Kept_for_later(Plain):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.later = self.net[0](batch[0]).sum()
            return super().training_step(batch, batch_idx)

        def on_train_batch_end(self, *_: Any) -> None:
            self.later.backward()

    class Numpy(Plain):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step(batch, batch_idx) * float(batch[0].numpy().max())

    class Getattr(Plain):
        def __getattr__(self, name: str) -> Any:
            return self.current_epoch + 1 if name == "gain" else super().__getattr__(name)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step(batch, batch_idx) * self.gain

    class Generator(Plain):
        def __init__(self) -> None:
            super().__init__()
            self.gains = iter(range(1, 10_000))

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step(batch, batch_idx) * next(self.gains)


@pytest.mark.parametrize("kind", [name for name in vars(Open) if not name.startswith("_")])
def test_an_open_world_stays_unchanged_with_a_line(kind: str) -> None:
    random.seed(0)
    plain, recorded = getattr(Open, kind)(), getattr(Open, kind)()
    fit(plain, "torch")
    random.seed(0)
    trainer = fit(recorded, "recorded")
    assert_same(plain, recorded)
    assert "not recorded" in notes(trainer)


def test_an_error_in_a_replay_is_the_step_s_own() -> None:
    class Data(Dataset[Any]):
        def __len__(self) -> int:
            return 400

        def __getitem__(self, index: int) -> Any:
            return torch.tensor(60 if index == 390 else index % 50), torch.tensor(index % 4)

    class Embeds(Plain):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Embedding(50, 8), nn.Linear(8, 4))

        def train_dataloader(self) -> Any:
            return DataLoader(Data(), 8)

    found = []
    for engine in ("torch", "recorded"):
        module = Embeds()
        trainer: Any = pl.Trainer(
            strategy=ORTStrategy(config={"engine": engine, **({"start": "now"} if engine == "recorded" else {})}),
            **{"accelerator": "cpu", "devices": 1, "max_epochs": 1, "logger": False, "enable_checkpointing": False},
            **{"enable_progress_bar": False, "enable_model_summary": False},
        )
        with pytest.raises(IndexError) as error:
            trainer.fit(module)
        found.append((str(error.value), copy.deepcopy(module.state_dict()), trainer.global_step))
    (one, own, steps), (other, theirs, same) = found
    assert one == other
    assert steps == same
    assert all(torch.equal(own[name], theirs[name]) for name in own)


class OddBatches(Plain):
    """Reads the number of the batch where that has another size, as no other batch does."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return self.scaled(loss, batch_idx) if len(batch[0]) == 4 else loss

    def scaled(self, loss: Tensor, number: int) -> Tensor:
        return loss * (1 + number)


def test_an_argument_that_one_size_reads_counts_for_that_size() -> None:
    class Sizes(Dataset[Any]):
        def __init__(self) -> None:
            self.x, self.y = data().tensors

        def __len__(self) -> int:
            return 60

        def __getitem__(self, index: int) -> Any:
            rows = 4 if index % 5 == 2 or index > 50 else 8
            return self.x[index : index + rows], self.y[index : index + rows]

    plain, recorded = OddBatches(), OddBatches()
    for module, engine in ((plain, "torch"), (recorded, "recorded")):
        torch.manual_seed(2)
        strategy = ORTStrategy(config={"engine": engine, **({"start": "now"} if engine == "recorded" else {})})
        trainer: Any = pl.Trainer(
            strategy=strategy,
            **{"accelerator": "cpu", "devices": 1, "max_epochs": 4, "logger": False, "enable_checkpointing": False},
            **{"enable_progress_bar": False, "enable_model_summary": False},
        )
        trainer.fit(module, DataLoader(Sizes(), batch_size=None))
    assert_same(plain, recorded)


def test_a_second_fit_records_again() -> None:
    modules = Logs(), Logs()
    for module, engine in zip(modules, ("torch", "recorded"), strict=True):
        for _ in range(2):
            trainer = fit(module, engine)
    assert replayed(trainer) > 10
    assert_same(*modules)


def test_replays_run_on_as_many_threads_as_are_faster(
    monkeypatch: pytest.MonkeyPatch, limits: Callable[..., None]
) -> None:
    limits(one_thread=5.0, slowdown=1.25)
    before, number = torch.get_num_threads(), list[int]()
    torch.set_num_threads(2)
    tell_threads = Turn.tell_threads

    def scripted(self: Turn, *args: Any) -> None:
        self.seconds = 1.0 if self.threads is ON_ONE_THREAD else 3.0
        tell_threads(self, *args)

    run = Replay.__call__

    def counted(self: Replay, *args: Any) -> Any:
        number.append(torch.get_num_threads())
        return run(self, *args)

    monkeypatch.setattr(Turn, "tell_threads", scripted)
    monkeypatch.setattr(Replay, "__call__", counted)
    try:
        trainer = fit(Plain(), "recorded", max_epochs=10)
    finally:
        torch.set_num_threads(before)
    assert replayed(trainer) > 10
    assert number[-10:].count(1) > 5, "now and then one runs on all"
    assert "one thread" in trainer.strategy.report.run.threads["training_step"]


class BeforeBackward(Plain):
    """Its hook gets the loss before the backward pass."""

    def on_before_backward(self, loss: Tensor) -> None:
        assert loss.requires_grad
        self.last = float(loss)


class OwnBackward(Plain):
    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        (loss * 1.0).backward()


@pytest.mark.parametrize("kind", [BeforeBackward, OwnBackward])
def test_where_others_take_part_in_the_backward_pass_steps_stay_unchanged(kind: type[Plain]) -> None:
    plain, recorded = kind(), kind()
    fit(plain, "torch")
    trainer = fit(recorded, "recorded")
    assert_same(plain, recorded)
    assert "takes part in its backward pass" in notes(trainer)


def test_a_step_that_changes_while_gradients_are_accumulated_is_recorded_again() -> None:
    class Late(Plain):
        gain = 1.0

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step(batch, batch_idx) * self.gain

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            self.gain = 2.0 if self.trainer.fit_loop.epoch_loop.total_batch_idx > 30 else 1.0

    modules = Late(), Late()
    for module, engine in zip(modules, ("torch", "recorded"), strict=True):
        trainer = fit(module, engine, accumulate_grad_batches=3, max_epochs=9)
    assert_same(*modules)
    assert "not recorded" not in notes(trainer)
    assert replayed(trainer) > 30


@pytest.mark.parametrize("profiler", ["simple", "advanced"])
def test_a_profiler_of_the_trainer_goes_on(make_trainer: Callable[..., Any], profiler: str) -> None:
    trainer = make_trainer(
        strategy=ORTStrategy(config={"engine": "recorded", "start": "now"}), profiler=profiler, max_epochs=2
    )
    trainer.fit(BoringModel())
    assert trainer.global_step == 2 * trainer.num_training_batches
