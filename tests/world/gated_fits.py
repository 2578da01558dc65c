"""Fits whose replays nobody checks: what the gate calls closed has to be right by itself."""

import collections
import random
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_ort import ORTStrategy
from lightning_ort.strategies.recording.recorded_step import RecordedStep

BATCHES, CHANGED = 40, 26  # once the race has settled, nearly all steps are replays
_OF_ALL = vars(pl.LightningModule()).keys()


@dataclass
class Case:
    """A module, and what changes between two of its steps."""

    module: pl.LightningModule
    change: Callable[[Any], Any] = lambda module: None
    around: Callable[[], AbstractContextManager[Any]] = nullcontext  # what puts back what the change leaves
    batches: list[Any] = field(default_factory=lambda: batches())


def batches() -> list[Any]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(4, 2, generator=generator) for _ in range(BATCHES)]


class Step(pl.LightningModule):
    """The loss of a small net times a factor that a function computes of the module, the batch, and the loss."""

    def __init__(self, factor_of: Callable[..., Any] = lambda m, x, loss: 1.0, **kept: Any) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1))
        self.factor_of = factor_of
        for name, value in kept.items():
            setattr(self, name, value)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x = batch[0] if isinstance(batch, list) else batch
        loss = self.net(x.float()).square().mean()
        return loss * self.factor_of(self, batch, loss)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.01)


class _Watcher(pl.Callback):
    def __init__(self, change: Callable[[Any], Any]) -> None:
        self.change, self.losses = change, list[Any]()

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == CHANGED:
            self.change(module)

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(plain(outputs))


def plain(value: Any, depth: int = 4) -> Any:
    """What a value holds, to compare."""
    if isinstance(value, Tensor):
        return value.detach().tolist() if value.layout is torch.strided else str(value)
    if isinstance(value, (int, float, str, type(None))):
        return repr(value)
    if depth and isinstance(value, dict):
        return {str(key): plain(one, depth - 1) for key, one in value.items()}
    if isinstance(value, np.ndarray):
        return value.tolist()
    if depth and isinstance(value, (list, tuple, set, collections.deque)):
        return [plain(one, depth - 1) for one in value]
    return ""


@dataclass
class Outcome:
    """What is left of a fit."""

    values: dict[str, str]
    replayed: int
    notes: str


def fit(make: Callable[[], Case], engine: str) -> Outcome:
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    case = make()
    module, watcher = case.module, _Watcher(case.change)
    own = vars(module).keys() - _OF_ALL - {"net", "factor_of"}
    settings: dict[str, Any] = {"accelerator": "cpu", "devices": 1, "max_epochs": 1, "logger": False}
    settings |= {"enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    start = {"start": "now"} if engine == "recorded" else {}
    strategy = ORTStrategy(config={"engine": engine, **start})
    trainer: Any = pl.Trainer(strategy=strategy, callbacks=[watcher], **settings)
    error = ""
    with case.around():
        try:
            trainer.fit(module, DataLoader(case.batches, batch_size=None))
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}"
    found = {
        "losses": watcher.losses,
        "parameters and buffers": plain(dict(module.state_dict())),
        "what it keeps": {name: plain(vars(module).get(name)) for name in sorted(own)},
        "what it logs": {name: float(value) for name, value in trainer.callback_metrics.items()},
        "random numbers": torch.get_rng_state().tolist(),
        "error": error,
    }
    text = str(trainer.strategy.report.run.recorded.get("training_step", "0"))
    notes = "\n".join(str(note) for note in trainer.strategy.report.notes)
    return Outcome({name: repr(value) for name, value in found.items()}, int(text.split()[0]), notes)


def compared(make: Callable[[], Case], monkeypatch: pytest.MonkeyPatch) -> Outcome:
    """A fit with replays that nobody checks, which has to be the one without."""
    monkeypatch.setattr(RecordedStep, "_check", RecordedStep._replay)
    eager, recorded = fit(make, "torch"), fit(make, "recorded")
    state = "CLOSED AND DIFFERENT" if recorded.replayed else "different, not replayed"
    for name, value in eager.values.items():
        assert recorded.values[name] == value, f"{state}: {name}"
    return recorded
