"""Checkpoint files that are whole or not there, for ``pytorch_lightning``."""

from lightning_fabric.plugins import TorchCheckpointIO

from lightning_ort.strategies.checkpoints import AtomicSaveMixin


class AtomicCheckpointIO(AtomicSaveMixin, TorchCheckpointIO):
    """``TorchCheckpointIO`` that puts a local file in place when it is whole and on the disk."""
