"""Runs of two processes that a test kills, or tells to end.

Lightning's launcher starts the script once per device, and torchrun does so for it. Here they fork instead, since a new
process would import torch again, which takes longer than all else; the processes, signals and connections are real.
"""

import contextlib
import logging
import multiprocessing
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies.launchers import subprocess_script
from running import is_running
from small_modules import Small, loader
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_ort import ORTDDPStrategy

LIMIT = float(os.environ.get("FAULT_LIMIT", "240"))  # seconds, for what takes a few on a quiet machine
RANKS = range(2)


class Slow(Small):
    """Says which step each rank is in, and takes its time.

    Args:
        folder: For what it says.
        seconds: For each batch.
    """

    def __init__(self, folder: Path, seconds: float = 0.05) -> None:
        super().__init__()
        self.folder, self.seconds = folder, seconds
        self.net[1] = nn.LeakyReLU()  # of which no state is zero

    def say(self, what: str, value: Any) -> None:
        """Write a file of this rank."""
        (self.folder / f"{what}.{self.global_rank}").write_text(repr(value))

    def on_fit_start(self) -> None:
        self.say("pid", os.getpid())

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.say("step", self.global_step)
        time.sleep(self.seconds)

    def on_train_end(self) -> None:
        self.say("losses", self.losses)

    def train_dataloader(self) -> Any:
        # the same batch each time: Lightning does not go on within an epoch where the data stopped
        (batch,) = loader(samples=8)
        return DataLoader(TensorDataset(*(part.repeat(64, *[1] * (part.dim() - 1)) for part in batch)), batch_size=8)


def train(
    module: Slow, ckpt_path: Path | None = None, strategy: Callable[..., Any] = ORTDDPStrategy, **kwargs: Any
) -> None:
    """What a user's script does, in each process."""
    arguments = {
        "max_steps": 10_000,
        "limit_val_batches": 0,
        "callbacks": ModelCheckpoint(dirpath=module.folder / "checkpoints", save_last=True),
        **kwargs,
    }
    trainer = Trainer(
        strategy=strategy(config={"engine": "torch"}),  # how a step computes has no part in this
        accelerator="cpu",
        devices=2,
        use_distributed_sampler=False,
        default_root_dir=module.folder,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **arguments,
    )
    trainer.fit(module, ckpt_path=ckpt_path)


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


def _process(folder: Path, run: Callable[[], None], env: dict[str, Any] | None) -> None:
    output = (folder / "output").open("a", buffering=1)
    sys.stdout = sys.stderr = output
    for name in (None, "lightning.fabric"):  # Lightning's observer of the processes does not tell the root
        logging.getLogger(name).addHandler(logging.StreamHandler(output))
    for descriptor in (1, 2):
        os.dup2(output.fileno(), descriptor)
    for name in ("LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    os.environ.update({name: str(value) for name, value in (env or {}).items()})
    subprocess_script.subprocess.Popen = lambda command, env, cwd: _Fork(run, env)  # type: ignore[misc, assignment]
    _exit(run)


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return listening.getsockname()[1]


class Run:
    """Two processes that run the same.

    Args:
        folder: Where they write.
        run: What they run.
        torchrun: Started as torchrun starts them, and not by rank 0.
    """

    def __init__(self, folder: Path, run: Callable[[], None], torchrun: bool = False) -> None:
        self.folder = folder
        environments: list[dict[str, Any] | None] = [None]
        if torchrun:
            every = {"WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "GROUP_RANK": 0, "TORCHELASTIC_RUN_ID": "test"}
            every |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
            environments = [{**every, "RANK": rank, "LOCAL_RANK": rank} for rank in RANKS]
        context = multiprocessing.get_context("fork")
        self.processes = [context.Process(target=_process, args=(folder, run, env)) for env in environments]
        for process in self.processes:
            process.start()

    @property
    def output(self) -> str:
        return (self.folder / "output").read_text()

    def read(self, what: str) -> list[Any]:
        """What each rank said last, or ``None``."""
        texts = [path.read_text() if (path := self.folder / f"{what}.{rank}").exists() else "" for rank in RANKS]
        return [eval(text) if text else None for text in texts]

    def wait_for(self, condition: Callable[[], Any]) -> None:
        """Wait until something is so."""
        end = time.monotonic() + LIMIT
        while not condition():
            assert time.monotonic() < end, self.output
            time.sleep(0.05)

    def wait_for_step(self, number: int = 3) -> list[int]:
        """Wait until both ranks are that far, and return their process ids."""
        self.wait_for(lambda: all((step or 0) >= number for step in self.read("step")))
        return self.read("pid")

    def ended(self) -> list[int | None]:
        """Wait for the end of all processes, and return the status of those that were started here."""
        for process in self.processes:
            process.join(LIMIT)
        ranks = [pid for pid in self.read("pid") if pid is not None]
        self.wait_for(lambda: not any(map(is_running, ranks)))
        return [process.exitcode for process in self.processes]

    def kill(self) -> None:
        """End what is left of it."""
        for pid in [*(process.pid for process in self.processes), *self.read("pid")]:
            with contextlib.suppress(ProcessLookupError, TypeError):
                os.kill(pid, signal.SIGKILL)
