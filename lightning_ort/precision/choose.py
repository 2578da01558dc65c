"""Which precision plugin a strategy uses for ``Trainer(precision=...)``: :func:`choose_precision`."""

from typing import TYPE_CHECKING, Any

from lightning_ort._imports import LightningNamespace

if TYPE_CHECKING:
    from lightning.pytorch.plugins.precision import Precision


def choose_precision(plugin: "Precision | None", namespace: LightningNamespace) -> Any:
    """Return ours for exactly Lightning's ``MixedPrecision``, with the same settings, and other plugins as is."""
    if type(plugin) is not namespace.submodule("plugins.precision").MixedPrecision:
        return plugin
    ours = namespace.classes.ORTMixedPrecision
    return ours(plugin.precision, plugin.device, plugin.scaler)  # type: ignore[union-attr]
