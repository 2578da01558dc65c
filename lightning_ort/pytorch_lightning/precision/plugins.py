"""Precision plugins for ``pytorch_lightning``."""

from pytorch_lightning.plugins.precision import HalfPrecision as _HalfPrecision
from pytorch_lightning.plugins.precision import MixedPrecision as _MixedPrecision
from pytorch_lightning.plugins.precision import Precision as _Precision

from lightning_ort.precision.bfloat16 import BFloat16Mixin
from lightning_ort.precision.matmul import MatmulPrecisionMixin
from lightning_ort.precision.mixed import MixedPrecisionMixin


class ORTMixedPrecision(MixedPrecisionMixin, _MixedPrecision):
    """:class:`MixedPrecisionMixin` as a precision plugin of ``pytorch_lightning``."""

    __qualname__ = "MixedPrecision"  # by which Lightning keys the scaler's state in a checkpoint


MixedPrecision = ORTMixedPrecision  # pickle goes by the same name


class ORTMatmulPrecision(MatmulPrecisionMixin, _Precision):
    """:class:`MatmulPrecisionMixin` as a precision plugin of ``pytorch_lightning``."""


class ORTBFloat16Precision(BFloat16Mixin, _HalfPrecision):
    """:class:`BFloat16Mixin` as a precision plugin of ``pytorch_lightning``."""
