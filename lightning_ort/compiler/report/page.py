"""The report as HTML: one page that needs no other file, and a page that compares two runs."""

import html
from collections.abc import Sequence
from typing import Any

from lightning_ort._text import duration
from lightning_ort.compiler.engines import ENGINES, label_of, step_label
from lightning_ort.compiler.report.data import FallbackReport, GraphReport, RegionReport, ReportData, engines, in_use
from lightning_ort.compiler.report.view import ReportView, named_ops, share_text, short_ops, speedup, startup_parts

_SUMMARY = 3  # operations that a closed row names


def render(report: ReportData, name: str, ranks: Sequence[ReportData] = ()) -> str:
    """Return the page of rank 0's report, called ``name``; with all ranks' reports in order, if there are several."""
    return _template("report.html.jinja").render(
        report=report,
        view=ReportView.of(report),
        name=name,
        label_of=label_of,
        step_label=step_label,
        steps=_steps(report),
        engines=engines(report),
        totals=_totals(report),
        timeline=_timeline(report),
        startup=[[part, f"{seconds:.1f}"] for part, seconds in startup_parts(report).items()],
        ranks=_ranks(ranks),
        optimizers=_optimizers(report),
        entries=_entries,
        summary=_summary,
    )


def render_comparison(reports: Sequence[ReportData], names: Sequence[str]) -> str:
    """Return a page that compares the runs of two reports."""
    first, second = reports
    columns = [dict((label, value) for label, value, _ in _totals(report)) for report in reports]
    facts = [
        [key, *(report.run.facts.get(key, "") for report in reports)] for key in {**first.run.facts, **second.run.facts}
    ]
    steps = [{(step.name, engine): ms for step in report.steps for engine, ms in step.ms.items()} for report in reports]
    notes = [{(entry.where, str(entry.reason)) for entry in (*report.fallbacks, *report.notes)} for report in reports]
    return _template("compare.html.jinja").render(
        names=names,
        totals=[
            (f"speed of a training step, {name}", _speed(report), "first")
            for name, report in zip(names, reports, strict=True)
        ],
        figures=[[label, *(column.get(label, "") for column in columns)] for label in {**columns[0], **columns[1]}],
        facts=sorted(facts, key=lambda row: row[1] == row[2]),
        steps=[
            [
                *key,
                *(duration(times[key]) if key in times else "" for times in steps),
                _ratio(*(times.get(key) for times in steps)),
            ]
            for key in {**steps[0], **steps[1]}
        ],
        only=[[names[index], *entry] for index in (0, 1) for entry in sorted(notes[index] - notes[1 - index])],
    )


def in_frame(report: ReportData) -> str:
    """Return the page in a frame for a notebook."""
    page = html.escape(render(report, "this run"), quote=True)
    return f'<iframe srcdoc="{page}" style="width: 100%; height: 30rem; border: 0" title="report of a run"></iframe>'


def _template(name: str) -> Any:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    loader = PackageLoader("lightning_ort", "compiler/report/pages")
    return Environment(loader=loader, autoescape=True, undefined=StrictUndefined).get_template(name)


def _speed(report: ReportData) -> str:
    ratio = speedup(report)
    if ratio is None:
        return "not timed"
    return f"{ratio:.2f}x" if ratio > 1 else "no gain"


def _totals(report: ReportData) -> list[tuple[str, object, str]]:
    run = report.run
    net = run.saved_seconds - run.startup_seconds
    return [
        ("speed of a training step, compared with the uncompiled one", _speed(report), "first"),
        (
            "saved in the run, start-up deducted" if net >= 0 else "lost in the run, start-up included",
            f"{abs(net):.1f} s",
            "first",
        ),
        ("of the compute nodes in use on ONNX Runtime", share_text(report).partition(" ")[0], ""),
        ("runs of a region on ONNX Runtime", report.ort_runs, ""),
        ("to start up", f"{run.startup_seconds:.1f} s", ""),
        ("saved by the steps since", f"{run.saved_seconds:.1f} s", ""),
        ("graphs", len(report.graphs), ""),
        ("graph breaks", report.graph_breaks, ""),
        ("recompiles", report.recompiles, ""),
        ("fallbacks", len(report.fallbacks), "bad" if report.fallbacks else ""),
    ]


def _entries(found: Sequence[FallbackReport]) -> list[list[str]]:
    return [[entry.where, str(entry.reason)] for entry in found]


def _steps(report: ReportData) -> dict[str, Any] | None:
    if not report.steps:
        return None
    tried = [engine for engine in ENGINES if any(engine in step.ms for step in report.steps)]
    rows = [
        [step.name, step.runs or step_label(step.engine), *(f"{step.ms[e]:.1f}" if e in step.ms else "" for e in tried)]
        for step in report.steps
    ]
    return {"columns": ["step", "continues with", *(f"{step_label(engine)}, ms" for engine in tried)], "rows": rows}


def _optimizers(report: ReportData) -> dict[str, Any]:
    rows = [[each.configured, each.runs_as, each.reason] for each in report.optimizers]
    columns = (
        ["configured", "runs as", "why"]
        if any(each.reason for each in report.optimizers)
        else ["configured", "runs as"]
    )
    return {"columns": columns, "rows": rows}


def _ranks(reports: Sequence[ReportData]) -> dict[str, Any] | None:
    if not reports:
        return None
    steps = list(dict.fromkeys(step.name for report in reports for step in report.steps))
    rows = []
    for rank, report in enumerate(reports):
        times = {step.name: step.ms for step in report.steps}
        shown = [duration(min(times[name].values())) if name in times else "" for name in steps]
        run = report.run
        figures = [f"{run.startup_seconds:.1f}", f"{run.saved_seconds:.1f}", report.ort_runs, len(report.fallbacks)]
        rows.append([f"rank {rank}", *figures, *shown])
    return {"columns": ["rank", "start-up, s", "saved, s", "ORT runs", "fallbacks", *steps], "rows": rows}


def _timeline(report: ReportData) -> dict[str, Any] | None:
    """Return the regions of the newest graphs of the training step in use, with their times, if most were measured."""
    latest: dict[str, GraphReport] = {}
    for graph in in_use(report):
        step, _, name = graph.name.partition("/")
        if step == "training_step":
            latest[name.rstrip("0123456789")] = graph
    graphs = (
        [latest["step_"]] if "step_" in latest else [latest[key] for key in ("forward_", "backward_") if key in latest]
    )
    regions = [(graph.name, region) for graph in graphs for region in graph.regions if region.num_nodes]
    timed = [(name, region) for name, region in regions if region.executor in region.ms]
    if not timed or len(timed) < len(regions) / 2:
        return None
    parts = [
        {"executor": region.executor, "title": f"{name}: {region.name}, {duration(ms)}", "ms": f"{ms:.4f}"}
        for name, region in timed
        if (ms := region.ms[region.executor])
    ]
    sums: dict[str, float] = {}
    for _, region in timed:
        sums[region.executor] = sums.get(region.executor, 0.0) + region.ms[region.executor]
    whole = [step.ms["ort"] for step in report.steps if step.name == "training_step" and "ort" in step.ms]
    rest = whole[-1] - sum(sums.values()) if whole else 0.0
    if rest > 0:
        parts.append({"executor": "rest", "title": f"the rest, {duration(rest)}", "ms": f"{rest:.4f}"})
    found = [f"{duration(ms)} in {label_of(executor)}" for executor, ms in sums.items()]
    text = ", ".join([*found, *([f"{duration(rest)} elsewhere"] if rest > 0 else [])])
    return {"parts": parts, "text": f"{text}."}


def _summary(region: RegionReport) -> str:
    named = ", ".join(named_ops(region.ops, _SUMMARY, "\N{MULTIPLICATION SIGN} "))
    more = len(short_ops(region.ops)) - _SUMMARY
    return f"{named} and {more} more" if more > 0 else named or "why"


def _ratio(first: float | None, second: float | None) -> str:
    return f"{second / first:.2f}" if first and second else ""
