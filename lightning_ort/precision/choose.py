"""What a strategy makes of ``Trainer(precision=...)``: :class:`ChoosePrecisionMixin`."""

import importlib
from typing import TYPE_CHECKING, Any, ClassVar

from typing_extensions import override

from lightning_ort._imports import LightningNamespace

if TYPE_CHECKING:
    from lightning.pytorch.plugins.precision import Precision
    from lightning.pytorch.strategies import Strategy as _Strategy
else:
    _Strategy = object


class ChoosePrecisionMixin(_Strategy):
    """Takes ``ORTMixedPrecision`` for Lightning's ``MixedPrecision``, with the same settings and scaler.

    Any other plugin stays, one of a class derived from ``MixedPrecision`` too.
    """

    namespace: ClassVar[LightningNamespace]

    @property
    @override
    def precision_plugin(self) -> "Precision":
        return super().precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, plugin: "Precision | None") -> None:
        self._precision_plugin: Any = plugin
        if type(plugin) is self.namespace.submodule("plugins.precision").MixedPrecision:
            ours = importlib.import_module(self.namespace.module).ORTMixedPrecision
            self._precision_plugin = ours(plugin.precision, plugin.device, plugin.scaler)  # type: ignore[union-attr]
