"""What is left when a process of a run is killed; for those that are told to end: test_sigterm.py."""

import multiprocessing
import os
import pickle
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fault_runs import Run, Slow, train
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO
from small_modules import loader

from lightning_ort import ORTDDPStrategy, ORTStrategy
from lightning_ort.lightning import AtomicCheckpointIO
from lightning_ort.strategies import checkpoints
from lightning_ort.strategies.checkpoints import save_atomically
from lightning_ort.strategies.distributed import ending

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="forks")


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    runs: list[Run] = []

    def start(run: Callable[[], None]) -> Run:
        runs.append(Run(tmp_path, run))
        return runs[-1]

    yield start
    for run in runs:
        run.kill()


@pytest.mark.parametrize("rank", [0, 1])
def test_killed_rank(rank: int, start: Callable[..., Run], tmp_path: Path) -> None:
    run = start(lambda: train(Slow(tmp_path)))
    ranks = run.wait_for_step()
    os.kill(ranks[rank], signal.SIGKILL)
    assert run.ended() != [0]
    named = {
        0: [f"rank 0 (PID {ranks[0]}) is gone"],
        # Lightning's observer looks every 5 s: where it comes first, it says so itself, and kills
        1: [
            f"rank 1 (PID {ranks[1]}) was killed by SIGKILL",
            f"[rank: 1] Child process with PID {ranks[1]} terminated",
        ],
    }[rank]
    assert any(name in run.output for name in named), run.output


class Predicts(Slow):
    """Takes longer in rank 1, without a collective."""

    def on_predict_start(self) -> None:
        self.say("pid", os.getpid())

    def predict_step(self, batch: Any, batch_idx: int) -> None:
        time.sleep(self.global_rank * 4.0)

    def on_predict_end(self) -> None:
        self.say("predicted", True)

    def predict_dataloader(self) -> Any:
        return loader(samples=32)


def test_rank_0_may_end_before_the_others(start: Callable[..., Run], tmp_path: Path) -> None:
    def predict() -> None:
        trainer = Trainer(strategy="ort_ddp", accelerator="cpu", devices=2, logger=False, default_root_dir=tmp_path)
        trainer.predict(Predicts(tmp_path), return_predictions=False)

    run = start(predict)
    assert run.ended() == [0], run.output
    assert run.read("predicted") == [True, True], run.output


class Fails(Slow):
    """Raises an error, in some ranks."""

    ranks: tuple[int, ...] = (1,)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 3 and self.global_rank in self.ranks:
            raise ValueError("a bad batch")
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("ranks", [(0,), (1,), (0, 1)])
def test_a_checkpoint_after_an_exception(
    ranks: tuple[int, ...], start: Callable[..., Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ending, "_HEARD_SECONDS", 2.0)
    monkeypatch.setattr(Fails, "ranks", ranks)
    saves = ModelCheckpoint(dirpath=tmp_path / "checkpoints", save_on_exception=True)
    run = start(lambda: train(Fails(tmp_path), callbacks=saves))
    assert run.ended() != [0]
    assert "ValueError: a bad batch" in run.output
    saved = list((tmp_path / "checkpoints").glob("*.ckpt")) if (tmp_path / "checkpoints").exists() else []
    if len(ranks) == 2:
        assert len(saved) == 1, run.output
    else:
        assert not saved
        assert f"rank {ranks[0]} has failed with ValueError: a bad batch" in run.output


class Notes(Slow):
    def on_fit_end(self) -> None:
        self.say("environment", [name for name in os.environ if name.startswith("LIGHTNING_ORT_LAUNCHER")])


def test_nothing_stays_in_the_environment(start: Callable[..., Run], tmp_path: Path) -> None:
    def run_twice() -> None:
        for _ in range(2):
            train(Notes(tmp_path), max_steps=2)

    run = start(run_twice)
    assert run.ended() == [0], run.output
    assert run.read("environment") == [[], []]


def _save_forever(folder: Path, first: int) -> None:
    checkpoint: dict[str, Any] = {"number": first, "weight": torch.zeros(1_000_000)}
    while True:
        checkpoint["number"] += 1
        checkpoint["weight"].fill_(checkpoint["number"])
        save_atomically(checkpoint, folder / f"step={checkpoint['number']}.ckpt")
        save_atomically(checkpoint, folder / "last.ckpt")


def names(folder: Path) -> set[str]:
    return {entry.name for entry in folder.iterdir()}


@pytest.mark.parametrize("kills", [8, pytest.param(100, marks=pytest.mark.slow)])
def test_killed_while_it_saves(kills: int, tmp_path: Path) -> None:
    """Nothing that was saved is lost, and nothing half is left, under whatever name it was to be."""
    partial, last = 0, 0
    draw = random.Random(0)
    for _ in range(kills):
        process = multiprocessing.get_context("fork").Process(target=_save_forever, args=(tmp_path, last))
        process.start()
        while not (tmp_path / f"step={last + 1}.ckpt").exists():
            time.sleep(0.001)
        time.sleep(draw.uniform(0.0, 0.1))
        process.kill()
        process.join()
        partial += any(tmp_path.glob(".*.partial"))
        for path in tmp_path.glob("*.ckpt"):
            checkpoint = torch.load(path, weights_only=True)
            assert (checkpoint["weight"] == checkpoint["number"]).all()
            assert path.stem in ("last", f"step={checkpoint['number']}")
            last = max(last, checkpoint["number"])
            if path.stem != "last":
                path.unlink()
    assert partial > kills / 10  # they were killed while they wrote
    save_atomically({"number": 0}, tmp_path / "other.ckpt")
    assert names(tmp_path) - {"last.ckpt"} == {"other.ckpt"}


def test_what_is_being_written_elsewhere_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = checkpoints._checksum(checkpoints._machine())
    writing = tmp_path / f".00000000.{os.getppid()}.{here}.partial"
    elsewhere = tmp_path / ".00000000.999999999.00000000.partial"
    foreign = tmp_path / ".mine.partial"
    for path in (writing, elsewhere, foreign):
        path.touch()
    save_atomically({}, tmp_path / "last.ckpt")
    assert names(tmp_path) == {"last.ckpt", writing.name, elsewhere.name, foreign.name}
    now = time.time()
    monkeypatch.setattr(checkpoints.time, "time", lambda: now + 2 * 24 * 3600)
    save_atomically({}, tmp_path / "last.ckpt")
    assert names(tmp_path) == {"last.ckpt", foreign.name}


def test_where_folders_cannot_be_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any) -> int:
        raise PermissionError("no folders here")

    for name in ("posix", "nt"):
        with monkeypatch.context() as patch:
            patch.setattr(checkpoints.os, "open", refuse)
            patch.setattr(checkpoints, "_POSIX", name == "posix")
            save_atomically({"number": 1}, tmp_path / "last.ckpt")
        assert torch.load(tmp_path / "last.ckpt", weights_only=True) == {"number": 1}


def test_a_save_that_fails_leaves_the_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    save_atomically({"number": 1}, path)
    with pytest.raises((AttributeError, pickle.PicklingError), match="lambda"):
        save_atomically({"number": lambda: 2}, path)
    assert torch.load(path, weights_only=True) == {"number": 1}
    assert [entry.name for entry in tmp_path.iterdir()] == ["last.ckpt"]


def test_checkpoint_io_is_atomic_unless_chosen() -> None:
    assert type(ORTStrategy().checkpoint_io) is AtomicCheckpointIO
    chosen = TorchCheckpointIO()
    assert ORTStrategy(checkpoint_io=chosen).checkpoint_io is chosen
    wrapping = AsyncCheckpointIO()
    strategy = ORTDDPStrategy(checkpoint_io=wrapping)
    assert strategy.checkpoint_io is wrapping
    assert type(wrapping.checkpoint_io) is AtomicCheckpointIO
    twice = AsyncCheckpointIO(inner := AsyncCheckpointIO())
    assert ORTStrategy(checkpoint_io=twice).checkpoint_io is twice
    assert type(inner.checkpoint_io) is AtomicCheckpointIO


def test_a_fork_of_what_started_others_was_not_started_by_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a run of several processes, something else may fork those of a next one, as a notebook's launcher does."""
    monkeypatch.setattr(ending, "_launcher", os.getppid())
    assert ending.is_launched()
    if (pid := os.fork()) == 0:
        os._exit(ending.is_launched())
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0
