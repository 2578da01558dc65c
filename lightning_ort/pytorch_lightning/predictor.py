"""An exported model in a Trainer: :class:`ORTPredictor`."""

from pytorch_lightning import LightningModule

from lightning_ort.onnx_export.predict import PredictorMixin


class ORTPredictor(PredictorMixin, LightningModule):
    """:class:`PredictorMixin` as a LightningModule of ``pytorch_lightning``."""
