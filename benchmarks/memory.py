"""Peak memory of fits: without compiling, with a trial for ONNX Runtime that is lost, and with one that is kept.

``python benchmarks/memory.py [MODULE ...] [--steps N] [--rounds N]``: modules of ``zoo.py`` and ``held_out.py``, and
:class:`Encoder` of this file, each fit in a process of its own. All have the fused optimizer and retained memory. What
the duel finds is replaced, or a module would be in one column alone. The peak is the process's, imports included.
"""

import argparse
import json
import logging
import resource
import statistics
import subprocess
import sys
import tempfile
import warnings
from typing import Any

import held_out
import torch
import zoo
from harness import BARE, console, table_of
from lightning.pytorch import Trainer, seed_everything
from torch import Tensor, nn

from lightning_ort import ORTStrategy
from lightning_ort.strategies.race.race import Race

WAYS = ("uncompiled", "lost", "kept")


class Encoder(zoo.Classifier):
    """Five layers of a transformer, 256 wide, on batches of 16 x 128 tokens."""

    batch = 16

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(4000, 256)
        layer = nn.TransformerEncoderLayer(256, 8, 1024, 0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 5, enable_nested_tensor=False)
        self.head = nn.Linear(256, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Return class scores."""
        scores: Tensor = self.head(self.layers(self.embedding(x)).mean(1))
        return scores

    def samples(self, count: int) -> Any:
        """Return tokens and class indices."""
        return torch.randint(0, 4000, (count, 128)), torch.randint(0, 10, (count,))


MODULES = {kind.__name__: kind for kind in (*zoo.MODULES, *held_out.MODULES, Encoder)}


def fit(name: str, way: str, steps: int) -> dict[str, Any]:
    """Fit in this process."""
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    seed_everything(0, verbose=False)
    crown, duels = Race._crown, []

    def decide(race: Race, duel: Any, wins: bool) -> None:
        duels.append(wins)
        crown(race, duel, way == "kept")

    Race._crown = decide  # type: ignore[method-assign]
    settings: dict[str, Any] = {"engine": "torch"} if way == "uncompiled" else {"engine": "ort", "start": "now"}
    with tempfile.TemporaryDirectory() as folder:
        strategy = ORTStrategy(config={"cache_dir": folder, **settings})
        Trainer(accelerator="cpu", strategy=strategy, max_steps=steps, max_epochs=-1, **BARE).fit(MODULES[name]())
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"peak": peak, "duels": len(duels)}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("modules", nargs="*", default=list(MODULES), metavar="MODULE")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--one", choices=WAYS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(fit(args.modules[0], args.one, args.steps)))
        return
    table = table_of(f"peak memory of {args.steps} steps", ["module"], (*WAYS, "lost", "kept", "duels"))
    for name in args.modules:
        found: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
        for _ in range(args.rounds):
            for way in WAYS:
                command = [sys.executable, __file__, name, "--one", way, "--steps", str(args.steps)]
                done = subprocess.run(command, capture_output=True, text=True, check=True)
                found[way].append(json.loads(done.stdout.strip().splitlines()[-1]))
        peaks = {way: statistics.fmean(one["peak"] for one in fits) for way, fits in found.items()}
        ratios = (f"{peaks[way] / peaks['uncompiled']:.2f}x" for way in WAYS[1:])
        duels = min(one["duels"] for way in WAYS[1:] for one in found[way])  # 0: nothing was tried, or it has failed
        table.add_row(name, *(f"{peak:.0f} MB" for peak in peaks.values()), *ratios, str(duels))
    console().print(table)


if __name__ == "__main__":
    main()
