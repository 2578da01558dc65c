"""Lightning callbacks, for ``lightning.pytorch`` (for ``pytorch_lightning``: ``lightning_ort.pytorch_lightning``).

- :mod:`~lightning_ort.callbacks.onnx_export`: the trained module as an ONNX model
- :mod:`~lightning_ort.callbacks.optimizer`: another implementation of the optimizers, under any strategy
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_ort.callbacks.onnx_export import OnnxExport
    from lightning_ort.callbacks.optimizer import ORTOptimizer

__all__ = ["ORTOptimizer", "OnnxExport"]


def __getattr__(name: str) -> Any:
    # not imported at the top: the other namespace uses the mixins of this package, perhaps without `lightning` installed
    if name == "ORTOptimizer":
        from lightning_ort.callbacks.optimizer import ORTOptimizer

        return ORTOptimizer
    if name == "OnnxExport":
        from lightning_ort.callbacks.onnx_export import OnnxExport

        return OnnxExport
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
