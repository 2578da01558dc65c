"""``Trainer(strategy="ort")`` for ``lightning.pytorch``: one CPU or one GPU."""

from typing import ClassVar

from lightning.fabric.plugins import CheckpointIO
from lightning.fabric.utilities.types import _DEVICE
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import SingleDeviceStrategy

from lightning_ort._imports import LIGHTNING, LightningNamespace
from lightning_ort.callbacks.optimizer import ORTOptimizer
from lightning_ort.config import ORTConfig
from lightning_ort.optim.registry import OptimName
from lightning_ort.precision.choose import ChoosePrecisionMixin
from lightning_ort.strategies.auto_device import AutoDeviceMixin
from lightning_ort.strategies.capture.steps import CompiledStepsMixin
from lightning_ort.strategies.checkpoints import AtomicCheckpointsMixin
from lightning_ort.strategies.host_memory import HostMemory, HostMemoryMixin
from lightning_ort.strategies.optimizers import SwapOptimizersMixin

_DEFAULT = ORTConfig()


class ORTStrategy(
    ChoosePrecisionMixin,
    AutoDeviceMixin,
    HostMemoryMixin,
    AtomicCheckpointsMixin,
    SwapOptimizersMixin,
    CompiledStepsMixin,
    SingleDeviceStrategy,
):
    """Trains, validates, tests and predicts on ONNX Runtime, on a single device.

    Args:
        config: Settings of the ONNX Runtime compiler; a mapping with the same keys will do.
        optim: What runs the optimizers that the module configures: a name, or an
            :class:`~lightning_ort.ORTOptimizer` for its further settings. ``"auto"`` fuses torch's Adam, AdamW, SGD
            and Adagrad where torch can, and leaves all else as it is.
        host_memory: ``"retain"`` keeps freed memory in the process for the next step while a run on the CPU lasts
            (glibc only), ``"default"`` gives it back each time.
        device: The device; ``None`` for the one that the Trainer's ``accelerator`` and ``devices`` say.
        accelerator: As for any strategy.
        checkpoint_io: As for any strategy.
        precision_plugin: As for any strategy.

    Example::

        trainer = Trainer(strategy=ORTStrategy(config=ORTConfig(placement="always")))
        trainer.fit(model)
        print(trainer.strategy.report.to_text())

    """

    strategy_name = "ort"
    namespace: ClassVar[LightningNamespace] = LIGHTNING

    def __init__(
        self,
        config: ORTConfig = _DEFAULT,
        optim: OptimName | ORTOptimizer = "auto",
        host_memory: HostMemory = "retain",
        device: _DEVICE | None = None,
        accelerator: Accelerator | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
    ) -> None:
        super().__init__(
            device=device,
            config=config,
            optim=optim,
            host_memory=host_memory,
            accelerator=accelerator,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
        )
