"""Precision plugins for ``pytorch_lightning``; the work is done by the mixins of :mod:`lightning_ort.precision`."""

from lightning_ort.pytorch_lightning.precision.plugins import ORTMatmulPrecision, ORTMixedPrecision

__all__ = ["ORTMatmulPrecision", "ORTMixedPrecision"]
