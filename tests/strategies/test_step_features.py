"""The code of a step, its batches and their shapes: under ``ort`` each gives what it gives under the stock strategy."""

import random
from collections import namedtuple
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from features import FEATURES, Trainers, check_feature, feature, features_of, fit
from small_modules import Small, batches, loader
from torch import Tensor, nn
from torch.utils.data import DataLoader, Sampler

# --- the code of a step


@feature("Steps", "control flow by data")
def control_flow(trainers: Trainers) -> Any:
    class Branches(Small):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = self.loss(batch)
            if batch[0].sum() > 0:
                loss = loss * 2
            return loss if loss > 0.3 else loss + self.net[0].weight.square().sum() * 1e-2

    return fit(Branches(), trainers())


@feature("Steps", "selection by a mask")
def mask(trainers: Trainers) -> Any:
    class Selects(Small):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, y = batch
            return self.loss((x[y > 0], y[y > 0]))

    return fit(Selects(), trainers())


@feature("Steps", "inputs that are NaN")
def nan(trainers: Trainers) -> Any:
    class Guarded(Small):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, y = batch
            if batch_idx == 1:
                x = torch.full_like(x, torch.nan)
            return torch.nan_to_num(self.loss((x, y)), nan=1.0)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            x, y = batch
            self.log("val_loss", self.loss((x * torch.nan, y)))

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            for parameter in self.parameters():
                parameter.grad.nan_to_num_()

    return fit(Guarded(), trainers(limit_val_batches=1.0))


@feature("Steps", "a loss that becomes NaN")
def nan_loss(trainers: Trainers) -> Any:
    class Explodes(Small):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self.loss(batch) * (torch.nan if self.current_epoch else 1.0)

    return fit(Explodes(), trainers())


@feature("Steps", "an empty last batch")
def empty_batch(trainers: Trainers) -> Any:
    class Sums(Small):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self.net(batch).square().sum()

    return fit(Sums(), trainers(), train_dataloaders=batches((8, 8), (8, 8), (0, 8)))


@feature("Steps", "dimensions of size zero")
def zero_size(trainers: Trainers) -> Any:
    class Empty(Small):
        def __init__(self) -> None:
            super().__init__()
            self.none = nn.Linear(0, 3)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return (self.net(batch) + self.none(batch[:, :0])).square().mean()

    return fit(Empty(), trainers(), train_dataloaders=batches(*[(8, 8)] * 4))


@feature("Steps", "autocast in the step")
def autocast(trainers: Trainers) -> Any:
    class Casts(Small):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, y = batch
            with torch.autocast("cpu", dtype=torch.bfloat16):
                hidden = self.net[0](x)
            return F.mse_loss(self.net[1:](hidden.float()), F.one_hot(y, 3).float())

    return fit(Casts(), trainers())


@feature("Steps", "a batch changed in place")
def inplace(trainers: Trainers) -> Any:
    class Changes(Small):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            batch[0].mul_(0.5).clamp_(-1, 1)
            return self.loss(batch)

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            super().on_train_batch_end(outputs, batch, batch_idx)
            self.losses.append(batch[0].sum().item())

    return fit(Changes(), trainers())


@feature("Steps", "outputs that are kept")
def kept(trainers: Trainers) -> Any:
    class Keeps(Small):
        def __init__(self) -> None:
            super().__init__()
            self.kept: list[Tensor] = []

        def training_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
            out = self(batch[0])
            return {"loss": out.square().mean(), "out": out}

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            super().on_train_batch_end(outputs, batch, batch_idx)
            self.kept.append(outputs["out"])

    module = Keeps()
    return fit(module, trainers()), module.kept


@feature("Steps", "one step that calls another")
def calls_validation(trainers: Trainers) -> Any:
    class Calls(Small):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self.shared(batch, "train")

        def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self.shared(batch, "val")

        def test_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self.validation_step(batch, batch_idx)

        def shared(self, batch: Any, stage: str) -> Tensor:
            loss = self.loss(batch)
            self.log(f"{stage}_loss", loss, on_step=False, on_epoch=True)
            return loss

    module, trainer = Calls(), trainers(limit_val_batches=1.0)
    return fit(module, trainer), trainer.test(module, verbose=False)


@feature("Steps", "random numbers of torch, NumPy and Python", how="modules", slow=True)
def random_numbers(trainers: Trainers) -> Any:
    class Draws(Small):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, y = batch
            x = F.dropout(x + 0.1 * torch.randn_like(x), 0.2)
            order = torch.randperm(len(x))
            scale = random.random() + float(np.random.rand())
            return self.loss((x[order], y[order])) * scale

    return fit(Draws(), trainers())


Pair = namedtuple("Pair", ["x", "y"])


@feature("Steps", "batches that are named tuples")
def named_tuples(trainers: Trainers) -> Any:
    class Named(Small):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self.loss((batch.x, batch.y))

        def train_dataloader(self) -> DataLoader:
            return DataLoader([Pair(x, y) for x, y in loader().dataset], batch_size=8)

    return fit(Named(), trainers())


@feature("Steps", "complex numbers and FFT")
def fft(trainers: Trainers) -> Any:
    class Fourier(Small):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, y = batch
            return self.loss((torch.fft.fft(x).abs() + x, y))

    return fit(Fourier(), trainers())


@feature("Steps", "`torch.func`")
def func(trainers: Trainers) -> Any:
    class Functional(Small):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, y = batch
            half = {name: p * 0.5 for name, p in self.net.named_parameters()}
            other = torch.func.functional_call(self.net, half, (x,))
            norms = torch.func.vmap(lambda row: row.square().sum())(other)
            return self.loss(batch) + norms.mean()

    return fit(Functional(), trainers())


@dataclass
class Item:
    x: Tensor
    rest: dict[str, Any]


class EveryThird(Sampler):
    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[int]:
        return iter([index * 3 % self.size for index in range(self.size)])

    def __len__(self) -> int:
        return self.size


def collate(samples: list[Any]) -> Item:
    x, y = (torch.stack(part) for part in zip(*samples, strict=True))
    return Item(
        x, {"labels": {"y": y}, "ids": [f"sample {i}" for i in range(len(y))], "weights": (x.norm(dim=1), None)}
    )


@feature("Steps", "batches of nested dataclasses, a sampler of one's own")
def dataclasses_and_sampler(trainers: Trainers) -> Any:
    class Nested(Small):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            weight, nothing = batch.rest["weights"]
            assert nothing is None
            loss = F.cross_entropy(self(batch.x), batch.rest["labels"]["y"], reduction="none")
            return (loss * weight / weight.sum()).sum()

    data = loader().dataset
    return fit(
        Nested(),
        trainers(),
        train_dataloaders=DataLoader(data, batch_size=8, sampler=EveryThird(len(data)), collate_fn=collate),
    )


@feature("Steps", "nested tensors of lists: sequences of different lengths in a batch")
def ragged(trainers: Trainers) -> Any:
    class Ragged(Small):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return torch.stack([self.net(sequence).mean(0) for sequence in batch]).square().mean()

    generator = torch.Generator().manual_seed(1)
    data = [torch.randn(length, 8, generator=generator) for length in (3, 5, 2, 4, 7, 1, 6, 5)]
    return fit(Ragged(), trainers(), train_dataloaders=DataLoader(data, batch_size=2, collate_fn=list))


# --- shapes that vary: each over fifty sizes


class Lengths(Small):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(batch).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.net(batch).square().mean())

    def val_dataloader(self) -> Any:
        return self.trainer.train_dataloader


SIZES = [7 * index % 51 for index in range(1, 51)]  # each from 1 to 50, out of order


@feature("Shapes", "fifty batch sizes")
def batch_sizes(trainers: Trainers) -> Any:
    shapes = [(size, 8) for size in SIZES]
    return fit(Lengths(), trainers(limit_val_batches=1.0), train_dataloaders=batches(*shapes))


@feature("Shapes", "fifty sequence lengths", slow=True)
def sequence_lengths(trainers: Trainers) -> Any:
    class Attends(Lengths):
        def __init__(self) -> None:
            super().__init__()
            layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
            self.net = nn.Sequential(nn.TransformerEncoder(layer, 1, enable_nested_tensor=False), nn.Linear(8, 3))

    shapes = [(4, size + 1, 8) for size in SIZES]
    return fit(Attends(), trainers(limit_val_batches=1.0), train_dataloaders=batches(*shapes))


@feature("Shapes", "fifty image sizes")
def image_sizes(trainers: Trainers) -> Any:
    class Convolves(Lengths):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(
                nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.AdaptiveAvgPool2d(1), nn.Flatten()
            )

    shapes = [(2, 1, 2 * size + 2, 2 * size + 4) for size in SIZES]
    return fit(Convolves(), trainers(limit_val_batches=1.0), train_dataloaders=batches(*shapes))


@pytest.mark.parametrize("name", features_of(__name__))
def test_feature(name: str, tmp_path: Path) -> None:
    reports = check_feature(name, tmp_path)
    if FEATURES[name].group == "Shapes":
        graphs = [graph.name for report in reports for graph in report.graphs]
        for kind in ("training_step/step", "validation_step/inference"):
            assert 0 < sum(name.startswith(kind) for name in graphs) <= 3
