"""How long an optimizer step takes, by implementation: tensors shaped like a transformer's, then whole Trainer steps.

Implementations alternate in rounds in one process; the table shows medians and their ratio to torch's plain AdamW.
``python benchmarks/optimizer_step.py [--millions 10 100] [--rounds N] [--optim NAME ...]``
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from harness import console, in_turns, medians, table_of
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_ort import ORTOptimizer, ORTStrategy

NAMES = ("keep", "adamw_torch_foreach", "adamw_torch_fused", "adamw_deepspeed", "adamw_bnb_8bit", "adamw_anyprecision")


def transformer(millions: float) -> nn.Module:
    """Make the tensors of a transformer of about that many parameters."""
    width = 384 if millions <= 20 else 768
    layers = max(1, round(millions * 1e6 / (12 * width**2)))
    layer = nn.TransformerEncoderLayer(width, 8, 4 * width, batch_first=True)
    return nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)


def stepper(name: str, module: nn.Module) -> Callable[[], None]:
    """Make a function that does one step with an implementation, on gradients that are there."""
    for parameter in module.parameters():
        parameter.grad = torch.full_like(parameter, 1e-3)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-5)
    ORTOptimizer(name).swap.apply(module, [optimizer], torch.device("cpu"))
    return lambda: optimizer.step()


class Small(LightningModule):
    """A small MLP: its step is mostly the optimizer's and Lightning's own."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*(layer for _ in range(8) for layer in (nn.Linear(128, 128), nn.ReLU())))
        self.seconds: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        """Return the loss."""
        return self.net(batch[0]).square().mean()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Start the clock."""
        self._start = time.perf_counter()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Stop the clock."""
        self.seconds.append(time.perf_counter() - self._start)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


def trainer_step(name: str, steps: int) -> float:
    """Return the median seconds of a Trainer's step, the first quarter left out."""
    module = Small()
    data = DataLoader(TensorDataset(torch.randn(8 * steps, 128)), batch_size=8)
    Trainer(
        strategy=ORTStrategy(config={"engine": "torch"}, optim=name),  # type: ignore[arg-type]
        accelerator="cpu",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(module, data)
    return statistics.median(module.seconds[steps // 4 :])


def show(title: str, times: dict[str, list[float]]) -> None:
    """Print a table of medians."""
    table, found = table_of(title, ["optim"], ["median ms", "ratio to plain"]), medians(times)
    for name, median in found.items():
        table.add_row(name, f"{median * 1e3:.3g}", f"{median / found['keep']:.2f}")
    shown.print(table)


parser = argparse.ArgumentParser()
parser.add_argument("--millions", type=float, nargs="*", default=[10, 100])
parser.add_argument("--rounds", type=int, default=10)
parser.add_argument("--trainer-steps", type=int, default=200)
parser.add_argument("--optim", nargs="+", default=list(NAMES))
args = parser.parse_args()
shown = console(110)
for millions in args.millions:
    steps: dict[str, Callable[[], None]] = {}
    for name in args.optim:
        module = transformer(millions)
        try:
            steps[name] = stepper(name, module)
            steps[name]()
        except Exception as error:  # a package or a compiler that is missing
            steps.pop(name, None)
            shown.print(f"{name}: {str(error).strip().splitlines()[0]}")
    times = in_turns(steps, args.rounds)
    count = sum(parameter.numel() for parameter in transformer(millions).parameters())
    show(f"optimizer step, {count / 1e6:.1f} million parameters, {args.rounds} interleaved rounds", times)
if args.trainer_steps:
    usable = [name for name in args.optim if name in ("keep", "adamw_torch_foreach", "adamw_torch_fused")]
    runs: dict[str, list[float]] = {name: [] for name in usable}
    for _ in range(3):
        for name in usable:
            runs[name].append(trainer_step(name, args.trainer_steps))
    show(f"Trainer step, 8 x Linear(128), batch 8, median of {args.trainer_steps} steps, 3 runs", runs)
