"""Lightning strategies for ``pytorch_lightning``; the work is done by the mixins of :mod:`lightning_ort.strategies`."""

from lightning_ort.pytorch_lightning.strategies.single_device import ORTStrategy

__all__ = ["ORTStrategy"]
