"""Checkpoint files that are whole or not there: :func:`save_atomically`, :class:`AtomicCheckpointsMixin`."""

import importlib
import os
import platform
import re
import time
import zlib
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from fsspec.utils import get_protocol
from typing_extensions import override

from lightning_ort._imports import LightningNamespace

if TYPE_CHECKING:
    from lightning.fabric.plugins import CheckpointIO
    from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO as _TorchCheckpointIO
    from lightning.fabric.utilities.types import _PATH
    from lightning.pytorch.strategies import Strategy as _Strategy
else:
    _TorchCheckpointIO = _Strategy = object


# a file that nobody has written to for so long is of a process that was killed, perhaps on another machine
_ABANDONED_SECONDS = 24 * 3600
_POSIX = os.name == "posix"
_OURS = re.compile(r"\.([0-9a-f]{8})\.([0-9]+)\.([0-9a-f]{8})\.partial")


def save_atomically(checkpoint: dict[str, Any], path: Path) -> None:
    """Write a checkpoint beside its place, down to the disk, and then rename it.

    What processes that were killed in the middle have left in that folder is removed: at once where the process was one
    of this machine, else after a day.

    Args:
        checkpoint: What ``torch.save`` takes.
        path: A local file; its folder is made, and a file that is there is replaced.

    """
    path.parent.mkdir(parents=True, exist_ok=True)
    _remove_abandoned(path.parent)
    # not the checkpoint's name, by which Lightning would find it; with the machine and the process, so that another one
    # can tell whether it is being written
    partial = path.parent / f".{_checksum(path.name)}.{os.getpid()}.{_checksum(_machine())}.partial"
    try:
        with partial.open("wb") as file:
            torch.save(checkpoint, file)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    """Write the names in a folder down to the disk, where the system and the file system can."""
    if not _POSIX:  # Windows opens no folders
        return
    with suppress(OSError):  # some network file systems do not
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _remove_abandoned(folder: Path) -> None:
    for file in folder.glob(".*.partial"):
        # those of earlier versions have no process in their name
        known = _OURS.fullmatch(file.name)
        if known is None and not re.fullmatch(r"\.[0-9a-f]{8}\.partial", file.name):
            continue
        with suppress(OSError):  # gone, or another user's
            here = known is not None and known[3] == _checksum(_machine())
            if time.time() - file.stat().st_mtime > _ABANDONED_SECONDS or (
                here and known is not None and not _is_running(int(known[2]))
            ):
                file.unlink()


def _is_running(pid: int) -> bool:
    if not _POSIX:  # where signal 0 would end it
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # another user's
        return True
    return True


def _machine() -> str:
    """Name what process ids are numbers of: a machine since it was started, or a container of it."""
    facts = [platform.node()]
    with suppress(OSError):
        facts += [Path("/proc/sys/kernel/random/boot_id").read_text(), os.readlink("/proc/self/ns/pid")]
    return " ".join(facts)


def _checksum(text: str) -> str:
    return f"{zlib.crc32(text.encode()):08x}"


class AtomicSaveMixin(_TorchCheckpointIO):
    """Puts a checkpoint in its place when it is whole.

    Lightning's own writes to the system's folder for temporary files. Where that is another file system it then copies,
    and a process that is killed meanwhile leaves half a file in the place of the checkpoint that was there.
    """

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], path: "_PATH", storage_options: Any | None = None) -> None:
        """Save a checkpoint; on other than local files as Lightning does.

        Raises:
            TypeError: If ``storage_options`` is given.

        """
        if storage_options is None and get_protocol(str(path)) == "file":
            save_atomically(checkpoint, Path(path))
        else:
            super().save_checkpoint(checkpoint, path, storage_options)


class AtomicCheckpointsMixin(_Strategy):
    """Saves by the namespace's ``AtomicCheckpointIO`` where the user chose nothing else."""

    namespace: ClassVar[LightningNamespace]

    @property
    @override
    def checkpoint_io(self) -> "CheckpointIO":
        io: Any = self._checkpoint_io
        wraps_nothing = getattr(io, "checkpoint_io", io) is None  # such as AsyncCheckpointIO()
        if wraps_nothing:
            atomic = importlib.import_module(f"{self.namespace.strategies}.checkpoint_io").AtomicCheckpointIO()
            if io is None:
                self._checkpoint_io = io = atomic
            else:
                io.checkpoint_io = atomic
        return io

    @checkpoint_io.setter
    def checkpoint_io(self, io: "CheckpointIO") -> None:
        self._checkpoint_io = io
