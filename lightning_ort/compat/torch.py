"""Private and undocumented names of torch, without those of ``torch._dynamo`` (:mod:`.dynamo`)."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch._ops import OpOverload  # the type of an op such as torch.ops.aten.add.Tensor, torch 2.13

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
