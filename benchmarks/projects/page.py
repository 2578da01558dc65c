"""The page docs/test_reports/projects.md, from the results of run.py."""

from pathlib import Path
from typing import Any

from catalogue import LEFT_OUT, ROWS, Row

Result = dict[str, Any]

HEAD = """# Other people's models

{count} models of other projects, trained on a CPU by stock Lightning and by `strategy="ort"`, on the same made-up data
and from the same seeds. `make projects` writes this page; the models are in
[`benchmarks/projects`](../../benchmarks/projects). Each fit is a process of its own with empty caches, so its seconds
contain all compiling. {measured}

- **stock, ort:** seconds of the whole `fit`, the median where there were several.
- **kept:** what the training step runs on at the end. *Nothing compiled*: with
  [`start="amortized"`](../how_it_works.md#when-compiling-starts) the run was too short for compiling to pay.
- **start-up:** seconds that compiling and trying took, as the [report](../report.md) has them.
- **breaks, recompiles:** how often a graph ended early, and how often a frame was compiled again.
- **losses:** the largest relative difference between the two, over the losses of all steps and the metrics at the end.
  Where it is over 1e-4 in short and medium fits, the distances of both from the same fit in float64 stand beside it:
  where stock is as far from it as `ort`, the difference comes from rounding, which training enlarges from step to step.
- **lines:** how many lines `ort` printed that stock did not.
"""


def write_page(path: Path, results: dict[str, Result]) -> None:
    """Write a table for each length and start."""
    good = [result for result in results.values() if not result["error"]]
    versions = sorted({f"{name} {version}" for result in good for name, version in result["versions"].items()})
    named = {row.name: row for row in ROWS}
    dates = dict.fromkeys(sorted(result["date"] for result in good))
    measured = (
        f"Measured on {', '.join(dates)} with {', '.join(versions)}." if good else "Nothing has been measured yet."
    )
    parts = [HEAD.format(count=len(ROWS), measured=measured)]
    for length, start in dict.fromkeys((result["length"], result["start"]) for result in results.values()):
        chosen = [result for result in results.values() if (result["length"], result["start"]) == (length, start)]
        rows = [line_of(named[result["row"]], result) for result in chosen if result["row"] in named]
        parts.append(
            f'## {length.capitalize()} fits, `start="{start}"`\n\n{HEADINGS}\n' + "\n".join(sorted(rows)) + "\n"
        )
    if LEFT_OUT:
        parts.append("\n".join(["## Left out", "", *(f"- **{name}:** {why}" for name, why in LEFT_OUT.items()), ""]))
    path.write_text("\n".join(parts), encoding="utf-8")


HEADINGS = """| package | model | steps | stock | ort | kept | start-up | breaks | recompiles | losses | lines |
|---|---|---|---|---|---|---|---|---|---|---|"""


def package_of(row: Row) -> str:
    """Return the package's name for the reader."""
    return row.package or row.group


def line_of(row: Row, result: Result) -> str:
    """Return a line of the table."""
    cells = [package_of(row), row.model, result["steps"]]
    if result["error"]:
        return f"| {' | '.join(map(str, cells))} | | | failed: {result['error']} | | | | | |"
    report = result["report"]
    losses = f"{result['difference']:.0e}"
    if "stock_from_double" in result:
        losses += f" (stock {result['stock_from_double']:.0e}, ort {result['ort_from_double']:.0e} from float64)"
    cells += [f"{result['stock_seconds']:.1f} s", f"{result['ort_seconds']:.1f} s", result["kept"]]
    cells += [f"{report['startup_seconds']:.1f} s", report["graph_breaks"], report["recompiles"], losses]
    return f"| {' | '.join(map(str, cells))} | {len(result['lines'])} |"
