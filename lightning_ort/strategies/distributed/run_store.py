"""A key-value store for one run, by which its processes exchange facts without waiting: :func:`open_run_store`."""

import uuid
from typing import TYPE_CHECKING

import torch

from lightning_ort.compat.torch import default_store

if TYPE_CHECKING:
    from lightning.pytorch.strategies import ParallelStrategy


def open_run_store(strategy: "ParallelStrategy") -> "torch.distributed.Store | None":
    """Return a part of the process group's store for one run of the Trainer; ``None`` for a single process.

    The process group and its store outlive a run. All processes agree on a new random prefix for each run, so that
    values of an earlier run, with another model or configuration, are not seen. Call it in all processes.
    """
    if strategy.world_size == 1 or not torch.distributed.is_initialized():
        return None
    name = strategy.broadcast(uuid.uuid4().hex)
    store = default_store()
    return None if store is None else torch.distributed.PrefixStore(f"lightning_ort/{name}", store)
