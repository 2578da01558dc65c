"""``lightning-ort report``: shows the report of a run, or two runs side by side, as one HTML page."""

import json
import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path

from lightning_ort._text import say
from lightning_ort.compiler.report import CompileReport
from lightning_ort.compiler.report.page import render, render_comparison
from lightning_ort.compiler.report.view import rank_file


def add_arguments(parser: ArgumentParser) -> None:
    """Add what :func:`report` takes."""
    add = parser.add_argument
    add("file", type=Path, help="the JSON report that a run with ORTConfig(report=PATH) wrote")
    add("other", nargs="?", type=Path, help="the report of a second run, to compare it with the first")
    add("-o", "--output", type=Path, help="the page; by default, the report's path with .html")


def report(given: Namespace) -> None:
    """Write the report of a run as one HTML page; with two reports, compare the runs."""
    file, other = given.file, given.other
    output = given.output or (
        file.with_suffix(".html") if other is None else file.with_name(f"{file.stem}-{other.stem}.html")
    )
    if output.resolve() in [path.resolve() for path in (file, other) if path is not None]:
        sys.exit(f"{output}: the page would overwrite the report; pass another path with --output.")
    found = _read(file)
    if other is not None:
        page = render_comparison((found, _read(other)), (file.name, other.name))
    else:
        page = render(found, file.name, _ranks(file, found))
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(page, encoding="utf-8", errors="xmlcharrefreplace")
    except OSError as error:
        sys.exit(f"lightning-ort report: {error}")
    say(output)


def _read(file: Path) -> CompileReport:
    try:
        return CompileReport.from_dict(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, RecursionError) as error:  # JSON's and Unicode's errors too
        text = error.strerror if isinstance(error, OSError) else f"it is no report: {error}"
        sys.exit(f"{file}: {text}\nPass a file that a run wrote with ORTConfig(report=PATH).")


def _ranks(file: Path, first: CompileReport) -> list[CompileReport]:
    """Return the reports of all ranks, where the others have written theirs beside that of rank 0."""
    count = first.run.facts.get("ranks", "1")
    others = [rank_file(file, rank) for rank in range(1, int(count) if count.isdecimal() and len(count) < 7 else 1)]
    found = [_read(path) for path in others if path.is_file()]
    return [first, *found] if found and len(found) == len(others) else []
