"""What happens when a process of a run is killed, or asked to end: :class:`FaultsMixin`."""

import importlib
import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from lightning_utilities.core.rank_zero import rank_zero_info
from typing_extensions import override

from lightning_ort._imports import LightningNamespace
from lightning_ort.strategies.distributed.run_store import RunStoreMixin
from lightning_ort.strategies.distributed.sigterm import AgreedStop

if TYPE_CHECKING:
    import subprocess

    from lightning.fabric.utilities.types import _PATH

log = logging.getLogger(__name__)

SIGTERM_CHECKPOINT = "sigterm.ckpt"
STATUS = 128 + signal.SIGTERM
_GRACE_SECONDS = 5.0
_REAPING_SECONDS = 1.0
_LAUNCHER = "LIGHTNING_ORT_LAUNCHER"

# the process of rank 0 that started the others of this machine, by Lightning's launcher, and in that one the others
_launcher: int | None = None
_started: "list[subprocess.Popen[bytes]]" = []


class FaultsMixin(RunStoreMixin):
    """Ends all processes of a run when one ends, says which, and saves a checkpoint when one is told to end.

    SIGTERM to any process, which cluster schedulers send before they kill, ends the run in all of them, after a batch
    that they agree on. If the Trainer has checkpointing enabled and is fitting, ``sigterm.ckpt`` is saved below its
    ``default_root_dir``. The process that was started first, or each one where something else starts them, then ends
    with the status 143.
    """

    namespace: ClassVar[LightningNamespace]

    _stop: AgreedStop | None = None
    _watch: "_ParentWatch | None" = None

    @override
    def _configure_launcher(self) -> None:
        super()._configure_launcher()
        start = getattr(self._launcher, "_call_children_scripts", None)  # one that forks or spawns has none
        if start is not None:
            self._launcher._call_children_scripts = self._start_others(start)  # type: ignore[union-attr]

    def _start_others(self, start: Callable[[], None]) -> Callable[[], None]:
        def start_others() -> None:
            global _launcher, _started
            _launcher = os.getpid()
            os.environ[_LAUNCHER] = str(_launcher)  # for the processes that this one starts, and not for later
            try:
                start()
            finally:
                del os.environ[_LAUNCHER]
            _started = self.launcher.procs  # type: ignore[union-attr]

        return start_others

    @property
    def _started_by_rank_zero(self) -> bool:
        # by the launcher that starts the script once per device, and is rank 0 itself
        return _launcher == (os.getppid() if self.local_rank > 0 else os.getpid())

    @override
    def setup_environment(self) -> None:
        global _launcher
        if (launcher := os.environ.pop(_LAUNCHER, None)) is not None:
            _launcher = int(launcher)
        if self._started_by_rank_zero and self.local_rank > 0:
            self._watch = _ParentWatch(self.local_rank)
            self._watch.start()
        super().setup_environment()
        assert self.lightning_module is not None
        self._stop = AgreedStop(self.lightning_module.trainer, self.run_store, self._status)
        self._stop.install()

    @property
    def _status(self) -> int:
        # one that is not 0 makes Lightning's observer of the other processes kill this one
        return STATUS if self.local_rank == 0 or not self._started_by_rank_zero else 0

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        if self._stop is not None:
            self._stop.on_train_batch_start()

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        self._before_evaluation_step()
        return super().validation_step(*args, **kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        self._before_evaluation_step()
        return super().test_step(*args, **kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        self._before_evaluation_step()
        return super().predict_step(*args, **kwargs)

    def _before_evaluation_step(self) -> None:
        if self._stop is not None and self._stop.on_evaluation_step():
            # here and not after the batch: Lightning takes a validation up again that was left within a batch, and
            # leaves out the rest of one that was left between two
            exceptions = importlib.import_module(f"{self.namespace.package}.utilities.exceptions")
            raise exceptions.SIGTERMException

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: "_PATH", storage_options: Any | None = None
    ) -> None:
        with AgreedStop.patience(self._stop):
            super().save_checkpoint(checkpoint, filepath, storage_options)

    @override
    def barrier(self, *args: Any, **kwargs: Any) -> None:
        with AgreedStop.patience(self._stop):  # which is where the others wait for the one that saves
            super().barrier(*args, **kwargs)

    @override
    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        if self._stop is not None and self._stop.agreed and isinstance(exception, SystemExit):
            with AgreedStop.patience(self._stop):
                self._save_for_later()
            exception.code = self._status
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
        if trainer.state.fn != "fit" or not trainer.checkpoint_callbacks or getattr(trainer, "fast_dev_run", False):
            if trainer.state.fn == "fit":
                rank_zero_info("lightning-ort: SIGTERM: no checkpoint is saved, since the Trainer has none enabled.")
            self.barrier()  # with rank 0 the store may go in which the others look for where to end
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
        codes = {(rank, process.pid): process.poll() for rank, process in enumerate(_started, start=1)}
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
