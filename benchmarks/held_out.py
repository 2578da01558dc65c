"""Six more kinds of modules, beside those of ``zoo.py``, which nothing was tuned to.

Named alike on a command line: ``lightning-ort bench benchmarks/held_out.py:Mixer``.
"""

import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent))

from zoo import Classifier, Zoo


class FTTransformer(Classifier):
    """Tabular data: each of 24 columns is a token of 64, three layers of attention (arXiv:2106.11959)."""

    batch = 64

    def __init__(self, columns: int = 24, width: int = 64) -> None:
        super().__init__()
        self.columns = columns
        self.weight = nn.Parameter(torch.randn(columns, width) * 0.1)
        self.bias = nn.Parameter(torch.zeros(columns, width))
        self.first = nn.Parameter(torch.zeros(1, 1, width))
        layer = nn.TransformerEncoderLayer(width, 4, 128, activation="gelu", batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.head = nn.Linear(width, self.classes)

    def forward(self, x: Tensor) -> Tensor:
        """Classify (batch, columns)."""
        tokens = x.unsqueeze(-1) * self.weight + self.bias
        return self.head(self.encoder(torch.cat([self.first.expand(len(x), -1, -1), tokens], 1))[:, 0])

    def samples(self, count: int) -> tuple[Tensor, ...]:
        """Return columns and classes."""
        return torch.randn(count, self.columns), self.labels(count)


class Mixer(Classifier):
    """An MLP-Mixer: 32 x 32 images in patches of 4, four layers of 128 (arXiv:2105.01601)."""

    def __init__(self, width: int = 128, depth: int = 4) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, stride=4)
        self.tokens = nn.ModuleList(self._mlp(64, 128) for _ in range(depth))
        self.channels = nn.ModuleList(self._mlp(width, 4 * width) for _ in range(depth))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2 * depth))
        self.head = nn.Linear(width, self.classes)

    @staticmethod
    def _mlp(width: int, hidden: int) -> nn.Module:
        return nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))

    def forward(self, x: Tensor) -> Tensor:
        """Classify (batch, 3, 32, 32)."""
        x = self.patches(x).flatten(2).mT
        for index, (tokens, channels) in enumerate(zip(self.tokens, self.channels, strict=True)):
            x = x + tokens(self.norms[2 * index](x).mT).mT
            x = x + channels(self.norms[2 * index + 1](x))
        return self.head(x.mean(1))

    def samples(self, count: int) -> tuple[Tensor, ...]:
        """Return images and classes."""
        return torch.randn(count, 3, 32, 32), self.labels(count)


class ResNet(Classifier):
    """ResNet-18's blocks at a quarter of its width on 32 x 32 images (arXiv:1512.03385)."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = self._convolution(3, 16, 1)
        widths = [(16, 16, 1), (16, 32, 2), (32, 64, 2), (64, 128, 2)]
        self.first = nn.ModuleList(self._convolution(given, made, stride) for given, made, stride in widths)
        self.second = nn.ModuleList(self._convolution(made, made, 1) for _, made, _ in widths)
        self.skips = nn.ModuleList(nn.Conv2d(given, made, 1, stride) for given, made, stride in widths)
        self.head = nn.Linear(128, self.classes)

    @staticmethod
    def _convolution(given: int, made: int, stride: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(given, made, 3, stride, 1, bias=False), nn.BatchNorm2d(made))

    def forward(self, x: Tensor) -> Tensor:
        """Classify (batch, 3, 32, 32)."""
        x = self.stem(x).relu()
        for first, second, skip in zip(self.first, self.second, self.skips, strict=True):
            x = (second(first(x).relu()) + skip(x)).relu()
        return self.head(x.mean((2, 3)))

    def samples(self, count: int) -> tuple[Tensor, ...]:
        """Return images and classes."""
        return torch.randn(count, 3, 32, 32), self.labels(count)


class Tagger(Classifier):
    """A bidirectional GRU that gives each of 48 words a class."""

    classes = 12

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(2000, 64)
        self.gru = nn.GRU(64, 64, batch_first=True, bidirectional=True)
        self.head = nn.Linear(128, self.classes)

    def forward(self, words: Tensor) -> Tensor:
        """Return (batch, classes, length) for (batch, length)."""
        return self.head(self.gru(self.words(words))[0]).mT

    def samples(self, count: int) -> tuple[Tensor, ...]:
        """Return words and their classes."""
        return torch.randint(2000, (count, 48)), torch.randint(self.classes, (count, 48))


class VAE(Zoo):
    """A variational autoencoder of 28 x 28 images: 784-400-20 (arXiv:1312.6114)."""

    batch = 128

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(784, 400), nn.ReLU(), nn.Linear(400, 40))
        self.decoder = nn.Sequential(nn.Linear(20, 400), nn.ReLU(), nn.Linear(400, 784))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return the loss."""
        mean, log_variance = self.encoder(batch[0]).chunk(2, 1)
        made = self.decoder(mean + torch.randn_like(mean) * (log_variance / 2).exp())
        difference = F.binary_cross_entropy_with_logits(made, batch[0], reduction="sum")
        divergence = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum()
        loss = (difference + divergence) / len(mean)
        self.log("train_loss", loss)
        return loss

    def samples(self, count: int) -> tuple[Tensor, ...]:
        """Return flat images."""
        return (torch.rand(count, 784),)


class Llama(Classifier):
    """Llama's architecture with random weights: four layers of 256, grouped queries, 64 tokens."""

    batch = 4

    def __init__(self, length: int = 64) -> None:
        super().__init__()
        from transformers import LlamaConfig, LlamaForCausalLM

        sizes = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 8, "intermediate_size": 688}
        config = LlamaConfig(**sizes, num_key_value_heads=4, vocab_size=4000, use_cache=False)
        self.length = length
        self.model = LlamaForCausalLM(config).train()

    def forward(self, tokens: Tensor) -> Tensor:
        """Return (batch, vocabulary, length) for (batch, length)."""
        return self.model(input_ids=tokens, use_cache=False).logits.mT

    def samples(self, count: int) -> tuple[Tensor, ...]:
        """Return tokens and those one further on."""
        tokens = torch.randint(4000, (count, self.length + 1))
        return tokens[:, :-1], tokens[:, 1:]


MODULES = (FTTransformer, Mixer, ResNet, Tagger, VAE, Llama)
