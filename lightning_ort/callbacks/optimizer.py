"""Another implementation of the configured optimizers, under any strategy: :class:`ORTOptimizer`."""

from typing import Any

from lightning.pytorch import Callback

from lightning_ort.callbacks.swap_optimizers import SwapOptimizersCallback
from lightning_ort.optim.registry import OptimName


class ORTOptimizer(SwapOptimizersCallback, Callback):
    """Runs the optimizers that ``configure_optimizers`` returned by another implementation.

    As a callback it works under every strategy; an ort strategy takes it as ``optim=`` too.

    Args:
        name: The implementation.
        min_8bit_size: Tensors with fewer elements keep 32-bit states (bitsandbytes).
        bits: Module name -> 8 or 32: bits of the states of its parameters (bitsandbytes). Embeddings have 32 unless
            they are named here.
        options: Further arguments for the implementation's constructor.

    Raises:
        ValueError: If the name is unknown, or a setting has no effect on it.

    Example::

        Trainer(callbacks=ORTOptimizer("adamw_bnb_8bit", bits={"lm_head": 32}))

    """

    def __init__(
        self,
        name: OptimName = "auto",
        min_8bit_size: int = 4096,
        bits: dict[str, int] | None = None,
        options: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(name=name, min_8bit_size=min_8bit_size, bits=bits, options=options)
