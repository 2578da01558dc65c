"""The memory of a step: what is predicted from one traced step is what the allocator counts in another."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_ort.tuning.memory import Saved, _work_spaces, peak_of, tensors_in
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


class Recurrent(Wide):
    """The backward kernel of an LSTM has a work space of its own."""

    def __init__(self, batch: int = 32) -> None:
        super().__init__("AdamW", batch)
        self.net = nn.LSTM(16, 32, batch_first=True)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.net(batch[0])[0].square().mean()

    def train_dataloader(self) -> Any:
        return DataLoader(TensorDataset(torch.randn(512, 24, 16)), batch_size=self.batch)


def probe(folder: Path, module: type[LightningModule] = Wide, **args: Any) -> Facts:
    return start_probe(Project(module=module, args=args, accelerator="cpu"), folder).finish()


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


def test_the_work_space_of_a_kernel_is_counted_and_grows_with_the_batch(tmp_path: Path) -> None:
    small, large = probe(tmp_path / "small", Recurrent), probe(tmp_path / "large", Recurrent, batch=128)
    assert small.memory.step.peak == pytest.approx(small.measured.peak, rel=0.1)
    assert small.memory.peak(batch_size=128) == pytest.approx(large.measured.peak, rel=0.1)
    without = [replace(saved, work=0) for saved in small.memory.saved]
    assert replace(small.memory, saved=without).peak() < 0.95 * small.memory.peak()


def event(name: str, ts: float, dur: float = 0.0, level: int | None = None) -> dict[str, Any]:
    args = {} if level is None else {"args": {"Total Allocated": level}}
    return {"name": name, "ts": ts, "dur": dur, **args}


def test_a_work_space_is_what_is_neither_there_before_nor_after() -> None:
    events = [
        event("aten::forward", 1, 2),
        event("[memory]", 2, level=500),  # of the forward pass
        event("lightning_ort: backward takes 3", 4),
        event("aten::outer", 5, 10),
        event("aten::inner", 6, 5),
        event("[memory]", 7, level=900),
        event("[memory]", 8, level=620),
        event("aten::next", 16, 2),
        event("[memory]", 17, level=700),  # its result
        event("lightning_ort: backward takes 2", 19),
        event("aten::last", 20, 5),
        event("[memory]", 21, level=1000),
        event("[memory]", 22, level=300),  # it has freed its input too
    ]
    assert _work_spaces(events) == {3: 280, 2: 300}


def test_facts(tmp_path: Path) -> None:
    facts = probe(tmp_path)
    assert (facts.module, facts.device, facts.optimizers, facts.fusable) == ("Wide", "cpu", ["AdamW"], True)
    assert (facts.fixed_batches, facts.made_of_tensors, facts.batch_argument) == (None, True, False)
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
