"""Another implementation of the configured optimizers, under any strategy: :class:`ORTOptimizer`."""

from pytorch_lightning import Callback

from lightning_ort.callbacks.swap_optimizers import SwapOptimizersCallback


class ORTOptimizer(SwapOptimizersCallback, Callback):
    """:class:`SwapOptimizersCallback` as a callback of ``pytorch_lightning``."""
