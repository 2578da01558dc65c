"""``lightning-ort tune``: finds the fastest way to train a user's own module on this machine.

PyTorch is imported while the time that the user allows is running.
"""

import importlib
import math
import re
import signal
import sys
import tempfile
import threading
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from lightning_ort._arguments import check_writable
from lightning_ort._text import PlainTable, console, plain, say, show
from lightning_ort.cli.arguments import add_project
from lightning_ort.cli.load import load_project

if TYPE_CHECKING:
    from lightning_ort.tuning.project import Project
    from lightning_ort.tuning.result import TuneResult
    from lightning_ort.tuning.space import Limits

_SECONDS = {"s": 1, "m": 60, "h": 3600}
_BYTES = {"MB": 10**6, "GB": 10**9, "TB": 10**12, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_TO_WRITE, _LEAST_TO_WRITE = 0.3, 1.0  # of the time until the search starts; seconds
_A_TRIAL = 15.0  # seconds that a candidate takes at least, in the plan
_EXPLANATION = (
    "-> what was chosen; speed-up: over yours, in brackets a 90 % interval; start s: until it has compiled; pays after:"
    " steps until a longer start is won back; loss differs: from that in float32 at the end, - if that was not compared"
)
_STARTS = 4.0  # times what the module's own start takes: compiling


def add_arguments(parser: ArgumentParser) -> None:
    """Add what :func:`tune` takes."""
    add = parser.add_argument
    add_project(parser)
    add("--time", default="5m", help="time for the whole command, such as 90s, 5m or 1h (default: %(default)s)")
    add("--memory", help="limit for the memory of the process or, on a GPU, for what it allocates there, such as 8GB")
    add("--effective-batch", type=int, help="examples between two steps of the optimizer; by default unchanged")
    add("--keep-numerics", action="store_true", help="keep float32 and the algorithm of the optimizer")
    add(
        "--devices",
        type=int,
        default=1,
        help="number of processes; with more than one, strategies for several are tried too (default: %(default)s)",
    )
    add(
        "-o",
        "--output",
        type=Path,
        default=Path("tuned.yaml"),
        help="the configuration; beside it are written the same name with .json and .png (default: %(default)s)",
    )
    add("--dry-run", action="store_true", help="only show what would be tried")
    add("--explain", type=Path, help="show what a search has tried and why, from its JSON file")


def tune(given: Namespace) -> None:
    """Find the fastest way to train a module on this machine, and write it as a LightningCLI configuration.

    Engines, precisions, implementations of the optimizer, settings of the data loading, batch sizes and more are tried
    for a few seconds each, in turns. A candidate is refused if its loss differs too much from that of float32. Ctrl-C
    ends the search and keeps the best so far. No file is ever overwritten.
    """
    if given.explain is not None:
        say(_read(given.explain).explanation())
        return
    try:
        seconds, size = _seconds(given.time), _bytes(given.memory)
        with nullcontext() if given.dry_run else _ended_at(given.started + seconds, given.time):
            asked = {name: getattr(given, name) for name in ("effective_batch", "keep_numerics", "devices")}
            limits = _api().Limits(seconds=seconds, memory=size, **asked)
            if not given.dry_run:
                _check_output(given.output)
            project = load_project("tune", given, devices=given.devices)
            project.namespace.load()
        if given.dry_run:
            _show_plan(project, limits)
            return
        result = _with_progress(project, limits, given.started)
        written = result.save(given.output)
    except (FileExistsError, TypeError, ValueError) as error:
        sys.exit(f"lightning-ort tune: {error}")
    except KeyboardInterrupt:
        sys.exit("lightning-ort tune: interrupted before anything was measured.")
    show(result.table(), _EXPLANATION)
    for note in (*result.not_measured, *result.notes):
        say(note)
    if result.chosen == 0:
        say(result.nothing_faster)
    else:
        say(f"{result.best['candidate']}: {result.speed_up:.2f}x as fast as what you have.")
    say(f"Written: {', '.join(map(str, written))}")


def _api() -> ModuleType:
    return importlib.import_module("lightning_ort.tuning.api")


@contextmanager
def _ended_at(deadline: float, allowed: str) -> Iterator[None]:
    """Exit with a message when the time is up, where a signal can interrupt what is imported."""
    if not hasattr(signal, "setitimer") or threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(*_: object) -> None:
        sys.exit(f"lightning-ort tune: --time {allowed} is too short: it was over before your module was imported.")

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, max(1e-3, deadline - time.monotonic()))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _check_output(output: Path) -> None:
    from lightning_ort.tuning.result import check_absent, files_of

    for path in files_of(output):
        check_absent(path)
    check_writable("--output", str(output), is_folder=False)


def _with_progress(project: "Project", limits: "Limits", started: float) -> "TuneResult":
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn())
    # writing imports and draws, which takes its share of what the imports until here have taken
    deadline = started + limits.seconds - max(_LEAST_TO_WRITE, _TO_WRITE * (time.monotonic() - started))
    with Progress(*columns, console=console(stderr=True)) as progress:
        task = progress.add_task("", total=limits.seconds)

        def listen(doing: str, best: str) -> None:
            text = f"{doing} (best so far: {best})" if best else doing
            progress.update(task, description=plain(text), completed=min(limits.seconds, time.monotonic() - started))

        result: TuneResult = _api().tune_project(project, limits, deadline, listen)
        progress.update(task, completed=limits.seconds)
    return result


def _show_plan(project: "Project", limits: "Limits") -> None:
    api = _api()
    start = time.monotonic()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        facts = api.probed(project, Path(folder), limits.seconds, start + limits.seconds, lambda doing, best: None)
    each = max(_A_TRIAL, _STARTS * (time.monotonic() - start))
    trials = api.planned(facts, limits, api.is_plain(project))
    table = PlainTable("stage", "candidate", "because", title=f"{facts.module}: what would be tried")
    table.add_column("MB of tensors", justify="right")
    for trial in trials:
        predicted = "-" if trial.predicted_peak is None else f"{trial.predicted_peak / 1e6:,.1f}"
        table.add_row(trial.stage, str(trial.candidate), trial.reason, predicted)
    show(table)
    needed = math.ceil((len(trials) + 1) * each / 60)
    say(f"{len(trials)} candidates, about {needed} minutes for all of them; --time allows {limits.seconds / 60:.1f}.")
    say("Each stage changes the fastest candidate so far. If the time runs short, the last stages are left out.")


def _read(path: Path) -> "TuneResult":
    from lightning_ort.tuning.result import TuneResult

    try:
        return TuneResult.from_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        sys.exit(f"--explain={path}: {error}. Pass the .json file that lightning-ort tune wrote.")


def _seconds(text: str) -> float:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smh])", text.strip())
    if found is None:
        raise ValueError(f"--time={text}: write it as 90s, 5m or 1h.")
    return float(found[1]) * _SECONDS[found[2]]


def _bytes(text: str | None) -> int | None:
    if text is None:
        return None
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMGT]i?B)", text.strip())
    if found is None or found[2] not in _BYTES:
        raise ValueError(f"--memory={text}: write it as {', '.join(f'8{unit}' for unit in _BYTES)}.")
    return int(float(found[1]) * _BYTES[found[2]])
