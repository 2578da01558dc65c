"""The same placement in every process: :class:`SharedTimingsMixin`."""

import json
import logging
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from lightning_ort.strategies.distributed.run_store import RunStoreMixin

if TYPE_CHECKING:
    import lightning.pytorch as pl
    import torch

    from lightning_ort.compiler.backend import ORTBackend

log = logging.getLogger(__name__)


class SharedTimingsMixin(RunStoreMixin):
    """Lets the processes of a run share their timings, so that all of them place a region alike.

    Processes that compute the same thing by different kernels drift apart in the last bits. The one that has timed a
    region first publishes what it measured, and the others go by that. Nobody waits for anybody: a process that
    compiles a graph which the others never see, such as that of its smaller last batch, is not left hanging.
    """

    if TYPE_CHECKING:
        _backend: ORTBackend | None

    @override
    def setup(self, trainer: "pl.Trainer") -> None:
        super().setup(trainer)
        if self._backend is not None:
            self._backend.agree = self._agree if self.run_store is not None else None

    def _agree(self, key: str, measured: dict[str, Any]) -> dict[str, Any]:
        return measured if self.run_store is None else agree(self.run_store, key, measured)


def agree(store: "torch.distributed.Store", key: str, measured: dict[str, Any]) -> dict[str, Any]:
    """Publish what was measured, or take what another process of the run has published.

    Args:
        store: Of the run.
        key: Of the region or step; the same in all processes.
        measured: Here, in plain types.

    Returns:
        What was published first, of that which was measured here too: a process does not go by what it has not got,
        such as an engine that failed in it.

    """
    published = json.loads(store.compare_set(f"placement/{key}", "", json.dumps(measured)))
    common = {name: published[name] for name in measured if name in published}
    if common.keys() != measured.keys():
        log.debug("%s: measured %s here, published is %s", key, measured, published)
    return common or measured
