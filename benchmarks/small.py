"""Modules whose steps take a millisecond or two, so that what surrounds their kernels shows.

Named on a command line as those of ``zoo.py``: ``lightning-ort bench benchmarks/small.py:Layers10x64``.
"""

import sys
from pathlib import Path

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent))

from zoo import Classifier


class Layers(Classifier):
    """Equal layers, each with what follows it."""

    width, depth = 64, 10

    def __init__(self) -> None:
        super().__init__()
        layers = (layer for _ in range(self.depth) for layer in (nn.Linear(self.width, self.width), *self.follow()))
        self.net = nn.Sequential(*layers, nn.Linear(self.width, self.classes))

    def follow(self) -> tuple[nn.Module, ...]:
        """Return what follows a layer."""
        return (nn.ReLU(),)

    def forward(self, x: Tensor) -> Tensor:
        """Classify (batch, width)."""
        return self.net(x)

    def samples(self, count: int) -> tuple[Tensor, ...]:
        """Return columns and classes."""
        return torch.randn(count, self.width), self.labels(count)


class Layers3x64(Layers):
    """Three layers of 64 at batch 32."""

    depth = 3


class Layers10x64(Layers):
    """Ten layers of 64 at batch 8."""

    batch = 8


class Layers8x128(Layers):
    """Eight layers of 128 with layer norms at batch 24."""

    batch, width, depth = 24, 128, 8

    def follow(self) -> tuple[nn.Module, ...]:
        """Return what follows a layer."""
        return nn.LayerNorm(self.width), nn.ReLU()


class Layers6x192(Layers):
    """Six layers of 192 with GELU and layer norms at batch 48."""

    batch, width, depth = 48, 192, 6

    def follow(self) -> tuple[nn.Module, ...]:
        """Return what follows a layer."""
        return nn.GELU(), nn.LayerNorm(self.width)


class Layers4x256(Layers):
    """Four layers of 256 at batch 256."""

    batch, width, depth = 256, 256, 4


MODULES = (Layers10x64, Layers8x128, Layers6x192, Layers4x256)
