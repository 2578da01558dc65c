"""The fused and foreach loops of torch's own optimizers, switched on in the user's optimizer object."""

import functools
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import nn, optim
from torch.distributed.optim import ZeroRedundancyOptimizer

from lightning_ort.compat.torch import pop_amp_scaling_mark, shard_of
from lightning_ort.optim.param_groups import name_of, parameters_of, sparse_embedding
from lightning_ort.optim.registry import TORCH_FLAGS, runs
from lightning_ort.optim.replacement import load_other_forms

log = logging.getLogger(__name__)

FUSED_CLASSES: tuple[type[optim.Optimizer], ...] = (optim.Adam, optim.AdamW, optim.SGD, optim.Adagrad)


def auto_unsupported_reason(module: nn.Module, optimizer: optim.Optimizer) -> str | None:
    """Return why ``optim="auto"`` leaves an optimizer as it is, or ``None``."""
    if type(optimizer) not in FUSED_CLASSES:
        return "no fused implementation"
    groups = [optimizer.defaults, *optimizer.param_groups]
    chosen = [flag for flag in TORCH_FLAGS if any(group.get(flag) is not None for group in groups)]
    if chosen:
        return f"{' and '.join(chosen)} set by the module"
    return fused_unsupported_reason(module, optimizer)


def fused_unsupported_reason(module: nn.Module, optimizer: optim.Optimizer) -> str | None:
    """Return why one of :data:`FUSED_CLASSES` cannot run fused, or ``None``."""
    if any(group.get("differentiable") for group in optimizer.param_groups):
        return "there is no fused implementation for differentiable=True"
    if any(group.get("momentum") and group.get("dampening") for group in optimizer.param_groups):
        return "with dampening, a first gradient that comes late counts in full"
    for parameter in parameters_of(optimizer):
        if not parameter.is_floating_point():
            return f"{name_of(module, parameter)} is {parameter.dtype}: fused needs floating-point parameters"
        if not _has_fused_kernel(type(optimizer), parameter.device.type, parameter.dtype):  # type: ignore[arg-type]
            return f"torch has no fused {type(optimizer).__name__} for {parameter.dtype} on {parameter.device.type}"
        if not nn.parameter.is_lazy(parameter) and _has_gaps(parameter):
            return f"{name_of(module, parameter)} has gaps in its memory, which fused kernels write to"
    if sparse := sparse_embedding(module, optimizer):
        return f"{sparse} has sparse gradients (sparse=True), which fused optimizers do not support"
    return None


def _has_gaps(parameter: torch.Tensor) -> bool:
    # a tensor without gaps has its strides' twin
    return not parameter.is_contiguous() and torch.empty_like(parameter, device="meta").stride() != parameter.stride()


def prepare_state(state: dict[str, Any], parameter: torch.Tensor, fused: bool) -> None:
    """Lay the states of a parameter out as it is, and have its steps as fused kernels do.

    They go through the memory of both from its start, and take the number of steps on the same device.
    """
    for name, value in state.items():
        if isinstance(value, torch.Tensor) and value.shape == parameter.shape and value.stride() != parameter.stride():
            state[name] = torch.empty_like(parameter, dtype=value.dtype, device=value.device).copy_(value)
    if fused and isinstance(state.get("step"), torch.Tensor):
        state["step"] = state["step"].to(parameter.device, torch.float32)


@functools.cache
def _has_fused_kernel(cls: type[optim.Optimizer], device_type: str, dtype: torch.dtype) -> bool:
    # tried, because torch has no list of the kernels of every class
    if device_type == "meta":
        return False
    try:
        parameter = torch.zeros(1, device=device_type, dtype=dtype, requires_grad=True)
        parameter.grad = torch.ones_like(parameter)
        cls([parameter], lr=0.1, fused=True).step()  # type: ignore[call-arg]
    except (RuntimeError, TypeError, ValueError, NotImplementedError):
        return False
    return True


def set_flag(optimizer: optim.Optimizer, flag: str) -> None:
    """Make one of torch's optimizers run ``"fused"`` or ``"foreach"``, also after it loads a checkpoint.

    The checkpoints that it saves have the flags that the user configured.
    """
    configured = {name: optimizer.defaults.get(name) for name in TORCH_FLAGS}

    def set_flags(optimizer: optim.Optimizer) -> None:
        for group in (optimizer.defaults, *optimizer.param_groups):
            group.update({name: name == flag or None for name in TORCH_FLAGS})
        for parameter, state in optimizer.state.items():
            if state:  # a shard has none for what other ranks update
                prepare_state(state, parameter, flag == "fused")
        pop_amp_scaling_mark(optimizer)  # with it, Lightning refuses gradient clipping

    def save_as_configured(optimizer: optim.Optimizer, saved: dict[str, Any]) -> None:
        for group in saved["param_groups"]:  # copies of the optimizer's groups
            group.update(configured)

    set_flags(optimizer)
    load_other_forms(optimizer)
    after_loading = optimizer.register_load_state_dict_post_hook(set_flags)
    optimizer.register_state_dict_post_hook(save_as_configured)

    def unset_flags() -> None:
        after_loading.remove()
        for group in (optimizer.defaults, *optimizer.param_groups):
            group.update(configured)
        log.warning(
            "A gradient is sparse, which fused optimizers do not support: %s runs as configured.", runs(optimizer)
        )

    # Adam takes no sparse gradients at all, and has no momentum by this name; a sharded SGD is known by it alone
    if flag == "fused" and (isinstance(optimizer, optim.Adagrad) or "momentum" in optimizer.param_groups[0]):
        _check_gradients(optimizer, unset_flags)


def _check_gradients(optimizer: optim.Optimizer, unset_flags: Callable[[], None]) -> None:
    """Before each step, allow for gradients with which torch's fused implementations cannot deal.

    That is: sparse ones, as ``F.embedding(..., sparse=True)`` makes them in the first step, and late ones.
    """
    first = True

    def check() -> None:
        nonlocal first
        if first and any(p.grad is not None and p.grad.is_sparse for p in parameters_of(optimizer)):
            unset_flags()
        first = False
        _fill_momentum(optimizer)

    _call_with_gradients(optimizer, check)


def _fill_momentum(optimizer: optim.Optimizer) -> None:
    """Add the buffers of parameters whose first gradient comes later than others': torch adds all or none (2.13)."""
    if not any(group.get("fused") and group.get("momentum") for group in optimizer.param_groups):
        return
    owner = shard_of(optimizer) if isinstance(optimizer, ZeroRedundancyOptimizer) else optimizer
    if not owner.state or len(owner.state) == sum(len(group["params"]) for group in owner.param_groups):
        return
    for parameter in parameters_of(owner):
        if parameter.grad is not None and owner.state[parameter].get("momentum_buffer") is None:
            owner.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


def _call_with_gradients(optimizer: optim.Optimizer, check: Callable[[], None]) -> None:
    """Call a function in each step when its gradients are there."""

    def before_step(optimizer: optim.Optimizer, args: Any, kwargs: dict[str, Any]) -> Any:
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            check()
            return None

        def closure_and_check() -> Any:  # the closure computes the gradients
            loss = closure()
            check()
            return loss

        return (optimizer,), {"closure": closure_and_check}

    optimizer.register_step_pre_hook(before_step)
