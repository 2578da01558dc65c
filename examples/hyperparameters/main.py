"""Search for hyperparameters with Optuna: each trial is a Trainer of its own, in one process."""

import logging
import time
import warnings
from typing import Literal

import optuna
import torch
import torch.nn.functional as F
from jsonargparse import auto_cli
from lightning.pytorch import LightningModule, Trainer, seed_everything
from sklearn.datasets import load_wine
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset, random_split
from torchmetrics.classification import MulticlassAccuracy

import lightning_ort
from lightning_ort import ORTConfig, ORTStrategy


class WineClassifier(LightningModule):
    def __init__(self, width: int, dropout: float, learning_rate: float) -> None:
        super().__init__()
        self.learning_rate = learning_rate
        layers = [nn.Linear(13, width), nn.GELU(), nn.Dropout(dropout), nn.Linear(width, width), nn.GELU()]
        self.network = nn.Sequential(*layers, nn.Linear(width, 3))
        self.accuracy = MulticlassAccuracy(3, average="micro")

    def forward(self, columns: Tensor) -> Tensor:
        return self.network(columns)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        columns, cultivars = batch
        return F.cross_entropy(self(columns), cultivars)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        columns, cultivars = batch
        logits = self(columns)
        self.accuracy(logits, cultivars)
        self.log_dict({"val_loss": F.cross_entropy(logits, cultivars), "val_accuracy": self.accuracy})

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.learning_rate)


def wine(batch_size: int) -> tuple[DataLoader, DataLoader]:
    data, target = load_wine(return_X_y=True)
    columns = torch.tensor(data, dtype=torch.float32)
    everything = TensorDataset((columns - columns.mean(0)) / columns.std(0), torch.tensor(target))
    train_set, validation_set = random_split(everything, [0.7, 0.3], torch.Generator().manual_seed(0))
    return DataLoader(train_set, batch_size, shuffle=True, drop_last=True), DataLoader(validation_set, batch_size)


def search(
    strategies: list[str],
    trials: int = 20,
    epochs: int = 20,
    batch_size: int = 16,
    widths: tuple[int, int] = (32, 256),
    learning_rates: tuple[float, float] = (1e-4, 1e-2),
    start: Literal["amortized", "now"] = "amortized",
) -> None:
    """Do the same search under each strategy, and print what it found.

    Args:
        strategies: Names of strategies.
        trials: Trainers of each search.
        epochs: Of each trial.
        batch_size: Of both loaders.
        widths: Least and most.
        learning_rates: Least and most.
        start: When ort compiles the step; a trial of seconds is too short for it to pay.
    """
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")
    for name in ("optuna", "lightning.pytorch", "lightning_ort"):  # one line for each search
        logging.getLogger(name).setLevel(logging.WARNING)
    for strategy in strategies:

        def train(trial: optuna.Trial, strategy: str = strategy) -> float:
            seed_everything(0, verbose=False)
            module = WineClassifier(
                width=trial.suggest_int("width", *widths, log=True),
                dropout=trial.suggest_float("dropout", 0.0, 0.5),
                learning_rate=trial.suggest_float("learning_rate", *learning_rates, log=True),
            )
            trainer = Trainer(
                strategy=ORTStrategy(config=ORTConfig(start=start)) if strategy == "ort" else strategy,
                accelerator="cpu",
                max_epochs=epochs,
                log_every_n_steps=1,
                logger=False,
                enable_checkpointing=False,
                enable_progress_bar=False,
                enable_model_summary=False,
            )
            trainer.fit(module, *wine(batch_size))
            if isinstance(trainer.strategy, lightning_ort.ORTStrategy):
                trial.set_user_attr("share", trainer.strategy.report.ort_node_fraction_in_use)
            trial.set_user_attr("accuracy", trainer.callback_metrics["val_accuracy"].item())
            return trainer.callback_metrics["val_loss"].item()

        began = time.perf_counter()
        study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=0))
        study.optimize(train, n_trials=trials)
        best = study.best_trial
        share = (
            f"; {best.user_attrs['share']:.0%} of its compute nodes on ONNX Runtime"
            if "share" in best.user_attrs
            else ""
        )
        print(
            f"{strategy}: {trials} trials in {time.perf_counter() - began:.1f} s; best loss {best.value:.4f}, "
            f"accuracy {best.user_attrs['accuracy']:.1%}, with {best.params}{share}",
            flush=True,
        )


if __name__ == "__main__":
    auto_cli(search)
