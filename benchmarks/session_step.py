"""A whole training step of small modules: a loop written by hand, stock Lightning and this strategy, in turns.

Three layers of 64 at batch 32, and the modules of ``small.py``. By hand: forward, loss, ``zero_grad``, ``backward`` and
``step`` in a loop over the same batches, with the optimizer as configured, and fused with one thread. Each way is a
process of its own that runs rounds of steps when it is told to, so that other work on the machine meets all of them.
``python benchmarks/session_step.py [--steps N] [--rounds N] [--modules Mlp Layers10x64 Layers8x128] [--memory]``
"""

import argparse
import json
import logging
import resource
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from harness import console, medians, table_of
from lightning.pytorch import Callback, LightningModule, Trainer
from small import Layers, Layers8x128, Layers10x64
from torch.utils.data import DataLoader, IterableDataset

from lightning_ort import ORTStrategy

WARM_UP = 1000  # steps, in which ways take turns


class Mlp(Layers):
    """Three layers of 64 at batch 32."""

    batch, width, depth = 32, 64, 3


MODULES = {kind.__name__: kind for kind in (Mlp, Layers10x64, Layers8x128)}
WAYS = ("by hand", "by hand, fused, one thread", "stock", "ort, unchanged", "ort")


class Turns(Callback):
    """Lets rounds of steps run when they are asked for, and prints the seconds of each step in one."""

    def __init__(self, steps: int) -> None:
        self._steps, self._begun = steps, 0.0

    def on_train_batch_start(self, trainer: Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        """Begin a round."""
        if batch_idx >= WARM_UP and (batch_idx - WARM_UP) % self._steps == 0:
            self.turn(batch_idx > WARM_UP)

    def turn(self, ended: bool) -> None:
        """End a round, and wait for the next."""
        if ended:
            print("took", (time.perf_counter() - self._begun) / self._steps, flush=True)
        else:
            print("ready", flush=True)
        sys.stdin.readline()
        self._begun = time.perf_counter()


class Batches(IterableDataset):
    """The same few batches, again and again."""

    def __init__(self, batches: list[Any], count: int) -> None:
        self.batches, self.count = batches, count

    def __iter__(self) -> Iterator[Any]:
        return (self.batches[number % len(self.batches)] for number in range(self.count))


def by_hand(module: LightningModule, data: Iterable[Any], turns: Turns, fused: bool) -> None:
    """Train without Lightning."""
    if fused:
        torch.set_num_threads(1)
    optimizer: Any = module.configure_optimizers()
    if fused:
        optimizer = type(optimizer)(optimizer.param_groups, fused=True)
    module.log = lambda *args, **kwargs: None  # type: ignore[method-assign, assignment]
    for number, batch in enumerate(data):
        turns.on_train_batch_start(None, module, batch, number)  # type: ignore[arg-type]
        loss = module.training_step(batch, number)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def run(name: str, way: str, steps: int, rounds: int) -> None:
    """Train one module in one way, in this process."""
    torch.manual_seed(0)
    module: Any = MODULES[name]()
    batches = [tuple(module.samples(module.batch)) for _ in range(8)]
    turns, data = Turns(steps), Batches(batches, WARM_UP + steps * rounds + 1)
    if way.startswith("by hand"):
        by_hand(module, data, turns, "fused" in way)
    else:
        settings: dict[str, Any] = {"compile_budget": 1e-9} if "unchanged" in way else {"start": "now", "engine": "ort"}
        off = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
        trainer = Trainer(
            strategy="auto" if way == "stock" else ORTStrategy(config={"cache_dir": None, **settings}),
            callbacks=[turns],
            accelerator="cpu",
            max_epochs=1,
            **dict.fromkeys(off, False),
        )
        trainer.fit(module, DataLoader(data, batch_size=None))
    print("peak", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, flush=True)


def measure(name: str, steps: int, rounds: int) -> dict[str, tuple[list[float], float]]:
    """Return the seconds of a step in each round, and the peak of memory in MB, of each way."""
    processes = {}
    for way in WAYS:
        command = [sys.executable, __file__, "--one", json.dumps([name, way, steps, rounds])]
        processes[way] = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        _answer(processes[way], "ready")
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(rounds):
        for way, process in processes.items():
            times[way].append(_turn(process))
    found = {}
    for way, process in processes.items():
        _tell(process)
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
    parser.add_argument("--steps", type=int, default=200, help="in a round")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--modules", nargs="+", choices=MODULES, default=list(MODULES))
    parser.add_argument("--one", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    if arguments.one:
        run(*json.loads(arguments.one))
        return
    out = console()
    for name in arguments.modules:
        found = measure(name, arguments.steps, arguments.rounds)
        middle = medians({way: times for way, (times, _) in found.items()})
        table = table_of(name, ("way",), ("us a step", "of by hand", "times stock", "peak MB"))
        for way, seconds in middle.items():
            hand, stock = (
                statistics.median(one / other for one, other in zip(*pair, strict=True))
                for pair in ((found[way][0], found["by hand"][0]), (found["stock"][0], found[way][0]))
            )
            table.add_row(way, f"{1e6 * seconds:.0f}", f"{hand:.2f}", f"{stock:.2f}", f"{found[way][1]:.0f}")
        out.print(table)


if __name__ == "__main__":
    main()
