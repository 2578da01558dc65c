"""Private and undocumented names of torch, without those of ``torch._dynamo`` (:mod:`.dynamo`)."""

from collections.abc import Callable, Iterator
from typing import Any

from torch import nn
from torch._ops import OpOverload  # the type of an op such as torch.ops.aten.add.Tensor, torch 2.13

__all__ = ["OpOverload"]

# nn.Module, for captured steps

COMPILED_CALL = "_compiled_call_impl"
"""The attribute with the call that ``nn.Module`` uses if it is not ``None``; pickling drops it (torch 2.13)."""


def has_compiled_call(module: nn.Module) -> bool:
    """Whether ``nn.Module.compile`` was called on this module (torch 2.13)."""
    return getattr(module, COMPILED_CALL) is not None


def uncompiled_call(module: nn.Module) -> Callable[..., Any]:
    """Return a module's call, hooks included, without its compiled one (torch 2.13)."""
    return module._call_impl


def forward_hooks_without(
    module: nn.Module, ids: set[int]
) -> Iterator[tuple[str, dict[int, Callable[..., Any]], dict[int, Callable[..., Any]]]]:
    """Yield name, value and value without these hooks of the attributes with forward hooks (torch 2.13)."""
    for name in ("_forward_pre_hooks", "_forward_hooks"):
        hooks = vars(module)[name]
        if ids & hooks.keys():
            yield name, hooks, type(hooks)((key, hook) for key, hook in hooks.items() if key not in ids)


def is_double_backward_error(error: BaseException) -> bool:
    """Whether AOTAutograd says that its graphs have no gradient of a gradient (torch 2.13)."""
    return "does not currently support double backward" in str(error)
