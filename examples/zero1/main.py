"""Tell malignant from benign tumours, in two processes that keep half of the optimizer's states each."""

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.cli import LightningCLI
from sklearn.datasets import load_breast_cancer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset, random_split
from torchmetrics.classification import BinaryAccuracy


class BreastCancer(LightningDataModule):
    def __init__(self, batch_size: int = 16) -> None:
        super().__init__()
        self.batch_size = batch_size

    def setup(self, stage: str) -> None:
        data, target = load_breast_cancer(return_X_y=True)
        columns = torch.tensor(data, dtype=torch.float32)
        everything = TensorDataset((columns - columns.mean(0)) / columns.std(0), torch.tensor(target).float())
        split = torch.Generator().manual_seed(0)
        self.train_set, self.validation_set = random_split(everything, [0.8, 0.2], split)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.train_set, self.batch_size, shuffle=True, drop_last=True)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.validation_set, self.batch_size)


class TumourClassifier(LightningModule):
    def __init__(self, width: int = 512, depth: int = 3, learning_rate: float = 3e-4) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.learning_rate = learning_rate
        hidden = [layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.LayerNorm(width), nn.GELU())]
        self.network = nn.Sequential(nn.Linear(30, width), nn.GELU(), *hidden, nn.Linear(width, 1), nn.Flatten(0))
        self.accuracy = BinaryAccuracy()

    def forward(self, columns: Tensor) -> Tensor:
        return self.network(columns)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        columns, benign = batch
        loss = F.binary_cross_entropy_with_logits(self(columns), benign)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        columns, benign = batch
        self.accuracy(self(columns), benign.int())
        self.log("val_accuracy", self.accuracy, prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.learning_rate)


if __name__ == "__main__":
    LightningCLI(TumourClassifier, BreastCancer)
