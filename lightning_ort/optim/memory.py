"""Bytes of parameters, gradients and optimizer states: :func:`predict`, from shapes, and :func:`measure`.

The states depend on the implementation: torch's Adam keeps two values of the parameter's dtype, an 8-bit one two bytes
per element and the scales of each block, Adafactor a row and a column of each matrix.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lightning_ort._arguments import check_choice, check_integer, check_type
from lightning_ort.compat.bitsandbytes import BLOCK_SIZE
from lightning_ort.compat.torch_optimizers import inner_tensors
from lightning_ort.optim.param_groups import EMBEDDINGS
from lightning_ort.optim.swap import OptimizerSwap

_SCALE = 4  # bytes of a block's float32 scale
_MIN_8BIT_SIZE = 4096  # the default of bitsandbytes and torchao


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


def _adam(p: nn.Parameter) -> int:
    return 2 * p.nbytes


def _bitsandbytes(p: nn.Parameter, tensors: int = 2) -> int:
    if p.numel() < _MIN_8BIT_SIZE:
        return tensors * 4 * p.numel()
    return tensors * (p.numel() + _SCALE * math.ceil(p.numel() / BLOCK_SIZE))


def _torchao(p: nn.Parameter, bits: int, block: int) -> int:
    if p.numel() < _MIN_8BIT_SIZE or p.numel() % block:
        return 2 * p.nbytes
    return 2 * (p.numel() * bits // 8 + _SCALE * p.numel() // block)


def _adafactor(p: nn.Parameter) -> int:
    if p.dim() < 2:
        return p.nbytes
    return p.element_size() * (p.numel() // p.shape[-1] + p.numel() // p.shape[-2])


# name of the optimizer -> bytes of the states of a parameter
STATES: dict[str, Callable[[nn.Parameter], int]] = {
    "keep": _adam,  # here the optimizer that is configured is torch's AdamW
    "auto": _adam,
    "adamw_torch_fused": _adam,
    "adamw_torch_foreach": _adam,
    "adamw_deepspeed": lambda p: 8 * p.numel(),
    "adamw_bnb_8bit": _bitsandbytes,
    "paged_adamw_8bit": _bitsandbytes,
    "lion_8bit": functools.partial(_bitsandbytes, tensors=1),
    "adamw_torchao_8bit": functools.partial(_torchao, bits=8, block=256),
    "adamw_torchao_4bit": functools.partial(_torchao, bits=4, block=128),
    "adafactor": _adafactor,
    "adamw_anyprecision": lambda p: (6 if p.element_size() >= 4 else 8) * p.numel(),
}
# for embeddings, where they are not quantized
_EMBEDDING_STATES = {"adamw_bnb_8bit": 8, "paged_adamw_8bit": 8, "lion_8bit": 4}  # bytes per element


def predict(module: nn.Module, optim: str) -> Memory:
    """Predict the memory from shapes and dtypes, for a module on any device including ``meta``.

    Raises:
        ValueError: If ``optim`` is not one of :data:`STATES`, or no parameter is trainable.

    """
    check_choice("optim", optim, STATES)
    trainable = _trainable(module)
    embeddings = {id(p) for m in module.modules() if isinstance(m, EMBEDDINGS) for p in m.parameters(recurse=False)}
    states = 0
    for parameter in trainable:
        if id(parameter) in embeddings and optim in _EMBEDDING_STATES:
            states += _EMBEDDING_STATES[optim] * parameter.numel()
        else:
            states += STATES[optim](parameter)
    return _memory(module, optim, states)


def measure(module: nn.Module, optim: str) -> Memory:
    """Measure the memory in one optimizer step with gradients of zero, which changes no parameter.

    Raises:
        ValueError: If no parameter is trainable, or the implementation does not support the module's parameters.
        ModuleNotFoundError: If the implementation's package is missing.

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
    tensors = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    # by storage: bitsandbytes shares one table of codes among all parameters
    storages = [part.untyped_storage() for tensor in tensors for part in inner_tensors(tensor)]
    sizes = {storage.data_ptr(): storage.nbytes() for storage in storages}
    return _memory(module, optim, sum(sizes.values()))


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
