"""All processes of a run end after the same batch when one of them is told to: :class:`AgreedStop`."""

import logging
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from typing_extensions import override

if TYPE_CHECKING:
    import lightning.pytorch as pl

log = logging.getLogger(__name__)

# how long a process that is told to end goes on without coming to its next batch, at least
PATIENCE_SECONDS = 60.0
# the same while it, or another one, saves a checkpoint
SAVING_SECONDS = 1800.0
_LISTEN_SECONDS = 0.3
_POSIX = os.name == "posix"


class AgreedStop:
    """Lets all processes stop after the same batch.

    Lightning's own answer to SIGTERM starts a collective wherever the signal meets a process, which may be in the
    middle of another one, and has rank 0 alone heard. This one sets a mark, and a thread of each process tells the
    others by way of the run's store. Each process gives a vote when its next batch begins, and when rank 0 has seen all
    votes it names the batch after which to stop. No process can be past that one, since Lightning has them wait for
    rank 0 at the start of each batch of training; and in evaluation they are not further apart than their collectives
    let them, which are all that has to match. A step of a run that is not told to end pays nothing.

    Where the vote comes to nothing, since a process is stuck, each process ends by itself, without a checkpoint.

    Args:
        trainer: Of the run.
        store: Of the run; ``None`` for a single process.
        status: To end with in that case.

    Attributes:
        agreed: Whether this process is at the batch after which to stop.

    """

    def __init__(self, trainer: "pl.Trainer", store: "torch.distributed.Store | None", status: int) -> None:
        self.agreed = False
        self.told = False  # by a signal, or by another process
        self.status = status
        self._trainer = trainer
        self._store = store
        self._voted = False
        # batches of training, and of the evaluation since
        self._position = (0, 0)
        self._listener: _Listener | None = None
        self._progress = time.monotonic()
        self._longest = 0.0
        self._saving = 0

    def install(self) -> None:
        """Take the place of Lightning's answer to SIGTERM; handlers that were there before are called as ever."""
        self._trainer._signal_connector._sigterm_notifier_fn = self._mark  # type: ignore[method-assign, assignment]
        if self._store is not None:
            self._listener = _Listener(self, self._store)
            self._listener.start()

    @property
    def _answers(self) -> bool:
        """Whether this is what answers SIGTERM now: Lightning has its handlers in place in the loops alone."""
        return self._mark in getattr(signal.getsignal(signal.SIGTERM), "signal_handlers", ())

    def remove(self) -> None:
        """Undo :meth:`install`."""
        vars(self._trainer._signal_connector).pop("_sigterm_notifier_fn", None)
        if self._listener is not None:
            self._listener.stop()
            self._listener = None

    def _mark(self, signum: int, frame: Any) -> None:
        self.tell()

    def tell(self) -> None:
        """Have this process vote from now on; a second call changes nothing."""
        if not self.told:
            self._progress = time.monotonic()
            self.told = True

    def on_train_batch_start(self) -> None:
        """Vote, and see whether all have: Lightning's loops end after this batch, and save their progress."""
        if self._at((self._position[0] + 1, 0)):
            self._trainer._signal_connector.received_sigterm = True

    def on_evaluation_step(self) -> bool:
        """Vote, and see whether all have; if so, this is where to end."""
        return not self._trainer.sanity_checking and self._at((self._position[0], self._position[1] + 1))

    def _at(self, position: tuple[int, int]) -> bool:
        now = time.monotonic()
        self._longest = max(self._longest, now - self._progress)
        self._position, self._progress = position, now
        if self.told and not self.agreed:
            self.agreed = self._store is None or self._vote(self._store)
        return self.agreed

    def _vote(self, store: "torch.distributed.Store") -> bool:
        votes = store.add("stop/votes", 0 if self._voted else 1)
        self._voted = True
        batches, steps = self._position
        if self._trainer.is_global_zero and votes == self._trainer.world_size and not store.check(["stop/at"]):
            # the next batch of training but, if an evaluation comes first, its second one: the first of them may have
            # begun elsewhere
            store.set("stop/at", f"{batches},{steps + 2}")
        if not store.check(["stop/at"]):
            return False
        at, step = store.get("stop/at").decode().split(",")
        return self._position >= (int(at), int(step))

    @staticmethod
    @contextmanager
    def patience(stop: "AgreedStop | None") -> Iterator[None]:
        """Allow for the time that saving takes."""
        if stop is None:
            yield
            return
        stop._saving += 1
        try:
            yield
        finally:
            stop._saving -= 1
            stop._progress = time.monotonic()

    @property
    def overdue(self) -> float | None:
        """For how many seconds this process has come to no batch, if that is too long since it was told to end."""
        waited = time.monotonic() - self._progress
        allowed = SAVING_SECONDS if self._saving else max(PATIENCE_SECONDS, 3 * self._longest)
        return waited if self.told and waited > allowed else None


class _Listener(threading.Thread):
    """Hears of a signal to any process of the run, and does not wait for ever.

    Python calls a handler when the main thread is back from what it does in C, which may be to wait for a process that
    is stuck. Of the signal itself it writes to a file at once, and that is what this thread reads.

    Args:
        stop: To be told.
        store: Of the run.

    """

    def __init__(self, stop: AgreedStop, store: "torch.distributed.Store") -> None:
        super().__init__(daemon=True, name="lightning-ort-listener")
        self._agreed_stop = stop
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
        stop = self._agreed_stop
        while not self._stopped:
            self._hear_of_signals(stop)
            try:
                self._hear_of_others(stop)
            except RuntimeError:  # the store is gone, with the process that had it: nobody is left to be told
                self._store = None
            if (waited := stop.overdue) is not None:
                log.error(
                    "lightning-ort: SIGTERM: the processes do not come to a batch to stop after, in %.0f s; this one"
                    " ends without a checkpoint.",
                    waited,
                )
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(stop.status)

    def _hear_of_signals(self, stop: AgreedStop) -> None:
        if not _POSIX:  # where pipes cannot be waited for, nor be told of signals
            time.sleep(_LISTEN_SECONDS)
            return
        if not select.select([self._read], [], [], _LISTEN_SECONDS)[0]:
            return
        signals = os.read(self._read, 4096)
        if signal.SIGTERM in signals and stop._answers:
            stop.tell()
        if self._before >= 0 and (others := signals.strip(b"\0")):
            os.write(self._before, others)

    def _hear_of_others(self, stop: AgreedStop) -> None:
        if self._store is None or self._passed_on:
            return
        if stop.told:
            self._store.set("stop/told", "1")
            self._passed_on = True
        elif self._store.check(["stop/told"]):
            self._passed_on = True
            stop.tell()

    def stop(self) -> None:
        """End the thread."""
        self._stopped = True
        if self._wakes and threading.current_thread() is threading.main_thread():
            _wakeups.discard(self._write)
            now = signal.set_wakeup_fd(self._before)
            if now != self._write:  # another's, since
                signal.set_wakeup_fd(now)
        os.write(self._write, b"\0")
        self.join(10.0)
        if not self.is_alive():
            os.close(self._read)
            os.close(self._write)


_wakeups: set[int] = set()  # of the runs of this process


def _leave_to_parent() -> None:
    """A forked process has the same file, and what it is told is not for the run."""
    if _wakeups:
        _wakeups.clear()
        signal.set_wakeup_fd(-1)


if _POSIX:
    os.register_at_fork(after_in_child=_leave_to_parent)
