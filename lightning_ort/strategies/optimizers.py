"""The optimizers of a run by another implementation, for any strategy: :class:`SwapOptimizersMixin`."""

from typing import TYPE_CHECKING, Any

from lightning_utilities.core.rank_zero import rank_zero_info
from typing_extensions import override

from lightning_ort.compiler.report import CompileReport
from lightning_ort.optim.swap import OptimizerSwap
from lightning_ort.precision.bfloat16 import BFloat16Mixin

if TYPE_CHECKING:
    import lightning.pytorch as pl
    from lightning.pytorch.strategies import Strategy as _Strategy
else:
    _Strategy = object


class SwapOptimizersMixin(_Strategy):
    """Runs the optimizers that the module configured by the implementation that ``optim`` names.

    Args:
        optim: One of :data:`~lightning_ort.optim.registry.OptimName`, or a callback
            :class:`~lightning_ort.callbacks.ORTOptimizer` for its further settings.
        **kwargs: For the strategy.

    Raises:
        ValueError: If the name is unknown.

    """

    if TYPE_CHECKING:
        report: CompileReport

    def __init__(self, optim: Any = "auto", **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._swap: OptimizerSwap = optim.swap if _is_ours(optim) else OptimizerSwap(optim)

    @override
    def setup_optimizers(self, trainer: "pl.Trainer") -> None:
        super().setup_optimizers(trainer)
        callbacks: list[Any] = [callback for callback in trainer.callbacks if _is_ours(callback)]  # type: ignore[attr-defined]
        if len(callbacks) > 1:
            raise ValueError(f"The Trainer has {len(callbacks)} callbacks ORTOptimizer. Choose one.")
        if callbacks and self._swap.name not in ("auto", callbacks[0].swap.name):
            raise ValueError(
                f"The strategy has optim={self._swap.name!r} and the callback ORTOptimizer has"
                f" {callbacks[0].swap.name!r}. Choose in one place."
            )
        # here also for the callback: what comes next may split the optimizers' states
        swap = callbacks[0].swap if callbacks else self._swap
        plugin = self.precision_plugin
        wanted = plugin.optim if isinstance(plugin, BFloat16Mixin) else None
        if wanted is not None and swap.name == "auto":
            swap = OptimizerSwap(wanted)
        elif wanted not in (None, swap.name):
            raise ValueError(
                f"ORTBFloat16Precision(master_weights=True) runs the optimizer as {wanted!r}, and optim={swap.name!r}"
                " was chosen. Leave one of them out, or pass master_weights=False."
            )
        swap_optimizers(swap, trainer)


def _is_ours(callback: Any) -> bool:
    from lightning_ort.callbacks.swap_optimizers import SwapOptimizersCallback  # which needs this module

    return isinstance(callback, SwapOptimizersCallback)


def swap_optimizers(swap: OptimizerSwap, trainer: "pl.Trainer") -> None:
    """Swap a Trainer's optimizers in place, and say so in the strategy's report, if it has one, and at INFO.

    Args:
        swap: What to put in place.
        trainer: Its strategy is set up.

    """
    strategy = trainer.strategy
    module = strategy.lightning_module
    assert module is not None
    reports = swap.apply(module, strategy.optimizers, strategy.root_device)
    strategy.optimizers = strategy.optimizers  # Lightning's wrappers imitate the class of what they wrap
    report = getattr(strategy, "report", None)
    if isinstance(report, CompileReport):
        report.optimizers = reports
    for entry in reports:
        if entry.runs_as != entry.configured:
            rank_zero_info("lightning-ort: %s", entry)
