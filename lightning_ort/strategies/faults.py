"""What happens when a process of a run is killed, or asked to end: :class:`FaultsMixin`."""

import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_info
from typing_extensions import override

if TYPE_CHECKING:
    import lightning.pytorch as pl
    from lightning.pytorch.strategies import DDPStrategy as _DDPStrategy
else:
    _DDPStrategy = object

log = logging.getLogger(__name__)

SIGTERM_CHECKPOINT = "sigterm.ckpt"
_GRACE_SECONDS = 5.0
_REAPING_SECONDS = 1.0
_LAUNCHER = "LIGHTNING_ORT_LAUNCHER"


class FaultsMixin(_DDPStrategy):
    """Ends all processes of a run when one ends, says which, and saves a checkpoint when the run is told to end.

    SIGTERM, which cluster schedulers send before they kill, ends training after a batch that all processes agree on.
    If the Trainer has checkpointing enabled, ``sigterm.ckpt`` is saved below its ``default_root_dir``. The process that
    was started first, or each one where something else starts them, then ends with the status 143.
    """

    _stop: "_AgreedStop | None" = None
    _watch: "_ParentWatch | None" = None

    @override
    def _configure_launcher(self) -> None:
        super()._configure_launcher()
        assert self.cluster_environment is not None
        if self._start_method == "popen" and not self.cluster_environment.creates_processes_externally:
            os.environ[_LAUNCHER] = str(os.getpid())  # for the processes that this one will start

    @property
    def _started_by_rank_zero(self) -> bool:
        # by the launcher that starts the script once per device, and is rank 0 itself
        return os.environ.get(_LAUNCHER) == str(os.getppid() if self.local_rank > 0 else os.getpid())

    @override
    def setup_environment(self) -> None:
        if self._started_by_rank_zero and self.local_rank > 0:
            self._watch = _ParentWatch(self.local_rank)
            self._watch.start()
        super().setup_environment()

    @override
    def on_train_start(self) -> None:
        super().on_train_start()
        if threading.current_thread() is threading.main_thread():
            assert self.lightning_module is not None
            self._stop = _AgreedStop(self.lightning_module.trainer)
            self._stop.install()

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        if self._stop is not None:
            self._stop.on_batch_start()

    @override
    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        if self._stop is not None and self._stop.agreed and isinstance(exception, SystemExit):
            self._save_for_later()
            # a status that is not 0 makes Lightning's observer of the other processes kill this one
            exception.code = 128 + signal.SIGTERM if self.local_rank == 0 or not self._started_by_rank_zero else 0
        elif isinstance(exception, Exception):
            # a closed connection is a RuntimeError to torch; the system closes those of a killed process first, and
            # only then can it be found to have ended
            end = time.monotonic() + (_REAPING_SECONDS if isinstance(exception, RuntimeError) else 0.0)
            while not (lost := self._lost_processes()) and time.monotonic() < end:
                time.sleep(0.02)
            for name in lost:
                log.error("lightning-ort: %s, so this run ends.", name)

    def _save_for_later(self) -> None:
        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        if not trainer.checkpoint_callbacks or getattr(trainer, "fast_dev_run", False):
            rank_zero_info("lightning-ort: SIGTERM: no checkpoint is saved, since the Trainer has none enabled.")
            return
        path = Path(trainer.default_root_dir) / SIGTERM_CHECKPOINT
        trainer.save_checkpoint(path)
        rank_zero_info("lightning-ort: SIGTERM: saved %s; go on with `trainer.fit(..., ckpt_path=%r)`", path, str(path))

    def _lost_processes(self) -> list[str]:
        """Which processes have ended by an error or a signal: of those that this one started, or rank 0."""
        if self._watch is not None:
            return self._watch.lost()
        if not self._started_by_rank_zero:
            return []
        processes = enumerate(self.launcher.procs, start=1)  # type: ignore[union-attr]
        codes = {(rank, process.pid): process.poll() for rank, process in processes}
        return [f"rank {rank} (PID {pid}) {_ended(code)}" for (rank, pid), code in codes.items() if code]

    @override
    def teardown(self) -> None:
        if self._stop is not None:
            self._stop.remove()
            self._stop = None
        if self._watch is not None:
            self._watch.stop()
            self._watch = None
        super().teardown()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_stop": None, "_watch": None}


def _ended(code: int) -> str:
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"


class _AgreedStop:
    """Lets all processes stop after the same batch.

    Lightning's own handler starts a collective wherever the signal meets a process, which may be in the middle of
    another one. This one sets a mark. Each marked process gives a vote in the run's store when its next batch begins,
    and when rank 0 has seen all votes it names the batch after which to stop. No process can be past that one, since
    Lightning has them wait for rank 0 at the start of each batch. A run that is not told to end pays nothing.

    Args:
        trainer: In a fit.

    """

    def __init__(self, trainer: "pl.Trainer") -> None:
        self._trainer = trainer
        self._marked = self._voted = self.agreed = False
        self._batches = 0
        self._before: Any = None

    def install(self) -> None:
        """Take the place of Lightning's handler of SIGTERM, which called others that were there before it."""
        connector = self._trainer._signal_connector
        self._before = signal.getsignal(signal.SIGTERM)
        handlers = getattr(self._before, "signal_handlers", ())
        others = [handler for handler in handlers if callable(handler) and handler != connector._sigterm_notifier_fn]
        signal.signal(signal.SIGTERM, self._handler(others))

    def _handler(self, others: list[Callable[..., Any]]) -> Callable[..., Any]:
        def mark(signum: int, frame: Any) -> None:
            if not self._marked:
                self._marked = True
                launcher = self._trainer.strategy.launcher
                if launcher is not None:
                    launcher.kill(signum)
            for handler in others:
                handler(signum, frame)

        return mark

    def remove(self) -> None:
        """Put Lightning's handler back."""
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._before)

    def on_batch_start(self) -> None:
        """Vote, and see whether all have."""
        self._batches += 1
        if not self._marked:
            return
        world_size = self._trainer.world_size
        if world_size > 1:
            default = torch.distributed.distributed_c10d._get_default_store()
            store = torch.distributed.PrefixStore("lightning_ort/sigterm", default)
            votes = store.add("votes", 0 if self._voted else 1)
            self._voted = True
            if self._trainer.is_global_zero and votes == world_size and not store.check(["stop"]):
                store.set("stop", str(self._batches + 1))
            self.agreed = store.check(["stop"]) and self._batches >= int(store.get("stop"))
        else:
            self.agreed = True
        if self.agreed:  # Lightning's loops end after this batch, and save their progress
            self._trainer._signal_connector.received_sigterm = True


class _ParentWatch(threading.Thread):
    """Ends this process when the one that started it, rank 0, is gone: nobody else would.

    Args:
        rank: Of this process.

    """

    def __init__(self, rank: int) -> None:
        super().__init__(daemon=True, name="lightning-ort-parent-watch")
        self._rank = rank
        self._parent = os.getppid()
        self._stopped = threading.Event()

    @override
    def run(self) -> None:
        while not self._stopped.wait(1.0):
            if lost := self.lost():
                # time for the main thread to find the connection closed, and to say where
                if not self._stopped.wait(_GRACE_SECONDS):
                    log.error("lightning-ort: %s, so rank %d ends.", lost[0], self._rank)
                    os.kill(os.getpid(), signal.SIGKILL)
                return

    def lost(self) -> list[str]:
        """That rank 0 has ended, if it has."""
        return [f"rank 0 (PID {self._parent}) is gone"] if os.getppid() != self._parent else []

    def stop(self) -> None:
        """End the watch."""
        self._stopped.set()
