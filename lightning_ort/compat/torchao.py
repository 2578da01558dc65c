"""Undocumented names of torchao's optimizers."""

from typing import Any

import torch


def is_quantized(value: Any) -> bool:
    """Return whether a state is torchao's ``OptimState8bit`` or ``OptimState4bit`` (torchao 0.18)."""
    return type(value) is not torch.Tensor and isinstance(value, torch.Tensor) and hasattr(value, "codes")


def quantize(optimizer: torch.optim.Optimizer, parameter: torch.Tensor, key: str, value: torch.Tensor) -> torch.Tensor:
    """Return a state of a parameter as an optimizer of torchao keeps it (torchao 0.18)."""
    return optimizer._new_buffer(parameter, key == "exp_avg").copy_(value)  # type: ignore[attr-defined]
