"""Third-party models under stock Lightning and ``strategy="ort"``: fit seconds, losses, what was kept, what was said.

Each fit is a process of its own, in its group's environment, with an empty cache; the strategies take turns. Where the
losses differ by more than 1e-4, a third fit in float64 tells whether that is chaos: rounding errors that grow in both.

``python benchmarks/projects/run.py [--rows NAME ...] [--length short] [--start now] [--rounds 1] [--json FILE] [--page
FILE]``. ``make projects`` makes the environments first.
"""

import argparse
import datetime
import functools
import json
import math
import os
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from catalogue import LENGTHS, ROWS, Row
from page import write_page
from rich.console import Console

ROOT = Path(__file__).resolve().parent.parent.parent
ENVIRONMENTS = ROOT / ".projects"
TOLERANCE = 1e-4
TIMEOUT = 3600  # seconds of one fit

Fit = dict[str, Any]  # what fit.py writes, and the lines that it printed


def fit(row: Row, strategy: str, steps: int, start: str) -> Fit:
    """Run fit.py in the row's environment with empty caches."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "fit.json"
        environment = os.environ | {
            "PYTHONPATH": str(ROOT),
            "LIGHTNING_ORT_CONFIG": json.dumps({"start": start, "cache_dir": f"{folder}/cache"}),
            "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor",
        }
        python = ENVIRONMENTS / row.group / "bin" / "python"
        script = Path(__file__).with_name("fit.py")
        command = [python, script, row.name, "--strategy", strategy, "--steps", str(steps), "--output", output]
        try:
            done = subprocess.run(
                command, cwd=folder, env=environment, capture_output=True, text=True, timeout=TIMEOUT, check=False
            )
        except subprocess.TimeoutExpired:
            return {"error": f"no end after {TIMEOUT} s", "lines": []}
        found: Fit = json.loads(output.read_text(encoding="utf-8")) if output.exists() else {"error": "no result"}
        if done.returncode != 0 and not found["error"]:
            found["error"] = f"exit status {done.returncode}"
        lines = (done.stdout + done.stderr).splitlines()
        return found | {"lines": [line.replace(folder, "") for line in lines]}


@functools.cache
def double_fit(row: Row, steps: int) -> Fit:
    """Return the fit in float64, which every start is compared with; nothing is compiled in it."""
    return fit(row, "double", steps, "amortized")


def difference(one: Fit, other: Fit) -> float:
    """Return the largest relative difference of losses and metrics."""
    if len(one["losses"]) != len(other["losses"]) or one["metrics"].keys() != other["metrics"].keys():
        return float("inf")
    pairs = [*zip(one["losses"], other["losses"], strict=True)]
    pairs += [(value, other["metrics"][name]) for name, value in one["metrics"].items()]
    differences = [abs(a - b) / max(abs(a), abs(b), 1e-12) for a, b in pairs if not math.isnan(a) or not math.isnan(b)]
    return max((float("inf") if math.isnan(value) else value for value in differences), default=float("inf"))


def new_lines(stock: Fit, ort: Fit) -> list[str]:
    """Return what ``ort`` printed and stock did not, without regard to numbers and to what we tell of ordinary runs."""

    def form(line: str) -> str:
        return re.sub(r"\d+", "0", line).strip()

    known = {form(line) for line in stock["lines"]}
    ordinary = re.compile(r"lightning-ort: |.* compute nodes on ONNX Runtime in ")
    return [line for line in ort["lines"] if form(line) not in known and not ordinary.match(line)]


def kept(report: dict[str, Any]) -> str:
    """Say what the training step runs on at the end of the run."""
    engines = {step["name"]: step["engine"] for step in report["steps"]}
    if "training_step" in engines:
        return {"ort": "ORT", "torch": "PyTorch"}.get(engines["training_step"], engines["training_step"])
    if report["startup_seconds"] == 0:
        return "nothing compiled"
    choices = [note["reason"]["type"] for note in report["notes"] if note["where"] == "training_step"]
    return "PyTorch" if {"BUDGET", "NOT_COMPILED"} & set(choices) else "captured, not timed"


def measure(row: Row, length: str, starts: list[str], rounds: int, float64: bool) -> list[dict[str, Any]]:
    """Train a row in turns, under stock and with each start, and compare."""
    steps = row.steps * LENGTHS[length]
    fits: dict[str, list[Fit]] = {way: [] for way in ("stock", *starts)}
    for number in range(rounds):
        for way in list(fits)[:: 1 if number % 2 == 0 else -1]:
            strategy, start = ("stock", starts[0]) if way == "stock" else ("ort", way)
            fits[way].append(fit(row, strategy, steps, start))
    return [compared(row, length, start, {"stock": fits["stock"], "ort": fits[start]}, float64) for start in starts]


def compared(row: Row, length: str, start: str, fits: dict[str, list[Fit]], float64: bool) -> dict[str, Any]:
    """Return what the fits of a row say."""
    steps = row.steps * LENGTHS[length]
    found: dict[str, Any] = {"row": row.name, "length": length, "start": start, "steps": steps}
    for strategy, made in fits.items():
        if error := next((one["error"] for one in made if one["error"]), ""):
            return found | {"error": f"{strategy}: {error}", "lines": made[-1]["lines"][-20:]}
    stock, ort = fits["stock"][0], fits["ort"][-1]
    found |= {"error": "", "versions": ort["versions"], "lines": new_lines(stock, ort)}
    found["report"] = ort["report"] | {"graphs": len(ort["report"]["graphs"])}  # megabytes otherwise
    for strategy, made in fits.items():
        found[f"{strategy}_seconds"] = statistics.median(one["seconds"] for one in made)
        found[f"{strategy}_processor_seconds"] = statistics.median(one["processor_seconds"] for one in made)
    found |= {"kept": kept(ort["report"]), "difference": difference(stock, ort), "losses": len(ort["losses"])}
    if float64 and found["difference"] > TOLERANCE:
        double = double_fit(row, steps)
        found["double_error"] = double["error"]
        if not double["error"]:
            found["stock_from_double"], found["ort_from_double"] = difference(stock, double), difference(ort, double)
    return found


def main() -> None:
    """Measure the rows, keep what is known after each, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", nargs="+", default=[""], metavar="NAME", help="beginnings of names, such as darts")
    parser.add_argument("--length", choices=LENGTHS, nargs="+", default=["short"])
    parser.add_argument("--start", choices=["now", "amortized"], nargs="+", default=["amortized"])
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument(
        "--float64", action=argparse.BooleanOptionalAction, default=True, help="the third fit where losses differ"
    )
    parser.add_argument("--json", type=Path, help="adds to it, or takes the place of what it has of a row")
    parser.add_argument("--page", type=Path, help="writes the table of all that is in the JSON file")
    args = parser.parse_args()

    rows = [row for row in ROWS if row.name.startswith(tuple(args.rows))]
    if not rows:
        sys.exit(
            f"--rows {' '.join(args.rows)}: got no row; allowed are beginnings of {', '.join(r.name for r in ROWS)}"
        )
    results: dict[str, Any] = {}
    if args.json is not None and args.json.exists():
        results = json.loads(args.json.read_text(encoding="utf-8"))
    console = Console(soft_wrap=True)
    for row, length in [(r, le) for r in rows for le in args.length]:
        for found in measure(row, length, args.start, args.rounds, args.float64):
            found["date"] = datetime.date.today().isoformat()
            results[f"{row.name} {length} {found['start']}"] = found
            console.print(summary(found), markup=False)
        if args.json is not None:
            args.json.write_text(json.dumps(results, indent=1), encoding="utf-8")
    if args.page is not None:
        write_page(args.page, results)


def summary(found: dict[str, Any]) -> str:
    """Return one line, and the lines that only ``ort`` printed."""
    head = f"{found['row']} {found['length']} {found['start']}"
    if found["error"]:
        return "\n  ".join([f"{head}: FAILED {found['error']}", *found["lines"]])
    double = ""
    if "stock_from_double" in found:
        double = f" (from float64: stock {found['stock_from_double']:.1e}, ort {found['ort_from_double']:.1e})"
    text = (
        f"{head}: stock {found['stock_seconds']:.1f} s, ort {found['ort_seconds']:.1f} s, processor "
        f"{found['stock_processor_seconds']:.1f} s, {found['ort_processor_seconds']:.1f} s; {found['kept']}; "
        f"{found['losses']} losses differ by {found['difference']:.1e}{double}; {found['report']['verdict']}"
    )
    return "\n  ".join([text, *found["lines"]])


if __name__ == "__main__":
    main()
