"""Checkpoint files that are complete or absent: :func:`save_atomically`, :class:`AtomicSaveMixin`."""

import math
import os
import platform
import re
import time
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from fsspec.core import url_to_fs
from fsspec.utils import get_protocol
from typing_extensions import override

from lightning_ort._imports import LightningNamespace
from lightning_ort.compat import lightning_bases
from lightning_ort.compat.lightning import chosen_checkpoint_io, set_checkpoint_io
from lightning_ort.compiler.machine.out_of_memory import causes

if TYPE_CHECKING:
    from lightning.fabric.plugins import CheckpointIO
    from lightning.pytorch.strategies import Strategy


# a file that nobody has written to for this long belongs to a process that was killed, perhaps on another machine
_ABANDONED_SECONDS = 24 * 3600
_POSIX = os.name == "posix"
_OURS = re.compile(r"\.([0-9a-f]{8})\.([0-9]+)\.([0-9a-f]{8})\.partial")


def save_atomically(checkpoint: dict[str, Any], path: Path, *, flushes: bool = True) -> None:
    """Write a checkpoint to a temporary file in its folder, flush it to the disk, and rename it.

    The folder is created, and an existing file is replaced. Temporary files of processes that were killed while they
    saved are removed: at once if the process ran on this machine, otherwise after a day. Without ``flushes`` the system
    chooses when the file gets to the disk, which only a machine that loses power tells from the other. An ``OSError``
    has the path and what was written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    _remove_abandoned(path.parent)
    # not the checkpoint's name, by which Lightning would find it; the machine and the process are part of the name so
    # that others can tell whether it is still being written
    partial = path.parent / f".{_checksum(path.name)}.{os.getpid()}.{_checksum(_machine())}.partial"
    try:
        with partial.open("wb") as file:
            torch.save(checkpoint, file)
            if flushes:
                file.flush()
                os.fsync(file.fileno())
        partial.replace(path)
    except BaseException as error:
        written = partial.stat().st_size if partial.exists() else 0
        partial.unlink(missing_ok=True)
        # what the system refused, which torch's writer of archives hides behind an error of its own (2.13)
        if (cause := next((one for one in causes(error) if isinstance(one, OSError)), None)) is not None:
            text = f"{cause.strerror or cause}, after {written:,} bytes of the checkpoint"
            raise OSError(cause.errno, text, str(path)) from error
        raise
    if flushes:
        _flush(path.parent)


def _flush(path: Path) -> None:
    if not _POSIX:  # Windows cannot open folders
        return
    with suppress(OSError):  # some network file systems cannot, and a file may be removed by now
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _remove_abandoned(folder: Path) -> None:
    for file in folder.glob(".*.partial"):
        if (known := _OURS.fullmatch(file.name)) is None:
            continue
        with suppress(OSError):  # removed, or of another user
            ended = known[3] == _checksum(_machine()) and not _is_running(int(known[2]))
            if ended or time.time() - file.stat().st_mtime > _ABANDONED_SECONDS:
                file.unlink()


def _is_running(pid: int) -> bool:
    if not _POSIX:  # on Windows signal 0 would end it
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # of another user
        return True
    return True


def _machine() -> str:
    """Return a name for the scope of process ids: a machine since it was started, or a container on it."""
    facts = [platform.node()]
    with suppress(OSError):
        facts += [Path("/proc/sys/kernel/random/boot_id").read_text(), os.readlink("/proc/self/ns/pid")]
    return " ".join(facts)


def _checksum(text: str) -> str:
    return f"{zlib.crc32(text.encode()):08x}"


class AtomicSaveMixin(lightning_bases.TorchCheckpointIO):
    """Puts a checkpoint in its place when it is complete.

    Lightning writes to the system's folder for temporary files first. If that is another file system it then copies the
    file, and a process that is killed meanwhile leaves half a file in the place of the earlier checkpoint.

    Attributes:
        flush_every: Seconds between two checkpoints of new names that are flushed to the disk, which may take as long
            as a short epoch. Those in between are flushed at the end of the run, and what replaces a file always is.

    """

    flush_every = 1.0
    _stock_save: ClassVar[Callable[..., None]]
    _flushed_at = -math.inf
    _waiting: frozenset[Path] = frozenset()  # for the end of the run

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls._stock_save = super().save_checkpoint

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None) -> None:
        """Save a checkpoint; other than local files, and with ``storage_options``, Lightning saves it, or refuses.

        So does what somebody has put in the place of Lightning's method.
        """
        is_stock = super().save_checkpoint == self._stock_save
        if is_stock and storage_options is None and get_protocol(str(path)) == "file":
            file = Path(url_to_fs(str(path))[1])  # as Lightning: "~" and "file://" too
            flushes = time.monotonic() - self._flushed_at >= self.flush_every or file.exists()
            save_atomically(checkpoint, file, flushes=flushes)
            if flushes:
                self._flushed_at = time.monotonic()
                self._waiting = frozenset(one for one in self._waiting - {file} if one.exists())
            else:
                self._waiting |= {file}
        else:
            super().save_checkpoint(checkpoint, path, storage_options=storage_options)

    @override
    def teardown(self) -> None:
        waiting, self._waiting = self._waiting, frozenset()
        self._flushed_at = -math.inf  # what is saved next may be saved after the last run
        for path in (*waiting, *{file.parent for file in waiting}):
            _flush(path)
        super().teardown()


def atomic_io(strategy: "Strategy", namespace: LightningNamespace) -> "CheckpointIO":
    """Return the checkpoint IO of a strategy: ``AtomicCheckpointIO``, unless the user has chosen another one."""
    innermost: Any = chosen_checkpoint_io(strategy)
    io = innermost
    while innermost is not None and hasattr(innermost, "checkpoint_io"):
        innermost = innermost.checkpoint_io
    if innermost is None:  # nothing, or something that wraps nothing, such as AsyncCheckpointIO(), which passes it on
        atomic = namespace.classes.AtomicCheckpointIO()
        if io is None:
            set_checkpoint_io(strategy, io := atomic)
        else:
            atomic.flush_every, io.checkpoint_io = 0, atomic  # what wraps it does not tell it of the end of a run
    return io
