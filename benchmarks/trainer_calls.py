"""Calls of functions, Python's and C's, in a settled step of the Trainer: what a step costs beyond its tensors.

An MLP of three layers of 64 trains on batches of 32, which are made before, or by a ``DataLoader`` from a
``TensorDataset``. ``sys.setprofile`` counts from one ``training_step`` to another 100 steps later, so that what happens
each 50 steps is in the mean; the counts do not depend on the machine or on what else it does. ``bare`` is a Trainer
without logger, checkpoints, bar and summary; ``logged`` has ``self.log(prog_bar=True)``, the bar and a CSV logger.
``python benchmarks/trainer_calls.py [--loader] [--by-function] [--only NAME]``
"""

import argparse
import collections
import contextlib
import io
import sys
import tempfile
import warnings
from collections.abc import Callable
from typing import Any

import torch
from harness import console, table_of
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import TQDMProgressBar
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_ort import ORTStrategy

FIRST, STEPS = 120, 100


class Counter:
    """Counts calls from its first tick on until the one that is ``STEPS`` later."""

    def __init__(self) -> None:
        self.calls: collections.Counter[str] = collections.Counter()
        self._ticks = 0

    def tick(self) -> None:
        """Begin a step."""
        self._ticks += 1
        if self._ticks == FIRST:
            sys.setprofile(self._see)
        elif self._ticks == FIRST + STEPS:
            sys.setprofile(None)

    def _see(self, frame: Any, event: str, argument: Any) -> None:
        if event == "call":
            code = frame.f_code
            self.calls[f"{code.co_filename.rpartition('site-packages/')[2]}:{code.co_firstlineno} {code.co_name}"] += 1
        elif event == "c_call" and argument is not sys.setprofile:
            self.calls[f"C {getattr(argument, '__qualname__', argument)}"] += 1

    @property
    def per_step(self) -> float:
        """Calls in a step."""
        return (sum(self.calls.values()) - self.calls["trainer_calls.py tick"]) / STEPS


class MLP(LightningModule):
    """Three layers of 64."""

    def __init__(self, counter: Counter, logs: bool) -> None:
        super().__init__()
        self.counter, self.logs = counter, logs
        self.net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Return the loss."""
        self.counter.tick()
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        if self.logs:
            self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Log the loss."""
        self.counter.tick()
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        if self.logs:
            self.log("loss", loss, prog_bar=True)

    predict_step = validation_step

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return AdamW."""
        return torch.optim.AdamW(self.parameters())


def batches(made: bool) -> Any:
    """Return batches of 32 for all steps."""
    count = FIRST + STEPS + 20
    x, y = torch.randn(32 * count, 64), torch.randint(10, (32 * count,))
    if made:
        return DataLoader(list(zip(x.split(32), y.split(32), strict=True)), batch_size=None)  # type: ignore[arg-type]
    return DataLoader(TensorDataset(x, y), batch_size=32)


def by_hand(made: bool) -> Counter:
    """Count a loop of one's own."""
    counter = Counter()
    module = MLP(counter, logs=False)
    optimizer = module.configure_optimizers()
    for x, y in batches(made):
        counter.tick()
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(module.net(x), y)
        loss.backward()
        optimizer.step()
    return counter


def by_trainer(strategy: Callable[[], Any], logs: bool, made: bool, run: str = "fit") -> Counter:
    """Count a run of the Trainer."""
    counter = Counter()
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        trainer = Trainer(
            strategy=strategy(),
            accelerator="cpu",
            devices=1,
            max_epochs=1,
            limit_val_batches=None if run == "validate" else 0,
            logger=CSVLogger(folder) if logs else False,
            callbacks=[TQDMProgressBar()] if logs else [],
            enable_progress_bar=logs,
            enable_checkpointing=False,
            enable_model_summary=False,
        )
        getattr(trainer, run)(MLP(counter, logs and run != "predict"), batches(made))
    return counter


def ours() -> Any:
    """Return a strategy with the default settings, for which nothing is worth compiling."""
    return ORTStrategy(config={"compile_budget": 1e-9, "cache_dir": None})


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--by-function", action="store_true", help="print how often each function is called")
    parser.add_argument("--loader", action="store_true", help="batches from a loader")
    parser.add_argument("--only", help="one row, such as 'fit, bare'")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    out = console()
    table = table_of("calls in a settled step", ("run",), ("stock", "ours", "ours / stock"))
    rows = {
        f"{run}, {'logged' if logs else 'bare'}": (run, logs)
        for run in ("fit", "validate", "predict")
        for logs in (False, True)
    }
    made = not arguments.loader
    out.print(f"by hand: {by_hand(made).per_step:.0f} calls")
    for name, (run, logs) in rows.items():
        if arguments.only in (None, name):
            counters = [by_trainer(make, logs, made, run) for make in (lambda: "auto", ours)]
            stock, own = (counter.per_step for counter in counters)
            table.add_row(name, f"{stock:.0f}", f"{own:.0f}", f"{own / stock:.2f}")
            if arguments.by_function:
                for what, count in counters[1].calls.most_common():
                    out.print(f"{count / STEPS:8.2f}  {what}", highlight=False, markup=False)
    out.print(table)


if __name__ == "__main__":
    main()
