"""An exported model in a Trainer: :class:`ORTPredictor`."""

from lightning.pytorch import LightningModule

from lightning_ort.onnx_export.predict import PredictorMixin


class ORTPredictor(PredictorMixin, LightningModule):
    """:class:`PredictorMixin` as a LightningModule of ``lightning.pytorch``."""
