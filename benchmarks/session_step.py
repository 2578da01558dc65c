"""A whole training step of small modules: a loop written by hand, stock Lightning and this strategy, in turns.

Three layers of 64 at batch 32, and the modules of ``small.py``. By hand: forward, loss, ``zero_grad``, ``backward`` and
``step`` in a loop over the same batches, with the optimizer as configured, and fused with one thread. Batches are made
beforehand, logged (a value in each step, and a CSVLogger), of a shuffled ``TensorDataset``, or of a data set of a
user's, which returns an example as a dictionary that it computes. Each way is a process of its own that runs epochs
when it is told to, so that other work on the machine meets all of them.
``python benchmarks/session_step.py [--steps N] [--rounds N] [--modules Mlp ...] [--data made logged tensors rows]``
"""

import argparse
import itertools
import json
import logging
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from harness import console, medians, table_of
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger
from small import Layers, Layers8x128, Layers10x64
from torch.utils.data import DataLoader, Dataset, TensorDataset

from lightning_ort import ORTStrategy

WARM_UP = 4000  # steps, in which ways take turns
DATA = ("made", "logged", "tensors", "rows")


class Mlp(Layers):
    """Three layers of 64 at batch 32."""

    batch, width, depth = 32, 64, 3


MODULES = {kind.__name__: kind for kind in (Mlp, Layers10x64, Layers8x128)}
WAYS = ("by hand", "by hand, fused, one thread", "stock", "ort, unchanged", "ort")


class Turns(Callback):
    """Lets epochs run when they are asked for, and prints the seconds of each step in one."""

    def __init__(self, steps: int) -> None:
        self._steps, self._warm_up, self._begun = steps, -(-WARM_UP // steps), 0.0

    def on_train_epoch_start(self, *_: Any) -> None:
        """Wait for a turn, after the warm-up."""
        self._warm_up -= 1
        if self._warm_up < 0:
            print("ready", flush=True)
            sys.stdin.readline()
        self._begun = time.perf_counter()

    def on_train_epoch_end(self, *_: Any) -> None:
        """Say what it took."""
        if self._warm_up < 0:
            print("took", (time.perf_counter() - self._begun) / self._steps, flush=True)


class Batches:
    """The same few batches, again and again."""

    def __init__(self, batches: list[Any], count: int) -> None:
        self.batches = [batches[number % len(batches)] for number in range(count)]

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)


class Rows(Dataset[Any]):
    """A data set of a user's, which computes."""

    def __init__(self, x: Any, y: Any) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Any:
        return self.x[index] * 1.0, self.y[index]


def data_of(module: Any, kind: str, steps: int) -> Any:
    """Return what an epoch iterates over."""
    if kind in ("made", "logged"):
        return Batches([tuple(module.samples(module.batch)) for _ in range(8)], steps)
    x, y = module.samples(module.batch * steps)
    return DataLoader(TensorDataset(x, y) if kind == "tensors" else Rows(x, y), module.batch, shuffle=True)


def by_hand(module: LightningModule, data: Iterable[Any], turns: Turns, epochs: int, fused: bool) -> None:
    """Train without Lightning."""
    if fused:
        torch.set_num_threads(1)
    optimizer: Any = module.configure_optimizers()
    if fused:
        optimizer = type(optimizer)(optimizer.param_groups, fused=True)
    module.log = lambda *args, **kwargs: None  # type: ignore[method-assign, assignment]
    for _ in range(epochs):
        turns.on_train_epoch_start()
        for number, batch in enumerate(data):
            loss = module.training_step(batch, number)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        turns.on_train_epoch_end()


def run(name: str, kind: str, way: str, steps: int, rounds: int) -> None:
    """Train one module in one way, in this process."""
    torch.manual_seed(0)
    module: Any = MODULES[name]()
    if kind != "logged":
        module.log = lambda *args, **kwargs: None
    turns, data, epochs = Turns(steps), data_of(module, kind, steps), -(-WARM_UP // steps) + rounds
    if way.startswith("by hand"):
        by_hand(module, data, turns, epochs, "fused" in way)
    else:
        settings: dict[str, Any] = {"compile_budget": 1e-9} if "unchanged" in way else {}
        off = ("enable_checkpointing", "enable_progress_bar", "enable_model_summary")
        folder = tempfile.mkdtemp()
        trainer = Trainer(
            strategy="auto" if way == "stock" else ORTStrategy(config={"cache_dir": None, **settings}),
            callbacks=[turns],
            accelerator="cpu",
            max_epochs=epochs,
            logger=CSVLogger(folder) if kind == "logged" else False,
            **dict.fromkeys(off, False),
        )
        trainer.fit(module, data)
        shutil.rmtree(folder)
        if way != "stock":
            print(trainer.strategy.report.to_text(), file=sys.stderr)
    print("peak", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, flush=True)


def measure(name: str, kind: str, steps: int, rounds: int) -> dict[str, tuple[list[float], float]]:
    """Return the seconds of a step in each round, and the peak of memory in MB, of each way."""
    processes = {}
    for way in WAYS:
        command = [sys.executable, __file__, "--one", json.dumps([name, kind, way, steps, rounds])]
        processes[way] = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        _answer(processes[way], "ready")
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    for number in range(rounds):
        for way, process in processes.items():
            times[way].append(_turn(process))
            if number < rounds - 1:
                _answer(process, "ready")
    found = {}
    for way, process in processes.items():
        found[way] = times[way], _answer(process, "peak")
        process.wait()
    return found


def _tell(process: Any) -> None:
    process.stdin.write("go\n")
    process.stdin.flush()


def _turn(process: Any) -> float:
    _tell(process)
    return _answer(process, "took")


def _answer(process: Any, word: str) -> float:
    for line in process.stdout:
        first, *rest = line.split()
        if first == word:
            return float(rest[0]) if rest else 0.0
    raise RuntimeError("a process has ended before its time")


def main() -> None:
    """Print a table for each module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=500, help="in a round, which is an epoch")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--modules", nargs="+", choices=MODULES, default=list(MODULES))
    parser.add_argument("--data", nargs="+", choices=DATA, default=list(DATA))
    parser.add_argument("--one", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    if arguments.one:
        run(*json.loads(arguments.one))
        return
    out = console()
    for name, kind in itertools.product(arguments.modules, arguments.data):
        found = measure(name, kind, arguments.steps, arguments.rounds)
        middle = medians({way: times for way, (times, _) in found.items()})
        table = table_of(f"{name}, {kind}", ("way",), ("us a step", "of by hand", "times stock", "peak MB"))
        for way, seconds in middle.items():
            hand, stock = (
                statistics.median(one / other for one, other in zip(*pair, strict=True))
                for pair in ((found[way][0], found["by hand"][0]), (found["stock"][0], found[way][0]))
            )
            table.add_row(way, f"{1e6 * seconds:.0f}", f"{hand:.2f}", f"{stock:.2f}", f"{found[way][1]:.0f}")
        out.print(table)


if __name__ == "__main__":
    main()
