"""Federated averaging: clients without PyTorch train on data of their own, and only their states are put together.

    python examples/federated/main.py --clients 4 --rounds 5

The training step of a small network is exported once. Each client then has the exported folder, numpy and onnxruntime:
it starts from the common `state.safetensors`, trains on its own digits, and hands its state back. The server averages
the states, weighted by the numbers of images. Here all are one process; elsewhere the files travel.
"""

import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from jsonargparse import auto_cli

Arrays = dict[str, Any]


def average(states: list[Arrays], weights: list[int]) -> Arrays:
    """Return the mean of states; what counts, such as the batches that a batch norm has seen, is the largest."""
    shares = np.array(weights) / sum(weights)
    mean: Arrays = {}
    for name, first in states[0].items():
        values = [state[name] for state in states]
        if first.dtype.kind == "f":
            mean[name] = sum(share * value for share, value in zip(shares, values, strict=True)).astype(first.dtype)
        else:
            mean[name] = np.maximum.reduce(values)
    return mean


def train_client(runner: ModuleType, folder: Path, state: Path, images: Any, labels: Any, seed: int) -> None:
    """Train on a client's images for an epoch, and write the client's state over the common one that it was given."""
    training = runner.Training.load(folder, state)
    order = np.random.default_rng(seed).permutation(len(images))
    for start in range(0, len(order), 16):
        rows = order[start : start + 16]
        training.step((images[rows], labels[rows]), lr=0.1)
    training.save(state)


def federated(clients: int = 4, rounds: int = 5, folder: Path | None = None) -> float:
    """Train, and return the accuracy on images that no client has.

    Args:
        clients: Number of clients, each with digits of mostly other kinds.
        rounds: How often states are put together.
        folder: Where to write the exported folder and the states.
    """
    work = Path(tempfile.mkdtemp()) if folder is None else folder
    images, labels = export(work / "exported")  # the only part that needs PyTorch
    import importlib.util

    spec = importlib.util.spec_from_file_location("training", work / "exported" / "training.py")
    assert spec is not None
    assert spec.loader is not None
    runner = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(runner)

    held_out, rest = np.arange(300), np.arange(300, len(images))
    parts = np.array_split(rest[np.argsort(labels[rest] // 3, kind="stable")], clients)
    common = work / "exported" / "state.safetensors"
    accuracy = 0.0
    for turn in range(rounds):
        states = []
        for client, rows in enumerate(parts):
            path = work / f"client_{client}.safetensors"
            path.write_bytes(common.read_bytes())
            train_client(runner, work / "exported", path, images[rows], labels[rows], seed=turn * clients + client)
            states.append(runner.read_state(path))
        steps = max(int(about["step"]) for _, about in states)
        mean = average([state for state, _ in states], [len(rows) for rows in parts])
        runner.write_state(common, mean, {"step": str(steps), "pending": "0"})
        scores = runner.Training.load(work / "exported").predict(images[held_out])["output"]
        accuracy = float((scores.argmax(1) == labels[held_out]).mean())
        print(f"round {turn + 1}: {accuracy:.0%} of {len(held_out)} digits that no client has")
    return accuracy


def export(folder: Path) -> tuple[Any, Any]:
    """Write the training step of a small network, and return scikit-learn's digits."""
    import torch
    import torch.nn.functional as F
    from lightning.pytorch import LightningModule
    from sklearn.datasets import load_digits

    from lightning_ort import export_training

    class Digits(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            return self.net(images)

        def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], batch_idx: int) -> torch.Tensor:
            return F.cross_entropy(self(batch[0]), batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    data = load_digits()
    order = np.random.default_rng(0).permutation(len(data.data))
    images, labels = (data.data[order] / 16).astype(np.float32), data.target[order].astype(np.int64)
    torch.manual_seed(0)
    export_training(Digits(), (torch.from_numpy(images[:16]), torch.from_numpy(labels[:16])), folder)
    return images, labels


if __name__ == "__main__":
    auto_cli(federated, as_positional=False)
