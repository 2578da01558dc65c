"""Lightning strategies, for ``lightning.pytorch`` (for ``pytorch_lightning``: ``lightning_ort.pytorch_lightning``).

- :mod:`~lightning_ort.strategies.capture.steps`: the mixin that captures the steps of a LightningModule
- :mod:`~lightning_ort.strategies.run_report`: the report at the end of a run: log, file, the Trainer's loggers
- :mod:`~lightning_ort.strategies.capture.shims`: what stands in for the module's helpers while a step is captured
- :mod:`~lightning_ort.strategies.capture.dynamo_monitor`: what dynamo did during a step
- :mod:`~lightning_ort.strategies.optimizers`: the optimizers by another implementation
- :mod:`~lightning_ort.strategies.host_memory`: freed memory stays in the process for the next step
- :mod:`~lightning_ort.strategies.auto_device`: lets the Trainer choose the device
- :mod:`~lightning_ort.strategies.single_device`: ``ort``, one CPU or GPU
- :mod:`~lightning_ort.strategies.distributed.shared_timings`: the same placement in every process
- :mod:`~lightning_ort.strategies.distributed.fault_tolerance`: processes that are killed, or asked to end
- :mod:`~lightning_ort.strategies.distributed.relaunch`: the other processes of a run start as the first one did
- :mod:`~lightning_ort.strategies.checkpoints`: checkpoint files that are whole or not there
- :mod:`~lightning_ort.strategies.parallel`: all of these together
- :mod:`~lightning_ort.strategies.ddp`: ``ort_ddp``, one process a device
- :mod:`~lightning_ort.strategies.shard_optimizers`: optimizer states split over the processes
- :mod:`~lightning_ort.strategies.zero`: ``ort_zero1_native``, the same with optimizer states split
- :mod:`~lightning_ort.strategies.deepspeed.mixin`: DeepSpeed's ZeRO stage 1 on CPUs, with plain checkpoints
- :mod:`~lightning_ort.strategies.deepspeed.config`: its configuration beside the Trainer's arguments
- :mod:`~lightning_ort.strategies.deepspeed_strategy`: ``ort_zero1``, with optimizer states split by DeepSpeed
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_ort.strategies.ddp import ORTDDPStrategy
    from lightning_ort.strategies.deepspeed_strategy import ORTZeRO1Strategy
    from lightning_ort.strategies.single_device import ORTStrategy
    from lightning_ort.strategies.zero import ORTNativeZeRO1Strategy

__all__ = ["ORTDDPStrategy", "ORTNativeZeRO1Strategy", "ORTStrategy", "ORTZeRO1Strategy"]

_MODULES = {
    "ORTDDPStrategy": "ddp",
    "ORTNativeZeRO1Strategy": "zero",
    "ORTStrategy": "single_device",
    "ORTZeRO1Strategy": "deepspeed_strategy",
}


def __getattr__(name: str) -> Any:
    # not imported at the top: the other namespace uses the mixins of this package, perhaps without `lightning` installed
    if name in _MODULES:
        return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
