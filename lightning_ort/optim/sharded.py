"""Optimizer states split over the processes of a run: ZeRO stage 1 by torch's :class:`ZeroRedundancyOptimizer`."""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.optim import LBFGS, Optimizer
from typing_extensions import override

from lightning_ort.compat.torch_optimizers import run_load_state_dict_pre_hooks, sends_in_buckets, shard_of
from lightning_ort.optim.fused import prepare_state
from lightning_ort.optim.registry import TORCH_FLAGS, runs
from lightning_ort.optim.replacement import replace_in_place


@sends_in_buckets
class ShardedOptimizer(ZeroRedundancyOptimizer):
    """Torch's, except that it sends buckets, and that loading a checkpoint keeps its fused or foreach flag.

    `ZeRO: Memory Optimizations Toward Training Trillion Parameter Models <https://arxiv.org/abs/1910.02054>`_
    """

    @override
    def step(self, closure: Callable[[], float] | None = None, **kwargs: Any) -> float | None:
        """Step this rank's share, and send it to the others.

        The closure runs first: torch copies the groups to the share before it, and back after it, so that what the
        training step changes in them, such as a learning rate, would be lost.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        # hooks run around this step, not around torch's too
        inspect.unwrap(ZeroRedundancyOptimizer.step)(self, None, **kwargs)
        return loss

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the states of all parameters; each rank keeps those of its own."""
        state_dict = run_load_state_dict_pre_hooks(self, state_dict)  # torch fills the shards before it calls them
        flags = [{flag: group.get(flag) for flag in TORCH_FLAGS} for group in self.param_groups]
        # copies: torch writes into both
        groups = [{**group, **own} for group, own in zip(state_dict["param_groups"], flags, strict=True)]
        super().load_state_dict({**state_dict, "state": dict(state_dict["state"]), "param_groups": groups})
        self.state.clear()  # the shards have them
        for parameter, state in shard_of(self).state.items():
            prepare_state(state, parameter, bool(flags[0]["fused"]))


def shard(optimizer: Optimizer) -> None:
    """Split the states of one of ``torch.optim`` over all processes, in the user's own object."""
    cls = type(optimizer)
    if not cls.__module__.startswith("torch.optim") or cls is LBFGS:
        raise ValueError(
            f"ZeRO stage 1 without DeepSpeed can split the states of torch's own optimizers, but not those of"
            f" {runs(optimizer)}. Use an optimizer of torch.optim, or the strategy 'ort_ddp'."
        )
    known = inspect.signature(cls.__init__).parameters
    defaults = {key: value for key, value in optimizer.defaults.items() if key in known}
    replace_in_place(optimizer, ShardedOptimizer([dict(group) for group in optimizer.param_groups], cls, **defaults))
