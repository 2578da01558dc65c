"""The report as text: the verdict first, then the steps, the totals and a table of the regions."""

import textwrap
from collections.abc import Sequence

from lightning_ort._text import plain, rendered
from lightning_ort.compiler.report.data import ReportData
from lightning_ort.compiler.report.view import EqualRegions, ReportView, counted, named_ops, share_text

_MOST_OPS = 4
_NARROWEST = 20  # the column of operations, in characters
_GAP = "  "


def render_text(report: ReportData, width: int) -> str:
    """Return the report as text of a width."""
    totals = (
        f"{share_text(report)}, {counted(report.ort_runs, 'run')}; {counted(len(report.graphs), 'graph')} compiled in"
        f" {report.compile_seconds:.1f} s, {counted(report.graph_breaks, 'graph break')},"
        f" {counted(report.recompiles, 'recompile')}, {counted(len(report.fallbacks), 'fallback')}"
    )
    view = ReportView.of(report)
    verdict = report.verdict
    above = [
        *([verdict] if verdict else []),
        *map(str, report.steps),
        *([totals] if report.graphs or not verdict else []),
    ]
    notes = [note for note in report.notes if str(note.reason.text) not in verdict]  # which has said it
    below = [
        *(f"fallback: {fallback}" for fallback in report.fallbacks),
        *(f"optimizer {index}: {optimizer}" for index, optimizer in enumerate(report.optimizers)),
        *(f"{name}: {text}" for name, text in view.facts.items()),
        *(f"note: {note}" for note in notes),
    ]
    table = _table(view, width) if report.graphs else []
    return rendered(*above, *table, *below, width=width)


def _table(view: ReportView, width: int) -> list[str]:
    """Return the headings, and for each graph its name and its regions."""
    graphs = [
        (graph.name, [(entry.name, *(column.cell(entry) for column in view.columns), _what(entry)) for entry in found])
        for graph, found in view.graphs
    ]
    headings = ("region", *(column.heading for column in view.columns), "operations; in PyTorch also why")
    columns = zip(headings, *(row for _, rows in graphs for row in rows), strict=True)
    widths = [max(len(plain(cell, "utf-8")) for cell in column) for column in columns][:-1]
    width = max(width, sum(widths) + len(_GAP) * (len(widths) + 1) + _NARROWEST)
    parts = ["lightning-ort: what ran where", _row(headings, widths, width)]
    for name, rows in graphs:
        parts += [name, *(_row(row, widths, width) for row in rows)]
    return parts


def _row(cells: Sequence[str], widths: Sequence[int], width: int) -> str:
    """Return a row, whose last cell goes on in further lines of this width."""
    first, *numbers = (plain(cell, "utf-8") for cell in cells[:-1])
    start = [first.ljust(widths[0]), *map(str.rjust, numbers, widths[1:]), ""]
    begin = _GAP + _GAP.join(start)
    left = width - len(begin)
    words = [word if len(word) <= left else f"{word[: left - 1]}\N{HORIZONTAL ELLIPSIS}" for word in cells[-1].split()]
    text = textwrap.wrap(" ".join(words), left, break_on_hyphens=False)
    return begin + f"\n{' ' * len(begin)}".join(text)


def _what(entry: EqualRegions) -> str:
    """Return the operations of regions, and why they run in torch."""
    ops = ", ".join(named_ops(entry.first.ops, _MOST_OPS, "x"))
    return ops if entry.reason is None else f"{entry.reason} ({ops})"
