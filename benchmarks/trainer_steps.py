"""How fast whole Trainer steps are: the modules of ``benchmarks/zoo.py``, each trained in several ways, in turns.

What ``lightning-ort bench`` does for one module. ``python benchmarks/trainer_steps.py [--modules NAME ...] [--variants
VARIANT ...] [--rounds N] [--steps N] [--plots FOLDER] [--json FILE]``; the defaults compare precisions.
"""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import zoo
from rich.console import Console

from lightning_ort.cli.bench import machine, measure, plot, to_table
from lightning_ort.cli.bench_worker import Job, Variant

NAMES = [kind.__name__ for kind in zoo.MODULES]
PRECISIONS = ("stock", "stock@bf16-mixed", "compile@bf16-mixed", "ort", "ort@bf16-mixed", "ort@medium")

parser = argparse.ArgumentParser()
parser.add_argument("--modules", nargs="+", default=["GPT", "BERT", "CNN"], choices=NAMES)
parser.add_argument("--variants", nargs="+", default=list(PRECISIONS))
parser.add_argument("--rounds", type=int, default=7)
parser.add_argument("--steps", type=int, default=10)
parser.add_argument("--warm-up", type=int, default=50)
parser.add_argument("--plots", type=Path, help="a folder for NAME.png")
parser.add_argument("--json", type=Path, help="a file for the machine and the rows of every module")
args = parser.parse_args()
console = Console(width=140)
found: dict[str, list[dict[str, Any]]] = {}
console.print(", ".join(f"{name} {value}" for name, value in machine().items()))
for name in args.modules:
    job = Job(f"{zoo.__file__}:{name}", accelerator="cpu", ort_config={"cache_dir": None})
    with tempfile.TemporaryDirectory() as folder:
        variants = [Variant.parse(text) for text in args.variants]
        rows = measure(job, variants, args.rounds, args.steps, args.warm_up, Path(folder))
    title = f"{name}: median of {args.rounds} rounds of {args.steps} steps"
    console.print(to_table(rows, args.warm_up, title))
    if args.plots is not None:
        plot(rows, title, args.plots / f"{name}.png")
    found[name] = [row.to_dict(rows[0], args.warm_up) for row in rows]
    if args.json is not None:
        settings = {"rounds": args.rounds, "steps": args.steps, "warm_up": args.warm_up}
        content = {"machine": machine(), "settings": settings, "modules": found}
        args.json.write_text(json.dumps(content, indent=1), encoding="utf-8")
