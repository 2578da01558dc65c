"""The same placement in every process: :class:`AgreedPlacementMixin`."""

import dataclasses
import json
from typing import TYPE_CHECKING

import torch
from typing_extensions import override

from lightning_ort.compiler.cache import Timing

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


def agree(key: str, timing: Timing) -> Timing:
    """Publish a timing, or take the one that another process has published.

    Args:
        key: Of the region; the same in all processes.
        timing: What was measured here.

    Returns:
        The timing that was published first.

    """
    store = torch.distributed.PrefixStore("lightning_ort", torch.distributed.distributed_c10d._get_default_store())
    mine = json.dumps(dataclasses.asdict(timing))
    return Timing(**json.loads(store.compare_set(key, "", mine)))
