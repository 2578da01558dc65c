"""Ordinary steps are closed; what they write is an effect; what they read is listed."""

import collections
import dataclasses
import enum
import logging
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from world_steps import observed, reasons

from lightning_ort.world import World

X, Y = torch.randn(4, 5, 8), torch.randn(4, 1)
SCALE = {"loss": 2.0, "all": [1.0, 2.0]}
log = logging.getLogger(__name__)


class Kind(enum.Enum):
    ONE = 1
    TWO = 2


@dataclasses.dataclass
class Config:
    width: int = 8
    kind: Kind = Kind.TWO
    rates: tuple[float, ...] = (0.1, 0.2)


class Head:
    """A plain class of the user's."""

    def __init__(self, width: int) -> None:
        self.net = nn.Linear(width, 1)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)


def weighted(loss: torch.Tensor, by: float = 1.0) -> torch.Tensor:
    return loss * by * SCALE["loss"] + sum(SCALE["all"])


class Plain(LightningModule):
    def __init__(self, net: nn.Module, width: int = 16) -> None:
        super().__init__()
        self.net, self.out = net, nn.Linear(width, 1)
        self.config, self.kind = Config(), Kind.ONE

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.net(x)
        return self.out(x[0][:, -1] if isinstance(x, tuple) else x.flatten(1) if x.dim() > 3 else x[:, -1])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        loss = F.mse_loss(self(x), y)
        if self.config.kind is Kind.TWO and self.kind != Kind.TWO:
            loss = weighted(loss, by=self.config.rates[0])
        log.debug("loss %s", loss)
        return {"loss": loss}


def nets() -> dict[str, Plain]:
    cnn = nn.Sequential(nn.Unflatten(1, (1, 5)), nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    return {
        "mlp": Plain(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.1))),
        "cnn": Plain(cnn, 160),
        "lstm": Plain(nn.LSTM(8, 16, num_layers=2, dropout=0.1, batch_first=True)),
        "gru": Plain(nn.GRU(8, 16, batch_first=True)),
        "transformer": Plain(nn.TransformerEncoder(layer, 2), 8),
    }


@pytest.mark.parametrize("name", nets())
def test_ordinary_modules_are_closed(name: str) -> None:
    module = nets()[name]
    world = observed(module.training_step, (X, Y), 0)
    assert reasons(world) == ""
    assert world.unread == {1}
    assert world.effects == world.slots == []
    assert {id(p) for p in module.parameters()} <= {id(tensor) for tensor in world.tensors}
    assert world.holds()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(1)
    module.not_read = 3
    assert world.holds(), world.changed()
    module.config.rates = (0.3,)
    assert not world.holds()
    assert "rates" in world.changed()


class Step(LightningModule):
    """A step that is given."""

    def __init__(self, step: Any, **kept: Any) -> None:
        super().__init__()
        self.net = nn.Linear(8, 1)
        self.step = step
        for name, value in kept.items():
            setattr(self, name, value)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        return self.step(self, x, F.mse_loss(self.net(x[:, 0]), y))


BATCH = (X, Y)


def test_a_plain_value_that_is_made_again_is_the_same() -> None:
    module = Step(lambda m, x, loss: loss * m.rate, rate=float("1.5"))
    world = observed(module.training_step, BATCH, 0)
    module.rate = float("1.5")
    assert world.holds()
    module.rate = 1.25
    assert not world.holds()


def test_a_tensor_that_is_kept_is_a_slot() -> None:
    def step(m: Any, x: Any, loss: Any) -> Any:
        old, m.hidden = m.hidden, x.mean(dim=0).detach()
        return loss + old.sum()

    module = Step(step, hidden=torch.zeros(5, 8))
    world = observed(module.training_step, BATCH, 0)
    assert reasons(world) == ""
    assert world.slots == [(vars(module), "hidden")]
    assert [(effect.key, effect.kind) for effect in world.effects] == [("hidden", "item")]
    assert world.effects[0].value is module.hidden
    assert world.holds(), world.changed()
    module.hidden = torch.ones(5, 8)
    assert world.holds()
    module.hidden = None
    assert not world.holds()


def test_a_buffer_that_is_set_is_a_slot() -> None:
    class Buffered(Step):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.mean = self.mean * 0.9 + batch[0].mean()
            return super().training_step(batch, batch_idx)

    module = Buffered(lambda m, x, loss: loss)
    module.register_buffer("mean", torch.zeros(()))
    world = observed(module.training_step, BATCH, 0)
    assert reasons(world) == ""
    assert world.slots == [(module._buffers, "mean")]
    assert world.holds(), world.changed()


def test_what_is_set_first_is_another_world_then() -> None:
    def step(m: Any, x: Any, loss: Any) -> Any:
        m.last = loss.detach()
        return loss

    module = Step(step)
    first = observed(module.training_step, BATCH, 0)
    assert reasons(first) == ""
    assert not first.holds()
    second = observed(module.training_step, BATCH, 0)
    assert second.slots == [(vars(module), "last")]
    assert second.holds(), second.changed()


def test_parameters_may_be_asked_for() -> None:
    module = Step(lambda m, x, loss: loss + sum(p.square().sum() for p in m.parameters()))
    world = observed(module.training_step, BATCH, 0)
    assert reasons(world) == ""
    assert world.holds(), world.changed()


def test_what_is_appended_is_an_effect() -> None:
    def step(m: Any, x: Any, loss: Any) -> Any:
        m.outputs["train"].append({"loss": loss.detach()})
        m.losses.append(loss.detach())
        return loss

    module = Step(step, losses=[], outputs={"train": []})
    world = observed(module.training_step, BATCH, 0)
    assert reasons(world) == ""
    assert sorted(map(id, (effect.owner for effect in world.effects))) == sorted(
        map(id, (module.losses, module.outputs["train"]))
    )
    assert {effect.kind for effect in world.effects} == {"append"}
    module.losses.clear()
    assert world.holds(), world.changed()


def test_a_list_that_is_read_too_is_no_place_to_append_to() -> None:
    def step(m: Any, x: Any, loss: Any) -> Any:
        m.losses.append(loss.detach())
        return loss * len(m.losses)

    world = observed(Step(step, losses=[]).training_step, BATCH, 0)
    assert world.openings or not world.holds()


@pytest.mark.parametrize("value", [3, "text", [1], {"a": 1}, Config()], ids=str)
def test_other_values_that_are_written_are_open(value: Any) -> None:
    def step(m: Any, x: Any, loss: Any) -> Any:
        m.kept = value
        return loss

    assert "kept" in reasons(observed(Step(step, kept=None).training_step, BATCH, 0))


def test_a_batch_that_is_changed_is_open() -> None:
    def step(batch: Any, batch_idx: int) -> Any:
        batch["x"] = batch["x"] * 2
        return batch["x"].sum()

    assert "batch" in reasons(observed(step, {"x": X}, 0))


@dataclasses.dataclass
class Pair:
    x: Any
    y: Any


Named = collections.namedtuple("Named", ["x", "y"])


@pytest.mark.parametrize(
    "batch",
    [[X, Y], {"x": X, "y": Y}, collections.OrderedDict(x=X), Pair(X, [1, "a", None]), Named(X, {"y": Y})],
    ids=lambda batch: type(batch).__name__,
)
def test_known_batches(batch: Any) -> None:
    module = Step(lambda m, x, loss: loss)
    module.training_step = lambda batch, batch_idx: module.net(X).sum()  # type: ignore[method-assign]
    assert reasons(observed(module.training_step, batch, 0)) == ""


class Unknown:
    def __init__(self) -> None:
        self.x = X


@pytest.mark.parametrize(
    "batch", [Unknown(), {Kind.ONE: X}, [range(3)], X.as_subclass(type("Own", (torch.Tensor,), {}))]
)
def test_unknown_batches_are_open(batch: Any) -> None:
    assert "batch" in reasons(observed(lambda batch, batch_idx: X.sum(), batch, 0))


def test_arguments_that_are_read() -> None:
    def first(batch: Any, batch_idx: int) -> Any:
        return X.sum() * batch_idx

    def second(batch: Any, *rest: Any) -> Any:
        return X.sum()

    assert observed(first, X, 0).unread == {0}
    assert observed(second, X, 0).unread == {0}


def test_epoch_and_step_are_read_again() -> None:
    module = Step(lambda m, x, loss: loss * m.current_epoch + m.global_step + m.trainer.max_epochs + m.hparams.gain)
    module.save_hyperparameters({"gain": 2.0})
    module.trainer = trainer = Trainer(max_epochs=2, logger=False, enable_checkpointing=False, accelerator="cpu")
    world = observed(module.training_step, BATCH, 0)
    assert reasons(world) == ""
    assert world.holds(), world.changed()
    trainer.fit_loop.epoch_progress.current.completed = 1
    assert not world.holds()
    trainer.fit_loop.epoch_progress.current.completed = 0
    assert world.holds(), world.changed()
    module.hparams.gain = 3.0
    assert not world.holds()


def test_what_is_done_with_the_trainer_is_open() -> None:
    def step(m: Any, x: Any, loss: Any) -> Any:
        m.trainer.should_stop = True
        return loss

    module = Step(step)
    module.trainer = Trainer(logger=False, enable_checkpointing=False, accelerator="cpu")
    assert "should_stop" in reasons(observed(module.training_step, BATCH, 0))


def test_a_watched_process_is_left_alone() -> None:
    def watch(*args: Any) -> None:
        return None

    old = sys.getprofile()
    sys.setprofile(watch)
    try:
        world = observed(lambda batch, batch_idx: X.sum(), X, 0)
        assert sys.getprofile() is watch
    finally:
        sys.setprofile(old)
    assert "profiler" in reasons(world)


def test_nothing_stays_behind() -> None:
    module = Step(lambda m, x, loss: loss)
    world = World(module.training_step, (BATCH, 0))
    with pytest.raises(ValueError, match="inside"), world.watched():
        raise ValueError("inside")
    assert sys.getprofile() is None


def test_parts_of_other_packages_are_trusted_but_not_their_state() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=20, hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16
    )

    class Bert(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.bert = transformers.BertForSequenceClassification(config)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.bert(**batch).loss

    module = Bert()
    batch = {"input_ids": torch.randint(20, (2, 6)), "attention_mask": torch.ones(2, 6), "labels": torch.tensor([0, 1])}
    for _ in range(2):  # the first writes what it found out about the loss
        world = observed(module.training_step, batch, 0)
    assert reasons(world) == ""
    assert world.holds(), world.changed()
    module.bert.dropout.p = 0.5
    assert not world.holds()


def ours(function: str) -> Any:
    """A function as one of this package, which replaces one of Lightning's while a step is recorded."""
    namespace: dict[str, Any] = {"__name__": "lightning_ort.recording.stand_in", "seen": []}
    exec(function, namespace)
    return namespace


def test_what_replaces_functions_is_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    namespace = ours(
        "import time\ndef log(self, name, value):\n    print(time.time(), end='')\n    seen.append(name)\n"
    )
    monkeypatch.setattr(LightningModule, "log", namespace["log"])

    def step(m: Any, x: Any, loss: Any) -> Any:
        m.log("loss", loss)
        return loss

    world = observed(Step(step).training_step, BATCH, 0)
    assert namespace["seen"] == ["loss"]
    assert reasons(world) == ""
    assert world.holds(), world.changed()


def test_what_is_called_after_a_replaced_function_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LightningModule, "log", ours("def log(self, name, value):\n    pass\n")["log"])

    def step(m: Any, x: Any, loss: Any) -> Any:
        m.log("loss", loss)
        return loss * float(m.net.bias.detach().numpy()[0])

    assert "numpy" in reasons(observed(Step(step).training_step, BATCH, 0))


def test_functions_of_a_backward_pass_are_read() -> None:
    class Scaled(torch.autograd.Function):
        by: Any = [2.0]

        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 1

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
            return grad * Scaled.by[0]

    world = observed(Step(lambda m, x, loss: Scaled.apply(loss)).training_step, BATCH, 0)
    assert reasons(world) == ""
    assert world.holds(), world.changed()
    Scaled.by[0] = 3.0
    assert not world.holds()


def test_hooks_of_a_backward_pass_that_are_open() -> None:
    module = Step(lambda m, x, loss: loss)
    module.net.weight.register_hook(lambda grad: print("", end=""))
    assert "print" in reasons(observed(module.training_step, BATCH, 0))


def test_looking_calls_nothing_of_the_objects() -> None:
    called = []

    class Odd:
        __slots__ = ("value",)

        def __getattr__(self, name: str) -> Any:
            called.append(name)
            raise ValueError(name)

    module = Plain(nn.Identity(), 8)
    vars(module)["odd"] = Odd()
    world = observed(module.training_step, (X, Y), 0)
    assert not called
    assert "cannot be read" not in reasons(world)
