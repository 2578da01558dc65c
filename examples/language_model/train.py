"""Train the same small GPT under Lightning's own strategy and under ``ort``, and compare the two runs.

Both runs start from the same seed and see the same batches, so their losses have to agree: the script exits with an
error if they differ by more than 1e-3, relative, anywhere in the first 50 steps.
"""

import argparse
import statistics
import time
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import TQDMProgressBar
from rich.console import Console
from rich.table import Table

import lightning_ort
from data import StandardLibrarySource
from model import GPT

TOLERANCE = 1e-3
COMPARED_STEPS = 50


class StepRecorder(Callback):
    """Keeps the loss and the seconds of every training step."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.seconds: list[float] = []

    def on_train_batch_start(self, *args: Any) -> None:
        self._start = time.perf_counter()

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, outputs: Any, *args: Any) -> None:
        self.seconds.append(time.perf_counter() - self._start)
        self.losses.append(outputs["loss"].item())


@dataclass
class Run:
    strategy: str
    recorder: StepRecorder
    metrics: dict[str, float]
    total_seconds: float
    report: str

    @property
    def step_ms(self) -> float:
        """Median over the second half: the first steps compile and measure."""
        return 1000 * statistics.median(self.recorder.seconds[len(self.recorder.seconds) // 2 :])


def train(name: str, args: argparse.Namespace) -> Run:
    # `strategy="ort"` would do; these settings compile at the first step, which so short a run does not pay for
    config = lightning_ort.ORTConfig(placement=args.placement, start="now")
    ort = lightning_ort.ORTStrategy(config=config) if name == "ort" else None
    seed_everything(args.seed, verbose=False)
    recorder = StepRecorder()
    trainer = Trainer(
        strategy=ort or name,
        accelerator=args.accelerator,
        devices=1,
        max_steps=args.steps,
        val_check_interval=args.steps,
        check_val_every_n_epoch=None,
        limit_val_batches=args.validation_batches,
        num_sanity_val_steps=0,
        callbacks=[recorder, TQDMProgressBar(refresh_rate=10)],
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    start = time.perf_counter()
    trainer.fit(GPT(context=args.context), StandardLibrarySource(args.context, args.batch_size, args.seed))
    total_seconds = time.perf_counter() - start
    metrics = {key: value.item() for key, value in trainer.callback_metrics.items()}
    return Run(name, recorder, metrics, total_seconds, ort.report.to_text() if ort else "")


def max_relative_difference(run: Run, reference: Run) -> float:
    losses = torch.tensor(run.recorder.losses[:COMPARED_STEPS], dtype=torch.float64)
    expected = torch.tensor(reference.recorder.losses[:COMPARED_STEPS], dtype=torch.float64)
    return ((losses - expected).abs() / expected.abs()).max().item()


def comparison(runs: list[Run]) -> Table:
    table = Table("strategy", title="language model on the Python standard library")
    for column in ("validation loss", "perplexity", "accuracy", "median step", "whole run", "difference of the loss"):
        table.add_column(column, justify="right")
    for run in runs:
        table.add_row(
            run.strategy,
            f"{run.metrics['val_loss']:.4f}",
            f"{run.metrics['val_perplexity']:.3f}",
            f"{run.metrics['val_accuracy']:.1%}",
            f"{run.step_ms:.1f} ms",
            f"{run.total_seconds:.1f} s",
            "" if run is runs[0] else f"{max_relative_difference(run, runs[0]):.1e}",
        )
    return table


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategies", nargs="+", choices=("auto", "ort"), default=["auto", "ort"], metavar="NAME")
    parser.add_argument("--placement", choices=("measured", "always"), default="measured")
    parser.add_argument("--accelerator", default="cpu")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--validation-batches", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")
    runs = [train(name, args) for name in args.strategies]
    console = Console()
    console.print(comparison(runs))
    for run in runs:
        if run.report:
            print(run.report)
    for run in runs[1:]:
        difference = max_relative_difference(run, runs[0])
        if not difference <= TOLERANCE:  # also catches nan
            raise SystemExit(
                f"The loss under {run.strategy!r} differs from {runs[0].strategy!r} by {difference:.1e}, relative, in "
                f"the first {COMPARED_STEPS} steps; at most {TOLERANCE:.0e} is allowed."
            )


if __name__ == "__main__":
    main()
