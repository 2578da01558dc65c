"""What DeepSpeed does with dtypes and gradients, as modules and hooks expect it: :class:`DeepSpeedPrecisionMixin`."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_ort._imports import is_inherited
from lightning_ort.compat import deepspeed
from lightning_ort.compat.lightning import WRAPPED
from lightning_ort.compat.lightning_deepspeed import DeepSpeedPrecisionNames

if TYPE_CHECKING:
    import lightning.pytorch as pl


class DeepSpeedPrecisionMixin(DeepSpeedPrecisionNames):
    """Shows averaged gradients to hooks, clips as they ask, and converts nothing under ``"32-true"``.

    DeepSpeed averages and clips when it steps, after all hooks. Where one of them is overridden, or the module
    optimizes manually, gradients are averaged before it too; DeepSpeed's mean of equal gradients is the same.
    """

    _configured: float | None = None  # the norm to clip to after the next step, if it is another one for that step

    @override
    def convert_module(self, module: nn.Module) -> nn.Module:
        return module if self.precision == "32-true" else super().convert_module(module)

    @override
    def convert_input(self, data: Any) -> Any:
        return data if self.precision == "32-true" else super().convert_input(data)

    @override
    @contextmanager
    def around_hooks(self, module: "pl.LightningModule", *names: str) -> Iterator[None]:
        hooks = (getattr(one, name, None) for one in (module, *module.trainer.callbacks) for name in names)  # type: ignore[attr-defined]
        if module.automatic_optimization and all(hook is None or is_inherited(hook) for hook in hooks):
            yield
            return
        (zero,) = module.trainer.strategy.optimizers
        groups = [[parameter for parameter, _ in group] for group in deepspeed.flattened_groups(zero)]
        for group in groups:
            _average(zero, group)
        hidden = [one for group in groups for one in group if deepspeed.gradient(zero, one) is not one.grad]
        for parameter in hidden:  # in 16 bits: a rounded copy
            parameter.grad = deepspeed.gradient(zero, parameter).to(parameter.dtype)  # type: ignore[union-attr]
        yield
        for parameter in hidden:
            shown, parameter.grad = parameter.grad, None
            gradient: Any = deepspeed.gradient(zero, parameter)
            if shown is None or not torch.equal(shown, gradient.to(shown.dtype)):
                deepspeed.set_gradient(zero, parameter, shown)

    @override
    def clip_gradients(
        self, optimizer: Optimizer, clip_val: float = 0.0, gradient_clip_algorithm: Any = "norm"
    ) -> None:
        if clip_val <= 0:
            return
        zero = getattr(optimizer, WRAPPED, optimizer)
        if gradient_clip_algorithm == "norm":
            if self._configured is None:
                self._configured = deepspeed.max_norm(zero)
            deepspeed.set_max_norm(zero, min(clip_val, deepspeed.max_norm(zero) or clip_val))
            return
        for group in deepspeed.flattened_groups(zero):
            for parameter, _ in group:
                gradient = deepspeed.gradient(zero, parameter) if parameter.grad is None else parameter.grad
                if gradient is not None:
                    gradient.clamp_(-clip_val, clip_val)

    @override
    def optimizer_step(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().optimizer_step(optimizer, *args, **kwargs)
        finally:
            if self._configured is not None:
                deepspeed.set_max_norm(optimizer, self._configured)
                self._configured = None


def _average(zero: Any, parameters: Sequence[Tensor]) -> None:
    """Average the gradients of a group over the processes; a missing one is zero, as in DeepSpeed's step."""
    if (world := dist.get_world_size()) == 1:
        return
    found = [(one, deepspeed.gradient(zero, one)) for one in parameters]
    gradients = [deepspeed.set_gradient(zero, one, None) if own is None else own for one, own in found]
    flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
    dist.all_reduce(flat.div_(world))
    for gradient, part in zip(gradients, flat.split([one.numel() for one in gradients]), strict=True):
        gradient.copy_(part.view_as(gradient))
