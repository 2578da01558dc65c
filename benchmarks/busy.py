"""Fits on a machine that other programs use: beside stock Lightning in the same state, start-up included.

``python benchmarks/busy.py [MODULE:SECONDS ...]``. Two programs multiply matrices on all cores meanwhile, each with as
many threads as there are cores. Stock and ours take turns (A B B A), with empty caches and the default settings, and a
number of steps that takes stock about so many seconds. The ratio of the sums is to be at most 1.15.
``--programs 0 --threads 16`` has more threads than processors instead, whose barriers wait as those of many cores do.
"""

import argparse
import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import small
import torch
import zoo
from harness import BARE, console, table_of
from lightning.pytorch import Trainer, seed_everything

import lightning_ort
from lightning_ort._busy import Stopwatch

DEFAULT = ("MLP:8", "Autoencoder:8", "CNN:8", "LSTM:8", "SmallGPT:8", "Columns:8", "Layers4x256:8", "MLP:60")
TURNS = ("stock", "ort", "ort", "stock")
LONG = 30  # seconds from which on each has one turn
MOST = 1.15
LOAD = "import torch; x = torch.ones(1500, 1500)\nwhile True: x @ x"


@contextmanager
def load(programs: int) -> Iterator[None]:
    """Keep all cores busy meanwhile."""
    running = [subprocess.Popen([sys.executable, "-c", LOAD]) for _ in range(programs)]
    try:
        time.sleep(5)  # until they have loaded torch
        yield
    finally:
        for program in running:
            program.kill()
            program.wait()


def fit(name: str, variant: str, steps: int) -> dict[str, Any]:
    """Fit a module of the zoo for some steps, and return what that took."""
    seed_everything(0, verbose=False)
    module = {kind.__name__: kind for kind in (*zoo.MODULES, *small.MODULES)}[name]()
    with tempfile.TemporaryDirectory() as cache:
        ours = lightning_ort.ORTStrategy(config={"cache_dir": cache}) if variant == "ort" else "auto"
        trainer = Trainer(
            accelerator="cpu", devices=1, strategy=ours, max_steps=steps, max_epochs=-1, limit_val_batches=0, **BARE
        )
        watch = Stopwatch()
        trainer.fit(module)
        seconds, waited = watch.read()
    report = getattr(trainer.strategy, "report", None)
    says = "" if report is None else "; ".join(filter(None, (report.run.verdict, *report.run.threads.values())))
    return {"seconds": seconds, "waited": waited, "says": says}


def compare(name: str, seconds: float) -> list[str]:
    """Return a row of the table."""
    fit(name, "stock", 3)
    tried = fit(name, "stock", 8)["seconds"]
    steps = max(20, round(8 * seconds / tried))
    turns = TURNS if seconds < LONG else TURNS[:2]
    found: dict[str, list[dict[str, Any]]] = {"stock": [], "ort": []}
    for variant in turns:
        found[variant].append(fit(name, variant, steps))
    stock, ours = (sum(each["seconds"] for each in fits) for fits in found.values())
    waited = sum(each["waited"] for each in found["ort"]) / ours
    ratio = f"{ours / stock:.2f}{' !' * (ours > MOST * stock)}"
    verdicts = "\n".join(dict.fromkeys(each["says"] for each in found["ort"]))
    return [
        name,
        str(steps),
        f"{stock / len(found['stock']):.1f}",
        f"{ours / len(found['ort']):.1f}",
        ratio,
        f"{waited:.0%}",
        verdicts,
    ]


def main() -> None:
    """Print a table of all fits."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("modules", nargs="*", default=DEFAULT, metavar="MODULE:SECONDS")
    parser.add_argument("--programs", type=int, default=2)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of torch in each fit")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    warnings.simplefilter("ignore")
    for logger in ("lightning.pytorch", "lightning_ort"):
        logging.getLogger(logger).setLevel(logging.ERROR)
    title = f"fits beside {args.programs} programs on all {os.cpu_count()} cores, with {args.threads} threads"
    columns = ("stock s", "ort s", "ort / stock", "waited")
    table = table_of(title, ["module", "steps"], columns)
    table.add_column("what the report says of the last")
    out = console(160)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))  # so that the programs end too
    with load(args.programs):
        for name, _, seconds in (module.partition(":") for module in args.modules):
            table.add_row(*(row := compare(name, float(seconds))))
            print(*row, file=sys.stderr, flush=True)
    out.print(table)


if __name__ == "__main__":
    main()
