"""bitsandbytes' 8-bit optimizers, able to load what other implementations saved.

`8-bit Optimizers via Block-wise Quantization <https://arxiv.org/abs/2110.02861>`_: blocks of 256 values share a scale.
"""

from collections.abc import Mapping
from typing import Any

import torch
from bitsandbytes import optim as bnb
from bitsandbytes.functional import quantize_blockwise

from lightning_ort.optim.states import BNB_BLOCK, form, to_torch_form


class _EightBit(torch.optim.Optimizer):
    """Adds to a bitsandbytes optimizer: parameters that keep 32-bit states, and loading of states in torch's form."""

    parameter_bits: Mapping[int, int] = {}  # id of a parameter -> 8 or 32, where the size does not decide

    def get_config(self, gindex: int, pindex: int, group: dict[str, Any]) -> dict[str, Any]:
        """Return what bitsandbytes goes by for one parameter."""
        config = super().get_config(gindex, pindex, group)  # type: ignore[misc]
        bits = self.parameter_bits.get(id(group["params"][pindex]))
        if bits is not None:
            config.update(optim_bits=bits, min_8bit_size=0)
        return config

    def load_state_dict(self, state_dict: dict[str, Any], move_to_device: bool = True) -> None:
        """Load states in any form that :mod:`lightning_ort.optim.states` knows.

        Raises:
            ValueError: If the parameter groups differ.

        """
        for before in self._optimizer_load_state_dict_pre_hooks.values():  # bitsandbytes calls no hooks
            state_dict = before(self, state_dict) or state_dict
        self._load(state_dict, move_to_device)
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def _load(self, state_dict: dict[str, Any], move_to_device: bool) -> None:
        if all(form(state) == "bitsandbytes" for state in state_dict["state"].values()):
            super().load_state_dict(state_dict, move_to_device)  # type: ignore[call-arg]
            return
        state_dict = to_torch_form(state_dict)
        super().load_state_dict({**state_dict, "state": {}}, move_to_device)  # type: ignore[call-arg]
        saved = iter(index for group in state_dict["param_groups"] for index in group["params"])
        for group_index, group in enumerate(self.param_groups):
            for index, parameter in enumerate(group["params"]):
                state = state_dict["state"].get(next(saved))
                if state:
                    self._fill(group_index, index, group, parameter, state)

    def _fill(
        self, group_index: int, index: int, group: dict[str, Any], parameter: torch.Tensor, saved: Mapping[str, Any]
    ) -> None:
        self.init_state(group, parameter, group_index, index)  # type: ignore[attr-defined]
        state = self.state[parameter]
        state["step"] = int(saved["step"]) if "step" in saved else 0
        for number, key in (("1", "exp_avg"), ("2", "exp_avg_sq")):
            if f"state{number}" not in state:
                continue
            value, target = saved[key].to(parameter.device, torch.float32), state[f"state{number}"]
            if target.dtype is torch.uint8:
                codes, quantization = quantize_blockwise(value, code=state[f"qmap{number}"], blocksize=BNB_BLOCK)
                target.copy_(codes.view(target.shape))
                state[f"absmax{number}"].copy_(quantization.absmax)
            else:
                target.copy_(value.view(target.shape))


class AdamW8bit(_EightBit, bnb.AdamW8bit):
    """:class:`bitsandbytes.optim.AdamW8bit` that loads states of other implementations."""


class Lion8bit(_EightBit, bnb.Lion8bit):
    """:class:`bitsandbytes.optim.Lion8bit` that loads states of other implementations."""
