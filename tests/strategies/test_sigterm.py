"""A run of several processes one of which is told to end: all save, and end."""

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fault_runs import RANKS, Run, Slow, train
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning_utilities.core.imports import RequirementCache

from lightning_ort import ORTDDPStrategy, ORTNativeZeRO1Strategy, ORTZeRO1Strategy
from lightning_ort.lightning import AtomicCheckpointIO
from lightning_ort.strategies.distributed.ending import SIGTERM_CHECKPOINT, STATUS

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="forks")
STEPS = 40
LAUNCHERS = pytest.mark.parametrize("torchrun", [True, False], ids=["torchrun", "lightning"])


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    runs: list[Run] = []

    def start(run: Callable[[], None], torchrun: bool = True, folder: Path = tmp_path) -> Run:
        folder.mkdir(exist_ok=True)
        runs.append(Run(folder, run, torchrun))
        return runs[-1]

    yield start
    for run in runs:
        run.kill()


def assert_saved(run: Run, torchrun: bool = True) -> dict[str, Any]:
    """All ended as they should, and left one whole checkpoint."""
    assert run.ended() == [STATUS] * (2 if torchrun else 1), run.output
    assert run.output.count(f"saved {run.folder / SIGTERM_CHECKPOINT}") == 1, run.output
    assert not list(run.folder.rglob("*.partial"))
    return torch.load(run.folder / SIGTERM_CHECKPOINT, weights_only=True)


@pytest.mark.parametrize("rank", RANKS)
@LAUNCHERS
def test_one_rank(rank: int, torchrun: bool, start: Callable[..., Run], tmp_path: Path) -> None:
    run = start(lambda: train(Slow(tmp_path)), torchrun)
    os.kill(run.wait_for_step()[rank], signal.SIGTERM)
    assert 3 <= assert_saved(run, torchrun)["global_step"] < 10_000


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [ORTDDPStrategy, ORTNativeZeRO1Strategy, ORTZeRO1Strategy])
@LAUNCHERS
def test_goes_on_as_if_nothing_had_been(
    strategy: type, torchrun: bool, start: Callable[..., Run], tmp_path: Path
) -> None:
    if strategy is ORTZeRO1Strategy:
        pytest.importorskip("deepspeed")
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    run = start(lambda: train(Slow(whole), strategy=strategy, max_steps=STEPS), torchrun, whole)
    assert set(run.ended()) == {0}, run.output
    losses = run.read("losses")[0]
    run = start(lambda: train(Slow(cut), strategy=strategy, max_steps=STEPS), torchrun, cut)
    os.kill(run.wait_for_step()[1], signal.SIGTERM)
    step = assert_saved(run, torchrun)["global_step"]
    assert 3 <= step < STEPS
    checkpoint = cut / SIGTERM_CHECKPOINT
    run = start(lambda: train(Slow(cut), ckpt_path=checkpoint, strategy=strategy, max_steps=STEPS), torchrun, cut)
    assert set(run.ended()) == {0}, run.output
    assert run.read("losses")[0] == pytest.approx(losses[step:], rel=1e-4)


@pytest.mark.slow
@LAUNCHERS
def test_all_ranks_several_times(torchrun: bool, start: Callable[..., Run], tmp_path: Path) -> None:
    run = start(lambda: train(Slow(tmp_path)), torchrun)
    ranks = run.wait_for_step()
    for _ in range(3):
        for pid in ranks:
            os.kill(pid, signal.SIGTERM)
        time.sleep(0.02)
    assert_saved(run, torchrun)


class Validates(Slow):
    """Validates for long, with a collective in each batch."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        time.sleep(self.seconds)
        self.log("val_loss", self.loss(batch), sync_dist=True, on_step=True)
        if not self.trainer.sanity_checking:
            self.say("validated", (self.global_step, batch_idx))

    def val_dataloader(self) -> Any:
        return self.train_dataloader()


VALIDATES = {"max_epochs": 2, "limit_train_batches": 4, "limit_val_batches": 60, "max_steps": -1}


def test_in_validation(start: Callable[..., Run], tmp_path: Path) -> None:
    run = start(lambda: train(Validates(tmp_path), **VALIDATES))
    run.wait_for(lambda: all(run.read("validated")))
    os.kill(run.read("pid")[1], signal.SIGTERM)
    assert assert_saved(run)["global_step"] == 4
    step, batch = run.read("validated")[0]
    assert batch < 40
    # the whole validation is done when the run goes on, and the rest of the training
    run = start(lambda: train(Validates(tmp_path, 0.0), ckpt_path=tmp_path / SIGTERM_CHECKPOINT, **VALIDATES))
    assert run.ended() == [0, 0], run.output
    assert run.read("validated") == [(8, 59)] * 2
    assert len(run.read("losses")[0]) == 4


@pytest.mark.slow
def test_in_the_sanity_check(start: Callable[..., Run], tmp_path: Path) -> None:
    run = start(lambda: train(Validates(tmp_path), num_sanity_val_steps=20, limit_val_batches=40))
    run.wait_for(lambda: all(run.read("pid")))
    time.sleep(0.3)
    os.kill(run.read("pid")[1], signal.SIGTERM)
    assert assert_saved(run)["global_step"] < 5


class Saving(AtomicCheckpointIO):
    """Takes long to save, and says so."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
        (self.folder / "saving.0").write_text("True")
        time.sleep(1.0)
        super().save_checkpoint(checkpoint, path, storage_options)


@pytest.mark.slow
@pytest.mark.parametrize("rank", RANKS)
def test_while_a_checkpoint_is_written(rank: int, start: Callable[..., Run], tmp_path: Path) -> None:
    def run_script() -> None:
        def strategy(**kwargs: Any) -> ORTDDPStrategy:
            return ORTDDPStrategy(checkpoint_io=Saving(tmp_path), **kwargs)

        every_step = ModelCheckpoint(dirpath=tmp_path / "checkpoints", every_n_train_steps=1, save_last=True)
        train(Slow(tmp_path), strategy=strategy, callbacks=every_step)

    run = start(run_script)
    run.wait_for(lambda: run.read("saving")[0])
    os.kill(run.read("pid")[rank], signal.SIGTERM)
    saved = assert_saved(run)
    last = torch.load(tmp_path / "checkpoints" / "last.ckpt", weights_only=True)
    assert 1 <= last["global_step"] <= saved["global_step"]


class Counts(Slow):
    """Counts the collectives of three settled steps."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 4:
            self.profile = torch.profiler.profile()
            self.profile.start()
        elif batch_idx == 7:
            self.profile.stop()
            names = [event.name for event in self.profile.events()]
            self.say("collectives", sorted(name for name in names if name.startswith("gloo:")))


@pytest.mark.skipif(not RequirementCache("lightning>=2.6"), reason="it broadcasts nothing for SIGTERM")
@pytest.mark.parametrize(
    ("strategy", "others"), [("ddp", ["gloo:broadcast"]), ("ort_ddp", []), ("ort_zero1_native", 2 * ["gloo:broadcast"])]
)
def test_collectives_of_a_settled_step(
    strategy: str, others: list[str], start: Callable[..., Run], tmp_path: Path
) -> None:
    """Lightning has one for a flag; each process sends its share of four parameters in one."""

    def run_script() -> None:
        train(Counts(tmp_path), strategy=lambda **_: strategy, max_steps=8, callbacks=[], enable_checkpointing=False)

    run = start(run_script)
    assert run.ended() == [0, 0], run.output
    assert run.read("collectives") == [sorted(3 * ["gloo:all_reduce", *others])] * 2


class Drifts(Slow):
    """Has no collective, and one rank is faster."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.automatic_optimization = False
        self.say("step", batch_idx)
        time.sleep(0.03 if self.global_rank else 0.005)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        pass

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        pass


@pytest.mark.parametrize("rank", RANKS)
def test_ranks_that_are_apart(rank: int, start: Callable[..., Run], tmp_path: Path) -> None:
    run = start(lambda: train(Drifts(tmp_path), max_steps=-1, max_epochs=1000))
    os.kill(run.wait_for_step(5)[rank], signal.SIGTERM)
    assert_saved(run)
    first, second = run.read("step")
    assert first == second >= 5


class Evaluated(Slow):
    """Is not trained."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.say("step", batch_idx)
        time.sleep(self.seconds)

    predict_step = validation_step

    def on_validation_start(self) -> None:
        self.say("pid", os.getpid())

    on_predict_start = on_validation_start

    def val_dataloader(self) -> Any:
        return self.train_dataloader()

    predict_dataloader = val_dataloader


@pytest.mark.slow
@pytest.mark.parametrize("what", ["validate", "predict"])
def test_without_training(what: str, start: Callable[..., Run], tmp_path: Path) -> None:
    def run_script() -> None:
        trainer = Trainer(strategy="ort_ddp", accelerator="cpu", devices=2, logger=False, default_root_dir=tmp_path)
        getattr(trainer, what)(Evaluated(tmp_path, 0.2))

    run = start(run_script)
    os.kill(run.wait_for_step(1)[1], signal.SIGTERM)
    assert run.ended() == [STATUS, STATUS], run.output
    assert not (tmp_path / SIGTERM_CHECKPOINT).exists()


def test_what_an_earlier_run_was_told_is_forgotten(start: Callable[..., Run], tmp_path: Path) -> None:
    """The process group and its store outlive a run."""

    def run_twice() -> None:
        with pytest.raises(SystemExit):
            train(Slow(tmp_path))
        train(Slow(tmp_path), max_steps=8)

    run = start(run_twice)
    os.kill(run.wait_for_step()[0], signal.SIGTERM)
    assert run.ended() == [0, 0], run.output
    assert [len(losses) for losses in run.read("losses")] == [8, 8]
