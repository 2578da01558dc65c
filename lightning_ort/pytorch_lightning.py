"""All classes for ``pytorch_lightning``; :mod:`lightning_ort.lightning` documents those for ``lightning.pytorch``."""

from lightning_fabric.plugins import TorchCheckpointIO
from pytorch_lightning import Callback, LightningModule
from pytorch_lightning.plugins import precision
from pytorch_lightning.strategies import DDPStrategy, DeepSpeedStrategy, SingleDeviceStrategy

from lightning_ort.callbacks.export_onnx import ExportOnnxCallback
from lightning_ort.callbacks.training_settings import TrainingSettingsCallback
from lightning_ort.onnx_export.predict import PredictorMixin
from lightning_ort.precision.bfloat16 import BFloat16Mixin
from lightning_ort.precision.matmul import MatmulPrecisionMixin
from lightning_ort.precision.mixed import MixedPrecisionMixin
from lightning_ort.strategies.auto_device import AutoDeviceMixin
from lightning_ort.strategies.checkpoints import AtomicSaveMixin
from lightning_ort.strategies.deepspeed.mixin import DeepSpeedZeRO1Mixin
from lightning_ort.strategies.mixin import ORTMixin
from lightning_ort.strategies.optimizers import SwapOptimizersCallback
from lightning_ort.strategies.parallel import ORTDDPMixin, ORTParallelMixin, ShardOptimizersMixin


class ORTStrategy(ORTMixin, AutoDeviceMixin, SingleDeviceStrategy):
    """See :class:`lightning_ort.lightning.ORTStrategy`."""


class ORTDDPStrategy(ORTDDPMixin, DDPStrategy):
    """See :class:`lightning_ort.lightning.ORTDDPStrategy`."""


class ORTNativeZeRO1Strategy(ShardOptimizersMixin, ORTDDPStrategy):
    """See :class:`lightning_ort.lightning.ORTNativeZeRO1Strategy`."""


class ORTZeRO1Strategy(ORTParallelMixin, DeepSpeedZeRO1Mixin, DeepSpeedStrategy):
    """See :class:`lightning_ort.lightning.ORTZeRO1Strategy`."""


class AtomicCheckpointIO(AtomicSaveMixin, TorchCheckpointIO):
    """See :class:`lightning_ort.lightning.AtomicCheckpointIO`."""


class ORTMixedPrecision(MixedPrecisionMixin, precision.MixedPrecision):
    """See :class:`MixedPrecisionMixin`."""

    __qualname__ = "MixedPrecision"  # Lightning stores the scaler's state in a checkpoint under this name


MixedPrecision = ORTMixedPrecision  # pickle looks the class up by its qualified name


class ORTMatmulPrecision(MatmulPrecisionMixin, precision.Precision):
    """See :class:`MatmulPrecisionMixin`."""


class ORTBFloat16Precision(BFloat16Mixin, precision.HalfPrecision):
    """See :class:`BFloat16Mixin`."""


class ORTOptimizer(SwapOptimizersCallback, Callback):
    """See :class:`SwapOptimizersCallback`."""


class ORTTrainingSettings(TrainingSettingsCallback, Callback):
    """See :class:`TrainingSettingsCallback`."""


class OnnxExport(ExportOnnxCallback, Callback):
    """See :class:`ExportOnnxCallback`."""


class ORTPredictor(PredictorMixin, LightningModule):
    """See :class:`PredictorMixin`."""
