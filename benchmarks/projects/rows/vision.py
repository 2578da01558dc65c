"""Pictures: self-supervised learning with lightly, classifiers of timm."""

import copy
from typing import Any

import lightning.pytorch as pl
import timm
import torch
import torchvision
from lightly.loss import NegativeCosineSimilarity, NTXentLoss
from lightly.models.modules import BYOLPredictionHead, BYOLProjectionHead, SimCLRProjectionHead
from lightly.models.utils import deactivate_requires_grad, update_momentum
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

CLASSES = 10


def _backbone() -> nn.Module:
    return nn.Sequential(*list(torchvision.models.resnet18().children())[:-1])


class SimCLR(pl.LightningModule):
    """lightly's example."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = _backbone()
        self.head = SimCLRProjectionHead(512, 512, 128)
        self.criterion = NTXentLoss()

    def forward(self, x: Tensor) -> Tensor:
        """Return the projections of pictures."""
        return self.head(self.backbone(x).flatten(start_dim=1))

    def training_step(self, batch: list[Tensor], _index: int) -> Tensor:
        """Return the contrastive loss of two views."""
        loss = self.criterion(self(batch[0]), self(batch[1]))
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return SGD."""
        return torch.optim.SGD(self.parameters(), lr=0.01)


class BYOL(pl.LightningModule):
    """lightly's example."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = _backbone()
        self.projection = BYOLProjectionHead(512, 1024, 256)
        self.prediction = BYOLPredictionHead(256, 1024, 256)
        self.backbone_momentum = copy.deepcopy(self.backbone)
        self.projection_momentum = copy.deepcopy(self.projection)
        deactivate_requires_grad(self.backbone_momentum)
        deactivate_requires_grad(self.projection_momentum)
        self.criterion = NegativeCosineSimilarity()

    def forward(self, x: Tensor) -> Tensor:
        """Return what the network predicts of its slower copy."""
        return self.prediction(self.projection(self.backbone(x).flatten(start_dim=1)))

    def forward_momentum(self, x: Tensor) -> Tensor:
        """Return the projections of the slower copy."""
        return self.projection_momentum(self.backbone_momentum(x).flatten(start_dim=1)).detach()

    def training_step(self, batch: list[Tensor], _index: int) -> Tensor:
        """Return the symmetric loss of two views."""
        update_momentum(self.backbone, self.backbone_momentum, m=0.99)
        update_momentum(self.projection, self.projection_momentum, m=0.99)
        first, second = batch
        loss = 0.5 * (
            self.criterion(self(first), self.forward_momentum(second))
            + self.criterion(self(second), self.forward_momentum(first))
        )
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return SGD."""
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Classifier(pl.LightningModule):
    """A network of timm with a cross entropy.

    Args:
        name: Of the network.
        sizes: Arguments of the network.
    """

    def __init__(self, name: str, **sizes: Any) -> None:
        super().__init__()
        self.network = timm.create_model(name, num_classes=CLASSES, **sizes)

    def training_step(self, batch: list[Tensor], _index: int) -> Tensor:
        """Return the loss, and log the accuracy."""
        logits = self.network(batch[0])
        loss = functional.cross_entropy(logits, batch[1])
        self.log_dict({"loss": loss, "accuracy": (logits.argmax(1) == batch[1]).float().mean()})
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


def _fit(model: pl.LightningModule, second: Tensor, steps: int, trainer: dict[str, Any]) -> None:
    pictures = torch.randn(128, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    loader = DataLoader(TensorDataset(pictures, second), batch_size=16, shuffle=True)
    pl.Trainer(max_steps=steps, max_epochs=-1, log_every_n_steps=5, **trainer).fit(model, loader)


def _view() -> Tensor:
    return torch.randn(128, 3, 32, 32, generator=torch.Generator().manual_seed(1))


def _labels() -> Tensor:
    return torch.arange(128) % CLASSES


def simclr(steps: int, **trainer: Any) -> None:
    """Contrastive learning of two views."""
    _fit(SimCLR(), _view(), steps, trainer)


def byol(steps: int, **trainer: Any) -> None:
    """Prediction of a slower copy of the network."""
    _fit(BYOL(), _view(), steps, trainer)


def resnet(steps: int, **trainer: Any) -> None:
    """A residual network."""
    _fit(Classifier("resnet18"), _labels(), steps, trainer)


def vit(steps: int, **trainer: Any) -> None:
    """A small vision transformer."""
    sizes = {"img_size": 32, "patch_size": 4, "embed_dim": 192, "depth": 6, "num_heads": 3, "drop_rate": 0.1}
    _fit(Classifier("vit_tiny_patch16_224", **sizes), _labels(), steps, trainer)


def convnext(steps: int, **trainer: Any) -> None:
    """A convolutional network in the manner of a transformer."""
    _fit(Classifier("convnext_atto", drop_path_rate=0.1), _labels(), steps, trainer)
