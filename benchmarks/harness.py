"""What the scripts share: a console that begins with the machine, tables of numbers, and calls that take turns."""

import json
import statistics
import subprocess
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from rich.console import Console
from rich.table import Table

from lightning_ort.tuning.api import machine

_Name = TypeVar("_Name", bound=Hashable)

# arguments of a Trainer without what it has by default
BARE: dict[str, Any] = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


def console(width: int = 120) -> Console:
    """Return a console that has shown what the figures depend on."""
    made = Console(width=width)
    made.print(", ".join(f"{name} {value}" for name, value in machine().items()), highlight=False)
    return made


def table_of(title: str, texts: Iterable[str], numbers: Iterable[str]) -> Table:
    """Return a table with columns of texts on the left, and of numbers."""
    made = Table(*texts, title=title)
    for column in numbers:
        made.add_column(column, justify="right")
    return made


def seconds(call: Callable[[], Any]) -> float:
    """Return how long a call takes."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def in_turns(calls: Mapping[_Name, Callable[[], Any]], rounds: int, warm_up: int = 0) -> dict[_Name, list[float]]:
    """Return the seconds of each call, which take turns; those of the first rounds are left out."""
    found: dict[_Name, list[float]] = {name: [] for name in calls}
    for number in range(warm_up + rounds):
        for name, call in calls.items():
            taken = seconds(call)
            if number >= warm_up:
                found[name].append(taken)
    return found


def medians(times: Mapping[_Name, Iterable[float]]) -> dict[_Name, float]:
    """Return the median of each."""
    return {name: statistics.median(values) for name, values in times.items()}


def printed_by(command: Sequence[str], seconds: float) -> Any:
    """Return what a process has printed last, as JSON; a text that says why there is nothing."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        return f"more than {seconds} s"
    lines = (done.stderr if done.returncode else done.stdout).strip().splitlines()
    return lines[-1][:60] if done.returncode else json.loads(lines[-1])
