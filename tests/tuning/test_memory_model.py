"""The memory of a step: what is predicted from one batch size is what the allocator counts for another."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_ort.tuning.probe import Facts, MeasuredStep, MemoryModel, start_probe
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


class Recurrent(Wide):
    """The backward kernel of an LSTM has a work space of its own."""

    def __init__(self, batch: int = 32) -> None:
        super().__init__("AdamW", batch)
        self.net = nn.LSTM(16, 32, batch_first=True)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.net(batch[0])[0].square().mean()

    def train_dataloader(self) -> Any:
        return DataLoader(TensorDataset(torch.randn(512, 24, 16)), batch_size=self.batch)


class Sparse(Wide):
    """Its gradients have no place for rows that were not looked up."""

    def __init__(self) -> None:
        super().__init__("SparseAdam")
        self.net = nn.Embedding(100, 4, sparse=True)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.net((batch[0] > 0).long()).square().sum()


def probe(folder: Path, module: type[LightningModule] = Wide, **args: Any) -> Facts:
    return start_probe(Project(module=module, args=args, accelerator="cpu"), folder).finish()


@pytest.mark.parametrize(("optimizer", "states"), [("AdamW", 2), ("SGD", 0), ("RMSprop", 1)])
def test_what_is_measured(optimizer: str, states: int, tmp_path: Path) -> None:
    step, parameters = probe(tmp_path, optimizer=optimizer).memory.step, sum(p.nbytes for p in Wide().parameters())
    assert (step.parameters, step.gradients) == (parameters, parameters)
    assert step.states == pytest.approx(states * parameters, rel=0.01, abs=200)
    assert step.activations > 0.5 * parameters
    assert step.peak >= step.parameters + step.gradients + step.states + step.activations


@pytest.mark.parametrize("module", [Wide, Recurrent])  # the backward kernel of an LSTM has a work space
def test_another_batch_size_is_predicted_from_this_one(module: type[Wide], tmp_path: Path) -> None:
    small, large = (probe(tmp_path / str(batch), module, batch=batch).memory for batch in (32, 128))
    assert small.batch_size == 32
    assert small.peak() == small.step.peak
    assert small.peak(batch_size=128) == pytest.approx(large.step.peak, rel=0.1)
    assert small.peak(optim="adamw_bnb_8bit") < small.peak()
    assert small.peak(kept=0.5) < small.peak()


def test_facts(tmp_path: Path) -> None:
    facts = probe(tmp_path)
    assert (facts.module, facts.device, facts.optimizers, facts.fusable) == ("Wide", "cpu", ["AdamW"], True)
    assert (facts.fixed_batches, facts.made_of_tensors) == (None, True)
    assert not facts.batch_norm
    assert not facts.convolutions
    assert facts.bfloat16 > 0


def test_sparse_gradients_have_a_size(tmp_path: Path) -> None:
    step = probe(tmp_path, Sparse).memory.step
    assert 0 < step.gradients < step.parameters
    module = nn.Embedding(100, 4, sparse=True)
    module(torch.tensor([1, 2])).sum().backward()
    step = MemoryModel.of(module, [torch.optim.SparseAdam(module.parameters())], (), 2, 0, (0, 0, 0)).step
    assert step.gradients == 2 * (4 * 4 + 8)  # of two rows: values in float32, places in int64


def test_a_step_whose_forward_pass_has_no_known_end_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of manual optimization without a backward pass, on a GPU."""
    for name in ("memory_allocated", "max_memory_allocated", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda device: 8)
    step = MeasuredStep(torch.device("cuda"))
    step.start()
    assert step.stop() is None
    step.start()
    step.forward_done()
    assert step.stop() == (0, 0, 0)
