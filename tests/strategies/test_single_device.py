"""``Trainer(strategy=ORTStrategy(...))`` against the stock strategy, from the same seed."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule, seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_ort import ORTStrategy
from lightning_ort.strategies.capture.capture import obstacle


class Classifier(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 3))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("val_loss", F.cross_entropy(self.net(batch[0]), batch[1]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 1e-2)


def fit(strategy: Any, make_trainer: Callable[..., Any]) -> tuple[Classifier, Any]:
    seed_everything(1, verbose=False)
    module = Classifier()
    inputs, targets = torch.randn(64, 8), torch.randint(0, 3, (64,))
    data = DataLoader(TensorDataset(inputs, targets), batch_size=8)
    trainer = make_trainer(strategy=strategy, max_epochs=2, num_sanity_val_steps=0)
    trainer.fit(module, data, data)
    return module, trainer


def test_fit_equals_stock(make_trainer: Callable[..., Any]) -> None:
    reference, stock = fit("auto", make_trainer)
    module, trainer = fit(ORTStrategy(config={"placement": "always"}), make_trainer)
    assert module.state_dict().keys() == reference.state_dict().keys()
    for name, value in module.state_dict().items():
        torch.testing.assert_close(value, reference.state_dict()[name], rtol=1e-4, atol=1e-6)
    assert trainer.callback_metrics.keys() == stock.callback_metrics.keys()
    for name, value in trainer.callback_metrics.items():
        assert value.item() == pytest.approx(stock.callback_metrics[name].item(), rel=1e-4)
    report = trainer.strategy.report
    assert report.ort_runs > 0 or obstacle()
    assert not report.fallbacks
    assert report.to_dict()["ort_runs"] == report.ort_runs
    assert "training_step/step" in report.to_text() or obstacle()
