"""Every strategy loads what every strategy saved, at other numbers of processes: prints a table of all pairs.

For each pair: a checkpoint is saved after five steps (under the ort strategies, on ONNX Runtime), loaded, and saved
again at once, which has to be the same, parameters and optimizer states bit for bit; then five more steps have to lose
what they lose without interruption, within 1e-4. All processes see the same samples, so that their number makes no
difference.
``python benchmarks/checkpoint_matrix.py [--processes 1 2 4]``
"""

import argparse
import json
import os
import platform
import tempfile
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_ort import ORTDDPStrategy, ORTNativeZeRO1Strategy, ORTStrategy, ORTZeRO1Strategy

ALWAYS: dict[str, Any] = {"placement": "always"}
OFF: dict[str, Any] = {"engine": "torch"}  # how a step computes has no part in loading
STEPS = 5


def strategy(name: str, config: dict[str, Any]) -> Any:
    """Make a strategy; its processes are forked."""
    if name == "stock":
        return "auto"
    if name == "ddp":
        return DDPStrategy(start_method="fork")
    if name == "ort":
        return ORTStrategy(config=config)
    cls = {"ort_ddp": ORTDDPStrategy, "ort_zero1": ORTZeRO1Strategy, "ort_zero1_native": ORTNativeZeRO1Strategy}[name]
    return cls(config=config, start_method="fork")


class Network(LightningModule):
    """A small network with two parameter groups, a frozen parameter, a buffer and a schedule."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(8, 33), nn.GELU(), nn.LayerNorm(33), nn.Linear(33, 3))
        self.net[2].bias.requires_grad_(False)
        self.register_buffer("seen", torch.zeros(()))
        self.folder = folder
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        """Return the loss."""
        x, y = batch
        self.seen += 1
        return nn.functional.cross_entropy(self.net(x), y)

    def on_train_start(self) -> None:
        """Save what was loaded."""
        self.trainer.save_checkpoint(self.folder / "again.ckpt")

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Keep the loss."""
        self.losses.append(outputs["loss"].item())

    def on_train_end(self) -> None:
        """Save what this run ends with."""
        self.trainer.save_checkpoint(self.folder / "end.ckpt")
        report = getattr(self.trainer.strategy, "report", None)
        if self.trainer.is_global_zero:
            facts = {"losses": self.losses, "ort_runs": report.ort_runs if report else 0}
            (self.folder / "facts.json").write_text(json.dumps(facts))

    def configure_optimizers(self) -> Any:
        """Return AdamW with a schedule."""
        matrices = [parameter for parameter in self.parameters() if parameter.dim() > 1]
        vectors = [parameter for parameter in self.parameters() if parameter.dim() == 1]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=1e-2)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def train(name: str, processes: int, folder: Path, steps: int, config: dict[str, Any], ckpt: Path | None = None) -> Any:
    """Train up to a step, and return the losses and how often ONNX Runtime ran."""
    folder.mkdir()
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(8, 8, generator=generator), torch.randint(0, 3, (8,), generator=generator)
    # one batch again and again: Lightning does not go on within an epoch where the data stopped
    data = DataLoader(TensorDataset(x.repeat(2 * STEPS, 1), y.repeat(2 * STEPS)), batch_size=8)
    Trainer(
        strategy=strategy(name, config),
        accelerator="cpu",
        devices=processes,
        max_epochs=-1,
        max_steps=steps,
        use_distributed_sampler=False,
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(Network(folder), data, ckpt_path=ckpt)
    facts = json.loads((folder / "facts.json").read_text())
    return facts["losses"], facts["ort_runs"]


def differences(saved: Path, again: Path) -> list[str]:
    """What of a checkpoint is not the same in another."""
    first, second = (torch.load(path, weights_only=True) for path in (saved, again))
    found = []
    if not _same(dict(first["state_dict"]), dict(second["state_dict"])):
        found.append("parameters")
    one, other = first["optimizer_states"][0], second["optimizer_states"][0]
    if not _same(one["state"], other["state"]):
        found.append("optimizer states")
    if not _same(one["param_groups"], other["param_groups"]):
        found.append("parameter groups")
    if not _same(first["lr_schedulers"], second["lr_schedulers"]):
        found.append("schedulers")
    return found


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    return one == other


def check(saver: tuple[str, int], loader: tuple[str, int], folder: Path, losses: list[float]) -> str:
    """Load a checkpoint, and say what is wrong, or ``"yes"``."""
    saved = folder / f"{saver[0]}-{saver[1]}" / "end.ckpt"
    place = folder / f"{saver[0]}-{saver[1]}-to-{loader[0]}-{loader[1]}"
    try:
        continued, _ = train(*loader, place, 2 * STEPS, OFF, saved)
    except Exception as error:  # a cell of the table
        return f"{type(error).__name__}"
    wrong = differences(saved, place / "again.ckpt")
    if any(abs(a - b) > 1e-4 * abs(b) for a, b in zip(continued, losses[STEPS:], strict=True)):
        wrong.append("losses")
    return ", ".join(wrong) or "yes"


def main() -> None:
    """Fill the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4])
    counts = parser.parse_args().processes
    torch.set_num_threads(1)  # a pool of threads does not survive a fork
    kinds = [("stock", 1), ("ort", 1)]
    kinds += [(name, n) for name in ("ddp", "ort_ddp") for n in counts if n > 1]
    kinds += [(name, n) for name in ("ort_zero1", "ort_zero1_native") for n in counts]
    titles = [f"{name} x{n}" if n > 1 else name for name, n in kinds]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        losses, _ = train("stock", 1, folder / "whole", 2 * STEPS, OFF)
        for (name, n), title in zip(kinds, titles, strict=True):
            first, ort_runs = train(name, n, folder / f"{name}-{n}", STEPS, ALWAYS)
            assert all(abs(a - b) < 1e-4 * abs(b) for a, b in zip(first, losses, strict=False)), title
            assert bool(ort_runs) == name.startswith("ort"), title
        print("| saved by \\ loaded by | " + " | ".join(titles) + " |\n" + "|---" * (len(kinds) + 1) + "|")
        for saver, title in zip(kinds, titles, strict=True):
            cells = [check(saver, loader, folder, losses) for loader in kinds]
            print(f"| **{title}** | " + " | ".join(cells) + " |", flush=True)
    print(f"\ntorch {torch.__version__}, Python {platform.python_version()}, {os.cpu_count()} cores")


if __name__ == "__main__":
    main()
