"""Modules whose steps take a millisecond or two, so that what surrounds their kernels shows.

Layers in many depths and widths, and five everyday modules for ``by_hand.py``, which log their loss to the bar.

Named on a command line as those of ``zoo.py``: ``lightning-ort bench benchmarks/small.py:Layers10x64``.
"""

import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

sys.path.insert(0, str(Path(__file__).parent))

from zoo import Classifier, Zoo


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


class Everyday(Zoo):
    """Logs its loss to the bar; :meth:`loss` alone is what a loop written by hand calls."""

    examples = 3200

    def loss(self, batch: Any) -> Tensor:
        """Return the loss."""
        return F.cross_entropy(self(batch[0]), batch[1])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return the loss, and log it."""
        loss = self.loss(batch)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def train_dataloader(self) -> Any:
        """Return batches of a ``TensorDataset``."""
        return DataLoader(TensorDataset(*self.samples(self.examples)), batch_size=self.batch, shuffle=True)


class Columns(Everyday):
    """An MLP of three layers of 64."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    def forward(self, x: Tensor) -> Tensor:
        """Classify (batch, 64)."""
        return self.net(x)

    def samples(self, count: int) -> tuple[Tensor, ...]:
        """Return columns and classes."""
        return torch.randn(count, 64), torch.randint(10, (count,))


class DigitsCNN(Everyday):
    """Two convolutions on images of 8 x 8."""

    examples = 1797

    def __init__(self) -> None:
        super().__init__()
        convolutions = [nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 16, 3, padding=1)]
        self.net = nn.Sequential(*convolutions, nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(64, 10))

    def forward(self, x: Tensor) -> Tensor:
        """Classify (batch, 1, 8, 8)."""
        return self.net(x)

    def samples(self, count: int) -> tuple[Tensor, ...]:
        """Return scikit-learn's digits."""
        from sklearn.datasets import load_digits

        data = load_digits()
        return torch.tensor(data.images[:count], dtype=torch.float32)[:, None] / 16, torch.tensor(data.target[:count])


class GCN(Everyday):
    """Two graph convolutions over all nodes of a graph, which is the only batch."""

    nodes, edges = 300, 1500

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(32, 16), nn.Linear(16, 7)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        """Classify (nodes, 32) with edges (2, edges)."""
        for number, layer in enumerate((self.first, self.second)):
            made = layer(x)
            x = torch.zeros_like(made).index_add(0, edges[1], made[edges[0]]) + made
            x = x if number else F.dropout(x.relu(), 0.5, self.training)
        return x

    def loss(self, batch: Any) -> Tensor:
        """Return the loss of all nodes."""
        x, edges, y = batch
        return F.cross_entropy(self(x, edges), y)

    def train_dataloader(self) -> Any:
        """Return the graph, a hundred times an epoch."""
        graph = torch.randn(self.nodes, 32), torch.randint(self.nodes, (2, self.edges)), torch.randint(7, (self.nodes,))
        return DataLoader([graph] * 100, batch_size=None)  # type: ignore[arg-type]


class ShortLSTM(Everyday):
    """One layer of 32 over 16 steps."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(8, 32, batch_first=True), nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Classify (batch, 16, 8)."""
        return self.head(self.lstm(x)[0][:, -1])

    def samples(self, count: int) -> tuple[Tensor, ...]:
        """Return sequences and classes."""
        return torch.randn(count, 16, 8), torch.randint(10, (count,))


class PolicyGradient(Everyday):
    """A policy and a value for observations of four numbers, as for a cart pole."""

    def __init__(self) -> None:
        super().__init__()
        self.policy = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 2))
        self.value = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 1))

    def loss(self, batch: Any) -> Tensor:
        """Return the loss of policy and value, less a bonus for entropy."""
        observations, actions, returns = batch
        chances = torch.distributions.Categorical(logits=self.policy(observations))
        values = self.value(observations).squeeze(1)
        gained = -(chances.log_prob(actions) * (returns - values.detach())).mean()
        return gained + 0.5 * F.mse_loss(values, returns) - 0.01 * chances.entropy().mean()

    def samples(self, count: int) -> tuple[Tensor, ...]:
        """Return observations, actions and returns."""
        return torch.randn(count, 4), torch.randint(2, (count,)), torch.randn(count)


EVERYDAY = (Columns, DigitsCNN, GCN, ShortLSTM, PolicyGradient)
MODULES = (Layers10x64, Layers8x128, Layers6x192, Layers4x256, *EVERYDAY)
