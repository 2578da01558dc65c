"""Classify scikit-learn's handwritten digits with an MLP and a CNN under ``strategy="ort"``."""

import argparse
import warnings

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningDataModule, LightningModule, Trainer, seed_everything
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset, random_split
from torchmetrics.classification import MulticlassAccuracy

import lightning_ort


class Digits(LightningDataModule):
    def __init__(self, batch_size: int = 64) -> None:
        super().__init__()
        self.batch_size = batch_size

    def setup(self, stage: str) -> None:
        digits = load_digits()
        images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
        everything = TensorDataset(images, torch.tensor(digits.target))
        split = torch.Generator().manual_seed(0)
        self.train_set, self.test_set = random_split(everything, [0.8, 0.2], split)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.train_set, self.batch_size, shuffle=True)

    def test_dataloader(self) -> DataLoader:
        return DataLoader(self.test_set, self.batch_size)


class Classifier(LightningModule):
    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network
        self.accuracy = MulticlassAccuracy(10, average="micro")
        self.example_input_array = torch.linspace(0, 1, 64).view(1, 1, 8, 8)

    def forward(self, images: Tensor) -> Tensor:
        return self.network(images)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        loss = F.cross_entropy(self(images), labels)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        images, labels = batch
        self.accuracy(self(images), labels)
        self.log("test_accuracy", self.accuracy)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=2e-3)


class MLP(Classifier):
    def __init__(self, width: int = 128) -> None:
        layers = [nn.Linear(64, width), nn.ReLU(), nn.Dropout(0.1), nn.Linear(width, width), nn.ReLU()]
        super().__init__(nn.Sequential(nn.Flatten(), *layers, nn.Linear(width, 10)))


class CNN(Classifier):
    def __init__(self, width: int = 32) -> None:
        first = [nn.Conv2d(1, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(2)]
        second = [nn.Conv2d(width, 2 * width, 3, padding=1), nn.BatchNorm2d(2 * width), nn.ReLU()]
        super().__init__(
            nn.Sequential(*first, *second, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2 * width, 10))
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--placement", choices=("measured", "always"), default="measured")
    args = parser.parse_args()
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")

    for network in (MLP, CNN):
        seed_everything(0, verbose=False)
        strategy = lightning_ort.ORTStrategy(config=lightning_ort.ORTConfig(placement=args.placement, start="now"))
        trainer = Trainer(
            strategy=strategy,
            accelerator="cpu",
            max_epochs=args.epochs,
            log_every_n_steps=10,
            logger=False,
            enable_checkpointing=False,
            enable_model_summary=False,
        )
        module, data = network(), Digits()
        trainer.fit(module, data)
        (result,) = trainer.test(module, data, verbose=False)
        print(f"\n{network.__name__}: test accuracy {result['test_accuracy']:.1%}")
        print(strategy.report.to_text())


if __name__ == "__main__":
    main()
