"""Modules for ``lightning-ort bench``, as a user's file has them."""

import os
import signal
from typing import Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Small(LightningModule):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)

    def train_dataloader(self) -> Any:
        return Data(self.net[0].in_features).train_dataloader()


class WithoutData(Small):
    train_dataloader = LightningModule.train_dataloader


class Data(LightningDataModule):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.width = width

    def train_dataloader(self) -> Any:
        return DataLoader(TensorDataset(torch.randn(16, self.width)), batch_size=4, shuffle=True)


class Dies(Small):
    def on_train_start(self) -> None:
        os._exit(7)


class IsKilled(Small):
    def on_train_start(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


class StopsItself(Small):
    def on_train_batch_end(self, *args: Any) -> None:
        self.trainer.should_stop = True
