"""How the processes of a run end together: :class:`Ending`."""

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from lightning_utilities.core.rank_zero import rank_zero_info
from typing_extensions import override

from lightning_ort._shims import Shims
from lightning_ort.compat import lightning as compat
from lightning_ort.compat.cpython import in_forked_children

if TYPE_CHECKING:
    import subprocess

    import lightning.pytorch as pl
    import torch

log = logging.getLogger(__name__)

SIGTERM_CHECKPOINT = "sigterm.ckpt"
STATUS = 128 + signal.SIGTERM
_LOOK_SECONDS = 0.3
_SAID_SECONDS = 60.0  # within which every process says how far it has come
_GRACE_SECONDS = 5.0  # for the main thread to find a connection closed, and to say where
_REAPING_SECONDS = 1.0
_HEARD_SECONDS = 10.0
_VARIABLE = "LIGHTNING_ORT_LAUNCHER"

_launcher = 0  # the process that started this one by Lightning's launcher of scripts, which runs in its rank 0
_children: "list[subprocess.Popen[bytes]]" = []  # what that launcher has started from this process
in_forked_children(_children.clear)  # to a process that is forked from this one they are no children


@contextmanager
def launching(launcher: Any) -> Iterator[None]:
    """Announce this process to those that the launcher starts within this context, and remember them."""
    os.environ[_VARIABLE] = str(os.getpid())  # only for the processes that are started now
    try:
        yield
    finally:
        del os.environ[_VARIABLE]
    _children[:] = launcher.procs


def is_launched() -> bool:
    """Return whether Lightning's launcher in the process of local rank 0 started this one, and that still lives."""
    global _launcher
    _launcher = int(os.environ.pop(_VARIABLE, _launcher))
    return _launcher == os.getppid()


class Ending(threading.Thread):
    """Ends the processes of a run together, if one gets SIGTERM, fails, or is killed.

    - SIGTERM: Lightning itself starts a collective wherever the signal meets a process, perhaps in the middle of
      another: where one of two processes is told to end, both hang, and where both are, they end with status 0 and
      without a checkpoint (2.6.6). And it broadcasts a flag in each step. Here the signal sets a flag, and this thread
      tells the others through the store of the run, and says how far its process has come, while that computes or waits
      in a collective. All stop at the first batch that none has reached before: so nobody has passed it, and nobody
      waits for one who waits in a collective. A process that is stuck is killed by what has sent the signal.
    - An exception, for which callbacks save a checkpoint: all save it if all have one, and none otherwise.
    - Lightning's launcher ends the others where a process that it has started ends. Here those end where the one that
      has started them is gone, unless that had ended the run normally, and told them.
    """

    def __init__(self, trainer: "pl.Trainer") -> None:
        super().__init__(daemon=True, name="lightning-ort-ending")
        self.agreed = False  # whether this process has reached the batch after which to stop
        self._trainer, self._shims = trainer, Shims()
        self._store: torch.distributed.Store | None = None
        self._parent = os.getppid() if is_launched() else None
        self._told = self._said = self._failed = self._may_go_on = False
        self._position = (0, 0)  # training batches, and steps of the evaluation since then
        self._began, self._longest = time.monotonic(), 0.0  # the last batch
        self._closed = threading.Event()

    def open(self, store: "torch.distributed.Store | None") -> None:
        """Replace Lightning's reaction to SIGTERM; handlers that the user installed still run."""
        compat.set_sigterm_handler(self._shims, self._trainer, self.on_signal)
        if store is not None:
            compat.leave_out_sigterm_broadcast(self._shims, self._trainer)
            self._store = store

    def close(self) -> None:
        """End the run in this process, and tell the others."""
        self._shims.remove()
        self._closed.set()
        self.join(_GRACE_SECONDS)
        if self._store is None:
            return
        with suppress(RuntimeError):  # the process that hosts the store may be gone
            self._say()  # to those that are still told
            rank = self._trainer.global_rank
            self._store.set(f"heard/{rank}", "")
            if self._failed:
                return
            self._store.set(f"ended/{rank}", "")
            end = time.monotonic() + _HEARD_SECONDS
            for local, child in enumerate(_children, start=1):
                while child.poll() is None and not self._store.check([f"heard/{rank + local}"]):
                    if time.monotonic() > end:
                        return
                    time.sleep(0.01)

    def on_signal(self, signum: int = signal.SIGTERM, frame: Any = None) -> None:
        """Let this process look for the batch after which to stop."""
        self._told = True

    def on_train_batch_start(self) -> None:
        """If this is the batch to stop after, let Lightning's loops end after it and save their progress."""
        if self._at((self._position[0] + 1, 0)):
            compat.end_after_this_batch(self._trainer)

    def on_evaluation_step(self) -> bool:
        """Return whether to end here."""
        return not self._trainer.sanity_checking and self._at((self._position[0], self._position[1] + 1))

    def _at(self, position: tuple[int, int]) -> bool:
        now = time.monotonic()
        self._began, self._longest = now, max(self._longest, now - self._began)
        self._position = position
        if self._told and not self.agreed:
            # the thread has said it, and then reads the position, or it will say this one
            self.agreed = self._store is None or (self._said and position > self._furthest(self._store))
        return self.agreed

    def _say(self) -> None:
        if self._store is not None and not self._said:
            self._said = True  # before the position is read: see `_at`
            self._store.set(f"position/{self._trainer.global_rank}", "{},{}".format(*self._position))

    def _keys(self, name: str) -> list[str]:
        return [f"{name}/{rank}" for rank in range(self._trainer.world_size)]

    def _furthest(self, store: "torch.distributed.Store") -> tuple[int, int]:
        """Wait until all have said how far they had come, and return the furthest."""
        store.wait(self._keys("position"), timedelta(seconds=_SAID_SECONDS))
        found = (store.get(key).decode().split(",") for key in self._keys("position"))
        return max((int(batches), int(steps)) for batches, steps in found)

    def _save_and_exit(self, exit_: SystemExit) -> None:
        """Save a checkpoint from which the run can continue, if the Trainer saves any, and set the exit status."""
        # a status other than 0 of a process that was started by another makes Lightning kill that
        exit_.code = STATUS if self._parent is None else 0
        trainer = self._trainer
        if trainer.state.fn != "fit" or not trainer.checkpoint_callbacks or getattr(trainer, "fast_dev_run", False):
            if trainer.state.fn == "fit":
                rank_zero_info("lightning-ort: SIGTERM: no checkpoint is saved, because checkpointing is disabled.")
            # the store may end with rank 0, and the others still have to read from it where to end
            trainer.strategy.barrier()
            return
        path = os.path.join(trainer.default_root_dir, SIGTERM_CHECKPOINT)  # which may be a URL
        trainer.save_checkpoint(path)
        rank_zero_info("lightning-ort: SIGTERM: saved %s; resume with `trainer.fit(..., ckpt_path=%r)`", path, path)

    def before_collective(self) -> None:
        """After an exception: go on if all have one; else raise it again, as the others would be waited for forever."""
        exception, store = sys.exc_info()[1], self._store
        if self._failed or self.agreed or store is None or exception is None or not self._trainer.interrupted:
            return
        self._failed = True
        rank, seconds = self._trainer.global_rank, max(_HEARD_SECONDS, 3 * self._longest)
        try:
            store.set(f"failed/{rank}", "")
            store.wait(self._keys("failed"), timedelta(seconds=seconds))
            if not store.check(["alone"]):
                return
        except RuntimeError:  # not all have one in this time, or the process that hosts the store is gone
            pass
        reason = f"rank {rank} has failed with {type(exception).__name__}: {exception}"
        with suppress(RuntimeError):
            reason = store.compare_set("alone", "", reason).decode()  # that of the first
        log.error("lightning-ort: %s; others have not, so nothing that all save together is saved.", reason)
        self._log_lost(exception)
        raise exception

    def on_exception(self, exception: BaseException) -> None:
        """Save at SIGTERM; else log which processes have ended by an error or a signal: that may be the cause."""
        if self.agreed and isinstance(exception, SystemExit):
            self._save_and_exit(exception)
            return
        self._failed = True
        if isinstance(exception, Exception):  # and no interrupt, which all get
            self._log_lost(exception)

    def _log_lost(self, exception: BaseException) -> None:
        # torch raises a RuntimeError for a closed connection; the system closes the connections of a killed process
        # before its end can be seen
        end = time.monotonic() + (_REAPING_SECONDS if isinstance(exception, RuntimeError) else 0.0)
        while not (lost := self._lost()) and time.monotonic() < end:
            time.sleep(0.02)
        for name in lost:
            log.error("lightning-ort: %s, so this run is stopped.", name)

    def _lost(self) -> list[str]:
        """Describe the lost processes among those that this one has started, or the one that has started it."""
        if self._parent not in (None, os.getppid()):
            return [f"rank {self._trainer.global_rank - self._trainer.local_rank} (PID {self._parent}) is gone"]
        codes = {(rank, process.pid): process.poll() for rank, process in enumerate(_children, start=1)}
        return [f"rank {rank} (PID {pid}) {_ended(code)}" for (rank, pid), code in codes.items() if code]

    @override
    def run(self) -> None:
        reachable = True
        while not self._closed.wait(_LOOK_SECONDS):
            try:
                if self._store is not None and reachable:
                    self._exchange(self._store)
            except RuntimeError:  # the process that hosts the store is gone: nobody is left to be told
                reachable = False
            if self._parent is not None and not self._may_go_on and (lost := self._lost()):
                if not self._closed.wait(_GRACE_SECONDS):
                    log.error("lightning-ort: %s, so rank %d exits.", lost[0], self._trainer.global_rank)
                    os.kill(os.getpid(), signal.SIGKILL)
                return

    def _exchange(self, store: "torch.distributed.Store") -> None:
        if not self._said:
            if self._told:
                store.set("told", "")
            elif store.check(["told"]):
                self._told = True
            if self._told:
                self._say()
        rank = self._trainer.global_rank
        if self._parent is not None and store.check([f"ended/{rank - self._trainer.local_rank}"]):
            self._may_go_on = True
            store.set(f"heard/{rank}", "")


def _ended(code: int) -> str:
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with status {code}"
