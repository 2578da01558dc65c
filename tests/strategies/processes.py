"""Runs with several real processes, each of which writes down what it saw, since it ends with the run."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule
from small_modules import Small
from torch import nn

START = "fork"  # spawned processes import torch again, which takes longer than all else here


class Records(LightningModule):
    """Keeps the facts of its rank in a file, and a checkpoint."""

    folder: Path
    name: str  # of this run, for the files' names
    losses: list[float]

    def on_train_end(self) -> None:
        report = getattr(self.trainer.strategy, "report", None)
        optimizer = self.trainer.optimizers[0]
        facts = {
            "losses": self.losses,
            "report": report and report.to_dict(),
            "weight": next(self.parameters()).tolist(),
            "fused": optimizer.param_groups[0].get("fused"),
            "states": self.states(),
            "state_bytes": state_bytes(optimizer),
        }
        (self.folder / f"{self.name}.{self.global_rank}.json").write_text(json.dumps(facts))
        self.trainer.save_checkpoint(self.folder / f"{self.name}.ckpt")

    def states(self) -> list[int]:
        """Which parameters this rank has states for, by number."""
        optimizer = self.trainer.optimizers[0]
        local = getattr(optimizer, "optim", optimizer)
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        return [index for index, parameter in enumerate(parameters) if local.state.get(parameter)]


class Recorded(Records, Small):
    """Trains with AdamW.

    Args:
        folder: For the files.
        name: Of this run.
        unused: Add a layer that no loss depends on.
    """

    def __init__(self, folder: Path, name: str, unused: bool = False) -> None:
        super().__init__()
        self.folder, self.name = folder, name
        self.net = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 3))
        self.unused = nn.Linear(2, 2) if unused else None

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def state_bytes(optimizer: Any) -> int:
    """Of the tensors of one rank's states that grow with the parameters."""
    for inner in ("optim", "optimizer"):  # ZeroRedundancyOptimizer's, DeepSpeedZeroOptimizer's
        optimizer = getattr(optimizer, inner, optimizer)
    tensors = [value for state in optimizer.state.values() for value in state.values()]
    return sum(tensor.nbytes for tensor in tensors if isinstance(tensor, torch.Tensor) and tensor.dim() > 0)


def fit(module: Records, strategy: Any, make_trainer: Callable[..., Any], **kwargs: Any) -> list[dict[str, Any]]:
    """Train a module in two processes, or as many as ``devices`` says, and return the facts of each rank."""
    ckpt_path = kwargs.pop("ckpt_path", None)
    arguments = {"devices": 2, "max_epochs": 2, "limit_val_batches": 1, "num_sanity_val_steps": 0, **kwargs}
    make_trainer(strategy=strategy, **arguments).fit(module, ckpt_path=ckpt_path)
    files = [module.folder / f"{module.name}.{rank}.json" for rank in range(arguments["devices"])]
    return [json.loads(file.read_text()) for file in files]
