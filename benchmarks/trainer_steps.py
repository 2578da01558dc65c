"""How fast whole Trainer steps are: modules of the files ``zoo``, ``held_out`` and ``small``, trained in several ways.

The ways take turns, as in ``lightning-ort bench`` for one module; at the end is the geometric mean over the modules.
``python benchmarks/trainer_steps.py [--modules NAME ...] [--variants
VARIANT ...] [--rounds N] [--steps N] [--plots FOLDER] [--json FILE]``; the defaults compare precisions. The honest
baseline of ``ort`` is ``off``: the same optimizer and retained memory without ONNX Runtime.
"""

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

import held_out
import small
import zoo
from rich.console import Console

from lightning_ort._text import PlainTable
from lightning_ort.cli.bench import NAMED, compare, named, to_dict, to_table
from lightning_ort.cli.bench_picture import draw_bars
from lightning_ort.cli.load import load
from lightning_ort.tuning.api import machine
from lightning_ort.tuning.project import Project
from lightning_ort.tuning.trials import Trial, times

FILES = {kind.__name__: where.__file__ for where in (zoo, held_out, small) for kind in where.MODULES}
PRECISIONS = ("stock", "stock@bf16-mixed", "compile@bf16-mixed", "ort", "ort@bf16-mixed", "ort@medium")

parser = argparse.ArgumentParser()
parser.add_argument("--modules", nargs="+", default=["GPT", "BERT", "CNN"], choices=FILES)
parser.add_argument("--variants", nargs="+", default=list(PRECISIONS))
parser.add_argument("--rounds", type=int, default=7)
parser.add_argument("--steps", type=int, default=10)
parser.add_argument("--warm-up", type=int, default=50)
parser.add_argument("--plots", type=Path, help="a folder for NAME.png")
parser.add_argument("--json", type=Path, help="a file for the machine and the rows of every module")
args = parser.parse_args()
measured: list[list[Trial]] = []
console = Console(width=140)
found: dict[str, list[dict[str, Any]]] = {}
footnote = ", ".join(f"{name} {value}" for name, value in machine().items())
console.print(footnote)
for name in args.modules:
    kind, settings = load(f"{FILES[name]}:{name}", "module"), NAMED | {"cache_dir": None}
    trials = named(args.variants)
    with tempfile.TemporaryDirectory() as folder:
        project = Project(module=kind, accelerator="cpu", ort_config=settings)
        compare(project, trials, args.rounds, args.steps, args.warm_up, Path(folder))
    measured.append(trials)
    title = f"{name}: median of {args.rounds} rounds of {args.steps} steps"
    console.print(to_table(trials, title))
    if args.plots is not None:
        draw_bars(trials, title, footnote, args.plots / f"{name}.png")
    found[name] = [to_dict(trial, trials[0]) for trial in trials]
    if args.json is not None:
        asked = {"rounds": args.rounds, "steps": args.steps, "warm_up": args.warm_up}
        content = {"machine": machine(), "settings": asked, "modules": found}
        args.json.write_text(json.dumps(content, indent=1), encoding="utf-8")


whole = [trials for trials in measured if all(trial.rounds for trial in trials)]
table = PlainTable("variant", title=f"speed, geometric mean over {len(whole)} modules")
for other in args.variants:
    table.add_column(f"against {other}", justify="right")
for index, variant in enumerate(args.variants):
    ratios = [[times(one[index], one[other]) or 0.0 for one in whole] for other in range(len(args.variants))]
    table.add_row(variant, *(f"{statistics.geometric_mean(column):.2f}x" for column in ratios if column))
console.print(table)
