"""The modules that the benchmarks train: ordinary LightningModules on data of the right shapes, drawn once.

Each is named as ``benchmarks/zoo.py:NAME`` on a command line: ``lightning-ort bench benchmarks/zoo.py:GPT``.
"""

import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

sys.path.insert(0, str(Path(__file__).parent.parent / "examples" / "language_model"))

from model import GPT as LanguageModel

BATCHES = 16  # the data is these, again and again


class Zoo(LightningModule):
    """What the modules share: AdamW, and the batches that :meth:`samples` draws."""

    batch = 32

    def samples(self, count: int) -> tuple[Tensor, ...]:
        """Return inputs and targets of this many samples."""
        raise NotImplementedError

    def train_dataloader(self) -> DataLoader:
        """Return the batches."""
        return DataLoader(TensorDataset(*self.samples(self.batch * BATCHES)), batch_size=self.batch)

    def configure_optimizers(self) -> Any:
        """Return AdamW with its defaults."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Classifier(Zoo):
    """Gives ``forward`` a batch and compares with class indices."""

    classes = 10

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return the loss."""
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.log("train_loss", loss)
        return loss

    def labels(self, count: int) -> Tensor:
        """Return class indices."""
        return torch.randint(self.classes, (count,))


class MLP(Classifier):
    """Tabular data: 64 columns, four layers of 256."""

    batch = 128

    def __init__(self) -> None:
        super().__init__()
        widths = (64, 256, 256, 256, 256)
        layers = (
            layer
            for given, made in zip(widths, widths[1:], strict=False)
            for layer in (nn.Linear(given, made), nn.LayerNorm(made), nn.GELU(), nn.Dropout(0.1))
        )
        self.net = nn.Sequential(*layers, nn.Linear(256, self.classes))

    def forward(self, x: Tensor) -> Tensor:
        """Classify (batch, 64)."""
        return self.net(x)

    def samples(self, count: int) -> tuple[Tensor, ...]:
        """Return columns and classes."""
        return torch.randn(count, 64), self.labels(count)


class Autoencoder(Zoo):
    """28 x 28 images through 32 numbers."""

    batch = 64

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 32), nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 784)
        )

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return the loss."""
        loss = F.mse_loss(self.net(batch[0]), batch[0])
        self.log("train_loss", loss)
        return loss

    def samples(self, count: int) -> tuple[Tensor, ...]:
        """Return flat images."""
        return (torch.rand(count, 784),)


class CNN(Classifier):
    """A small residual network with batch norm on 32 x 32 images."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = self._block(3, 32, 1)
        self.blocks = nn.ModuleList([self._block(32, 32, 1), self._block(32, 64, 2), self._block(64, 64, 1)])
        self.head = nn.Linear(64, self.classes)

    @staticmethod
    def _block(given: int, made: int, stride: int) -> nn.Module:
        convolution = nn.Conv2d(given, made, 3, stride=stride, padding=1, bias=False)
        return nn.Sequential(convolution, nn.BatchNorm2d(made), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        """Classify (batch, 3, 32, 32)."""
        x = self.stem(x)
        for block in self.blocks:
            made = block(x)
            x = x + made if made.shape == x.shape else made
        return self.head(x.mean((2, 3)))

    def samples(self, count: int) -> tuple[Tensor, ...]:
        """Return images and classes."""
        return torch.randn(count, 3, 32, 32), self.labels(count)


class LSTM(Classifier):
    """Two layers over 32 steps."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(32, 64, num_layers=2, batch_first=True)
        self.head = nn.Linear(64, self.classes)

    def forward(self, x: Tensor) -> Tensor:
        """Classify (batch, 32, 32)."""
        return self.head(self.lstm(x)[0][:, -1])

    def samples(self, count: int) -> tuple[Tensor, ...]:
        """Return sequences and classes."""
        return torch.randn(count, 32, 32), self.labels(count)


class GPT(LanguageModel):
    """The language model of the examples, four layers of 256 on 4,000 tokens."""

    def __init__(self, batch: int = 8, context: int = 128, vocabulary_size: int = 4000) -> None:
        super().__init__(vocabulary_size=vocabulary_size, context=context, width=256, depth=4, heads=8)
        self.batch, self.context, self.vocabulary_size = batch, context, vocabulary_size

    def train_dataloader(self) -> DataLoader:
        """Return windows of tokens, and the same one token further on."""
        tokens = torch.randint(self.vocabulary_size, (self.batch * BATCHES, self.context + 1))
        return DataLoader(TensorDataset(tokens[:, :-1], tokens[:, 1:]), batch_size=self.batch)


class SmallGPT(GPT):
    """The same with one window of 64 tokens a step, where Python's share is largest."""

    def __init__(self) -> None:
        super().__init__(batch=1, context=64)


class BERT(Classifier):
    """Fine-tuning at the sizes of MiniLM-L6: six layers of 384."""

    batch = 8
    classes = 2

    def __init__(self, length: int = 64) -> None:
        super().__init__()
        from transformers import BertConfig, BertForSequenceClassification

        sizes = {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536}
        config = BertConfig(**sizes, num_labels=self.classes)
        self.length = length
        self.bert = BertForSequenceClassification(config).train()

    def forward(self, tokens: Tensor) -> Tensor:
        """Classify (batch, length)."""
        return self.bert(input_ids=tokens, attention_mask=torch.ones_like(tokens)).logits

    def samples(self, count: int) -> tuple[Tensor, ...]:
        """Return tokens and classes."""
        return torch.randint(1000, 30000, (count, self.length)), self.labels(count)


class ViT(Classifier):
    """A tiny vision transformer: 64 x 64 images in patches of 8."""

    batch = 16

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 192, 8, stride=8)
        self.positions = nn.Parameter(torch.zeros(64, 192))
        layer = nn.TransformerEncoderLayer(192, 3, 768, activation="gelu", batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)
        self.head = nn.Linear(192, self.classes)

    def forward(self, x: Tensor) -> Tensor:
        """Classify (batch, 3, 64, 64)."""
        return self.head(self.encoder(self.patches(x).flatten(2).mT + self.positions).mean(1))

    def samples(self, count: int) -> tuple[Tensor, ...]:
        """Return images and classes."""
        return torch.randn(count, 3, 64, 64), self.labels(count)


class UNet(Zoo):
    """A small UNet with group norm that denoises 32 x 32 images."""

    batch = 8

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([self._block(3, 32), self._block(32, 64)])
        self.middle = self._block(64, 64)
        self.up = nn.ModuleList([self._block(128, 32), self._block(64, 32)])
        self.out = nn.Conv2d(32, 3, 1)

    @staticmethod
    def _block(given: int, made: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(given, made, 3, padding=1), nn.GroupNorm(8, made), nn.SiLU())

    def forward(self, x: Tensor) -> Tensor:
        """Denoise (batch, 3, 32, 32)."""
        kept = []
        for block in self.down:
            x = block(x)
            kept.append(x)
            x = F.max_pool2d(x, 2)
        x = self.middle(x)
        for block in self.up:
            x = block(torch.cat([F.interpolate(x, scale_factor=2.0), kept.pop()], 1))
        return self.out(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return the loss."""
        noise = torch.randn_like(batch[0])
        loss = F.mse_loss(self(batch[0] + noise), noise)
        self.log("train_loss", loss)
        return loss

    def samples(self, count: int) -> tuple[Tensor, ...]:
        """Return images."""
        return (torch.randn(count, 3, 32, 32),)


MODULES = (MLP, Autoencoder, CNN, LSTM, GPT, SmallGPT, BERT, ViT, UNet)
