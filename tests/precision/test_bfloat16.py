"""``ORTBFloat16Precision``: bfloat16 weights go where float32 ones go."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins.precision import HalfPrecision
from torch.utils.data import DataLoader, TensorDataset

from lightning_ort import ORTBFloat16Precision, ORTStrategy
from lightning_ort.optim.anyprecision import AnyPrecisionAdamW
from lightning_ort.strategies.capture.capture import obstacle


class SmallSteps(LightningModule):
    """Goes down a slope by steps of a thousandth, which a bfloat16 near 1 cannot."""

    def __init__(self, cls: Any = torch.optim.AdamW) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((4, 4), 1.0))
        self.cls = cls

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return (batch[0] @ self.weight).float().mean()

    def configure_optimizers(self) -> Any:
        return self.cls(self.parameters(), lr=1e-3)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(TensorDataset(torch.ones(100, 4)), batch_size=1)


def weight(plugin: Any, make_trainer: Callable[..., Any], strategy: Any = "auto") -> tuple[float, Any]:
    module = SmallSteps()
    trainer = make_trainer(strategy=strategy, plugins=[plugin] if plugin else None, max_epochs=1)
    trainer.fit(module)
    return module.weight.float().mean().item(), trainer


@pytest.mark.parametrize("name", ["stock", "ort"])
def test_small_steps_count(name: str, make_trainer: Callable[..., Any]) -> None:
    exact, _ = weight(None, make_trainer)
    rounded, _ = weight(HalfPrecision("bf16-true"), make_trainer)
    assert rounded == 1.0
    strategy = "auto" if name == "stock" else ORTStrategy(config={"placement": "always"})
    ours, trainer = weight(ORTBFloat16Precision(), make_trainer, strategy)
    assert ours == pytest.approx(exact, abs=2**-8)
    assert isinstance(trainer.optimizers[0], AnyPrecisionAdamW)
    if name == "ort":
        assert trainer.strategy.report.graphs or obstacle()
        assert "AnyPrecisionAdamW" in str(trainer.strategy.report.optimizers[0])


def test_without_master_weights_it_is_stock(make_trainer: Callable[..., Any]) -> None:
    rounded, trainer = weight(ORTBFloat16Precision(master_weights=False), make_trainer, ORTStrategy())
    assert rounded == 1.0
    assert type(trainer.optimizers[0]) is torch.optim.AdamW


def test_another_choice_of_the_optimizer_is_an_error(make_trainer: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match="master_weights=False"):
        weight(ORTBFloat16Precision(), make_trainer, ORTStrategy(optim="adamw_torch_fused"))


def test_another_algorithm_is_an_error(make_trainer: Callable[..., Any]) -> None:
    trainer = make_trainer(strategy="ort", plugins=[ORTBFloat16Precision()], max_epochs=1)
    with pytest.raises(ValueError, match="cannot replace"):
        trainer.fit(SmallSteps(torch.optim.SGD))
