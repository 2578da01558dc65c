"""``lightning-ort tune``: finds the fastest way to train a user's own module on this machine.

PyTorch is imported while the time that the user allows is running.
"""

import re
import sys
import time
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from lightning_ort._arguments import check_writable
from lightning_ort._text import console, plain, say, show
from lightning_ort.cli.arguments import add_project
from lightning_ort.cli.load import load_project

if TYPE_CHECKING:
    from lightning_ort.tuning.result import TuneResult

_SECONDS = {"s": 1, "m": 60, "h": 3600}
_TO_WRITE = 1.0  # seconds
_EXPLANATION = (
    "-> what was chosen; speed-up: over yours, in brackets a 90 % interval; start s: until it has compiled; pays after:"
    " steps until a longer start is won back; loss differs: from that in float32 at the end, - if that was not compared"
)


def add_arguments(parser: ArgumentParser) -> None:
    """Add what :func:`tune` takes."""
    add = parser.add_argument
    add_project(parser)
    add("--time", default="5m", help="time for the whole command, such as 90s, 5m or 1h (default: %(default)s)")
    add("--keep-numerics", action="store_true", help="keep float32 and the algorithm of the optimizer")
    add(
        "-o",
        "--output",
        type=Path,
        default=Path("tuned.yaml"),
        help="the configuration; beside it is written the same name with .json (default: %(default)s)",
    )


def tune(given: Namespace) -> None:
    """Find the fastest way to train a module on this machine, and write it as a LightningCLI configuration.

    Engines, precisions, implementations of the optimizer, settings of the data loading, batch sizes and more are tried
    for a few seconds each, in turns. A candidate is refused if its loss differs too much from that of float32. Ctrl-C
    ends the search and keeps the best so far. No file is ever overwritten.
    """
    try:
        result = _found(given)
        written = result.save(given.output)
    except (FileExistsError, ModuleNotFoundError, TypeError, ValueError) as error:
        sys.exit(f"lightning-ort tune: {error}")
    except KeyboardInterrupt:
        sys.exit("lightning-ort tune: interrupted before anything was measured.")
    show(result.table(), _EXPLANATION)
    for line in (*result.not_measured, *result.notes, result.conclusion, f"Written: {', '.join(map(str, written))}"):
        say(line)


def _found(given: Namespace) -> "TuneResult":
    if (found := re.fullmatch(r"(\d+(?:\.\d+)?)([smh])", given.time.strip())) is None:
        raise ValueError(f"--time={given.time}: write it as 90s, 5m or 1h.")
    seconds = float(found[1]) * _SECONDS[found[2]]
    from lightning_ort.tuning.api import tune_project
    from lightning_ort.tuning.result import files_of
    from lightning_ort.tuning.space import Limits

    limits = Limits(seconds=seconds, keep_numerics=given.keep_numerics)
    files_of(given.output)
    check_writable("--output", str(given.output), is_folder=False)
    project = load_project("tune", given)
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console(stderr=True)) as progress:
        task = progress.add_task("", total=seconds)

        def listen(doing: str, best: str) -> None:
            text = f"{doing} (best so far: {best})" if best else doing
            progress.update(task, description=plain(text), completed=min(seconds, time.monotonic() - given.started))

        return tune_project(project, limits, given.started + seconds - _TO_WRITE, listen)
