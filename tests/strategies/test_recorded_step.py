"""A whole training step as recordings: with a tape in place of CUDA graphs, and a compiler that compiles nothing."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._inductor.compile_fx
from functorch.compile import make_boxed_func
from lightning.pytorch import Callback, LightningModule, callbacks
from lightning.pytorch.callbacks import GradientAccumulationScheduler, ModelCheckpoint
from lightning.pytorch.loggers import Logger
from lightning.pytorch.plugins import MixedPrecision
from small_modules import Small, loader
from tape import Streams, Tape
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import ExponentialLR, OneCycleLR
from torch.utils.data import default_collate

from lightning_ort import ORTConfig, ORTStrategy
from lightning_ort.compiler import engines
from lightning_ort.compiler.executors import inductor
from lightning_ort.compiler.machine import recorder
from lightning_ort.compiler.reason import ReasonType

EPOCHS, BATCHES = 4, 51


def named(found: Any) -> Any:
    """Let a loader's batches have parts, and things that are no tensors."""
    found.collate_fn = lambda rows: {"data": default_collate(rows), "name": "a", "nothing": None}
    return found


class Module(Small):
    """With random numbers, buffers that a step writes to, a schedule, and a last batch that is smaller."""

    start: str | None = None  # a checkpoint
    on_train_batch_end = LightningModule.on_train_batch_end  # one of the module's own could look at gradients

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16, bias=False), nn.BatchNorm1d(16), nn.Dropout(0.5), nn.Linear(16, 3))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch["data"])
        self.log("loss", loss, prog_bar=True)
        self.log("twice", 2 * loss.detach(), on_step=True, on_epoch=True)
        return loss

    def train_dataloader(self) -> Any:
        return named(loader(8 * (BATCHES - 1) + 3))

    def configure_optimizers(self) -> Any:
        optimizer = AdamW(self.parameters(), lr=1e-2, weight_decay=0.1)
        return [optimizer], [{"scheduler": ExponentialLR(optimizer, 0.99), "interval": "step"}]


class Cycles(Module):
    """Whose schedule changes other settings, too."""

    def configure_optimizers(self) -> Any:
        optimizer = AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [
            {"scheduler": OneCycleLR(optimizer, 1e-2, total_steps=EPOCHS * BATCHES), "interval": "step"}
        ]


class Momentum(Module):
    """With another optimizer, and parts of it frozen."""

    def configure_optimizers(self) -> Any:
        self.net[3].bias.requires_grad_(False)
        return SGD(self.net.parameters(), lr=0.02, momentum=0.9)


class Values(Logger):
    name, version = "values", 0

    def __init__(self) -> None:
        super().__init__()
        self.found: list[dict[str, float]] = []

    def log_metrics(self, metrics: Any, step: Any = None) -> None:
        self.found.append(metrics)

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        pass


@pytest.fixture
def tape(monkeypatch: pytest.MonkeyPatch, paces: Callable[..., None], captured_at_once: None) -> Tape:
    paces(torch=1.0, inductor=0.5)
    monkeypatch.setattr(engines, "ON_CPU", ["inductor"])
    found = Tape()
    found.streams = Streams(monkeypatch)

    def compile_fx(gm: Any, inputs: Any, **kwargs: Any) -> Any:
        return aot_autograd(fw_compiler=lambda gm, inputs: make_boxed_func(gm))(gm, inputs)

    monkeypatch.setattr(torch._inductor.compile_fx, "compile_fx", compile_fx)
    monkeypatch.setattr(inductor, "cpp_compiler", lambda: "/usr/bin/g++")
    monkeypatch.setattr(recorder, "recorder_for", lambda device: found)
    return found


def fit(module: Module, make_trainer: Callable[..., Any], strategy: Any, **settings: Any) -> Any:
    torch.manual_seed(0)
    defaults = {"max_epochs": 2, "limit_val_batches": 0, "logger": Values(), "log_every_n_steps": 1}
    trainer = make_trainer(strategy=strategy, **{**defaults, **settings})
    trainer.fit(module, ckpt_path=module.start)
    return trainer


def recording() -> ORTStrategy:
    return ORTStrategy(config={"engine": "auto", "debug": {"record_step": True}})


def notes(trainer: Any) -> str:
    return "\n".join(note.reason.text for note in trainer.strategy.report.notes)


def assert_equal(ours: Any, theirs: Any) -> None:
    pairs = [*zip(ours.logger.found, theirs.logger.found, strict=True)]
    assert len(pairs) > 50
    for mine, other in pairs:
        assert mine == pytest.approx(other, rel=1e-5, abs=1e-6)
    for mine, other in zip(states(ours), states(theirs), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)


def states(trainer: Any) -> Any:
    """Parameters and buffers, and the optimizer's state as a checkpoint has it."""
    optimizer = trainer.optimizers[0].state_dict()
    return [trainer.model.state_dict(), optimizer["state"], optimizer["param_groups"]]


@pytest.mark.parametrize(
    ("kind", "settings", "both"),
    [
        (Module, {}, True),
        (Module, {"gradient_clip_val": 0.1}, True),
        (Momentum, {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}, True),
        (Module, {"precision": "bf16-mixed", "gradient_clip_val": 0.1}, True),
        (Cycles, {}, False),  # of the update, as other settings than the learning rate change
    ],
)
def test_it_is_what_eager_computes(
    kind: Any, settings: Any, both: bool, make_trainer: Callable[..., Any], tape: Tape
) -> None:
    stock, ours = kind(), kind()
    settings["max_epochs"] = EPOCHS
    is_exact = "precision" not in settings  # where roundings add up, it is what the same graph computes otherwise
    theirs = fit(stock, make_trainer, "auto" if is_exact else ORTStrategy(config={"engine": "auto"}), **settings)
    trainer = fit(ours, make_trainer, recording(), **settings)
    assert "its forward and backward pass are one recording" in notes(trainer)
    assert ("clipping and update are one recording" in notes(trainer)) == both
    # but for the last batch of each epoch, and what comes before the recording
    assert tape.replayed > (1 + both) * (EPOCHS * BATCHES - EPOCHS - 50)
    assert tape.recorded == 1 + both
    assert len(tape.streams.copied) == len(tape.streams.recorded) == 2 * EPOCHS * BATCHES
    assert_equal(trainer, theirs)


def test_steps_that_accumulate_run_as_usual(make_trainer: Callable[..., Any], tape: Tape) -> None:
    stock, ours = Module(), Module()
    theirs = fit(stock, make_trainer, "auto", callbacks=[GradientAccumulationScheduler({0: 1, 1: 3})])
    trainer = fit(ours, make_trainer, recording(), callbacks=[GradientAccumulationScheduler({0: 1, 1: 3})])
    assert 0 < tape.replayed / 2 < BATCHES
    assert_equal(trainer, theirs)


class Looks(Callback):
    def __init__(self) -> None:
        self.found: list[Tensor] = []

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        self.found.append(module.net[3].weight.grad)


def test_nothing_is_recorded_where_somebody_keeps_gradients(make_trainer: Callable[..., Any], tape: Tape) -> None:
    theirs, ours = Looks(), Looks()
    fit(Module(), make_trainer, "auto", callbacks=[theirs])
    trainer = fit(Module(), make_trainer, recording(), callbacks=[ours])
    assert tape.recorded == 0
    assert "may look at gradients" in notes(trainer)
    for mine, other in zip(ours.found, theirs.found, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("back", [False, True])
def test_checkpoints_are_those_of_plain_runs(
    back: bool, make_trainer: Callable[..., Any], tape: Tape, tmp_path: Path
) -> None:
    """A run goes on from a checkpoint of the other kind; its own recordings are made anew."""

    def checkpoint(name: str) -> dict[str, Any]:
        return {"callbacks": [ModelCheckpoint(tmp_path / name, save_last=True)], "enable_checkpointing": True}

    fit(Module(), make_trainer, recording() if back else "auto", **checkpoint("first"))
    strategies = ["auto", "auto" if back else recording()]
    found = []
    for strategy in strategies:
        module = Module()
        module.start = str(tmp_path / "first" / "last.ckpt")
        found.append(fit(module, make_trainer, strategy, max_epochs=4))
    assert_equal(*found)
    saved = torch.load(tmp_path / "first" / "last.ckpt", weights_only=True)["optimizer_states"][0]
    assert all(type(group["lr"]) is float and not group["capturable"] for group in saved["param_groups"])
    assert tape.replayed > BATCHES / 2


class Replaces(Module):
    """Its parameters move to other memory in the middle of a run."""

    def on_train_epoch_start(self) -> None:
        for parameter in self.parameters():
            parameter.data = parameter.data.clone()
        states = self.optimizers().state
        for state in states.values():
            state["exp_avg"] = state["exp_avg"].clone()


def test_what_moves_is_recorded_again(make_trainer: Callable[..., Any], tape: Tape) -> None:
    """With averaged weights, which change places with the others where the Trainer has that."""
    averages = getattr(callbacks, "EMAWeightAveraging", None)
    stock, ours = Replaces(), Replaces()
    theirs = fit(stock, make_trainer, "auto", callbacks=[averages()] if averages else [])
    trainer = fit(ours, make_trainer, recording(), callbacks=[averages()] if averages else [])
    assert tape.recorded > 2
    assert_equal(trainer, theirs)


@pytest.mark.parametrize("of_update", [False, True])
def test_a_replay_that_differs_is_found_before_anything_is_made_of_it(
    of_update: bool, make_trainer: Callable[..., Any], tape: Tape
) -> None:
    stock, ours = Module(), Module()
    theirs = fit(stock, make_trainer, "auto")
    tape.wrong = 2 if of_update else 1
    trainer = fit(ours, make_trainer, recording())
    assert tape.recorded == tape.wrong
    (fallback,) = trainer.strategy.report.fallbacks
    assert fallback.reason.type is ReasonType.MISMATCH
    assert_equal(trainer, theirs)


def test_a_capture_that_fails_ends_no_run(make_trainer: Callable[..., Any], tape: Tape) -> None:
    stock, ours = Module(), Module()
    theirs = fit(stock, make_trainer, "auto")
    tape.fails = True
    trainer = fit(ours, make_trainer, recording())
    assert (tape.recorded, tape.replayed) == (1, 0)
    assert "not recorded: RuntimeError: operation not permitted" in notes(trainer)
    assert_equal(trainer, theirs)


class NaNGradient(Module):
    """Its gradients become NaN in a late step; from then on somebody looks for what makes them."""

    def __init__(self) -> None:
        super().__init__()
        self.begun = 0
        self.register_buffer("gap", torch.ones(()))

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.begun = batch_idx
        if batch_idx == BATCHES - 5:
            torch.autograd.set_detect_anomaly(True)
            self.gap.zero_()

    def loss(self, batch: Any) -> Tensor:
        x = self(batch[0])
        return (x - x.detach() + self.gap).square().sqrt().sum() + super().loss(batch)


def test_what_makes_a_nan_is_found_after_replays(make_trainer: Callable[..., Any], tape: Tape) -> None:
    module = NaNGradient()
    with pytest.raises(RuntimeError, match="returned nan"):
        fit(module, make_trainer, recording(), max_epochs=1)
    assert tape.replayed > 0
    assert module.begun == BATCHES - 5


class Several(Module):
    """A second result could be differentiated."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss": self.loss(batch["data"]), "logits": self(batch["data"][0])}


class Writes(Module):
    """It writes to its batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        batch["data"][0].mul_(2)
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("kind", [Several, Writes])
def test_steps_that_cannot_be_recorded_run_as_usual(kind: Any, make_trainer: Callable[..., Any], tape: Tape) -> None:
    stock, ours = kind(), kind()
    theirs = fit(stock, make_trainer, "auto")
    trainer = fit(ours, make_trainer, recording())
    assert tape.replayed == 0
    assert "not recorded" in notes(trainer)
    for mine, other in zip(states(trainer), states(theirs), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)


def test_what_cannot_record_says_so(make_trainer: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="records CUDA graphs, which cpu has not"):
        make_trainer(strategy=recording(), max_epochs=1).fit(Module())
    for other in ({"engine": "ort"}, {"engine": "torch"}, {"placement": "always"}):
        with pytest.raises(ValueError, match="record_step=True"):
            ORTConfig(debug={"record_step": True}, **other)
    monkeypatch.setattr(recorder, "recorder_for", lambda device: Tape())
    with pytest.raises(ValueError, match="16-mixed"):
        make_trainer(strategy=recording(), max_epochs=1, plugins=[MixedPrecision("16-mixed", "cpu")]).fit(Module())
    monkeypatch.setattr(inductor, "cpp_compiler", lambda: None)
    with pytest.raises(ValueError, match="record_step=True.* needs inductor: "):
        make_trainer(strategy=recording(), max_epochs=1).fit(Module())
