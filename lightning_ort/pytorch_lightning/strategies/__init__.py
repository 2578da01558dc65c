"""Lightning strategies for ``pytorch_lightning``; the work is done by the mixins of :mod:`lightning_ort.strategies`."""

from lightning_ort.pytorch_lightning.strategies.ddp import ORTDDPStrategy
from lightning_ort.pytorch_lightning.strategies.deepspeed import ORTZeRO1Strategy
from lightning_ort.pytorch_lightning.strategies.single_device import ORTStrategy
from lightning_ort.pytorch_lightning.strategies.zero import ORTNativeZeRO1Strategy

__all__ = ["ORTDDPStrategy", "ORTNativeZeRO1Strategy", "ORTStrategy", "ORTZeRO1Strategy"]
