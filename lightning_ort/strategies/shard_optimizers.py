"""Optimizer states split over the processes, for any data parallel strategy: :class:`ShardOptimizersMixin`."""

import dataclasses
from typing import TYPE_CHECKING

from typing_extensions import override

from lightning_ort.strategies.parallel import ORTParallelMixin

if TYPE_CHECKING:
    import lightning.pytorch as pl


class ShardOptimizersMixin(ORTParallelMixin):
    """Splits the states of the optimizers, which must be torch's own, when they are set up."""

    @override
    def setup_optimizers(self, trainer: "pl.Trainer") -> None:
        # torch's, whose import takes 0.2 s, which every strategy's start would pay
        from lightning_ort.optim.sharded import shard

        super().setup_optimizers(trainer)
        for optimizer in self.optimizers:
            shard(optimizer)
        self.optimizers = self.optimizers  # Lightning's wrappers copy the class of what they wrap
        note = f"states split over {self.world_size} processes"
        self.report.optimizers = [dataclasses.replace(entry, reason=note) for entry in self.report.optimizers]
