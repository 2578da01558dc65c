"""The report as text: the verdict first, then the steps, the totals and a table of the regions."""

from collections.abc import Sequence

from lightning_ort._text import PlainTable, plain, rendered
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


def _table(view: ReportView, width: int) -> list[PlainTable | str]:
    """Return the headings, and for each graph its name and a table of its regions with the widths of the headings."""
    regions = [entry for _, rows in view.graphs for entry in rows]
    headings = [column.heading for column in view.columns]
    shown = [_figures(view, entry) for entry in regions]
    widths = [
        max([len("region"), *(len(plain(entry.name, "utf-8")) for entry in regions)]),
        *(max(len(name), *(len(row[index]) for row in shown), 0) for index, name in enumerate(headings)),
    ]
    left = max(_NARROWEST, width - sum(widths) - len(_GAP) * (len(widths) + 1))
    parts: list[PlainTable | str] = ["lightning-ort: what ran where"]
    parts.append(_rows([["region", *headings, "operations; in PyTorch also why"]], widths))
    for graph, found in view.graphs:
        rows = [[entry.name, *_figures(view, entry), _what(entry, left)] for entry in found]
        parts += [graph.name, *([_rows(rows, widths)] if rows else [])]
    return parts


def _rows(rows: Sequence[Sequence[str]], widths: Sequence[int]) -> PlainTable:
    table = PlainTable(encoding="utf-8")
    table.box, table.show_header, table.pad_edge, table.padding = None, False, False, (0, 0, 0, 0)
    table.add_column(width=len(_GAP))
    for index, width in enumerate(widths):
        table.add_column(justify="right" if index else "left", no_wrap=True, width=width + len(_GAP) * (index == 0))
        if index:
            table.add_column(width=len(_GAP))
    table.add_column()
    for first, *numbers, what in rows:
        table.add_row("", first, *(cell for number in numbers for cell in (number, "")), what)
    return table


def _figures(view: ReportView, entry: EqualRegions) -> list[str]:
    return [column.cell(entry) for column in view.columns]


def _what(entry: EqualRegions, width: int) -> str:
    """Return the operations of regions, and why they run in torch, in lines that end between words."""
    ops = named_ops(entry.first.ops, _MOST_OPS, "x")
    words = [f"{op}," for op in ops[:-1]] + ops[-1:]
    if entry.reason is not None:
        words = [*str(entry.reason).split(" "), *([f"({words[0]}", *words[1:-1], f"{words[-1]})"] if words[1:] else [])]
        words += [f"({ops[0]})"] if len(ops) == 1 else []
    lines = [""]
    for word in words:
        short = word if len(word) <= width else f"{word[: width - 1]}\N{HORIZONTAL ELLIPSIS}"
        if lines[-1] and len(lines[-1]) + 1 + len(short) > width:
            lines.append("")
        lines[-1] += f" {short}" if lines[-1] else short
    return "\n".join(lines)
