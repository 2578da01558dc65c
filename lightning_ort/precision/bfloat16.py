"""A module in bfloat16 that learns by small steps: :class:`BFloat16Mixin`, over Lightning's ``HalfPrecision``."""

from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_ort._arguments import check_choice
from lightning_ort.optim.swap import OptimizerSwap

if TYPE_CHECKING:
    from lightning.pytorch.plugins.precision import HalfPrecision as _HalfPrecision
else:
    _HalfPrecision = object


class BFloat16Mixin(_HalfPrecision):
    """``"bf16-true"`` whose Adam or AdamW keeps what rounding takes from the weights.

    A bfloat16 weight of 1 does not change when 0.001 is added to it. So the optimizer runs as
    :class:`~lightning_ort.optim.anyprecision.AnyPrecisionAdamW`, with the rest of each weight in a second bfloat16
    (Kahan summation), which stands for a float32 master weight in half of its memory.

    Args:
        master_weights: Whether to keep the rests; without, this is Lightning's ``"bf16-true"``.

    Raises:
        ValueError: If ``master_weights`` is no boolean; when the fit starts, if an optimizer is neither Adam without
            weight decay nor AdamW.

    """

    def __init__(self, master_weights: bool = True) -> None:
        check_choice("master_weights", master_weights, (True, False))
        super().__init__("bf16-true")
        self.optim = "adamw_anyprecision" if master_weights else None

    @override
    def connect(
        self, model: nn.Module, optimizers: list[Optimizer], lr_schedulers: list[Any]
    ) -> tuple[nn.Module, list[Optimizer], list[Any]]:
        if self.optim is not None and optimizers:  # an ort strategy has done so already
            OptimizerSwap(self.optim).apply(model, optimizers, next(model.parameters()).device)
        return super().connect(model, optimizers, lr_schedulers)
