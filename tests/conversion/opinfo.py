"""Write docs/test_reports/opinfo.md: what torch's own test database says of the ops that ONNX Runtime runs.

Every sample of every op of the database is compiled with ``placement="always"``, run forward and backward, and compared
with eager; some of each op's samples besides with special values, in other memory layouts, in other dtypes, in place
and with the standard kernels. Run as ``make conformance``, or by hand for some ops::

    python -m tests.conversion.opinfo --ops add softmax --limit 2 --plain 5
"""

import argparse
import datetime
import importlib.metadata
import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lightning_ort.compiler.executors.ort import kernels
from tests.conversion.opinfo_cases import LAYOUTS, OPS
from tests.conversion.opinfo_check import Outcome, Status
from tests.conversion.opinfo_known import explained
from tests.conversion.opinfo_run import CHANGING_SIZES, Key, run_all

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "test_reports" / "opinfo.md"
FAILURES = (Status.MISMATCH, Status.CRASH, Status.TIMEOUT)
# ONNX Runtime had nothing to do, or there is no result to compare
_NOT_COMPARED = (Status.IN_TORCH, Status.NOT_TRACED, Status.EAGER_CRASH)

HEAD = """\
# torch's test database

Made by `make conformance` with {versions} on a CPU, {date}; do not edit.

torch tests its operations with a database of samples,
[OpInfo](https://github.com/pytorch/pytorch/blob/main/torch/testing/_internal/opinfo/core.py). Here each sample is
compiled with `placement="always"` and `min_region_nodes=1`, run forward and backward, and compared with eager. The
comparison covers values, NaN and infinities, dtypes, shapes, strides, gradients, values written to inputs, and errors.
Eager in float64 decides which differences are rounding. A difference counts as rounding if it is at most a few units in
the last place, at most a few times the distance of eager in float32 from float64, or at most the change that results
from moving the inputs by one unit in the last place.

{ops} operations were tried. ONNX Runtime ran all or parts of {reached} of them, in {ran} of {calls} calls, and in
{backward} of these calls in the backward pass too. **{mismatches} differ by more than rounding explains, {crashes}
crashed or hung.** {explained} differ for [a known reason](#known-differences).

| calls | compiled | on ONNX Runtime | backward too | as eager | both raise | torch differs alike | known | mismatches |
|---|---|---|---|---|---|---|---|---|
{table}

- *compiled*: calls in which ONNX Runtime had something to run, so that the result is compared.
- *changing sizes*: calls of one compiled function, whose inputs have more rows, fewer, one and none after the first.
- *torch differs alike*: the graph that torch captures differs in the same way when torch itself runs it, or eager
  gives different results from call to call.
- Special values are mixed with ordinary ones: NaN, infinities, denormals and -0.0 (*tiny*), numbers near the largest
  finite number (*huge*), and the smallest and largest integers (*limits*), which include indices out of range.
- When numbers near the largest finite number are added, the order of additions decides whether the sum overflows. Such
  differences are not counted.
- The indices of equal values, which `sort` and `topk` return, may be in any order.

In {in_torch} calls, ONNX Runtime had nothing to run. torch cannot capture {not_traced} calls as one graph, mostly
because a size depends on the data: dynamo ends the graph there.
"""

KNOWN_HEAD = """
## Known differences

| operation | calls | why |
|---|---|---|
"""
FAILED_HEAD = """
## Mismatches

| operation | calls | first |
|---|---|---|
"""
REACHED_HEAD = """
## In the default test suite

For each ATen operation that ONNX Runtime runs, the default test suite runs the first float32 sample of one database
operation. This list is grouped by the pass in which it ran.
"""


def label(key: Key, outcome: Outcome) -> str:
    """The row of the table that an outcome counts in."""
    if key.dtype != "float32":
        return key.dtype if outcome.values == "plain" else f"{key.dtype}, special values"
    if key.kernels == "standard":
        return "float32, standard kernels"
    if key.variant != "plain":
        return f"float32, {key.variant}"
    return "float32" if outcome.values == "plain" else f"float32, {outcome.values}"


def _order(name: str) -> tuple[int, str]:
    first = ["float32", "float32, standard kernels", *(f"float32, {kind}" for kind in ("nan", "inf", "tiny", "huge"))]
    ordered = [*first, *(f"float32, {layout}" for layout in LAYOUTS)]
    ordered += ["float32, in place", f"float32, {CHANGING_SIZES}"]
    return (ordered.index(name), "") if name in ordered else (len(ordered), name)


def _row(name: str, outcomes: list[Outcome]) -> str:
    found = Counter(outcome.status for outcome in outcomes)
    cells = [
        sum(outcome.status not in _NOT_COMPARED for outcome in outcomes),
        sum(outcome.forward or outcome.backward for outcome in outcomes),
        sum(outcome.backward for outcome in outcomes),
        found[Status.OK],
        found[Status.EAGER_FAILS],
        found[Status.TORCH] + found[Status.UNDEFINED],
        found[Status.EXPLAINED],
        sum(found[status] for status in FAILURES),
    ]
    return f"| {name} | {' | '.join(f'{cell:,}' for cell in cells)} |"


def _by_op(results: Iterable[tuple[Key, Outcome]]) -> str:
    found: dict[str, list[tuple[Key, Outcome]]] = {}
    for key, outcome in results:
        found.setdefault(key.op, []).append((key, outcome))
    lines = []
    for op, entries in sorted(found.items()):
        key, outcome = entries[0]
        text = outcome.detail.replace("|", "/")
        if outcome.status is not Status.EXPLAINED:
            text = f"{label(key, outcome)}, sample {key.sample}: {text}"
        lines.append(f"| `{op}` | {len(entries)} | {text} |\n")
    return "".join(lines)


def reached(results: Iterable[tuple[Key, Outcome]]) -> dict[str, list[str]]:
    """Ops whose first sample ONNX Runtime ran in float32, by where it ran: enough that each ATen op is there."""
    there: set[str] = set()
    found: dict[str, list[str]] = {"forward and backward": [], "forward": [], "backward": []}
    for key, outcome in results:
        first = (key.dtype, key.variant, key.kernels, key.sample, outcome.values)
        where = " and ".join(kind for kind in ("forward", "backward") if getattr(outcome, kind))
        if first == ("float32", "plain", "auto", 0, "plain") and where and not there.issuperset(outcome.ops):
            found[where].append(key.op)
            there.update(outcome.ops)
    return found


def page(results: list[tuple[Key, Outcome]]) -> str:
    """The page as Markdown."""
    results = [(key, outcome) for key, outcome in results if key.variant != "sampling"]
    rows: dict[str, list[Outcome]] = {}
    for key, outcome in results:
        rows.setdefault(label(key, outcome), []).append(outcome)
    outcomes = [outcome for _, outcome in results]
    found = Counter(outcome.status for outcome in outcomes)
    ran = [(key, outcome) for key, outcome in results if outcome.forward or outcome.backward]
    installed = next(name for name in kernels.DISTRIBUTIONS if kernels.installed(name))
    text = HEAD.format(
        versions=" and ".join(f"{name} {importlib.metadata.version(name)}" for name in ("torch", installed)),
        date=datetime.date.today().isoformat(),
        ops=len({key.op for key, _ in results}),
        reached=len({key.op for key, _ in ran}),
        ran=f"{len(ran):,}",
        calls=f"{len(outcomes):,}",
        backward=f"{sum(outcome.backward for outcome in outcomes):,}",
        mismatches=found[Status.MISMATCH],
        crashes=found[Status.CRASH] + found[Status.TIMEOUT],
        explained=found[Status.EXPLAINED],
        in_torch=f"{found[Status.IN_TORCH]:,}",
        not_traced=f"{found[Status.NOT_TRACED]:,}",
        table="\n".join([*(_row(name, rows[name]) for name in sorted(rows, key=_order)), _row("**all**", outcomes)]),
    )
    failed = [(key, outcome) for key, outcome in results if outcome.status in FAILURES]
    known = [(key, outcome) for key, outcome in results if outcome.status is Status.EXPLAINED]
    text += (FAILED_HEAD + _by_op(failed) if failed else "") + KNOWN_HEAD + _by_op(known) + REACHED_HEAD
    for where, ops in reached(results).items():
        text += f"\n{where.capitalize()}: {', '.join(f'`{op}`' for op in sorted(ops))}.\n"
    return text


def as_dict(key: Key, outcome: Outcome) -> dict[str, Any]:
    """A result as a line of JSON has it."""
    return {**asdict(key), **asdict(outcome), "status": outcome.status.name}


def main() -> None:
    """Run the database, say what fails, and write the page if all of it was run."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument(
        "--ops", nargs="*", default=list(OPS), metavar="NAME", help="names in the database; all if left out"
    )
    parser.add_argument("--limit", type=int, default=3, help="samples of an op in each other way than plain float32")
    parser.add_argument("--plain", type=int, help="samples of an op in plain float32; all if left out")
    parser.add_argument("--workers", type=int, default=2, help="processes")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "opinfo.jsonl", help="file for all results")
    arguments = parser.parse_args()
    unknown = sorted(set(arguments.ops) - set(OPS))
    if unknown:
        parser.error(f"no such ops in the database: {', '.join(unknown)}")
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    results = []
    with arguments.out.open("w", encoding="utf-8") as file:
        for key, found in run_all(arguments.ops, (arguments.limit, arguments.plain), arguments.workers):
            outcome = explained(key, found)
            results.append((key, outcome))
            file.write(json.dumps(as_dict(key, outcome)) + "\n")
            if outcome.status in FAILURES:
                print(f"{key} {outcome.values}: {outcome.status.value}: {outcome.detail}", flush=True)
    order = {name: index for index, name in enumerate(OPS)}
    results.sort(key=lambda result: order[result[0].op])  # ops end in any order, samples of one in theirs
    if set(arguments.ops) == set(OPS):
        PAGE.write_text(page(results), encoding="utf-8")
    print(Counter(outcome.status.value for _, outcome in results))


if __name__ == "__main__":
    main()
