"""The trained module as an ONNX model: :class:`OnnxExport`."""

from pytorch_lightning import Callback

from lightning_ort.callbacks.export_onnx import ExportOnnxCallback


class OnnxExport(ExportOnnxCallback, Callback):
    """:class:`ExportOnnxCallback` as a callback of ``pytorch_lightning``."""
