"""What the region-by-region path earns: where a training step cannot be one session, what runs it, and how much faster.

``python benchmarks/region_path.py [MODULE ...] [--steps N] [--seconds N]``: the modules of ``zoo.py`` and
``held_out.py``, each in a process of its own that fits it with ``engine="ort"`` and ``start="now"``. Steps on ONNX
Runtime and unchanged ones take turns, so the ratio is of one run; unchanged ones have the fused optimizer and the
retained memory too. "One session" has no operation in PyTorch but the drawing of random numbers. The second table has
the lines of Python that the path consists of.
"""

import argparse
import json
import logging
import math
import statistics
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

from harness import BARE, console, printed_by, table_of

PACKAGE = Path(__file__).parents[1] / "lightning_ort" / "compiler"
PARTS = ("regions", "placement", "executors/ort")  # a step that is one session needs most of these too


def fit(name: str, steps: int) -> dict[str, Any]:
    """Fit in this process."""
    import held_out
    import zoo
    from lightning.pytorch import Trainer, seed_everything

    from lightning_ort import ORTStrategy

    warnings.simplefilter("ignore")
    logging.getLogger("lightning").setLevel(logging.ERROR)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    seed_everything(0, verbose=False)
    kind = next(kind for kind in (*zoo.MODULES, *held_out.MODULES) if kind.__name__ == name)
    with tempfile.TemporaryDirectory() as folder:
        strategy = ORTStrategy(config={"engine": "ort", "start": "now", "cache_dir": folder})
        trainer = Trainer(accelerator="cpu", strategy=strategy, max_steps=steps, max_epochs=-1, **BARE)
        trainer.fit(kind())
    report = strategy.report
    graphs = [graph for graph in report.graphs if graph.name.startswith("training_step")]
    regions = [region for graph in graphs for region in graph.regions]
    on_ort = [region for region in regions if region.executor == "ort"]
    return {
        "steps": trainer.global_step,
        "graphs": len(graphs),
        "regions": len(regions),
        "on_ort": len(on_ort),
        "nodes": sum(graph.num_nodes for graph in graphs),
        "nodes_on_ort": sum(graph.num_ort_nodes for graph in graphs),
        "served": max((region.runs for region in on_ort), default=0),  # their trials are not counted
        "ms": next((step.ms for step in report.run.steps if step.name == "training_step"), {}),
        "kept": next(
            (step.runs or step.engine for step in reversed(report.run.steps) if step.name == "training_step"), ""
        ),
    }


def lines_of(folder: str) -> int:
    """Return how many lines of Python a folder of the compiler has."""
    return sum(len(file.read_text(encoding="utf-8").splitlines()) for file in (PACKAGE / folder).rglob("*.py"))


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser()
    parser.add_argument("modules", nargs="*")
    parser.add_argument("--steps", type=int, default=60, help="of each fit, at most")
    parser.add_argument("--seconds", type=int, default=300, help="for one fit, start-up included")
    parser.add_argument("--only")
    args = parser.parse_args()
    if args.only:
        print(json.dumps(fit(args.only, args.steps)))
        return
    import held_out
    import zoo

    shown = console(150)
    names = args.modules or [kind.__name__ for kind in (*zoo.MODULES, *held_out.MODULES)]
    columns = ("graphs", "regions", "on ort", "nodes", "on ort", "steps", "on ort", "unchanged ms", "ort ms", "gain")
    table = table_of("training steps", ["module", "the step is", "kept"], columns)
    gains: dict[str, list[float]] = {}
    numbers = {"one session": 0, "several regions": 0, "PyTorch alone": 0}
    for name in names:
        command = [sys.executable, __file__, "--only", name, "--steps", str(args.steps)]
        one = printed_by(command, args.seconds)
        if isinstance(one, str):
            table.add_row(name, one, "")
            continue
        is_whole = one["on_ort"] == 1 and one["nodes"] == one["nodes_on_ort"]
        what = "PyTorch alone" if not one["on_ort"] else "one session" if is_whole else "several regions"
        numbers[what] += 1
        ms, gain = one["ms"], math.nan
        if "ort" in ms and "torch" in ms:
            gain = ms["torch"] / ms["ort"]
            gains.setdefault(what, []).append(max(1.0, gain))
        counts = (one[key] for key in ("graphs", "regions", "on_ort", "nodes", "nodes_on_ort", "steps", "served"))
        times = (f"{ms[engine]:.2f}" if engine in ms else "-" for engine in ("torch", "ort"))
        table.add_row(name, what, one["kept"] or "-", *map(str, counts), *times, f"{gain:.2f}")
    shown.print(table)
    for what, number in numbers.items():
        mean = statistics.geometric_mean(gains[what]) if what in gains else 1.0
        shown.print(f"{what}: {number} of {len(names)} modules, {mean:.3f}x where the slower way counts as 1")
    costs = table_of("lines of Python", ["part"], ["lines"])
    for part in PARTS:
        costs.add_row(f"compiler/{part}", f"{lines_of(part):,}")
    shown.print(costs)


if __name__ == "__main__":
    main()
