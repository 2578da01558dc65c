"""The same placement in every process: :class:`AgreedPlacementMixin`."""

import json
from typing import TYPE_CHECKING, Any

import torch
from typing_extensions import override

if TYPE_CHECKING:
    import lightning.pytorch as pl
    from lightning.pytorch.strategies import Strategy as _Strategy

    from lightning_ort.compiler.backend import ORTBackend
else:
    _Strategy = object


class AgreedPlacementMixin(_Strategy):
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
        if self._backend is not None and torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
            self._backend.agree = agree


def agree(key: str, measured: dict[str, Any]) -> dict[str, Any]:
    """Publish what was measured, or take what another process has published.

    Args:
        key: Of the region or step; the same in all processes.
        measured: Here, in plain types.

    Returns:
        What was published first.

    """
    store = torch.distributed.PrefixStore("lightning_ort", torch.distributed.distributed_c10d._get_default_store())
    published: dict[str, Any] = json.loads(store.compare_set(key, "", json.dumps(measured)))
    return published
