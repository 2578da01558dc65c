"""SIGTERM to any process of a run ends all of them after the same batch: :class:`CoordinatedSigterm`."""

import logging
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_info
from typing_extensions import override

from lightning_ort.compat import lightning as compat
from lightning_ort.compat.cpython import in_forked_children

if TYPE_CHECKING:
    import lightning.pytorch as pl

log = logging.getLogger(__name__)

SIGTERM_CHECKPOINT = "sigterm.ckpt"
STATUS = 128 + signal.SIGTERM
PATIENCE_SECONDS = 60.0  # a process that is to end may take at least this long to reach its next batch
SAVING_SECONDS = 1800.0  # the same while it, or another process, saves a checkpoint
_LISTEN_SECONDS = 0.3
_WAIT_SECONDS = 0.005
_POSIX = os.name == "posix"


class CoordinatedSigterm:
    """Lets all processes of a run stop after the same batch, and save a checkpoint, when one of them gets SIGTERM.

    Lightning itself starts a collective wherever the signal meets a process, perhaps in the middle of another: where
    one of two processes is told to end, both hang, and where both are, they end with status 0 and without a checkpoint
    (2.6.6). And it broadcasts a flag in each step, which is not needed here and left out.

    Here the signal sets a flag, and a thread of each process tells the others through the store of the run. That thread
    also says how far its process has come, while the process computes, or waits for another one in a collective. From
    then on the process waits where its next batch begins until all have said it. All stop at the first batch that none
    has reached before. So nobody has passed it, whatever is between two collectives; and nobody waits for one who waits
    in a collective, since what is said needs no main thread.

    If they do not agree because a process is stuck, each process ends by itself, without a checkpoint.
    """

    def __init__(self, trainer: "pl.Trainer", store: "torch.distributed.Store | None", status: int) -> None:
        self.agreed = False  # whether this process has reached the batch after which to stop
        self.told = False  # by a signal, or by another process
        self.status = status
        self._trainer = trainer
        self._store = store
        self._said = False  # whether the others may read how far this process has come
        self._last: tuple[int, int] | None = None  # the furthest that any process had come
        self._position = (0, 0)  # training batches, and steps of the evaluation since then
        self._listener: _Listener | None = None
        self._progress = time.monotonic()
        self._longest = 0.0
        self._saving = 0

    def install(self) -> None:
        """Replace Lightning's reaction to SIGTERM; handlers that the user installed still run."""
        compat.set_sigterm_handler(self._trainer, self.on_signal)
        if self._store is not None:
            compat.leave_out_sigterm_broadcast(self._trainer)
            self._listener = _Listener(self, self._store)
            self._listener.start()

    def remove(self) -> None:
        """Undo :meth:`install`."""
        compat.reset_sigterm_handler(self._trainer)
        if self._listener is not None:
            self._listener.stop()
            self._listener = None
            with suppress(RuntimeError):  # the process that hosts the store may be gone
                self.say()  # to those that are still told

    def on_signal(self, signum: int = signal.SIGTERM, frame: Any = None) -> None:
        """Let this process look for the batch after which to stop; a second call does nothing."""
        if not self.told:
            self._progress = time.monotonic()
            self.told = True

    def on_train_batch_start(self) -> None:
        """If this is the batch to stop after, let Lightning's loops end after it and save their progress."""
        if self._at((self._position[0] + 1, 0)):
            compat.end_after_this_batch(self._trainer)

    def on_evaluation_step(self) -> bool:
        """Return whether to end here."""
        return not self._trainer.sanity_checking and self._at((self._position[0], self._position[1] + 1))

    def _at(self, position: tuple[int, int]) -> bool:
        now = time.monotonic()
        self._longest = max(self._longest, now - self._progress)
        self._position, self._progress = position, now
        if self.told and not self.agreed:
            # the thread has said it, and then reads the position, or it will say this one
            self.agreed = self._store is None or (self._said and position > self._furthest(self._store))
        return self.agreed

    def say(self) -> None:
        """Tell the others how far this process has come, once; call it from any thread."""
        if self._store is not None and not self._said:
            self._said = True  # before the position is read: see `_at`
            batches, steps = self._position
            self._store.set(f"stop/after/{self._trainer.global_rank}", f"{batches},{steps}")

    def _furthest(self, store: "torch.distributed.Store") -> tuple[int, int]:
        """Wait until all have said how far they had come, and return the furthest."""
        if self._last is None:
            keys = [f"stop/after/{rank}" for rank in range(self._trainer.world_size)]
            while not store.check(keys):
                time.sleep(_WAIT_SECONDS)
            found = (store.get(key).decode().split(",") for key in keys)
            self._last = max((int(batches), int(steps)) for batches, steps in found)
        return self._last

    @contextmanager
    def patience(self) -> Iterator[None]:
        """Allow for the time that saving takes."""
        self._saving += 1
        try:
            yield
        finally:
            self._saving -= 1
            self._progress = time.monotonic()

    def save_and_exit(self, exit_: SystemExit) -> None:
        """Save a checkpoint from which the run can continue, if the Trainer saves any, and set the exit status."""
        with self.patience():
            self._save()
        exit_.code = self.status

    def _save(self) -> None:
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

    @property
    def overdue(self) -> float | None:
        """The seconds since this process has last reached a batch, if it is to end and that is too long."""
        waited = time.monotonic() - self._progress
        allowed = SAVING_SECONDS if self._saving else max(PATIENCE_SECONDS, 3 * self._longest)
        return waited if self.told and waited > allowed else None


class _Listener(threading.Thread):
    """Learns of a signal to any process of the run, and ends this process if that comes to nothing.

    Python calls a signal handler only when the main thread returns from C code, where it may wait for a process that is
    stuck. But it writes the signal's number to the wakeup file at once, and this thread reads that.
    """

    def __init__(self, sigterm: CoordinatedSigterm, store: "torch.distributed.Store") -> None:
        super().__init__(daemon=True, name="lightning-ort-listener")
        self._sigterm = sigterm
        self._store: torch.distributed.Store | None = store
        self._stopped = False
        self._passed_on = False
        self._read, self._write = os.pipe()
        self._before = -1
        self._wakes = _POSIX and threading.current_thread() is threading.main_thread()
        if self._wakes:
            os.set_blocking(self._write, False)
            self._before = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
            _wakeups.add(self._write)

    @override
    def run(self) -> None:
        while not self._stopped:
            self._read_signals()
            try:
                self._read_store()
            except RuntimeError:  # the process that hosts the store is gone: nobody is left to be told
                self._store = None
            if (waited := self._sigterm.overdue) is not None:
                log.error(
                    "lightning-ort: SIGTERM: the processes did not agree on a batch to stop after within %.0f s; this"
                    " process ends without a checkpoint.",
                    waited,
                )
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(self._sigterm.status)

    def _read_signals(self) -> None:
        if not _POSIX:  # Windows can neither select() a pipe nor write signals to it
            time.sleep(_LISTEN_SECONDS)
            return
        if not select.select([self._read], [], [], _LISTEN_SECONDS)[0]:
            return
        signals = os.read(self._read, 4096)
        # Lightning has its handlers in place only in its loops
        if signal.SIGTERM in signals and compat.is_sigterm_handler(self._sigterm.on_signal):
            self._sigterm.on_signal()
        if self._before >= 0 and (others := signals.strip(b"\0")):
            os.write(self._before, others)

    def _read_store(self) -> None:
        if self._store is None or self._passed_on:
            return
        if self._sigterm.told:
            self._store.set("stop/told", "1")
        elif self._store.check(["stop/told"]):
            self._sigterm.on_signal()
        else:
            return
        self._sigterm.say()
        self._passed_on = True

    def stop(self) -> None:
        self._stopped = True
        if self._wakes and threading.current_thread() is threading.main_thread():
            _wakeups.discard(self._write)
            now = signal.set_wakeup_fd(self._before)
            if now != self._write:  # somebody else has set another one since
                signal.set_wakeup_fd(now)
        os.write(self._write, b"\0")
        self.join(10.0)
        if not self.is_alive():
            os.close(self._read)
            os.close(self._write)


_wakeups: set[int] = set()  # the wakeup files of the runs in this process


@in_forked_children
def _leave_to_parent() -> None:
    """Forget the wakeup file in a forked process: signals to that process do not concern the run."""
    if _wakeups:
        _wakeups.clear()
        signal.set_wakeup_fd(-1)
