"""Bytes of parameters, gradients and optimizer states: :func:`predict`, from shapes, and :func:`measure`.

The states depend on the implementation: torch's Adam keeps two values of the parameter's dtype, an 8-bit one two bytes
per element and the scales of each block, Adafactor a row and a column of each matrix.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lightning_ort._arguments import check_choice, check_integer, check_type
from lightning_ort.compat.torch_optimizers import inner_tensors
from lightning_ort.optim.param_groups import EMBEDDINGS
from lightning_ort.optim.registry import DEEPSPEED, REPLACEMENTS, TORCH_FLAGS, adam_bytes
from lightning_ort.optim.swap import OptimizerSwap


@dataclass(frozen=True)
class Memory:
    """Bytes that are in use between the steps of a training."""

    optim: str  # the implementation, as in `optim=`
    parameters: int
    gradients: int
    states: int  # of the optimizer
    elements: int  # number of trainable elements

    @property
    def states_per_element(self) -> float:
        """Bytes of states for one trainable element."""
        return self.states / self.elements

    def per_rank(self, ranks: int) -> int:
        """Bytes on each of ``ranks`` processes under ZeRO stage 1, which splits only the states."""
        return self.parameters + self.gradients + math.ceil(self.states / check_integer("ranks", ranks, 1))


# name of the optimizer -> bytes of the states of a parameter
STATES: dict[str, Callable[[nn.Parameter], int]] = {
    # of "keep" and "auto": here the optimizer that is configured is torch's AdamW
    **dict.fromkeys(("keep", "auto", *(f"adamw_torch_{flag}" for flag in TORCH_FLAGS)), adam_bytes),
    **{
        name: one.state_bytes
        for name, one in {**REPLACEMENTS, "adamw_deepspeed": DEEPSPEED["cpu"]}.items()
        if one.state_bytes is not None
    },
}


def predict(module: nn.Module, optim: str) -> Memory:
    """Predict the memory from shapes and dtypes, also on ``meta``; ``ValueError`` if nothing is trainable or known."""
    check_choice("optim", optim, STATES)
    trainable = _trainable(module)
    embeddings = {id(p) for m in module.modules() if isinstance(m, EMBEDDINGS) for p in m.parameters(recurse=False)}
    per_element = REPLACEMENTS[optim].embedding_bytes if optim in REPLACEMENTS else None
    states = 0
    for parameter in trainable:
        if id(parameter) in embeddings and per_element is not None:
            states += per_element * parameter.numel()
        else:
            states += STATES[optim](parameter)
    return _memory(module, optim, states)


def measure(module: nn.Module, optim: str) -> Memory:
    """Measure the memory in one optimizer step with gradients of zero, which changes no parameter.

    The errors are those of :meth:`OptimizerSwap.apply`, and ``ValueError`` if no parameter is trainable.
    """
    trainable = _trainable(module)
    optimizer = torch.optim.AdamW(trainable, lr=0.0, weight_decay=0.0)
    OptimizerSwap(optim).apply(module, [optimizer], trainable[0].device)
    gradients = [p.grad for p in trainable]
    try:
        for parameter in trainable:
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
    finally:
        for parameter, gradient in zip(trainable, gradients, strict=True):
            parameter.grad = gradient
    return _memory(module, optim, state_bytes([optimizer]))


def state_bytes(optimizers: Iterable[torch.optim.Optimizer]) -> int:
    """Return the bytes of the states that optimizers have."""
    values = (value for one in optimizers for state in one.state.values() for value in state.values())
    # by storage: bitsandbytes shares one table of codes among all parameters
    parts = (part for value in values if isinstance(value, Tensor) for part in inner_tensors(value))
    return sum({part.untyped_storage().data_ptr(): part.untyped_storage().nbytes() for part in parts}.values())


def _trainable(module: nn.Module) -> list[nn.Parameter]:
    check_type("module", module, nn.Module, "a torch.nn.Module")
    trainable = [parameter for parameter in module.parameters() if parameter.requires_grad]
    if not trainable:
        raise ValueError(f"{type(module).__name__} has no parameter that requires a gradient.")
    return trainable


def _memory(module: nn.Module, optim: str, states: int) -> Memory:
    trainable = _trainable(module)
    gradients, elements = sum(p.nbytes for p in trainable), sum(p.numel() for p in trainable)
    return Memory(optim, sum(p.nbytes for p in module.parameters()), gradients, states, elements)
