"""The update of one of torch's fused optimizers on a CPU, without what torch has around its kernels: :func:`update`.

Eight tensors of up to 4,096 elements took 66 microseconds in ``step``, of which the kernels take 22. The kernels open a
parallel region for each tensor, whatever its size, and wake all threads for it: that takes longer than a small update,
and while other programs use the cores it takes milliseconds. So small tensors are updated by one thread.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, optim

from lightning_ort.compat.torch_optimizers import FUSED_KERNELS, note_step, only_step_hooks
from lightning_ort.compiler.machine.openmp import one_thread

# elements of a tensor that one thread updates in less time than it takes to wake another
SMALL = 2**15

_ADAM = ("exp_avg", "exp_avg_sq", "step")
_STATES: Mapping[type[optim.Optimizer], tuple[str, ...]] = {
    optim.Adam: _ADAM,
    optim.AdamW: _ADAM,
    optim.SGD: ("momentum_buffer",),
    optim.Adagrad: ("sum", "step"),
}
_OF_ADAM = ("lr", "weight_decay", "eps", "amsgrad", "maximize")
_SETTINGS: Mapping[type[optim.Optimizer], tuple[str, ...]] = {
    optim.Adam: _OF_ADAM,
    optim.AdamW: _OF_ADAM,
    optim.SGD: ("lr", "weight_decay", "momentum", "dampening", "nesterov", "maximize"),
    optim.Adagrad: ("lr", "lr_decay", "weight_decay", "eps", "maximize"),
}
_ONE = torch.ones(())
_Call = tuple[Callable[..., Any], list[list[Tensor]], dict[str, Any], bool]  # kernel, tensors, settings, on one thread

# marks the hook of an optimizer's step that :func:`update` calls by itself: the attribute has what it does
CHECK = "before_fused_update"


def may_update(optimizer: optim.Optimizer) -> bool:
    """Return whether ``optimizer.step()`` only calls torch's fused kernels, as far as its class and hooks tell."""
    if type(optimizer) not in _STATES or (hooks := only_step_hooks(optimizer)) is None:
        return False
    for hook in hooks:  # noqa: SIM110 (a generator takes longer)
        if not hasattr(hook, CHECK):
            return False
    return True


def update(optimizer: optim.Optimizer) -> bool:
    """Do what ``optimizer.step()`` does, if :func:`may_update`; return whether it was done.

    The first step of a parameter, which makes its states, is left to torch.
    """
    kind = type(optimizer)
    for hook in only_step_hooks(optimizer) or ():
        getattr(hook, CHECK)()
    calls: list[_Call] = []
    for group in optimizer.param_groups:
        if not group.get("fused") or not _add_calls(calls, kind, group, optimizer.state):
            return False
    with torch.no_grad():
        for kernel, tensors, settings, is_small in calls:
            if kind is not optim.SGD:
                steps = tensors[-1]
                torch._foreach_add_(steps, [_ONE] * len(steps))  # to add a number takes three times as long
            if is_small:
                with one_thread():
                    kernel(*tensors, **settings)
            else:
                kernel(*tensors, **settings)
    note_step(optimizer)
    return True


def _add_calls(calls: list[_Call], kind: type, group: dict[str, Any], states: Mapping[Tensor, Any]) -> bool:
    """Add the calls of kernels for a group; return whether there are only such as torch would make."""
    settings = {name: group[name] for name in _SETTINGS[kind]}
    kernel, names = FUSED_KERNELS[kind], _STATES[kind]
    if kind is optim.SGD:
        settings["is_first_step"] = False
        names = names if group["momentum"] else ()
    elif kind is not optim.Adagrad:
        settings["beta1"], settings["beta2"] = group["betas"]
        if group["amsgrad"]:
            names = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "step")
        if group["decoupled_weight_decay"]:
            kernel = FUSED_KERNELS[optim.AdamW]
    if group.get("capturable") or Tensor in map(type, settings.values()):  # torch converts it first
        return False
    rows: tuple[list[Any], list[Any]] = ([], [])  # of large tensors and of small ones
    for p in group["params"]:
        if (gradient := p.grad) is not None:
            if not names:
                row = [p, gradient]
            elif not (own := states.get(p)) or own[names[0]] is None:
                return False
            else:
                row = [p, gradient, *map(own.__getitem__, names)]
            rows[p.numel() <= SMALL].append(row)
    for is_small, found in enumerate(rows):
        if found:
            tensors = [*map(list, zip(*found, strict=True))]
            if not names:
                tensors.append([])
            elif kind in (optim.Adam, optim.AdamW) and not group["amsgrad"]:
                tensors.insert(4, [])
            calls.append((kernel, tensors, settings, bool(is_small)))
    return True
