"""Another implementation of the configured optimizers, under any strategy: :class:`ORTOptimizer`."""

from lightning.pytorch import Callback

from lightning_ort.callbacks.swap_optimizers import SwapOptimizersCallback


class ORTOptimizer(SwapOptimizersCallback, Callback):
    """:class:`SwapOptimizersCallback` as a callback of ``lightning.pytorch``."""
