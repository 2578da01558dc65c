"""The LightningModule that the tests of this folder vary: two layers, data from a seed."""

from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule, seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


def loader(samples: int = 32, batch_size: int = 8, features: int = 8) -> DataLoader:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(samples, features, generator=generator)
    y = torch.randint(0, 3, (samples,), generator=generator)
    return DataLoader(TensorDataset(x, y), batch_size=batch_size)


def batches(*shapes: tuple[int, ...]) -> DataLoader:
    """Batches of these shapes."""
    generator = torch.Generator().manual_seed(1)
    return DataLoader([torch.randn(shape, generator=generator) for shape in shapes], batch_size=None)


class Small(LightningModule):
    """Trains a classifier, and keeps the losses as the Trainer saw them."""

    def __init__(self) -> None:
        super().__init__()
        seed_everything(0, verbose=False)
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))
        self.losses: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return F.mse_loss(self(x), F.one_hot(y, 3).to(x.dtype))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("loss", loss, on_epoch=True)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if loss is not None:
            self.losses.append(loss.item())

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch))

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self) -> DataLoader:
        return loader()

    def val_dataloader(self) -> DataLoader:
        return loader(16)

    def test_dataloader(self) -> DataLoader:
        return loader(16)

    def predict_dataloader(self) -> DataLoader:
        return loader(16)


class Appends(Small):
    """Compiles again each step: dynamo guards on the length of the list."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.kept.append(loss.detach())
        return loss


# not in a test's file, where pytest rewrites each `assert`


def asserts(module: Any, p: Tensor, y: Tensor) -> None:
    assert (y <= 1).all(), "a label is too large"


def asserts_in_silence(module: Any, p: Tensor, y: Tensor) -> None:
    assert (y <= 1).all()
