"""Mixed precision for ``pytorch_lightning``: :class:`ORTMixedPrecision`."""

from pytorch_lightning.plugins.precision import MixedPrecision as _MixedPrecision

from lightning_ort.precision.scaled_steps import ScaledStepsMixin


class ORTMixedPrecision(ScaledStepsMixin, _MixedPrecision):
    """:class:`ScaledStepsMixin` as a precision plugin of ``pytorch_lightning``."""

    __qualname__ = "MixedPrecision"  # by which Lightning keys the scaler's state in a checkpoint


MixedPrecision = ORTMixedPrecision  # pickle goes by the same name
