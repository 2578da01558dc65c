"""Gives the user's optimizer object another class, and lets it load checkpoints of other implementations."""

import functools
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import optim

from lightning_ort.compat.torch_optimizers import (
    attributes_without_class,
    count_steps_for_schedulers,
    load_state_dict_pre_hooks,
)
from lightning_ort.optim import registry, states
from lightning_ort.optim.registry import Implementation
from lightning_ort.optim.states import Algorithm


def load_other_forms(optimizer: optim.Optimizer) -> None:
    """Let an optimizer of torch load the states that another implementation saved."""
    algorithm = states.ALGORITHMS.get(type(optimizer))
    hooks = load_state_dict_pre_hooks(optimizer)
    if algorithm is not None and not any(getattr(hook, "func", None) is _to_torch_form for hook in hooks):
        optimizer.register_load_state_dict_pre_hook(functools.partial(_to_torch_form, algorithm=algorithm, own="torch"))


def _to_torch_form(
    optimizer: optim.Optimizer, saved: dict[str, Any], *, algorithm: Algorithm, own: str
) -> dict[str, Any] | None:
    states.check_algorithm(saved, algorithm, registry.runs(optimizer))
    if any(states.form(state) not in ("torch", own) for state in saved["state"].values() if state):
        return states.to_torch_form(saved)
    return None


def replace(
    optimizer: optim.Optimizer, target: Implementation, carried: Iterable[str], arguments: Mapping[str, Any]
) -> None:
    """Let an optimizer run with another implementation, with the same parameter groups and states.

    The hyperparameters ``carried`` are those of the groups; ``arguments`` are the same for all groups.
    """
    before = optimizer.state_dict() if optimizer.state else None
    keys = [key for key in carried if key in optimizer.defaults and key not in arguments]
    groups = [{key: group[key] for key in ("params", *keys) if key in group} for group in optimizer.param_groups]
    defaults = {key: optimizer.defaults[key] for key in keys}
    replace_in_place(optimizer, target.load()(groups, **{**defaults, **arguments}))
    to_torch_form = functools.partial(_to_torch_form, algorithm=target.algorithm, own=target.form)
    optimizer.register_load_state_dict_pre_hook(to_torch_form)
    optimizer.register_state_dict_post_hook(_save_lr_as_number)
    optimizer.register_load_state_dict_post_hook(_complete_groups)
    if target.to_save is not None:
        optimizer.register_state_dict_post_hook(target.to_save)
    if target.adopt is not None:
        optimizer.register_load_state_dict_post_hook(target.adopt)
    if before is not None:
        optimizer.load_state_dict(before)


def _complete_groups(optimizer: optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        for key, value in optimizer.defaults.items():
            group.setdefault(key, value)


def _save_lr_as_number(optimizer: optim.Optimizer, saved: dict[str, Any]) -> None:
    """Save learning rates as numbers, as they were configured; torchao makes them tensors."""
    for group in saved["param_groups"]:  # copies of the optimizer's groups
        if isinstance(group["lr"], torch.Tensor):
            group["lr"] = group["lr"].item()


def replace_in_place(optimizer: optim.Optimizer, other: optim.Optimizer) -> None:
    """Give an optimizer object the class and contents of another one over the same parameters.

    It keeps its parameter groups, updated with the other's entries, its hooks, and attributes that the user has set.
    ``other`` gets the former class and contents.
    """
    groups = optimizer.param_groups
    for group, new in zip(groups, other.param_groups, strict=True):
        group.update(new)
    other.defaults = {**optimizer.defaults, **other.defaults}
    other.param_groups = groups
    counted = "step" in vars(optimizer)
    contents = {**vars(other), **attributes_without_class(optimizer)}
    # exchanged, not copied: the destructor of `other` must not free what is used now
    optimizer.__class__, other.__class__ = _named(type(other), type(optimizer).__name__), type(optimizer)  # type: ignore[arg-type]
    optimizer.__dict__, other.__dict__ = contents, vars(optimizer)
    if counted:
        count_steps_for_schedulers(optimizer)


@functools.cache
def _named(cls: type[optim.Optimizer], name: str) -> type[optim.Optimizer]:
    """Return the class under another name: LearningRateMonitor's keys, and so a user's plots, have the class's name.

    If it frees something when an object goes, the objects of its subclasses do not: Lightning's wrapper of an optimizer
    is one, which has the same attributes, and comes and goes.
    """
    members: dict[str, Any] = {"__qualname__": cls.__qualname__, "__module__": cls.__module__}
    if free := getattr(cls, "__del__", None):
        members["__del__"] = lambda self: free(self) if type(self) is named else None
    named: type[optim.Optimizer] = type(name, (cls,), members)
    return named
