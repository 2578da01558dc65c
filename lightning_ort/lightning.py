"""All classes for ``lightning.pytorch``; :mod:`lightning_ort.pytorch_lightning` makes those for ``pytorch_lightning``.

A class here only joins one of our mixins, which does the work in both namespaces, with the class of Lightning's that it
extends. Each strategy takes the arguments ``config``, ``optim`` and ``host_memory``, see
:class:`~lightning_ort.strategies.mixin.ORTMixin`, and those of the strategy of Lightning that it extends.
"""

from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.plugins import precision
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, SingleDeviceStrategy

from lightning_ort.callbacks.export_onnx import ExportOnnxCallback
from lightning_ort.callbacks.training_settings import TrainingSettingsCallback
from lightning_ort.onnx_export.predict import PredictorMixin
from lightning_ort.precision.bfloat16 import BFloat16Mixin
from lightning_ort.precision.matmul import MatmulPrecisionMixin
from lightning_ort.precision.mixed import MixedPrecisionMixin
from lightning_ort.strategies.auto_device import AutoDeviceMixin
from lightning_ort.strategies.checkpoints import AtomicSaveMixin
from lightning_ort.strategies.deepspeed.mixin import DeepSpeedZeRO1Mixin
from lightning_ort.strategies.deepspeed.precision import DeepSpeedPrecisionMixin
from lightning_ort.strategies.mixin import ORTMixin
from lightning_ort.strategies.optimizers import SwapOptimizersCallback
from lightning_ort.strategies.parallel import ORTDDPMixin, ORTParallelMixin, ShardOptimizersMixin


class ORTStrategy(ORTMixin, AutoDeviceMixin, SingleDeviceStrategy):
    """Trains, validates, tests and predicts on ONNX Runtime, on a single CPU or GPU: ``Trainer(strategy="ort")``.

    Example::

        trainer = Trainer(strategy=ORTStrategy(config=ORTConfig(placement="always")))
        trainer.fit(model)
        print(trainer.strategy.report.to_text())
    """


class ORTDDPStrategy(ORTDDPMixin, DDPStrategy):
    """Trains on ONNX Runtime in several processes that average their gradients: ``Trainer(strategy="ort_ddp")``.

    Example::

        trainer = Trainer(strategy=ORTDDPStrategy(find_unused_parameters=True), accelerator="cpu", devices=2)
    """


class ORTNativeZeRO1Strategy(ShardOptimizersMixin, ORTDDPStrategy):
    """``ort_ddp`` with ZeRO stage 1: each process keeps a share of the optimizer states. ``"ort_zero1_native"``.

    Torch's ZeroRedundancyOptimizer updates a share of the parameters on each rank and broadcasts them. Checkpoints are
    those of ``ort_ddp`` and of a stock Trainer: whole, in one file, for any number of processes. ``optim`` must be one
    of torch's own implementations.
    """


class ORTZeRO1Strategy(ORTParallelMixin, DeepSpeedZeRO1Mixin, DeepSpeedStrategy):
    """Data parallel training on ONNX Runtime with DeepSpeed's ZeRO stage 1, on CPUs and GPUs: ``"ort_zero1"``.

    Each process keeps the optimizer states of its share of the parameters. Checkpoints are those of ``ort`` and of a
    stock Trainer: whole, in one file, for any number of processes. Further arguments and the errors:
    :class:`~lightning_ort.strategies.deepspeed.mixin.DeepSpeedZeRO1Mixin`.

    Example::

        trainer = Trainer(strategy="ort_zero1", accelerator="cpu", devices=2)
    """


class AtomicCheckpointIO(AtomicSaveMixin, TorchCheckpointIO):
    """``TorchCheckpointIO`` that puts a local file in its place when all of it is on the disk."""


class ORTMixedPrecision(MixedPrecisionMixin, precision.MixedPrecision):
    """Mixed precision for every optimizer, with overflows counted; see :class:`MixedPrecisionMixin`."""

    __qualname__ = "MixedPrecision"  # Lightning stores the scaler's state in a checkpoint under this name


MixedPrecision = ORTMixedPrecision  # pickle looks the class up by its qualified name


class ORTDeepSpeedPrecision(DeepSpeedPrecisionMixin, precision.DeepSpeedPrecision):
    """What ``ORTZeRO1Strategy`` uses in place of ``DeepSpeedPrecision``; see :class:`DeepSpeedPrecisionMixin`."""


class ORTMatmulPrecision(MatmulPrecisionMixin, precision.Precision):
    """Faster float32 matrix products with less precision; see :class:`MatmulPrecisionMixin`."""


class ORTBFloat16Precision(BFloat16Mixin, precision.HalfPrecision):
    """bfloat16 weights that learn from small updates too; see :class:`BFloat16Mixin`."""


class ORTOptimizer(SwapOptimizersCallback, Callback):
    """Another implementation of the optimizers, under any strategy; see :class:`SwapOptimizersCallback`."""


class ORTTrainingSettings(TrainingSettingsCallback, Callback):
    """Batches, layout, threads and recomputing of a fit, under any strategy; see :class:`TrainingSettingsCallback`."""


class OnnxExport(ExportOnnxCallback, Callback):
    """The trained module as an ONNX model; see :class:`ExportOnnxCallback`."""


class ORTPredictor(PredictorMixin, LightningModule):
    """An exported model as a LightningModule that predicts; see :class:`PredictorMixin`."""
