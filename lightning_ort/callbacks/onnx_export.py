"""The trained module as an ONNX model: :class:`OnnxExport`."""

from lightning.pytorch import Callback

from lightning_ort.callbacks.export_onnx import ExportOnnxCallback


class OnnxExport(ExportOnnxCallback, Callback):
    """:class:`ExportOnnxCallback` as a callback of ``lightning.pytorch``."""
