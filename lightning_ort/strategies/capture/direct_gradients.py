"""What a step as one graph may do to ``.grad`` itself: :func:`may_write_gradients`, :func:`may_drop_gradients`."""

from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer

from lightning_ort._imports import LightningNamespace

if TYPE_CHECKING:
    from lightning.pytorch.strategies import Strategy


def may_write_gradients(strategy: "Strategy", namespace: LightningNamespace) -> bool:
    """Return whether nobody takes part in the backward pass of a run but Lightning.

    A wrapper such as DDP listens to autograd's engine, and code of the user that runs before ``loss.backward()``, or
    instead of it, may ask for gradients without wanting them in ``.grad``.
    """
    module = strategy.lightning_module
    if module is None or strategy.model is not module or not module.automatic_optimization:
        return False
    base = namespace.submodule("core.module").LightningModule
    precision = namespace.submodule("plugins.precision.precision").Precision
    return (
        _keeps(module, base, "backward")
        and _keeps_hook(strategy, namespace, "on_before_backward")
        and _keeps(strategy.precision_plugin, precision, "backward")
    )


def may_drop_gradients(strategy: "Strategy", namespace: LightningNamespace) -> bool:
    """Return whether nobody sees the last gradients between a training step and ``zero_grad()``, which follows it.

    Then they may go before the new ones are computed, and never take memory beside these.
    """
    if not may_write_gradients(strategy, namespace) or len(strategy.optimizers) != 1:
        return False
    base = namespace.submodule("core.module").LightningModule
    return (
        _keeps(strategy.lightning_module, base, "optimizer_zero_grad")
        and _keeps_hook(strategy, namespace, "on_before_zero_grad")
        and _keeps(strategy.optimizers[0], Optimizer, "zero_grad")
    )


def _keeps_hook(strategy: "Strategy", namespace: LightningNamespace, hook: str) -> bool:
    """Whether neither the module nor a callback has a hook of its own."""
    module: Any = strategy.lightning_module
    base = namespace.submodule("core.module").LightningModule
    callback = namespace.submodule("callbacks.callback").Callback
    return _keeps(module, base, hook) and all(_keeps(one, callback, hook) for one in module.trainer.callbacks)


def _keeps(instance: Any, base: type, method: str) -> bool:
    """Whether a method is that of a base class."""
    return getattr(getattr(instance, method), "__func__", None) is getattr(base, method)
