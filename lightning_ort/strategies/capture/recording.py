"""Whether a run can record its training step: :func:`recorder_of`."""

from typing import TYPE_CHECKING

from lightning_ort.compiler.engines import ENGINES
from lightning_ort.compiler.machine import recorder
from lightning_ort.compiler.machine.recorder import Recorder

if TYPE_CHECKING:
    from lightning.pytorch.strategies import Strategy


def recorder_of(strategy: "Strategy") -> Recorder:
    """Return what records on a strategy's device.

    Raises:
        ValueError: If nothing can be recorded there.
    """
    device, given = strategy.root_device, "DebugSettings(record_step=True)"
    if (found := recorder.recorder_for(device)) is None:
        raise ValueError(f"{given} records CUDA graphs, which {device} has not. Train on a GPU, or leave it out.")
    if strategy.model is not strategy.lightning_module or getattr(strategy, "world_size", 1) > 1:
        raise ValueError(f"{given} is for one process: {type(strategy).__name__} takes part in backward passes.")
    if strategy.precision_plugin.precision == "16-mixed":
        raise ValueError(f"{given}: 16-mixed scales the loss by a number that varies. Use 'bf16-mixed'.")
    if obstacle := ENGINES["inductor"].obstacle(device.type == "cuda"):
        raise ValueError(f"{given} needs inductor: {obstacle}.")
    return found
