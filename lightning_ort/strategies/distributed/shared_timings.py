"""The same placement in every process of a run: :func:`share_timings`.

Processes that compute the same thing with different kernels drift apart in the last bits. The process that has timed a
region first publishes its timings, and the others use them instead of their own. No process waits for another: one that
compiles a graph which the others never see, such as that of its smaller last batch, does not hang.
"""

import json
import logging
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

Agree = Callable[[str, dict[str, Any]], dict[str, Any]]


def share_timings(store: "torch.distributed.Store | None") -> Agree | None:
    """Return the function by which a backend shares timings through the store of a run."""
    return None if store is None else partial(agree, store)


def agree(store: "torch.distributed.Store", key: str, measured: dict[str, Any]) -> dict[str, Any]:
    """Publish timings, or return those that another process of the run has published.

    Args:
        store: The store of the run.
        key: The region or step; the same in all processes.
        measured: The timings of this process, in plain types.

    Returns:
        The part of what was published first that was measured here too. A process must not use timings of something
        that it does not have, such as an engine that failed in it.

    """
    published = json.loads(store.compare_set(f"placement/{key}", "", json.dumps(measured)))
    common = {name: published[name] for name in measured if name in published}
    if common.keys() != measured.keys():
        log.debug("%s: measured %s here, published is %s", key, measured, published)
    return common or measured
