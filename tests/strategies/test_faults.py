"""What is left when a process of a run is killed, or told to end.

Lightning's launcher starts the script once per device. Here it forks instead, since a new process would import torch
again, which takes longer than all else; the processes, signals and connections are real.
"""

import contextlib
import logging
import multiprocessing
import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO
from lightning.pytorch.strategies.launchers import subprocess_script
from running import is_running
from small_modules import Small, loader
from torch.utils.data import DataLoader, TensorDataset

from lightning_ort import ORTDDPStrategy, ORTStrategy
from lightning_ort.strategies.atomic_checkpoints import save_atomically
from lightning_ort.strategies.checkpoint_io import AtomicCheckpointIO
from lightning_ort.strategies.faults import SIGTERM_CHECKPOINT

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="forks")
LIMIT = 240.0  # seconds, for what takes a few on a quiet machine
STEPS = 40


class Slow(Small):
    """Says which step each rank is in, and takes its time."""

    def __init__(self, folder: Path, seconds: float = 0.05) -> None:
        super().__init__()
        self.folder, self.seconds = folder, seconds

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        (self.folder / f"pid.{self.global_rank}").write_text(str(os.getpid()))
        (self.folder / f"step.{self.global_rank}").write_text(str(self.global_step))
        time.sleep(self.seconds)

    def on_train_end(self) -> None:
        (self.folder / f"losses.{self.global_rank}").write_text(repr(self.losses))

    def train_dataloader(self) -> Any:
        # the same batch each time: Lightning does not go on within an epoch where the data stopped
        (batch,) = loader(samples=8)
        return DataLoader(TensorDataset(*(part.repeat(64, *[1] * (part.dim() - 1)) for part in batch)), batch_size=8)


class _Fork:
    """Stands for :class:`subprocess.Popen` of the same script."""

    def __init__(self, run: Callable[[], None], env: dict[str, str]) -> None:
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            os.environ.clear()
            os.environ.update(env)
            _exit(run)

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def send_signal(self, signum: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, signum)


def _exit(run: Callable[[], None]) -> None:
    """End as a script would."""
    code: Any = 1
    try:
        run()
        code = 0
    except SystemExit as error:
        code = error.code or 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _script(folder: Path, ckpt_path: str | None, max_steps: int) -> None:
    """What a user's script does, in each process."""
    trainer = Trainer(
        strategy=ORTDDPStrategy(config={"capture": "off"}),  # how a step computes has no part in this
        accelerator="cpu",
        devices=2,
        max_steps=max_steps,
        use_distributed_sampler=False,
        limit_val_batches=0,
        default_root_dir=folder,
        callbacks=ModelCheckpoint(dirpath=folder / "checkpoints", save_last=True),
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Slow(folder), ckpt_path=ckpt_path)


def _rank_zero(folder: Path, ckpt_path: str | None, max_steps: int) -> None:
    output = (folder / "output").open("a", buffering=1)
    sys.stdout = sys.stderr = output
    for name in (None, "lightning.fabric"):  # Lightning's observer of the processes does not tell the root
        logging.getLogger(name).addHandler(logging.StreamHandler(output))
    for descriptor in (1, 2):
        os.dup2(output.fileno(), descriptor)
    for name in ("LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)

    def run() -> None:
        _script(folder, ckpt_path, max_steps)

    subprocess_script.subprocess.Popen = lambda command, env, cwd: _Fork(run, env)  # type: ignore[misc, assignment]
    _exit(run)


@pytest.fixture
def start() -> Iterator[Callable[..., Any]]:
    """Run the script; what is left of it after the test is killed."""
    started: list[tuple[Any, Path]] = []

    def start(folder: Path, ckpt_path: Path | None = None, max_steps: int = 10_000) -> Any:
        arguments = (folder, ckpt_path and str(ckpt_path), max_steps)
        process = multiprocessing.get_context("fork").Process(target=_rank_zero, args=arguments)
        process.start()
        started.append((process, folder))
        return process

    yield start
    for process, folder in started:
        process.kill()
        for path in folder.glob("pid.*"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(path.read_text()), signal.SIGKILL)


def wait_for(condition: Callable[[], Any], folder: Path) -> None:
    end = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < end, (folder / "output").read_text()
        time.sleep(0.1)


def trains(folder: Path) -> bool:
    steps = [folder / f"step.{rank}" for rank in range(2)]
    return all(step.exists() and int(step.read_text() or 0) >= 3 for step in steps)


def pids(folder: Path) -> list[int]:
    return [int((folder / f"pid.{rank}").read_text()) for rank in range(2)]


@pytest.mark.parametrize("rank", [0, 1])
def test_killed_rank(rank: int, start: Callable[..., Any], tmp_path: Path) -> None:
    process = start(tmp_path)
    wait_for(lambda: trains(tmp_path), tmp_path)
    ranks = pids(tmp_path)
    os.kill(ranks[rank], signal.SIGKILL)
    wait_for(lambda: not any(map(is_running, ranks)), tmp_path)
    process.join()
    assert process.exitcode != 0
    output = (tmp_path / "output").read_text()
    named = {
        0: [f"rank 0 (PID {ranks[0]}) is gone"],
        # Lightning's observer looks every 5 s: where it comes first, it says so itself, and kills
        1: [f"rank 1 (PID {ranks[1]}) was ended by SIGKILL", f"[rank: 1] Child process with PID {ranks[1]} terminated"],
    }[rank]
    assert any(name in output for name in named), output


@pytest.mark.slow
def test_sigterm_saves_and_resumes(start: Callable[..., Any], tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    whole.mkdir()
    start(whole, max_steps=STEPS).join(LIMIT)
    losses = eval((whole / "losses.0").read_text())
    cut = tmp_path / "cut"
    cut.mkdir()
    process = start(cut, max_steps=STEPS)
    wait_for(lambda: trains(cut), cut)
    ranks = pids(cut)
    os.kill(process.pid, signal.SIGTERM)
    wait_for(lambda: not any(map(is_running, ranks)), cut)
    process.join()
    output = (cut / "output").read_text()
    assert process.exitcode == 128 + signal.SIGTERM, output
    assert SIGTERM_CHECKPOINT in output
    step = torch.load(cut / SIGTERM_CHECKPOINT, weights_only=True)["global_step"]
    assert 3 <= step < STEPS
    start(cut, cut / SIGTERM_CHECKPOINT, max_steps=STEPS).join(LIMIT)
    assert eval((cut / "losses.0").read_text()) == pytest.approx(losses[step:], rel=1e-4)


def _save_forever(path: Path) -> None:
    checkpoint: dict[str, Any] = {"number": 0, "weight": torch.zeros(1_000_000)}
    while True:
        checkpoint["number"] += 1
        checkpoint["weight"].fill_(checkpoint["number"])
        save_atomically(checkpoint, path)


def test_killed_while_it_saves(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    partial = False
    for _ in range(8):
        process = multiprocessing.get_context("fork").Process(target=_save_forever, args=(path,))
        process.start()
        wait_for(path.exists, tmp_path)
        time.sleep(0.15)
        process.kill()
        process.join()
        checkpoint = torch.load(path, weights_only=True)
        assert (checkpoint["weight"] == checkpoint["number"]).all()
        partial |= any(tmp_path.glob(".*.partial"))
    assert partial  # one was killed while it wrote
    save_atomically({"number": 0}, path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["last.ckpt"]


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
