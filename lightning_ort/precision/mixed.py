"""Mixed precision for ``lightning.pytorch``: :class:`ORTMixedPrecision`."""

from lightning.pytorch.plugins.precision import MixedPrecision as _MixedPrecision

from lightning_ort.precision.scaled_steps import ScaledStepsMixin


class ORTMixedPrecision(ScaledStepsMixin, _MixedPrecision):
    """:class:`ScaledStepsMixin` as a precision plugin of ``lightning.pytorch``."""

    __qualname__ = "MixedPrecision"  # by which Lightning keys the scaler's state in a checkpoint


MixedPrecision = ORTMixedPrecision  # pickle goes by the same name
