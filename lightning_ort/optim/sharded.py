"""Optimizer states split over the processes of a run: ZeRO stage 1 by torch's :class:`ZeroRedundancyOptimizer`."""

import inspect
from typing import Any

import torch
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.optim import LBFGS, Optimizer
from typing_extensions import override

from lightning_ort.optim.registry import TORCH_FLAGS, runs
from lightning_ort.optim.swap import become


class ShardedOptimizer(ZeroRedundancyOptimizer):
    """Torch's, which here keeps its fused or foreach loop when it loads a checkpoint, and leaves the checkpoint alone.

    `ZeRO: Memory Optimizations Toward Training Trillion Parameter Models <https://arxiv.org/abs/1910.02054>`_
    """

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the whole states; each rank takes those of its parameters.

        Raises:
            ValueError: If they are not those of this optimizer.

        """
        for hook in self._optimizer_load_state_dict_pre_hooks.values():  # torch's shards are filled before they run
            state_dict = hook(self, state_dict) or state_dict
        flags = [{flag: group.get(flag) for flag in TORCH_FLAGS} for group in self.param_groups]
        # copies: torch writes into both
        groups = [{**group, **own} for group, own in zip(state_dict["param_groups"], flags, strict=True)]
        super().load_state_dict({**state_dict, "state": dict(state_dict["state"]), "param_groups": groups})
        for parameter, state in self.optim.state.items():
            if "step" in state and flags[0]["fused"]:
                state["step"] = state["step"].to(parameter.device, torch.float32)


def shard(optimizer: Optimizer) -> None:
    """Split an optimizer's states over all processes, in the user's own object.

    Args:
        optimizer: One of ``torch.optim``, without states yet.

    Raises:
        ValueError: If its states cannot be split.

    """
    cls = type(optimizer)
    if not cls.__module__.startswith("torch.optim") or cls is LBFGS:
        raise ValueError(
            f"ZeRO stage 1 without DeepSpeed splits the states of torch's own optimizers, but not those of"
            f" {runs(optimizer)}. Use one of torch.optim, or the strategy 'ort_ddp'."
        )
    known = inspect.signature(cls.__init__).parameters
    defaults = {key: value for key, value in optimizer.defaults.items() if key in known}
    groups = [dict(group) for group in optimizer.param_groups]
    become(optimizer, ShardedOptimizer(groups, cls, **defaults))
