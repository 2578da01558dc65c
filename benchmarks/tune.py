"""What ``lightning-ort tune`` gives: five modules, each tuned, and then compared with what it was by other means.

``python benchmarks/tune.py [--modules NAME ...] [--time SECONDS] [--rounds N] [--steps N]``. The search decides on its
own trials; the check afterwards trains the configuration that it wrote beside the module's own, in turns, in processes
of their own. Losses are means over the last quarter of the same examples.
"""

import argparse
import statistics
import sys
import tempfile
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path
from typing import Any

import yaml
from harness import console, table_of

import lightning_ort
from lightning_ort.tuning.candidate import Candidate
from lightning_ort.tuning.project import Project, start
from lightning_ort.tuning.trials import departure

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "examples" / name) for name in ("language_model", "minilm", "digits")]
WARM_UP = 60
# name -> module, data
MODULES = {
    "language model": ("model.GPT", "data.StandardLibrarySource"),
    "MiniLM": ("main.DocstringClassifier", "main.Docstrings"),
    "digits CNN": ("digits.CNN", "digits.Digits"),
    "LSTM": ("zoo.LSTM", None),
    "tabular MLP": ("zoo.MLP", None),
}


def imported(path: str | None) -> Any:
    """Return what a path names."""
    module, _, name = (path or "").rpartition(".")
    return getattr(import_module(module), name) if module else None


def checked(name: str, result: lightning_ort.TuneResult, rounds: int, steps: int) -> tuple[float, float, float, str]:
    """Return the speed-up in the median and its range over rounds, and the difference of the loss."""
    model, data = MODULES[name]
    own: dict[str, Any] = {"trainer": {"accelerator": "cpu"}, "model": {"class_path": model}}
    if data is not None:
        own["data"] = {"class_path": data}
    each = result.best["settings"].get("accumulate", 1)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        workers = []
        for which, config in (("own", own), ("tuned", yaml.safe_load(result.yaml))):
            workers.append(start(Project(config=config), Candidate(), folder / which))
            stack.callback(workers[-1].stop)
        losses: list[list[float]] = [[], []]
        ratios = []
        for number in range(rounds + 1):
            seconds = []
            for worker, kept in zip(workers, losses, strict=True):
                batches = (WARM_UP if number == 0 else steps) * (each if worker is workers[1] else 1)
                sample = worker.sample(batches)
                kept += sample.losses
                seconds.append(sample.step_seconds * batches)
            if number:
                ratios.append(seconds[0] / seconds[1])
    tuned = [statistics.fmean(losses[1][at : at + each]) for at in range(0, len(losses[1]), each)]
    apart = departure(tuned, losses[0])
    differs = "-" if apart is None else f"{apart.difference:.1e} (by chance up to {apart.noise:.1e})"
    return statistics.median(ratios), min(ratios), max(ratios), differs


def main() -> None:
    """Tune, check, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modules", nargs="+", default=list(MODULES), choices=list(MODULES), metavar="NAME")
    parser.add_argument("--time", type=float, default=300.0)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()
    shown = console(170)
    numbers = ["in the search", "checked afterwards", "(rounds)", "loss differs"]
    table = table_of(f"lightning-ort tune, {args.time:.0f} s each", ["module", "chosen"], numbers)
    for name in args.modules:
        model, data = map(imported, MODULES[name])
        result = lightning_ort.tune(model, data, time=args.time, accelerator="cpu")
        shown.print(result.table(), *result.not_measured, *result.notes, sep="\n")
        median, low, high, differs = checked(name, result, args.rounds, args.steps)
        speeds = [f"{result.speed_up:.2f}x", f"{median:.2f}x", f"{low:.2f}-{high:.2f}"]
        table.add_row(name, result.best["candidate"], *speeds, differs)
    shown.print(table)


if __name__ == "__main__":
    main()
