"""Batches from torch's DataLoader: as it fetches them, and as it does while a run of ours lasts.

Calls are of functions, Python's and C's together, for one batch. Times are the least of the rounds, which take turns,
in processor time of this process.
``python benchmarks/loading.py [--rounds N]``
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from harness import console, table_of
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, TensorDataset

from lightning_ort.strategies.whole_batches import whole_batches

BATCHES = 20


def tensors(rows: int, *shape: int) -> TensorDataset:
    """Return examples of a shape, with labels."""
    return TensorDataset(torch.randn(rows, *shape), torch.randint(0, 9, (rows,)))


class Indexes(Dataset[Any]):
    """As people write them: an example is what there is at the index."""

    def __init__(self, x: Any, y: Any) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Any:
        return self.x[index], self.y[index]


class Table(Indexes):
    """As pytorch_tabular has it."""

    def __init__(self, x: Any, y: Any) -> None:
        super().__init__(x, y)
        self.columns = ["a"]

    def __getitem__(self, index: int) -> Any:
        return {"continuous": self.x[index] if self.columns else torch.Tensor(), "target": self.y[index]}


class Makes(Indexes):
    """Does more: examples are made one by one, and collated by columns."""

    def __init__(self, x: Any, y: Any, make: Callable[[Any, Any], Any]) -> None:
        super().__init__(x, y)
        self.make = make

    def __getitem__(self, index: int) -> Any:
        return self.make(self.x[index], self.y[index])


def of_users(size: int) -> Iterator[tuple[str, Any, int]]:
    """Yield data sets of people's own, with a name and a batch size."""
    rows = BATCHES * size
    x, y = np.random.default_rng(0).random((rows, 64), dtype=np.float32), np.arange(rows) % 9
    images = np.zeros((rows, 3, 32, 32), np.float32)
    yield "indexes tensors", Indexes(torch.from_numpy(x), torch.from_numpy(y)), size
    yield "indexes arrays", Indexes(x, y), size
    yield "indexes arrays, if there are any", Table(x, y), size
    yield "indexes a list of numbers", Indexes(torch.from_numpy(x), y.tolist()), size
    yield "makes tuples: array, int", Makes(x, y, lambda x, y: (x + 1, int(y))), size
    yield "makes tuples: tensor, int", Makes(torch.from_numpy(x), y, lambda x, y: (x + 1, int(y))), size
    yield "makes tuples: image, int", Makes(images, y, lambda x, y: (x + 1, int(y))), size
    yield "makes dicts: 2 arrays, int, float", Makes(x, y, lambda x, y: {"x": x, "z": -x, "y": int(y), "w": 1.5}), size


def cases() -> Iterator[tuple[str, Any, int]]:
    """Yield a name, data and a batch size."""
    for size in (1, 4, 32, 256):
        yield f"64 numbers, batches of {size}", tensors(BATCHES * size, 64), size
    data = tensors(2 * BATCHES * 32, 64)
    yield "Subset of them", Subset(data, torch.randperm(len(data))[: BATCHES * 32].tolist()), 32
    yield "ConcatDataset of two", ConcatDataset([tensors(BATCHES * 16, 64), tensors(BATCHES * 16, 64)]), 32
    yield "images of 28 x 28", tensors(BATCHES * 64, 1, 28, 28), 64
    yield "images of 3 x 224 x 224", tensors(BATCHES * 8, 3, 224, 224), 8
    yield from of_users(64)


@contextmanager
def in_a_run(on: bool) -> Iterator[None]:
    """Fetch as while a run lasts, or as torch does."""
    if on:
        whole_batches.begin("a run")
    try:
        yield
    finally:
        whole_batches.end("a run")


def calls(loader: DataLoader) -> int:
    """Return the calls of one batch."""
    batches, found = iter(loader), []
    next(batches)
    sys.setprofile(lambda frame, event, argument: found.append(1) if event in ("call", "c_call") else None)
    next(batches)
    sys.setprofile(None)
    return len(found) - 1  # that of setprofile


def microseconds(loader: DataLoader) -> float:
    """Return the processor time of one batch of an epoch."""
    start = time.process_time()
    for _ in loader:
        pass
    return 1e6 * (time.process_time() - start) / len(loader)


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=30)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    table = table_of("one batch", ("data",), ("calls, torch", "calls, ours", "us, torch", "us, ours", "times as fast"))
    for name, data, size in cases():
        loader = DataLoader(data, batch_size=size, shuffle=True)
        count, least = [0, 0], [float("inf")] * 2
        for turn in range(rounds):
            for ours in (0, 1) if turn % 2 else (1, 0):
                with in_a_run(bool(ours)):
                    count[ours] = calls(loader)
                    least[ours] = min(least[ours], microseconds(loader))
        table.add_row(name, *map(str, count), *(f"{one:,.0f}" for one in least), f"{least[0] / least[1]:.2f}")
    console().print(table)


if __name__ == "__main__":
    main()
