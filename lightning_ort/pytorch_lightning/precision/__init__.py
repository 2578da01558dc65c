"""Precision plugins for ``pytorch_lightning``; the work is done by the mixins of :mod:`lightning_ort.precision`."""

from lightning_ort.pytorch_lightning.precision.plugins import (
    ORTBFloat16Precision,
    ORTMatmulPrecision,
    ORTMixedPrecision,
)

__all__ = ["ORTBFloat16Precision", "ORTMatmulPrecision", "ORTMixedPrecision"]
