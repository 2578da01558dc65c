"""Bytes of parameters, gradients and optimizer states: :func:`predict`, from shapes, and :func:`measure`.

What a state holds per element is that of the implementation: torch's Adam two values of the parameter's dtype, 8-bit
ones two bytes and the scales of each block, Adafactor a row and a column of each matrix.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from lightning_ort._arguments import check_choice, check_integer, check_type
from lightning_ort.optim.states import BNB_BLOCK
from lightning_ort.optim.swap import EMBEDDINGS, OptimizerSwap

_SCALE = 4  # bytes of a block's float32 scale
_MIN_8BIT_SIZE = 4096  # bitsandbytes' and torchao's rule

_Bytes = Callable[[nn.Parameter, bool], int]


@dataclass(frozen=True)
class Memory:
    """What training a module keeps, in bytes.

    Args:
        optim: The implementation, as in ``optim=``.
        parameters: All parameters.
        gradients: Those of the trainable ones.
        states: Of the optimizer.
        elements: Trainable elements.

    """

    optim: str
    parameters: int
    gradients: int
    states: int
    elements: int

    @property
    def states_per_element(self) -> float:
        """Bytes of states for one trainable element."""
        return self.states / self.elements

    def per_rank(self, ranks: int) -> int:
        """Bytes on each of ``ranks`` processes under ZeRO stage 1, which splits the states alone."""
        return self.parameters + self.gradients + math.ceil(self.states / check_integer("ranks", ranks, 1))


def _full(bytes_per_element: int | None = None) -> _Bytes:
    return lambda p, embedding: p.numel() * (bytes_per_element or 2 * p.element_size())


def _bitsandbytes(states: int) -> _Bytes:
    def count(p: nn.Parameter, embedding: bool) -> int:
        if embedding or p.numel() < _MIN_8BIT_SIZE:
            return states * 4 * p.numel()
        return states * (p.numel() + _SCALE * math.ceil(p.numel() / BNB_BLOCK))

    return count


def _torchao(bits: int, block: int) -> _Bytes:
    def count(p: nn.Parameter, embedding: bool) -> int:
        if p.numel() < _MIN_8BIT_SIZE or p.numel() % block:
            return 2 * p.element_size() * p.numel()
        return 2 * (p.numel() * bits // 8 + _SCALE * p.numel() // block)

    return count


def _adafactor(p: nn.Parameter, embedding: bool) -> int:
    if p.dim() < 2:
        return p.numel() * p.element_size()
    return p.element_size() * (p.numel() // p.shape[-1] + p.numel() // p.shape[-2])


def _anyprecision(p: nn.Parameter, embedding: bool) -> int:
    return p.numel() * (6 if p.element_size() >= 4 else 8)


STATES: dict[str, _Bytes] = {
    "adamw_torch_fused": _full(),
    "adamw_torch_foreach": _full(),
    "adamw_deepspeed": _full(8),
    "adamw_bnb_8bit": _bitsandbytes(2),
    "paged_adamw_8bit": _bitsandbytes(2),
    "lion_8bit": _bitsandbytes(1),
    "adamw_torchao_8bit": _torchao(8, 256),
    "adamw_torchao_4bit": _torchao(4, 128),
    "adafactor": _adafactor,
    "adamw_anyprecision": _anyprecision,
}


def predict(module: nn.Module, optim: str) -> Memory:
    """Predict what training keeps, from shapes and dtypes.

    Args:
        module: On any device, ``meta`` included.
        optim: One of :data:`STATES`.

    Raises:
        ValueError: If nothing is known of that name, or no parameter is trainable.

    """
    check_choice("optim", optim, STATES)
    trainable = _trainable(module)
    embeddings = {id(p) for m in module.modules() if isinstance(m, EMBEDDINGS) for p in m.parameters(recurse=False)}
    states = sum(STATES[optim](p, id(p) in embeddings) for p in trainable)
    return _memory(module, optim, states)


def measure(module: nn.Module, optim: str) -> Memory:
    """Measure it: one optimizer step on gradients of zero, which changes no parameter.

    Args:
        module: On the device to measure on.
        optim: Any name of ``optim=``.

    Raises:
        ValueError: If no parameter is trainable, or the implementation does not take the module's parameters.
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
    # by storage: bitsandbytes shares one table of codes among all parameters
    storages = {
        part.untyped_storage().data_ptr(): part.untyped_storage().nbytes()
        for state in optimizer.state.values()
        for value in state.values()
        for part in _parts(value)
    }
    return _memory(module, optim, sum(storages.values()))


def _parts(value: object) -> list[torch.Tensor]:
    if not isinstance(value, torch.Tensor):
        return []
    if hasattr(value, "__tensor_flatten__"):  # torchao's states are tensors made of tensors
        return [getattr(value, name) for name in value.__tensor_flatten__()[0]]
    return [value]


def _trainable(module: nn.Module) -> list[nn.Parameter]:
    check_type("module", module, nn.Module, "a torch.nn.Module")
    trainable = [parameter for parameter in module.parameters() if parameter.requires_grad]
    if not trainable:
        raise ValueError(f"{type(module).__name__} has no parameter that requires a gradient.")
    return trainable


def _memory(module: nn.Module, optim: str, states: int) -> Memory:
    trainable = _trainable(module)
    return Memory(
        optim,
        sum(parameter.nbytes for parameter in module.parameters()),
        sum(parameter.nbytes for parameter in trainable),
        states,
        sum(parameter.numel() for parameter in trainable),
    )
