"""``Trainer(strategy="ort_zero1_native")`` for ``pytorch_lightning``: ZeRO stage 1 without DeepSpeed."""

from lightning_ort.pytorch_lightning.strategies.ddp import ORTDDPStrategy
from lightning_ort.strategies.shard_optimizers import ShardOptimizersMixin


class ORTNativeZeRO1Strategy(ShardOptimizersMixin, ORTDDPStrategy):
    """Data parallel training on ONNX Runtime in which each process keeps its share of the optimizer states.

    Torch's ZeroRedundancyOptimizer updates a share of the parameters on each rank and broadcasts them. Checkpoints are
    those of ``ort_ddp`` and of a stock Trainer: whole, in one file, for any number of processes.

    Args:
        config: Settings of the ONNX Runtime compiler; a mapping with the same keys will do.
        optim: As for ``ort_ddp``, but of torch's own implementations.
        host_memory: As for ``ort``.
        **kwargs: Of Lightning's ``DDPStrategy``.

    Raises:
        ValueError: When the fit starts, if an optimizer is not one of torch's own.

    """

    strategy_name = "ort_zero1_native"
