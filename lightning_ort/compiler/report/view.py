"""What the text and the page of a report show, :class:`ReportView` and figures; and the text: :func:`render_text`."""

import dataclasses
import re
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_ort._busy import differ
from lightning_ort._text import plain, rendered
from lightning_ort.compiler.reason import ReasonType
from lightning_ort.compiler.report.data import FallbackReport, GraphReport, RegionReport, ReportData, figure, in_use

_OVERLOAD = re.compile(r"^aten\.(\w+)\.\w+$")


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, such as ``no fallbacks``, ``1 graph`` or ``2 graphs``."""
    return f"{number or 'no'} {noun}{'' if number == 1 else 's'}"


def short_ops(ops: dict[str, int]) -> dict[str, int]:
    """Return how often each operation occurs, the most frequent first, without the names of overloads."""
    found: Counter[str] = Counter()
    for op, count in ops.items():
        found[_OVERLOAD.sub(r"\1", op)] += count
    return dict(found.most_common())


@dataclass(frozen=True)
class EqualRegions:
    """Regions of a graph that do the same work in the same place, such as those of equal layers."""

    regions: Sequence[RegionReport]

    @property
    def first(self) -> RegionReport:
        """The first of them, for everything in which they are equal."""
        return self.regions[0]

    @property
    def name(self) -> str:
        """The name of the first, with the number of regions if there are several."""
        return self.first.name if len(self.regions) == 1 else f"{self.first.name} (x {len(self.regions)})"

    @property
    def ms(self) -> dict[str, float]:
        """Mean time of one run by executor, where it was measured."""
        times: dict[str, list[float]] = {}
        for region in self.regions:
            for executor, ms in region.ms.items():
                times.setdefault(executor, []).append(ms)
        return {executor: sum(found) / len(found) for executor, found in times.items()}


@dataclass(frozen=True)
class Column:
    """A column of figures in the tables of regions."""

    heading: str
    cell: Callable[[EqualRegions], str]  # returns what it says in a row

    @classmethod
    def of_field(cls, each: "dataclasses.Field[Any]") -> "Column":
        """Return the column of a field that has :func:`in_column`."""
        heading, of_equal, text = each.metadata["column"]
        return cls(heading, lambda row: text(of_equal([getattr(region, each.name) for region in row.regions])))

    @classmethod
    def of_times(cls, executor: str) -> "Column":
        """Return the column of the times of an executor."""
        return cls(f"{'ORT' if executor == 'ort' else executor} ms", lambda row: figure(row.ms.get(executor)))


def folded(graph: GraphReport) -> list[EqualRegions]:
    """Return the regions of a graph that compute something; equal ones are one entry, in the place of the first."""
    groups: dict[object, list[RegionReport]] = {}
    for region in graph.regions:
        if region.num_nodes:
            kind = region.reason.type if region.reason else None
            key = (region.executor, kind, region.num_nodes, tuple(sorted(region.ops.items())))
            groups.setdefault(key, []).append(region)
    return [EqualRegions(regions) for regions in groups.values()]


@dataclass(frozen=True)
class ReportView:
    """What every form of a report shows."""

    graphs: Sequence[tuple[GraphReport, Sequence[EqualRegions]]]  # each with its rows
    columns: Sequence[Column]  # of figures, in each row
    facts: dict[str, str]  # lines about a run, by what they are about

    @classmethod
    def of(cls, report: ReportData) -> "ReportView":
        """Return what is shown of a report."""
        graphs = [(graph, folded(graph)) for graph in report.graphs]
        timed = dict.fromkeys(executor for _, rows in graphs for entry in rows for executor in entry.ms)
        shown = [executor for executor in dict.fromkeys(("ort", "torch", *timed)) if executor in timed]
        run = report.run
        facts = {
            "without compiling": run.uncompiled_text,
            "a training step": str(run.step_time or ""),
            "host memory": "" if run.host_memory == "retained" else run.host_memory,  # or the first one says it
            "peak memory": run.peak_text,
            "dropout masks": "" if run.draws_masks_faster else run.dropout_masks,
            "threads": "; ".join(f"{name} on {text}" for name, text in run.threads.items()),
            "recorded": "; ".join(f"{name}, {text}" for name, text in run.recorded.items()),
            "Trainer's loop": run.trainer_loop,
            "audits": run.audit_text if run.audits else "",
        }
        return cls(
            graphs,
            [
                *(Column.of_field(each) for each in dataclasses.fields(RegionReport) if "column" in each.metadata),
                *map(Column.of_times, shown),
            ],
            {name: text for name, text in facts.items() if text},
        )


def named_ops(ops: dict[str, int], most: int, times: str) -> list[str]:
    """Return the most frequent operations, with how often each occurs."""
    found = list(short_ops(ops).items())[:most]
    return [f"{op} {times}{count}" if count > 1 else op for op, count in found]


def share_text(report: ReportData) -> str:
    """Say how much of what is in use runs on ONNX Runtime."""
    used = in_use(report)
    if report.graphs and not used:
        return "nothing compiled stays in use"
    return f"{report.ort_node_fraction_in_use:.0%} of the compute nodes in use on ONNX Runtime"


def speedup(report: ReportData) -> float | None:
    """Return how many times as fast as before its duel the training step runs, if both met the same machine."""
    step = next((step for step in report.steps if step.name == "training_step" and "torch" in step.ms), None)
    if step is None or not (time := step.ms[step.engine]):  # a time of 0 has no ratio
        return None
    if differ(step.slowdown.get(engine, 1.0) for engine in ("torch", step.engine)):
        return None
    return step.ms["torch"] / time


def rank_file(file: Path, rank: int) -> Path:
    """Return where a process of this rank writes its report, beside the file of rank 0."""
    return file.with_name(f"{file.stem}.rank{rank}{file.suffix}")


def startup_parts(report: ReportData) -> dict[str, float]:
    """Return the seconds of starting up by part; what is in none of the others is torch's capture."""
    run = report.run
    compiling = min(report.compile_seconds, run.startup_seconds)
    duels = min(run.trial_seconds, run.startup_seconds - compiling)
    parts = {
        "gradients, ONNX models, sessions and timing of regions": compiling,
        "duels of the steps": duels,
        "capture by torch, and the rest": run.startup_seconds - compiling - duels,
    }
    return {name: seconds for name, seconds in parts.items() if seconds >= 0.05}


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
    # without those that the verdict has said
    notes = [note for note in report.notes if (note.reason.text or note.reason.type.value) not in verdict]
    below = [
        *(f"fallback: {fallback}" for fallback in report.fallbacks),
        *(f"{about}: {optimizer}" for optimizer, about in optimizers_by_text(report).items()),
        *(f"{name}: {text}" for name, text in view.facts.items()),
        *(f"note: {note}" for note in one_note_of_breaks(notes)),
    ]
    table = _table(view, width) if report.graphs else []
    return rendered(*above, *table, *below, width=width)


def optimizers_by_text(report: ReportData) -> dict[str, str]:
    """Return what is said of optimizers, each with those it is said of, such as ``optimizers 0, 1``."""
    found: dict[str, list[str]] = {}
    for index, optimizer in enumerate(report.optimizers):
        found.setdefault(str(optimizer), []).append(str(index))
    return {text: f"optimizer{'s' * (len(each) > 1)} {', '.join(each)}" for text, each in found.items()}


def one_note_of_breaks(notes: Iterable[FallbackReport]) -> list[str]:
    """Return notes as text, those on where graphs of one step end early as one: a manual step has a dozen."""
    found: dict[object, list[FallbackReport]] = {}
    for note in notes:
        key = note.where if note.reason.type is ReasonType.GRAPH_BREAK else note
        found.setdefault(key, []).append(note)
    return [str(each[0]) + f"; and {len(each) - 1} more (report.notes)" * (len(each) > 1) for each in found.values()]


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
    ops = ", ".join(named_ops(entry.first.ops, _MOST_OPS, "x"))
    if entry.first.reason is not None:
        return f"{entry.first.reason} ({ops})"
    return ops + "; timed in an earlier run" * (entry.first.cached and bool(entry.first.ms))
