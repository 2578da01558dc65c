"""Where each implementation of the optimizer ends: the language model example after 300 steps, from the same seed.

``python benchmarks/optimizer_accuracy.py [--steps N] [--optim NAME ...]``
"""

import argparse
import platform
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer, seed_everything
from rich.console import Console
from rich.table import Table

from lightning_ort import ORTStrategy

sys.path.insert(0, str(Path(__file__).parent.parent / "examples" / "language_model"))

from data import StandardLibrarySource
from model import GPT

LAST = 20  # steps whose losses are averaged: one batch's loss says little


class Losses(Callback):
    """Keeps the loss of every step."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *args: Any) -> None:
        """Take a step's loss."""
        self.values.append(outputs["loss"].item())


def train(name: str, steps: int) -> tuple[float, float, str]:
    """Return the training loss of the last steps, the validation loss, and what ran."""
    seed_everything(0, verbose=False)
    losses = Losses()
    strategy = ORTStrategy(config={"engine": "torch"}, optim=name)  # type: ignore[arg-type]
    trainer = Trainer(
        strategy=strategy,
        accelerator="cpu",
        max_steps=steps,
        val_check_interval=steps,
        check_val_every_n_epoch=None,
        limit_val_batches=20,
        num_sanity_val_steps=0,
        callbacks=losses,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
    )
    trainer.fit(GPT(), StandardLibrarySource(64, 16, 0))
    runs_as = strategy.report.optimizers[0].runs_as
    return statistics.mean(losses.values[-LAST:]), trainer.callback_metrics["val_loss"].item(), runs_as


parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=300)
parser.add_argument("--optim", nargs="+", default=["keep", "auto", "adamw_bnb_8bit", "adamw_anyprecision", "adafactor"])
args = parser.parse_args()
console = Console(width=120)
console.print(
    f"{time.strftime('%Y-%m-%d')}  torch {torch.__version__}, Python {platform.python_version()}, "
    f"{torch.get_num_threads()} threads, {platform.machine()}"
)
table = Table(title=f"language model example, {args.steps} steps, loss of the last {LAST} and on 20 validation batches")
for column in ("optim", "runs as", "training loss", "ratio to plain", "validation loss", "ratio to plain"):
    table.add_column(column, justify="left" if column in ("optim", "runs as") else "right")
plain: tuple[float, float] | None = None
for name in args.optim:
    training, validation, runs_as = train(name, args.steps)
    plain = plain or (training, validation)
    ratios = training / plain[0], validation / plain[1]
    table.add_row(name, runs_as, f"{training:.4f}", f"{ratios[0]:.4f}", f"{validation:.4f}", f"{ratios[1]:.4f}")
console.print(table)
