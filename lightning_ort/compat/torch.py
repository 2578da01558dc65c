"""Private and undocumented names of torch, without those of ``torch._dynamo`` (:mod:`.dynamo`)."""

from torch._ops import OpOverload  # the type of an op such as torch.ops.aten.add.Tensor, torch 2.13

__all__ = ["OpOverload"]
