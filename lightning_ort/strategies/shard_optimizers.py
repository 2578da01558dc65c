"""Optimizer states split over the processes, for any data parallel strategy: :class:`ShardOptimizersMixin`."""

import dataclasses
from typing import TYPE_CHECKING

from typing_extensions import override

from lightning_ort.optim.sharded import shard

if TYPE_CHECKING:
    import lightning.pytorch as pl
    from lightning.pytorch.strategies import ParallelStrategy as _ParallelStrategy

    from lightning_ort.compiler.report import CompileReport
else:
    _ParallelStrategy = object


class ShardOptimizersMixin(_ParallelStrategy):
    """Splits the states of the optimizers, which must be torch's own, when they are set up."""

    if TYPE_CHECKING:
        report: CompileReport

    @override
    def setup_optimizers(self, trainer: "pl.Trainer") -> None:
        super().setup_optimizers(trainer)
        for optimizer in self.optimizers:
            shard(optimizer)
        self.optimizers = self.optimizers  # Lightning's wrappers copy the class of what they wrap
        note = f"states split over {self.world_size} processes"
        self.report.optimizers = [dataclasses.replace(entry, reason=note) for entry in self.report.optimizers]
