"""What a compiled step may do to ``.grad``, as nobody sees it: :func:`may_write_gradients` and those after it."""

import operator
import os
import sys
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from lightning_ort._imports import LightningNamespace
from lightning_ort.compat.lightning import MODEL, callbacks_of, optimizers_of, precision_of
from lightning_ort.compat.torch_optimizers import step_hooks
from lightning_ort.optim.fused_update import CHECK

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
        and _is_of_package(torch.Tensor.backward, torch.Tensor)
        and _is_of_package(torch.autograd.backward, torch.Tensor)
    )


def may_drop_gradients(strategy: "Strategy", namespace: LightningNamespace) -> bool:
    """Return whether nobody sees the last gradients between a training step and ``zero_grad()``, which follows it.

    Then they may go before the new ones are computed, and never take memory beside these.
    """
    base = namespace.submodule("core.module").LightningModule
    return (
        may_write_gradients(strategy, namespace)  # what is asked of a fit, which then has one optimizer
        and _keeps(strategy.lightning_module, base, "optimizer_zero_grad")
        and _keeps_hook(strategy, namespace, "on_before_zero_grad")
        and _keeps(strategy.optimizers[0], Optimizer, "zero_grad")
    )


# what runs between a backward pass and the next one, and may look at gradients or keep them
_LATER_HOOKS = ("on_after_backward", "on_before_optimizer_step", "on_train_batch_end")


def are_gradients_unseen(strategy: "Strategy", namespace: LightningNamespace) -> bool:
    """Return whether nobody sees gradients but the optimizer, from the backward pass on until they are dropped."""
    module: Any = strategy.lightning_module
    base = namespace.submodule("core.module").LightningModule
    return (
        may_drop_gradients(strategy, namespace)
        and all(_keeps(module, base, name) for name in (*_LATER_HOOKS, "configure_gradient_clipping", "optimizer_step"))
        and all(_is_lightnings(one, name, namespace) for one in module.trainer.callbacks for name in _LATER_HOOKS)
        and all(hasattr(hook, CHECK) for hook in step_hooks(strategy.optimizers[0]))
    )


def runs_nothing_of_others(strategy: "Strategy", namespace: LightningNamespace) -> bool:
    """Return whether nothing of others runs between a training step and the clipping of gradients before its update."""
    return may_drop_gradients(strategy, namespace) and all(
        _keeps_hook(strategy, namespace, hook) for hook in _LATER_HOOKS[:2]
    )


def hooks_on_gradients(strategy: "Strategy", module: Any) -> list[Any]:
    """Return the methods on which the answers above depend: people replace them while they train."""
    found = [_OF_MODULE(module), _BACKWARD(precision_of(strategy)), _OF_TORCH(torch), _MODEL(strategy)]
    return [*found, *map(_ZERO_GRAD, optimizers_of(strategy)), *map(_HOOKS, callbacks_of(module))]


_NAMES = ("on_before_backward", "on_before_zero_grad", *_LATER_HOOKS)
_HOOKS, _ZERO_GRAD, _BACKWARD = (operator.attrgetter(*names) for names in (_NAMES, ("zero_grad",), ("backward",)))
_MODEL = operator.attrgetter(MODEL)
_OF_TORCH = operator.attrgetter("Tensor.backward", "autograd.backward")
_OF_MODULE = operator.attrgetter("backward", "optimizer_zero_grad", *_NAMES)


def _is_lightnings(callback: Any, hook: str, namespace: LightningNamespace) -> bool:
    return getattr(callback, hook).__module__.startswith(f"{namespace.package}.")


def _keeps_hook(strategy: "Strategy", namespace: LightningNamespace, hook: str) -> bool:
    """Whether neither the module nor a callback has a hook of its own."""
    module: Any = strategy.lightning_module
    base = namespace.submodule("core.module").LightningModule
    callback = namespace.submodule("callbacks.callback").Callback
    return _keeps(module, base, hook) and all(_keeps(one, callback, hook) for one in module.trainer.callbacks)


def _keeps(instance: Any, base: type, method: str) -> bool:
    """Whether a method is that of a base class, in whose place nobody has put another: people patch those too."""
    function = getattr(getattr(instance, method), "__func__", None)
    return function is getattr(base, method) and _is_of_package(function, base)


def _is_of_package(function: Any, kind: type) -> bool:
    """Whether a function is one of the package that has a class."""
    package: Any = sys.modules[kind.__module__.partition(".")[0]]
    code = getattr(function, "__code__", None)
    return code is not None and code.co_filename.startswith(os.path.join(os.path.dirname(package.__file__), ""))
