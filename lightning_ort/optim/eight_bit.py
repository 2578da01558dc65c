"""bitsandbytes' 8-bit optimizers, which here also load what other implementations saved."""

from collections.abc import Mapping
from typing import Any

import torch
from bitsandbytes import optim as bnb

from lightning_ort.compat.bitsandbytes import load_torch_state
from lightning_ort.compat.torch_optimizers import run_load_state_dict_post_hooks, run_load_state_dict_pre_hooks
from lightning_ort.optim.states import form, to_torch_form


class _EightBit(torch.optim.Optimizer):
    """Adds to a bitsandbytes optimizer: parameters that keep 32-bit states, and loading of states in torch's form."""

    parameter_bits: Mapping[int, int] = {}  # id of a parameter -> 8 or 32, where its size does not decide

    def get_config(self, gindex: int, pindex: int, group: dict[str, Any]) -> dict[str, Any]:
        """Return the settings for one parameter (called by bitsandbytes 0.50.2)."""
        config = super().get_config(gindex, pindex, group)  # type: ignore[misc]
        bits = self.parameter_bits.get(id(group["params"][pindex]))
        if bits is not None:
            config.update(optim_bits=bits, min_8bit_size=0)
        return config

    def load_state_dict(self, state_dict: dict[str, Any], move_to_device: bool = True) -> None:
        """Load states in any form that :mod:`lightning_ort.optim.states` knows."""
        state_dict = run_load_state_dict_pre_hooks(self, state_dict)  # bitsandbytes calls no hooks
        if all(form(state) == "bitsandbytes" for state in state_dict["state"].values()):
            super().load_state_dict(state_dict, move_to_device)  # type: ignore[call-arg]
        else:
            state_dict = to_torch_form(state_dict)
            super().load_state_dict({**state_dict, "state": {}}, move_to_device)  # type: ignore[call-arg]
            for group_index, group in enumerate(state_dict["param_groups"]):
                for index, number in enumerate(group["params"]):
                    if state := state_dict["state"].get(number):
                        load_torch_state(self, group_index, index, state)
        run_load_state_dict_post_hooks(self)


class AdamW8bit(_EightBit, bnb.AdamW8bit):
    """:class:`bitsandbytes.optim.AdamW8bit` that loads states of other implementations."""


class Lion8bit(_EightBit, bnb.Lion8bit):
    """:class:`bitsandbytes.optim.Lion8bit` that loads states of other implementations."""
