"""What the processes of a run exchange without waiting: its store, and the same placement in each of them.

Processes that compute the same thing with different kernels drift apart in the last bits. The process that has timed a
region first publishes its timings, and the others use them instead of their own. No process waits for another: one that
compiles a graph which the others never see, such as that of its smaller last batch, does not hang.
"""

import json
import logging
import uuid
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from lightning_ort.compat.torch import default_store

if TYPE_CHECKING:
    from lightning.pytorch.strategies import ParallelStrategy

log = logging.getLogger(__name__)

Agree = Callable[[str, dict[str, Any]], dict[str, Any]]


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


def share_timings(store: "torch.distributed.Store | None") -> Agree | None:
    """Return the function by which a backend shares timings through the store of a run."""
    return None if store is None else partial(agree, store)


def agree(store: "torch.distributed.Store", key: str, measured: dict[str, Any]) -> dict[str, Any]:
    """Publish the timings of a region or step, or return those that another process has published under the same key.

    Only the part that was measured here too is returned: a process must not use timings of something that it does not
    have, such as an engine that failed in it.
    """
    published = json.loads(store.compare_set(f"placement/{key}", "", json.dumps(measured)))
    common = {name: published[name] for name in measured if name in published}
    if common.keys() != measured.keys():
        log.debug("%s: measured %s here, published is %s", key, measured, published)
    return common or measured
