"""What all strategies with several processes have in common: :class:`DataParallelMixin`."""

import inspect
from collections.abc import Iterable

from torch.nn.parallel import DistributedDataParallel

from lightning_ort._arguments import check_keywords
from lightning_ort.strategies.capture.steps import CompiledStepsMixin
from lightning_ort.strategies.checkpoints import AtomicCheckpointsMixin
from lightning_ort.strategies.distributed.fault_tolerance import FaultsMixin
from lightning_ort.strategies.distributed.relaunch import RelaunchMixin
from lightning_ort.strategies.distributed.shared_timings import SharedTimingsMixin
from lightning_ort.strategies.host_memory import HostMemoryMixin
from lightning_ort.strategies.optimizers import SwapOptimizersMixin


class DataParallelMixin(
    RelaunchMixin,
    FaultsMixin,
    HostMemoryMixin,
    AtomicCheckpointsMixin,
    SharedTimingsMixin,
    SwapOptimizersMixin,
    CompiledStepsMixin,
):
    """Compiled steps, placed alike in all processes, with swapped optimizers and without half checkpoints."""


def check_ddp_keywords(strategy: type, stock: type, given: Iterable[str]) -> None:
    """Refuse a keyword argument that is neither Lightning's nor torch's, which would be met when the module is wrapped.

    Args:
        strategy: Whose argument it is.
        stock: Lightning's ``DDPStrategy``.
        given: The names.

    Raises:
        TypeError: With the closest one.

    """
    own = inspect.signature(strategy.__init__).parameters  # type: ignore[misc]
    kinds = (stock, DistributedDataParallel)
    theirs = [name for kind in kinds for name in inspect.signature(kind.__init__).parameters]  # type: ignore[misc]
    allowed = [name for name in dict.fromkeys([*own, *theirs]) if name not in ("self", "kwargs", "module")]
    check_keywords(strategy.__name__, given, allowed)
