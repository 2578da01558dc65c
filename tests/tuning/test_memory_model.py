"""The memory of a step: what is predicted from one traced step is what the allocator counts in another."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_ort.tuning.memory import Saved, peak_of, tensors_in
from lightning_ort.tuning.probe import Facts, start_probe
from lightning_ort.tuning.project import Project


class Wide(LightningModule):
    """Activations weigh as much as parameters."""

    def __init__(self, optimizer: str = "AdamW", batch: int = 64) -> None:
        super().__init__()
        layers = [layer for _ in range(4) for layer in (nn.Linear(128, 128), nn.LayerNorm(128), nn.GELU())]
        self.net = nn.Sequential(nn.Linear(16, 128), *layers, nn.Linear(128, 1))
        self.optimizer, self.batch = optimizer, batch

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self) -> Any:
        return getattr(torch.optim, self.optimizer)(self.parameters(), lr=1e-3)

    def train_dataloader(self) -> Any:
        return DataLoader(TensorDataset(torch.randn(1024, 16)), batch_size=self.batch)


def probe(folder: Path, **args: Any) -> Facts:
    return start_probe(Project(module=Wide, args=args, accelerator="cpu"), folder).finish()


@pytest.mark.parametrize("optimizer", ["AdamW", "SGD", "RMSprop"])
def test_predicted_is_measured(optimizer: str, tmp_path: Path) -> None:
    facts = probe(tmp_path, optimizer=optimizer)
    predicted, measured = facts.memory.step, facts.measured
    for part in ("parameters", "gradients", "states", "activations", "peak"):
        assert getattr(predicted, part) == pytest.approx(getattr(measured, part), rel=0.1, abs=200), part
    assert predicted.activations > 0.5 * predicted.parameters


def test_another_batch_size_is_predicted_from_this_one(tmp_path: Path) -> None:
    small, large = probe(tmp_path / "small", batch=32), probe(tmp_path / "large", batch=128)
    assert small.batch_size == 32
    assert small.memory.peak(batch_size=128) == pytest.approx(large.measured.peak, rel=0.1)
    assert small.memory.peak(optim="adamw_bnb_8bit") < small.memory.peak()
    assert small.memory.peak(kept=0.5) < small.memory.peak()


def test_facts(tmp_path: Path) -> None:
    facts = probe(tmp_path)
    assert (facts.module, facts.device, facts.optimizers, facts.fusable) == ("Wide", "cpu", ["AdamW"], True)
    assert (facts.fixed_batches, facts.not_in_whole_batches, facts.batch_argument) == (None, None, False)
    assert not facts.batch_norm
    assert not facts.convolutions
    assert facts.bfloat16 > 0


def test_peak_is_the_largest_sum_on_the_way() -> None:
    saved = [Saved(activation=10, flowing=10), Saved(gradient=4), Saved(activation=100, flowing=0)]
    # at the end of the forward pass, with the gradients of the step before
    assert peak_of(1, 4, 2, 3, saved) == 1 + 2 + 3 + 110 + 4
    # in the backward pass, where the gradient of what was saved is there too
    assert peak_of(0, 4, 0, 0, [Saved(activation=10, flowing=10), Saved(gradient=4)]) == 10 + 20 + 4


def test_tensors_of_a_nested_batch() -> None:
    one, two = torch.ones(1), torch.ones(2)
    assert [tensor.numel() for tensor in tensors_in({"a": one, "b": [two, ("text", one)], "c": None})] == [1, 2, 1]
