"""Private and undocumented names of torch, without those of ``torch._dynamo`` (:mod:`.dynamo`)."""

import functools
import re
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch._ops import OpOverload  # the type of an op such as torch.ops.aten.add.Tensor, torch 2.13
from torch.optim import Optimizer

if TYPE_CHECKING:
    from torch.distributed.optim import ZeroRedundancyOptimizer

__all__ = ["OpOverload"]


def default_store() -> "torch.distributed.Store | None":
    """Return the key-value store of the default process group; MPI has none (torch 2.13)."""
    return torch.distributed.distributed_c10d._get_default_store()


# nn.Module and its gradients, for captured steps

COMPILED_CALL = "_compiled_call_impl"  # if not None, `nn.Module.__call__` calls it; pickling drops it (torch 2.13)


def has_compiled_call(module: nn.Module) -> bool:
    """Return whether ``nn.Module.compile`` was called on this module (torch 2.13)."""
    return getattr(module, COMPILED_CALL) is not None


def uncompiled_call(module: nn.Module) -> Callable[..., Any]:
    """Return a module's call, with its hooks, but not the compiled one (torch 2.13)."""
    return module._call_impl


def forward_hooks_without(module: nn.Module, ids: set[int]) -> Iterator[tuple[str, Any]]:
    """Yield name and value without these hooks of the attributes that hold any of them (torch 2.13)."""
    for name in ("_forward_pre_hooks", "_forward_hooks"):
        hooks = vars(module)[name]
        if ids & hooks.keys():
            yield name, type(hooks)((key, hook) for key, hook in hooks.items() if key not in ids)


def is_double_backward_error(error: BaseException) -> bool:
    """Return whether AOTAutograd says that its graphs have no gradient of a gradient (torch 2.13)."""
    return "does not currently support double backward" in str(error)


# optimizers


def load_state_dict_pre_hooks(optimizer: Optimizer) -> list[Callable[..., Any]]:
    """Return the hooks that an optimizer calls on a state dict before loading it (torch 2.13)."""
    return list(optimizer._optimizer_load_state_dict_pre_hooks.values())


def run_load_state_dict_pre_hooks(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return a state dict as those hooks change it, without loading it (torch 2.13)."""
    for hook in load_state_dict_pre_hooks(optimizer):
        state_dict = hook(optimizer, state_dict) or state_dict
    return state_dict


def run_load_state_dict_post_hooks(optimizer: Optimizer) -> None:
    """Call the hooks that an optimizer calls after loading a state dict (torch 2.13)."""
    for hook in optimizer._optimizer_load_state_dict_post_hooks.values():
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


def shard_of(optimizer: "ZeroRedundancyOptimizer") -> Optimizer:
    """Return the optimizer that updates this rank's share of the parameters (torch 2.13)."""
    return optimizer.optim


def inner_tensors(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensors that a tensor subclass consists of, such as torchao's states, or the tensor (torch 2.13)."""
    if not hasattr(tensor, "__tensor_flatten__"):
        return [tensor]
    return [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]


# files written by torch.save


def unpickling_reason(error: Exception) -> str:
    """Return why ``torch.load(weights_only=True)`` failed, without its advice to trust the file (torch 2.13)."""
    return str(error).rpartition("WeightsUnpickler error: ")[2].strip().partition("\n")[0]


def refused_global(error: Exception) -> list[str]:
    """Return the function or class that ``torch.load(weights_only=True)`` refused to call, if any (torch 2.13)."""
    return re.findall(r"GLOBAL (\S+)", str(error))[:1]
