"""Undocumented names of bitsandbytes: the states of its 8-bit optimizers. Importing this does not import bitsandbytes.

`8-bit Optimizers via Block-wise Quantization <https://arxiv.org/abs/2110.02861>`_: blocks of 256 values share a scale.
"""

from collections.abc import Mapping
from typing import Any

import torch

BLOCK_SIZE = 256
_KEYS = {"1": "exp_avg", "2": "exp_avg_sq"}  # number in bitsandbytes' keys -> torch's key


def flatten_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a parameter's state without the nested dict that hides its tensors from FSDP (bitsandbytes 0.50.2)."""
    nested = {key: value for entry in state.values() if isinstance(entry, dict) for key, value in entry.items()}
    return {**{key: value for key, value in state.items() if not isinstance(value, dict)}, **nested}


def is_state(state: Mapping[str, Any]) -> bool:
    """Return whether a flat state was written by an optimizer of bitsandbytes (bitsandbytes 0.50.2)."""
    return "state1" in state


def to_torch(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a flat state with torch's keys, dequantized (bitsandbytes 0.50.2)."""
    values = {key: _dequantize(state, number) for number, key in _KEYS.items() if f"state{number}" in state}
    return {**({"step": state["step"]} if "step" in state else {}), **values}


def _dequantize(state: Mapping[str, Any], number: str) -> torch.Tensor:
    value = state[f"state{number}"]
    if value.dtype is not torch.uint8:
        return value
    code, absmax = state[f"qmap{number}"].to(value.device), state[f"absmax{number}"].to(value.device)
    blocks = torch.nn.functional.pad(code[value.flatten().long()], (0, -value.numel() % BLOCK_SIZE))
    scaled = blocks.view(-1, BLOCK_SIZE) * absmax[:, None]
    return scaled.flatten()[: value.numel()].view(value.shape)


def load_torch_state(optimizer: Any, group_index: int, index: int, saved: Mapping[str, Any]) -> None:
    """Fill the state of one parameter of a bitsandbytes optimizer from torch's form (bitsandbytes 0.50.2)."""
    from bitsandbytes.functional import quantize_blockwise

    group = optimizer.param_groups[group_index]
    parameter = group["params"][index]
    optimizer.init_state(group, parameter, group_index, index)
    state = optimizer.state[parameter]
    state["step"] = int(saved["step"]) if "step" in saved else 0
    for number, key in _KEYS.items():
        if f"state{number}" not in state:
            continue
        value, target = saved[key].to(parameter.device, torch.float32), state[f"state{number}"]
        if target.dtype is torch.uint8:
            codes, quantization = quantize_blockwise(value, code=state[f"qmap{number}"], blocksize=BLOCK_SIZE)
            target.copy_(codes.view(target.shape))
            state[f"absmax{number}"].copy_(quantization.absmax)
        else:
            target.copy_(value.view(target.shape))
