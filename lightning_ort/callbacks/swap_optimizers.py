"""The optimizers of a fit by another implementation: :class:`SwapOptimizersCallback`, for both flavors of Lightning."""

from typing import TYPE_CHECKING, Any

from typing_extensions import override

from lightning_ort.optim.hooks import OptimizerSwap
from lightning_ort.strategies.swap_optimizers import swap_optimizers

if TYPE_CHECKING:
    import lightning.pytorch as pl
    from lightning.pytorch import Callback as _Callback
else:
    _Callback = object


class SwapOptimizersCallback(_Callback):
    """Swaps when a fit starts: the optimizers are there, and the states of a checkpoint are not loaded yet.

    Args:
        **settings: Of :class:`~lightning_ort.optim.hooks.OptimizerSwap`.

    """

    def __init__(self, **settings: Any) -> None:
        self.swap = OptimizerSwap(**settings)

    @override
    def on_fit_start(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        swap_optimizers(self.swap, trainer)
