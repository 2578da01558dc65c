"""``Trainer(strategy="ort_zero1")`` for ``pytorch_lightning``: ZeRO stage 1 by DeepSpeed."""

from pathlib import Path
from typing import Any, ClassVar, Literal

from pytorch_lightning.strategies import DeepSpeedStrategy

from lightning_ort._imports import PYTORCH_LIGHTNING, LightningNamespace
from lightning_ort.config import ORTConfig
from lightning_ort.optim.registry import OptimName
from lightning_ort.pytorch_lightning.callbacks.optimizer import ORTOptimizer
from lightning_ort.strategies.deepspeed.mixin import CheckpointForm, DeepSpeedZeRO1Mixin
from lightning_ort.strategies.host_memory import HostMemory
from lightning_ort.strategies.parallel import DataParallelMixin

_DEFAULT = ORTConfig()


class ORTZeRO1Strategy(DataParallelMixin, DeepSpeedZeRO1Mixin, DeepSpeedStrategy):
    """Data parallel training on ONNX Runtime and DeepSpeed's ZeRO stage 1, on CPUs and GPUs.

    Each process keeps the optimizer states of its share of the parameters. Checkpoints are those of ``ort`` and of a
    stock Trainer: whole, in one file, for any number of processes.

    Args:
        config: Settings of the ONNX Runtime compiler; a mapping with the same keys will do.
        optim: What runs the optimizers that the module configures: a name, or an
            :class:`~lightning_ort.ORTOptimizer` for its further settings.
        host_memory: As for ``ort``.
        deepspeed_config: DeepSpeed's configuration, or the path of a JSON file with it. What the Trainer says too must
            be the same there, or ``"auto"``.
        offload_optimizer: Keep the optimizer's states, and its step, on the CPU.
        checkpoint: ``"file"``: plain, as a stock Trainer's; ``"directory"``: DeepSpeed's, each process its part.
        start_method: How processes are started.
        stage: Of ZeRO.
        overlap_comm: As for Lightning's ``DeepSpeedStrategy``, where it is on.
        contiguous_gradients: As there; ``None`` is on for GPUs and off for CPUs, where that is several times faster.
        reduce_bucket_size: As there, in elements; ``None`` is 200 million on GPUs and 5 million on CPUs.
        **kwargs: Of Lightning's ``DeepSpeedStrategy``, such as ``process_group_backend`` and ``timeout``.

    Raises:
        ValueError: If an argument asks for another stage than 1; when the fit starts, if the module configures an
            optimizer that looks at whole parameters.
        MisconfigurationException: If DeepSpeed is not installed; when the fit starts, if the DeepSpeed configuration
            contradicts the Trainer, or the module configures several optimizers.

    Example::

        trainer = Trainer(strategy="ort_zero1", accelerator="cpu", devices=2)

    """

    strategy_name = "ort_zero1"
    namespace: ClassVar[LightningNamespace] = PYTORCH_LIGHTNING
    stock: ClassVar[type] = DeepSpeedStrategy

    def __init__(
        self,
        config: ORTConfig = _DEFAULT,
        optim: OptimName | ORTOptimizer = "auto",
        host_memory: HostMemory = "retain",
        deepspeed_config: str | Path | dict[str, Any] | None = None,
        offload_optimizer: bool = False,
        checkpoint: CheckpointForm = "file",
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
        stage: Literal[1] = 1,
        overlap_comm: bool = False,
        contiguous_gradients: bool | None = None,
        reduce_bucket_size: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            config=config,
            optim=optim,
            host_memory=host_memory,
            deepspeed_config=deepspeed_config,
            offload_optimizer=offload_optimizer,
            checkpoint=checkpoint,
            start_method=start_method,
            stage=stage,
            overlap_comm=overlap_comm,
            contiguous_gradients=contiguous_gradients,
            reduce_bucket_size=reduce_bucket_size,
            **kwargs,
        )
