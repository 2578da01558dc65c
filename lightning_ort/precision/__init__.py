"""Precision plugins, for ``lightning.pytorch`` (for ``pytorch_lightning``: ``lightning_ort.pytorch_lightning``).

- :mod:`~lightning_ort.precision.scaled_steps`: mixed precision for every optimizer, with overflows counted
- :mod:`~lightning_ort.precision.choose`: what a strategy makes of ``Trainer(precision=...)``
- :mod:`~lightning_ort.precision.mixed`: the plugin
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_ort.precision.mixed import ORTMixedPrecision

__all__ = ["ORTMixedPrecision"]


def __getattr__(name: str) -> Any:
    # not imported at the top: the other flavor uses the mixins of this package, perhaps without `lightning` installed
    if name == "ORTMixedPrecision":
        from lightning_ort.precision.mixed import ORTMixedPrecision

        return ORTMixedPrecision
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
