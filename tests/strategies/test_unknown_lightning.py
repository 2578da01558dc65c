"""A Lightning in which a function is another: what relies on it is Lightning's own, and the rest of a run is lean."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, seed_everything
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_ort import ORTStrategy
from lightning_ort.compat import lightning_sources


class Module(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 1)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.layer(batch).square().mean()
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val", self.layer(batch).mean())

    test_step = validation_step

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.layer(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


class Seen(Callback):
    """What callbacks see after each batch."""

    def __init__(self) -> None:
        self.values: list[dict[str, Any]] = []

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        self.values.append({name: float(value) for name, value in trainer.callback_metrics.items()})

    on_validation_batch_end = on_train_batch_end


def run(make_trainer: Callable[..., Any], strategy: Any) -> tuple[Any, list[Any]]:
    seed_everything(0)
    module, seen = Module(), Seen()
    trainer = make_trainer(strategy=strategy, max_epochs=2, callbacks=[seen], log_every_n_steps=1)
    loader = DataLoader(torch.randn(16, 8), batch_size=4)
    trainer.fit(module, loader, loader)
    text = trainer.strategy.report.run.trainer_loop if hasattr(trainer.strategy, "report") else ""
    trainer.test(module, loader, verbose=False)
    predicted = trainer.predict(module, loader)
    return text, [seen.values, *map(Tensor.tolist, (*module.parameters(), *predicted))]


@pytest.fixture
def unknown(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    def forget(name: str) -> None:
        monkeypatch.setattr(lightning_sources, "KNOWN", {**lightning_sources.KNOWN, name: frozenset()})
        lightning_sources._unknown.cache_clear()

    yield forget
    monkeypatch.undo()
    lightning_sources._unknown.cache_clear()


@pytest.mark.parametrize(
    "name",
    [
        "loops.training_epoch_loop._TrainingEpochLoop.advance",
        "loops.fetchers._PrefetchDataFetcher.__next__",
        "loops.evaluation_loop._EvaluationLoop._evaluation_step",
        "loops.prediction_loop._PredictionLoop._predict_step",
        "core.module.LightningModule.log",
        "callbacks.progress.tqdm_progress.TQDMProgressBar.on_train_batch_end",
        "plugins.precision.precision.Precision._wrap_closure",
        "trainer.call._call_callback_hooks",
    ],
)
def test_runs_are_as_before(name: str, make_trainer: Callable[..., Any], unknown: Callable[[str], None]) -> None:
    _, stock = run(make_trainer, "auto")
    unknown(name)
    text, ours = run(make_trainer, ORTStrategy({"engine": "torch"}))
    assert ours == stock
    assert text.startswith("Lightning's own: " if name.startswith("trainer.") else "lean; Lightning's own for ")
    assert name in text


def test_what_relies_on_nothing_unknown_is_lean(
    make_trainer: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lightning's loop of batches runs where it is another, and not where only that of validations is."""
    advance, calls = _TrainingEpochLoop.advance, list[Any]()
    monkeypatch.setattr(_TrainingEpochLoop, "advance", lambda *args: [calls.append(args), advance(*args)][1])
    run(make_trainer, ORTStrategy({"engine": "torch"}))
    assert len(calls) == 8
    monkeypatch.setattr(lightning_sources, "_unknown", lambda *_: ("loops.evaluation_loop._EvaluationLoop.run",))
    run(make_trainer, ORTStrategy({"engine": "torch"}))
    assert len(calls) == 8


def test_a_part_that_is_called_otherwise(make_trainer: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    _, stock = run(make_trainer, "auto")
    monkeypatch.setattr("lightning_ort.strategies.lean.lean.parts_of", lambda trainer: trainer.no_such_loop)
    text, ours = run(make_trainer, ORTStrategy({"engine": "torch"}))
    assert ours == stock
    assert "no_such_loop" in text
