"""Lightning callbacks for ``pytorch_lightning``; the work is done by :mod:`lightning_ort.callbacks`."""

from lightning_ort.pytorch_lightning.callbacks.onnx_export import OnnxExport
from lightning_ort.pytorch_lightning.callbacks.optimizer import ORTOptimizer

__all__ = ["ORTOptimizer", "OnnxExport"]
