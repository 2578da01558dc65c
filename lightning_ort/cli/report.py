"""``lightning-ort report``: shows the report of a run as one HTML page."""

import json
import sys
from pathlib import Path

from lightning_ort._text import say
from lightning_ort.compiler.report import CompileReport, ms_label

_LABELS = {
    "ort": "ONNX Runtime",
    "torch": "PyTorch",
    "inductor": "inductor",
    "inductor-graphs": "inductor, CUDA graphs",
}


def report(file: Path, output: Path | None = None) -> None:
    """Write the report of a run as one HTML page.

    Args:
        file: The JSON report that a run with ORTConfig(report=PATH) wrote.
        output: The page; by default, the report's path with the suffix .html.

    """
    output = output or file.with_suffix(".html")
    if output.resolve() == file.resolve():
        sys.exit(f"{output}: the page would overwrite the report; pass another path with --output.")
    try:
        found = CompileReport.from_dict(json.loads(file.read_text(encoding="utf-8")))
        output.write_text(render(found, file.name), encoding="utf-8", errors="xmlcharrefreplace")
    except OSError as error:
        sys.exit(f"lightning-ort report: {error}")
    except (ValueError, RecursionError) as error:  # JSON's and Unicode's errors too
        sys.exit(f"{file}: {error}\nPass a file that a run of this version wrote with ORTConfig(report=PATH).")
    say(output)


def render(report: CompileReport, name: str) -> str:
    """Return the page, HTML that needs no other file; ``name`` is what it calls the report."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(loader=PackageLoader("lightning_ort", "cli"), autoescape=True, undefined=StrictUndefined)
    tried = {engine for step in report.steps for engine in step.ms}
    return environment.get_template("report.html.jinja").render(
        report=report,
        name=name,
        labels=_LABELS,
        ms_labels={executor: ms_label(executor) for executor in report.timed_executors},
        tried={engine: f"{label}, ms" for engine, label in _LABELS.items() if engine in tried},
        engines={step.name: step.engine for step in report.steps},  # a step that was tried again: the last
        totals={
            "of the graphs' compute nodes on ONNX Runtime": f"{report.ort_node_fraction:.0%}",
            "runs of a region on ONNX Runtime": report.ort_runs,
            "graphs": len(report.graphs),
            "to compile": f"{report.compile_seconds:.1f} s",
            "to start up, dynamo and trials included": f"{report.run.startup_seconds:.1f} s",
            "saved by the steps since": f"{report.run.saved_seconds:.1f} s",
            "graph breaks": report.graph_breaks,
            "recompiles": report.recompiles,
            "fallbacks": len(report.fallbacks),
        },
    )
