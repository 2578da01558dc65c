"""Processes of a run that are gone: :class:`ParentWatchdog`, :func:`report_lost_processes`.

Lightning's script launcher runs in the process of rank 0 and starts the other processes of its machine. They learn from
an environment variable that they were started so.
"""

import logging
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from lightning_ort.compat.cpython import in_forked_children

if TYPE_CHECKING:
    import subprocess

log = logging.getLogger(__name__)

_GRACE_SECONDS = 5.0
_REAPING_SECONDS = 1.0
_VARIABLE = "LIGHTNING_ORT_LAUNCHER"

# the process that started the others of this machine by Lightning's launcher, and, in that process, the others
_launcher_pid: int | None = None
_children: "list[subprocess.Popen[bytes]]" = []


@contextmanager
def launching(launcher: Any) -> Iterator[None]:
    """Announce this process to those that the launcher starts within this context, and remember them."""
    global _launcher_pid, _children
    _launcher_pid = os.getpid()
    os.environ[_VARIABLE] = str(_launcher_pid)  # only for the processes that are started now
    try:
        yield
    finally:
        del os.environ[_VARIABLE]
    _children = launcher.procs


def is_launched_by_rank_zero(local_rank: int) -> bool:
    """Return whether Lightning's launcher started this process, or runs in it."""
    return _launcher_pid == (os.getppid() if local_rank > 0 else os.getpid())


def start_watchdog(local_rank: int) -> "ParentWatchdog | None":
    """Watch rank 0, if it has started this process."""
    global _launcher_pid
    if (launcher := os.environ.pop(_VARIABLE, None)) is not None:
        _launcher_pid = int(launcher)
    if local_rank == 0 or not is_launched_by_rank_zero(local_rank):
        return None
    watchdog = ParentWatchdog(local_rank)
    watchdog.start()
    return watchdog


@in_forked_children
def _forget_launch() -> None:
    """Forget, in a forked process, what its parent has started: a later run there is another one."""
    global _launcher_pid, _children
    _launcher_pid, _children = None, []


class ParentWatchdog(threading.Thread):
    """Ends this process when its parent, rank 0, is gone, because nothing else would."""

    def __init__(self, rank: int) -> None:
        super().__init__(daemon=True, name="lightning-ort-parent-watchdog")
        self._rank = rank
        self._parent = os.getppid()
        self._stopped = threading.Event()

    @override
    def run(self) -> None:
        while not self._stopped.wait(1.0):
            if lost := self.lost():
                # give the main thread time to find the connection closed and to say where
                if not self._stopped.wait(_GRACE_SECONDS):
                    log.error("lightning-ort: %s, so rank %d exits.", lost[0], self._rank)
                    os.kill(os.getpid(), signal.SIGKILL)
                return

    def lost(self) -> list[str]:
        """Return that rank 0 is gone, if it is."""
        return [f"rank 0 (PID {self._parent}) is gone"] if os.getppid() != self._parent else []

    def stop(self) -> None:
        """End the thread."""
        self._stopped.set()


def report_lost_processes(error: Exception, watchdog: ParentWatchdog | None, local_rank: int) -> None:
    """Log which processes have ended by an error or a signal, since that may be the cause of an error in this one."""
    # torch raises a RuntimeError for a closed connection; the system closes the connections of a killed process before
    # its end can be seen
    end = time.monotonic() + (_REAPING_SECONDS if isinstance(error, RuntimeError) else 0.0)
    while not (lost := _lost_processes(watchdog, local_rank)) and time.monotonic() < end:
        time.sleep(0.02)
    for name in lost:
        log.error("lightning-ort: %s, so this run is stopped.", name)


def _lost_processes(watchdog: ParentWatchdog | None, local_rank: int) -> list[str]:
    """Describe the lost processes among those that this one has started, or rank 0."""
    if watchdog is not None:
        return watchdog.lost()
    if not is_launched_by_rank_zero(local_rank):
        return []
    codes = {(rank, process.pid): process.poll() for rank, process in enumerate(_children, start=1)}
    return [f"rank {rank} (PID {pid}) {_ended(code)}" for (rank, pid), code in codes.items() if code]


def _ended(code: int) -> str:
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with status {code}"
