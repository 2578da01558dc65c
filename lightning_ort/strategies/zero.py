"""``Trainer(strategy="ort_zero1_native")`` for ``lightning.pytorch``: ZeRO stage 1 without DeepSpeed."""

import dataclasses
from typing import TYPE_CHECKING

from typing_extensions import override

from lightning_ort.optim.sharded import shard
from lightning_ort.strategies.ddp import ORTDDPStrategy

if TYPE_CHECKING:
    import lightning.pytorch as pl


class ORTNativeZeRO1Strategy(ORTDDPStrategy):
    """Data parallel training on ONNX Runtime in which each process keeps its share of the optimizer states.

    Torch's ZeroRedundancyOptimizer updates a share of the parameters on each rank and broadcasts them. Checkpoints are
    those of ``ort_ddp`` and of a stock Trainer: whole, in one file, for any number of processes.

    Args:
        config: Settings of the ONNX Runtime compiler; a mapping with the same keys will do.
        optim: As for ``ort_ddp``, but of torch's own implementations.
        **kwargs: Of Lightning's ``DDPStrategy``.

    Raises:
        ValueError: When the fit starts, if an optimizer is not one of torch's own.

    """

    strategy_name = "ort_zero1_native"

    @override
    def setup_optimizers(self, trainer: "pl.Trainer") -> None:
        super().setup_optimizers(trainer)
        for optimizer in self.optimizers:
            shard(optimizer)
        self.optimizers = self.optimizers  # Lightning's wrappers imitate the class of what they wrap
        note = f"states split over {self.world_size} processes"
        self.report.optimizers = [dataclasses.replace(entry, reason=note) for entry in self.report.optimizers]
