"""Private and undocumented names of torch, without those of ``torch._dynamo`` (:mod:`.dynamo`)."""

from collections.abc import Callable

import torch
from torch._ops import OpOverload  # the type of an op such as torch.ops.aten.add.Tensor, torch 2.13

__all__ = ["OpOverload"]


# memory of tensors


def empty_strided_cpu() -> Callable[..., torch.Tensor] | None:
    """Return inductor's allocator, which is four times as fast as ``torch.empty_strided``, if there is one (torch 2.13)."""
    return getattr(getattr(torch._C._dynamo, "guards", None), "_empty_strided_cpu", None)


def is_zero_tensor(tensor: torch.Tensor) -> bool:
    """Return whether a tensor consists of zeros and has no memory, as tangents of forward-mode derivatives (torch 2.13)."""
    return tensor._is_zerotensor()
