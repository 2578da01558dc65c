"""Run the optimizers of a fit with another implementation, under any strategy: :class:`SwapOptimizersCallback`."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from lightning_utilities.core.rank_zero import rank_zero_info
from typing_extensions import override

from lightning_ort._arguments import names_its_arguments
from lightning_ort._imports import LightningNamespace
from lightning_ort.compat import lightning_bases
from lightning_ort.compat.lightning import WRAP_CLOSURE
from lightning_ort.compiler.report import CompileReport
from lightning_ort.optim import registry
from lightning_ort.optim.registry import OptimName
from lightning_ort.optim.swap import OptimizerSwap
from lightning_ort.precision.bfloat16 import BFloat16Mixin
from lightning_ort.strategies.lean.known import FITS, unknown_parts

if TYPE_CHECKING:
    import lightning.pytorch as pl
    from lightning.pytorch.strategies import Strategy


@names_its_arguments
class SwapOptimizersCallback(lightning_bases.Callback):
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
        # ours have used this callback when they set the optimizers up
        if not isinstance(getattr(trainer.strategy, "report", None), CompileReport):
            swap_optimizers(self.swap, trainer)


def choose_swap(
    swap: OptimizerSwap, callbacks: Iterable[Any], precision_plugin: Any, otherwise: str | None = None
) -> OptimizerSwap:
    """Return the one swap that a strategy, callbacks and precision plugin ask for; ``ValueError`` if they contradict.

    ``otherwise`` is the name for when none of them asks for one.
    """
    chosen = [callback.swap for callback in callbacks if isinstance(callback, SwapOptimizersCallback)]
    if len(chosen) > 1:
        raise ValueError(f"The Trainer has {len(chosen)} ORTOptimizer callbacks. Pass only one.")
    if chosen and swap.name not in ("auto", chosen[0].name):
        raise ValueError(
            f"The strategy has optim={swap.name!r} and the callback ORTOptimizer has {chosen[0].name!r}. Choose only"
            " one of them."
        )
    swap = chosen[0] if chosen else swap
    wanted = precision_plugin.optim if isinstance(precision_plugin, BFloat16Mixin) else None
    if wanted is not None and swap.name == "auto":
        return OptimizerSwap(wanted)
    if otherwise is not None and wanted is None and not chosen and swap.name == "auto":
        return OptimizerSwap(otherwise)
    if wanted not in (None, swap.name):
        raise ValueError(
            f"ORTBFloat16Precision(master_weights=True) runs the optimizer as {wanted!r}, but optim={swap.name!r} was"
            " chosen. Leave one of them out, or pass master_weights=False."
        )
    return swap


def steps_with_closure(strategy: "Strategy", namespace: LightningNamespace) -> bool:
    """Return whether a step is Lightning's: the closure, the hooks and clipping, then the optimizer's update.

    Other precision plugins, such as one with a scaler, and wrappers of several processes do more.
    """
    precision = namespace.submodule("plugins.precision.precision").Precision
    base = namespace.submodule("strategies.strategy").Strategy
    own: Any = next(kind for kind in type(strategy).__mro__ if kind.__module__.startswith(namespace.package))
    kind: Any = type(strategy.precision_plugin)
    is_plain = kind.optimizer_step is precision.optimizer_step
    is_plain = is_plain and getattr(kind, WRAP_CLOSURE) is getattr(precision, WRAP_CLOSURE)
    # somebody may have put something in the place of Lightning's own
    return is_plain and own.optimizer_step is base.optimizer_step and not {"", FITS} & unknown_parts(namespace).keys()


def swap_optimizers(swap: OptimizerSwap, trainer: "pl.Trainer") -> None:
    """Swap the optimizers of a Trainer in place; log it, and record it if the strategy has a report."""
    strategy = trainer.strategy
    module = strategy.lightning_module
    assert module is not None
    reports = swap.apply(module, strategy.optimizers, strategy.root_device)
    strategy.optimizers = strategy.optimizers  # Lightning's wrappers imitate the class of what they wrap
    report = getattr(strategy, "report", None)
    if isinstance(report, CompileReport):
        report.optimizers = reports
    for entry in dict.fromkeys(reports):
        if entry.runs_as != entry.configured:
            rank_zero_info("lightning-ort: %s", entry)
