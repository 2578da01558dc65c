"""Candidates that somebody names, each for a fixed number of steps, in turns: :func:`compare`."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

from lightning_ort.tuning.candidate import TuneError
from lightning_ort.tuning.project import Project, start
from lightning_ort.tuning.trainer_process import TrainerProcess, VariantFailed
from lightning_ort.tuning.trials import Trial, in_turns


def compare(
    project: Project,
    trials: Sequence[Trial],
    rounds: int,
    steps: int,
    warm_up: int,
    folder: Path,
    advance: Callable[[str], None] = lambda doing: None,
) -> None:
    """Train a module in several ways and time them against each other; what came of it is noted in the trials.

    If the first one fails in its first steps, the others are not tried: they are compared with it. Every candidate has
    a process of its own, so that none inherits another's compiled code, memory or settings, and a folder of its name.
    The order changes from round to round. ``KeyboardInterrupt`` ends the measurement early.

    Rounds have so many ``steps`` and are noted in seconds per batch; ``advance`` is called before each sample. Raises
    :class:`TuneError` if the first one does not train.
    """
    first: dict[str, float] = {}  # seconds of a step while it compiles and warms up
    with ExitStack() as stack:
        processes: dict[str, TrainerProcess] = {}
        for trial in trials:
            processes[trial.name] = start(project, trial.candidate, folder / trial.name.replace("/", "_"))
            stack.callback(processes[trial.name].stop)
        with suppress(KeyboardInterrupt):
            for trial in trials:
                advance(f"{trial.name}: first steps")
                if (sample := _tried(trial, partial(processes[trial.name].sample, warm_up))) is not None:
                    first[trial.name] = sample.step_seconds
                elif trial is trials[0]:
                    raise TuneError(f"{trial.name}, which the others are compared with, does not train: {trial.why}")
            for number in range(1, rounds + 1):
                for trial in in_turns(trials, number):
                    advance(f"{trial.name}: round {number} of {rounds}")
                    if (sample := _tried(trial, partial(processes[trial.name].sample, steps))) is not None:
                        trial.note(sample)
                        trial.count(number, sample)
            for trial in trials:
                trial.summary = _tried(trial, processes[trial.name].finish)
    for trial in trials:
        if (seconds := trial.seconds_per_example) is not None:
            trial.startup = max(0.0, warm_up * (first[trial.name] - seconds))


def _tried(trial: Trial, call: Callable[[], Any]) -> Any:
    if trial.verdict == "failed":
        return None
    try:
        return call()
    except VariantFailed as error:
        trial.verdict, trial.why = "failed", str(error)
    return None
