"""What the inputs of a captured graph say about it."""

from collections.abc import Sequence
from typing import Any

import torch


def tensor_class_of(inputs: Sequence[Any]) -> type[torch.Tensor] | None:
    """Return the first class with a ``__torch_function__`` of its own, but no ``__torch_dispatch__``, among inputs.

    Dynamo traces into that function. The graph has its results already, and must not call it.
    """
    for value in inputs:
        kind = type(value)
        is_plain = not isinstance(value, torch.Tensor) or not torch.overrides.has_torch_function((value,))
        if not is_plain and kind.__torch_dispatch__ is torch.Tensor.__torch_dispatch__:
            return kind
    return None


def device_of(inputs: Sequence[Any]) -> torch.device:
    """Return the device that a graph runs on."""
    devices = [value.device for value in inputs if isinstance(value, torch.Tensor)]
    # a scalar on the CPU may be an input of a graph on an accelerator
    return next((device for device in devices if device.type != "cpu"), torch.device("cpu"))
