"""Precision plugins, for ``lightning.pytorch`` (for ``pytorch_lightning``: ``lightning_ort.pytorch_lightning``).

- :mod:`~lightning_ort.precision.mixed`: mixed precision for every optimizer, with overflows counted
- :mod:`~lightning_ort.precision.matmul`: faster float32 matrix products with less precision
- :mod:`~lightning_ort.precision.bfloat16`: bfloat16 weights that learn by small steps
- :mod:`~lightning_ort.precision.choose`: what a strategy makes of ``Trainer(precision=...)``
- :mod:`~lightning_ort.precision.plugins`: the plugins
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_ort.precision.plugins import ORTBFloat16Precision, ORTMatmulPrecision, ORTMixedPrecision

__all__ = ["ORTBFloat16Precision", "ORTMatmulPrecision", "ORTMixedPrecision"]


def __getattr__(name: str) -> Any:
    # not imported at the top: the other namespace uses the mixins of this package, perhaps without `lightning` installed
    if name in __all__:
        from lightning_ort.precision import plugins

        return getattr(plugins, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
