"""Run the optimizers of a fit with another implementation: :class:`SwapOptimizersCallback`."""

from typing import TYPE_CHECKING, Any

from typing_extensions import override

from lightning_ort._arguments import names_its_arguments
from lightning_ort.compat import lightning_bases
from lightning_ort.optim import registry
from lightning_ort.optim.registry import OptimName
from lightning_ort.optim.swap import OptimizerSwap
from lightning_ort.strategies.mixin import ORTMixin
from lightning_ort.strategies.optimizers import OptimizerSettings, swap_optimizers

if TYPE_CHECKING:
    import lightning.pytorch as pl


@names_its_arguments
class SwapOptimizersCallback(OptimizerSettings, lightning_bases.Callback):
    """Runs the optimizers that ``configure_optimizers`` returned with another implementation.

    As a callback it works under every strategy; the strategies of this package also take it as ``optim=``. It swaps
    when a fit starts: the optimizers exist then, and the states of a checkpoint are not loaded yet.

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
        registry.check_name(name, "name")
        self.swap = OptimizerSwap(name, min_8bit_size=min_8bit_size, bits=bits, options=options)

    @override
    def on_fit_start(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        if not isinstance(trainer.strategy, ORTMixin):  # ours have used this callback when they set the optimizers up
            swap_optimizers(self.swap, trainer)
