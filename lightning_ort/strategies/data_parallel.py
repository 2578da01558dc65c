"""What all strategies with several processes have in common: :class:`DataParallelMixin`."""

from lightning_ort.strategies.agreed_placement import AgreedPlacementMixin
from lightning_ort.strategies.atomic_checkpoints import AtomicCheckpointsMixin
from lightning_ort.strategies.compile_steps import CompiledStepsMixin
from lightning_ort.strategies.faults import FaultsMixin
from lightning_ort.strategies.host_memory import HostMemoryMixin
from lightning_ort.strategies.start_again import StartAgainMixin
from lightning_ort.strategies.swap_optimizers import SwapOptimizersMixin


class DataParallelMixin(
    StartAgainMixin,
    FaultsMixin,
    HostMemoryMixin,
    AtomicCheckpointsMixin,
    AgreedPlacementMixin,
    SwapOptimizersMixin,
    CompiledStepsMixin,
):
    """Compiled steps, placed alike in all processes, with swapped optimizers and without half checkpoints."""
