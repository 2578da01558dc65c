"""The classes of Lightning's that ours extend in both namespaces, for type checkers.

While a program runs each is ``object``: a mixin is joined with the class of its namespace where it is used.
"""

# ruff: noqa: F401

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning.fabric.plugins import TorchCheckpointIO
    from lightning.pytorch import Callback, LightningModule
    from lightning.pytorch.loops.evaluation_loop import _EvaluationLoop as EvaluationLoop
    from lightning.pytorch.loops.optimization.automatic import Closure
    from lightning.pytorch.loops.optimization.automatic import _AutomaticOptimization as AutomaticOptimization
    from lightning.pytorch.loops.optimization.manual import _ManualOptimization as ManualOptimization
    from lightning.pytorch.loops.prediction_loop import _PredictionLoop as PredictionLoop
    from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop as TrainingEpochLoop
    from lightning.pytorch.plugins.precision import DeepSpeedPrecision, HalfPrecision, MixedPrecision, Precision
    from lightning.pytorch.strategies import DeepSpeedStrategy, ParallelStrategy, SingleDeviceStrategy, Strategy
    from lightning.pytorch.trainer.connectors.logger_connector.logger_connector import (
        _LoggerConnector as LoggerConnector,
    )
else:

    def __getattr__(name: str) -> type:
        if name.startswith("_"):
            raise AttributeError(name)
        return object
