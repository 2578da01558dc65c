"""Faster float32 matrix products with less precision: :class:`MatmulPrecisionMixin`, over Lightning's ``Precision``."""

from typing import Any, Literal, get_args

import torch
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_ort._arguments import check_choice, names_its_arguments
from lightning_ort.compat import lightning_bases
from lightning_ort.compat.torch import float32_matmul_precision, set_float32_matmul_precision

Level = Literal["highest", "high", "medium"]


@names_its_arguments
class MatmulPrecisionMixin(lightning_bases.Precision):
    """Computes float32 matrix products with fewer bits during a run.

    It sets ``torch.set_float32_matmul_precision``. On CUDA ``"high"`` and ``"medium"`` are TensorFloat-32, which the
    ORT CUDA provider uses too. On CPUs ``"medium"`` is bfloat16 if the CPU has instructions for it, and ``"high"``
    changes nothing. If a level has no effect, which is tested with a product, a warning says so.

    Args:
        level: ``"highest"``, ``"high"`` or ``"medium"``.

    Raises:
        ValueError: If the level is another one.
    """

    precision = "32-true"

    def __init__(self, level: Level = "high") -> None:
        check_choice("level", level, get_args(Level))
        self.level = level
        self._before: str | None = None

    @override
    def connect(
        self, model: nn.Module, optimizers: list[Optimizer], lr_schedulers: list[Any]
    ) -> tuple[nn.Module, list[Optimizer], list[Any]]:
        if self._before is None:
            device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
            self._before = float32_matmul_precision()
            torch.set_float32_matmul_precision("highest")
            exact = _product(device)
            torch.set_float32_matmul_precision(self.level)
            if self.level != "highest" and torch.equal(exact, _product(device)):
                rank_zero_warn(
                    f"Matmul precision {self.level!r} has no effect on this {device.type}: float32 products have the"
                    f" same bits as before. {_advice(device, self.level)}"
                )
            else:
                rank_zero_info(f"lightning-ort: float32 matrix products have precision {self.level!r}")
        return super().connect(model, optimizers, lr_schedulers)

    @override
    def teardown(self) -> None:
        if self._before is not None:
            set_float32_matmul_precision(self._before)
            self._before = None
        super().teardown()


def _product(device: torch.device) -> Tensor:
    values = torch.linspace(-1, 1, 512 * 512, device=device).view(512, 512)  # large enough for the faster kernels
    return values @ values


def _advice(device: torch.device, level: str) -> str:
    if device.type != "cpu":
        return "TensorFloat-32 needs an Ampere GPU or a later one."
    if level == "high":
        return "CPUs support only 'medium', with bfloat16 instructions (AVX512-BF16 or AMX)."
    return "This CPU has no bfloat16 instructions (AVX512-BF16 or AMX)."
