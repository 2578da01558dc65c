"""Checkpoint files that are whole or not there: :func:`save_atomically`, :class:`AtomicCheckpointsMixin`."""

import importlib
import os
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from fsspec.utils import get_protocol
from typing_extensions import override

from lightning_ort._imports import Flavor

if TYPE_CHECKING:
    from lightning.fabric.plugins import CheckpointIO
    from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO as _TorchCheckpointIO
    from lightning.fabric.utilities.types import _PATH
    from lightning.pytorch.strategies import Strategy as _Strategy
else:
    _TorchCheckpointIO = _Strategy = object


def save_atomically(checkpoint: dict[str, Any], path: Path) -> None:
    """Write a checkpoint beside its place, down to the disk, and then rename it.

    Args:
        checkpoint: What ``torch.save`` takes.
        path: A local file; its folder is made, and a file that is there is replaced.

    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # the same name each time, so that what a killed process leaves is used again; and not the checkpoint's name, by
    # which Lightning would find it
    partial = path.parent / f".{zlib.crc32(path.name.encode()):08x}.partial"
    try:
        with partial.open("wb") as file:
            torch.save(checkpoint, file)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # the new name, too
    finally:
        os.close(folder)


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
    """Saves by the flavor's ``AtomicCheckpointIO`` where the user chose nothing else."""

    flavor: ClassVar[Flavor]

    @property
    @override
    def checkpoint_io(self) -> "CheckpointIO":
        io: Any = self._checkpoint_io
        wraps_nothing = getattr(io, "checkpoint_io", io) is None  # such as AsyncCheckpointIO()
        if wraps_nothing:
            atomic = importlib.import_module(f"{self.flavor.strategies}.checkpoint_io").AtomicCheckpointIO()
            if io is None:
                self._checkpoint_io = io = atomic
            else:
                io.checkpoint_io = atomic
        return io

    @checkpoint_io.setter
    def checkpoint_io(self, io: "CheckpointIO") -> None:
        self._checkpoint_io = io
