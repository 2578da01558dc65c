"""bfloat16 weights that learn from small updates: :class:`BFloat16Mixin`, over Lightning's ``HalfPrecision``."""

from typing import Any

from torch import nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_ort._arguments import check_choice
from lightning_ort.compat import lightning_bases
from lightning_ort.optim.swap import OptimizerSwap


class BFloat16Mixin(lightning_bases.HalfPrecision):
    """``"bf16-true"`` whose Adam or AdamW keeps the rounding errors of the weights.

    A bfloat16 weight of 1 does not change when 0.001 is added to it. So the optimizer runs as
    :class:`~lightning_ort.optim.anyprecision.AnyPrecisionAdamW`, with the rounding error of each weight in a second
    bfloat16 (Kahan summation). That serves like a float32 master weight, with half of its memory.

    Args:
        master_weights: Whether to keep the rounding errors. If not, this is Lightning's ``"bf16-true"``.

    Raises:
        ValueError: If ``master_weights`` is not a boolean; when the fit starts, if an optimizer is neither Adam without
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
