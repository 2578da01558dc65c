"""Lightning strategies, for ``lightning.pytorch`` (for ``pytorch_lightning``: ``lightning_ort.pytorch_lightning``).

- :mod:`~lightning_ort.strategies.compile_steps`: the mixin that captures the steps of a LightningModule
- :mod:`~lightning_ort.strategies.step_patches`: what stands in for the module's helpers while a step is captured
- :mod:`~lightning_ort.strategies.dynamo_watch`: what dynamo did during a step
- :mod:`~lightning_ort.strategies.swap_optimizers`: the optimizers by another implementation
- :mod:`~lightning_ort.strategies.one_device`: lets the Trainer choose the device
- :mod:`~lightning_ort.strategies.single_device`: ``ort``, one CPU or GPU
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_ort.strategies.single_device import ORTStrategy

__all__ = ["ORTStrategy"]


def __getattr__(name: str) -> Any:
    # not imported at the top: the other flavor uses the mixins of this package, perhaps without `lightning` installed
    if name == "ORTStrategy":
        from lightning_ort.strategies.single_device import ORTStrategy

        return ORTStrategy
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
