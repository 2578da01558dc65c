"""Private names of torch's optimizers, and of the files that ``torch.save`` writes."""

import functools
import re
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FunctionType, MethodType
from typing import Any, TypeVar

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from lightning_ort.compat.lightning_sources import if_known

_BUCKET_BYTES = 25 * 2**20  # as DDP's
_Sharded = TypeVar("_Sharded", bound=Optimizer)


def _hooks(optimizer: Optimizer, name: str) -> list[Callable[..., Any]]:
    """Return hooks of an optimizer: none if its class does not call torch's constructor, as that of some wrappers."""
    return [*vars(optimizer).get(name, {}).values()]


def calls_step_hooks(optimizer: Optimizer) -> bool:
    """Return whether ``step`` calls hooks, for which torch's constructor wraps it (torch 2.13)."""
    return "_optimizer_step_post_hooks" in vars(optimizer)


def load_state_dict_pre_hooks(optimizer: Optimizer) -> list[Callable[..., Any]]:
    """Return the hooks that an optimizer calls on a state dict before loading it (torch 2.13)."""
    return _hooks(optimizer, "_optimizer_load_state_dict_pre_hooks")


def run_load_state_dict_pre_hooks(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return a state dict as those hooks change it, without loading it (torch 2.13)."""
    for hook in load_state_dict_pre_hooks(optimizer):
        state_dict = hook(optimizer, state_dict) or state_dict
    return state_dict


def run_load_state_dict_post_hooks(optimizer: Optimizer) -> None:
    """Call the hooks that an optimizer calls after loading a state dict (torch 2.13)."""
    for hook in _hooks(optimizer, "_optimizer_load_state_dict_post_hooks"):
        hook(optimizer)


@contextmanager
def unscaled_by_scaler(optimizer: Optimizer) -> Iterator[None]:
    """Let the GradScaler unscale the gradients of a fused optimizer, which does so in its step itself (torch 2.13)."""
    mark = pop_amp_scaling_mark(optimizer)
    try:
        yield
    finally:
        if mark is not None:
            optimizer._step_supports_amp_scaling = mark  # type: ignore[attr-defined]


def pop_amp_scaling_mark(optimizer: Optimizer) -> bool | None:
    """Remove and return the mark by which the GradScaler leaves unscaling to the optimizer (torch 2.13)."""
    return vars(optimizer).pop("_step_supports_amp_scaling", None)


def attributes_without_class(optimizer: Optimizer) -> dict[str, Any]:
    """Return the attributes of an optimizer that do not depend on its class, such as its hooks (torch 2.13)."""
    of_class = {"state", "defaults", "param_groups", "step", "_zero_grad_profile_name", "_step_supports_amp_scaling"}
    return {key: value for key, value in vars(optimizer).items() if key not in of_class}


def count_steps_for_schedulers(optimizer: Optimizer) -> None:
    """Wrap ``step`` as ``LRScheduler`` does, which warns if it finds no wrapper or no call of it (torch 2.13)."""
    reference, step = weakref.ref(optimizer), type(optimizer).step

    @functools.wraps(step)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        current = reference()
        assert current is not None
        current._opt_called = True  # type: ignore[attr-defined]
        return step(current, *args, **kwargs)

    wrapper._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    optimizer.step = wrapper  # type: ignore[method-assign]


def shard_of(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer that updates this rank's share of the parameters (torch 2.13).

    Only a ``ZeroRedundancyOptimizer`` has another than itself. Its class is not looked up: the import takes 0.2 s.
    """
    shard = getattr(optimizer, "optim", None)
    return shard if isinstance(shard, Optimizer) else optimizer


def sends_in_buckets(cls: type[_Sharded]) -> type[_Sharded]:
    """Let a class of ``ZeroRedundancyOptimizer`` send each rank's share in buckets, not one by one (torch 2.13).

    Torch's buckets are views that parameters must not leave, which ``parameter.data = ...`` does in silence.
    """

    def send(self: Any) -> None:
        for rank, groups in enumerate(self._partition_parameters()):
            parameters = [parameter.detach() for group in groups for parameter in group["params"]]
            if parameters:
                torch.distributed._broadcast_coalesced(self.process_group, parameters, _BUCKET_BYTES, rank)

    cls._sync_params = send  # type: ignore[attr-defined]
    return cls


def inner_tensors(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensors that a tensor subclass consists of, such as torchao's states, or the tensor (torch 2.13)."""
    if not hasattr(tensor, "__tensor_flatten__"):
        return [tensor]
    return [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]


# Files written by torch.save


def unpickling_reason(error: Exception) -> str:
    """Return why ``torch.load(weights_only=True)`` failed, without its advice to trust the file (torch 2.13)."""
    return str(error).rpartition("WeightsUnpickler error: ")[2].strip().partition("\n")[0]


def refused_global(error: Exception) -> list[str]:
    """Return the function or class that ``torch.load(weights_only=True)`` refused to call, if any (torch 2.13)."""
    return re.findall(r"GLOBAL (\S+)", str(error))[:1]


# Updates

# torch's fused kernels, which take lists of tensors, parameters and gradients first (2.13)
FUSED_KERNELS: dict[type[Optimizer], Callable[..., Any]] = {
    torch.optim.Adam: torch._fused_adam_,
    torch.optim.AdamW: torch._fused_adamw_,
    torch.optim.SGD: torch._fused_sgd_,
    torch.optim.Adagrad: torch._fused_adagrad_,
}


@functools.cache
def _without_profiling(step: Any) -> Any:
    """The ``step`` of a class without the wrapper that the first object of a class adds."""
    return getattr(step, "__wrapped__", step) if hasattr(step, "hooked") else step


# torch's own `step` of their classes, without hooks
STEPS = {kind: _without_profiling(kind.step) for kind in FUSED_KERNELS}


def only_step_hooks(optimizer: Optimizer) -> Iterable[Callable[..., Any]] | None:
    """Return the hooks before an optimizer's steps, if a step has nothing else but torch's own code (torch 2.13).

    ``None`` if ``step`` is another than torch's, which schedulers wrap to see that it is called, if there are hooks
    after it, or of all optimizers, if a gradient scaler takes part, or if torch's profiler runs, which shows steps.
    """
    own, kind = vars(optimizer), type(optimizer)
    step = own.get("step")
    if (
        not (step is None or (isinstance(step, (FunctionType, MethodType)) and hasattr(step, "_wrapped_by_lr_sched")))
        or not isinstance(kind.step, FunctionType)  # a mock, which counts who asks for its hash
        or _without_profiling(kind.step) is not STEPS.get(kind)
        or own.get("grad_scale") is not None
        or own.get("found_inf") is not None
        or own["_optimizer_step_post_hooks"]
        or _global_optimizer_pre_hooks
        or _global_optimizer_post_hooks
        or torch.autograd._profiler_enabled()
    ):
        return None
    return own["_optimizer_step_pre_hooks"].values()


@contextmanager
def only_hooks_before_steps(optimizer: Optimizer, keep: Callable[[Any], bool]) -> Iterator[None]:
    """Within the block an optimizer has only some of its hooks before a step (torch 2.13)."""
    own, name = vars(optimizer), "_optimizer_step_pre_hooks"
    before = own[name]
    own[name] = OrderedDict((key, hook) for key, hook in before.items() if keep(hook))
    try:
        yield
    finally:
        own[name] = before


def step_hooks(optimizer: Optimizer) -> list[Callable[..., Any]]:
    """Return the hooks before and after the steps of an optimizer (torch 2.13)."""
    return [hook for when in ("pre", "post") for hook in _hooks(optimizer, f"_optimizer_step_{when}_hooks")]


def note_step(optimizer: Optimizer) -> None:
    """Note a call of ``step`` for schedulers, as their wrapper does (torch 2.13)."""
    optimizer._opt_called = True  # type: ignore[attr-defined]


_STOCK_ZERO_GRAD = if_known(Optimizer.zero_grad, "bc15fd7a43a8")


def drop_gradients(optimizer: Any) -> None:
    """Do what ``zero_grad`` does, without its entry for torch's profiler where that does not run (torch 2.13)."""
    own = getattr(optimizer.zero_grad, "__func__", ())
    if own is not _STOCK_ZERO_GRAD or torch.autograd._profiler_enabled():
        optimizer.zero_grad()
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = None
