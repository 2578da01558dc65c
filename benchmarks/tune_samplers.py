"""The greedy search of ``lightning-ort tune`` beside a sampler of Optuna, with the same candidates and the same time.

``python benchmarks/tune_samplers.py [--modules NAME ...] [--time SECONDS] [--rounds N] [--steps N]``; needs the extra
``examples``. Each trial of the sampler trains its candidate and the module's own settings in turns. What each search
chose is compared with the module's own settings afterwards, all three in turns.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optuna
from rich.console import Console
from rich.table import Table
from tune import MODULES, imported

import lightning_ort
from lightning_ort.tuning.api import probed
from lightning_ort.tuning.candidate import Candidate
from lightning_ort.tuning.machine import machine
from lightning_ort.tuning.probe import Facts
from lightning_ort.tuning.project import Project
from lightning_ort.tuning.runner import ProcessRunner
from lightning_ort.tuning.trainer_process import TimeIsUp, VariantFailed

WARM_UP = 60  # steps, after which the engines of the strategy have been tried
TRIAL_ROUNDS = 3


def sampled(trial: optuna.Trial, facts: Facts) -> Candidate:
    """Return a candidate with a value for each setting that the greedy search tries, also in another combination."""
    choose: Callable[[str, list[Any]], Any] = trial.suggest_categorical
    engine = choose("engine", ["stock", "ort", "auto"])
    size = facts.batch_size * facts.accumulate
    parts = choose("accumulate", [1, 2]) if facts.fixed_batches is None and size % 2 == 0 else facts.accumulate
    return Candidate(
        engine=engine,
        precision=choose("precision", [None, "bf16-mixed", "medium"]),
        optim=choose("optim", [None, "auto"]) if engine == "stock" and facts.fusable else None,
        threads=choose("threads", [None, 1]),
        whole_batches=choose("whole_batches", [None, True]) if facts.not_in_whole_batches is None else None,
        num_workers=choose("num_workers", [None, 1]),
        batch_size=size // parts if parts != facts.accumulate else None,
        accumulate=parts if parts != facts.accumulate else None,
        channels_last=choose("channels_last", [None, True]) if facts.convolutions else None,
        host_memory=choose("host_memory", [None, "default"]) if engine != "stock" else None,
    )


def ratio(runner: ProcessRunner, candidate: Candidate, steps: int, seconds: float) -> float:
    """Return how many times as fast a candidate is as the module's own settings, in one round."""
    parts = candidate.accumulate or 1
    own = runner.sample(Candidate(), steps, seconds).step_seconds
    return own / (parts * runner.sample(candidate, steps * parts, seconds).step_seconds)


def with_optuna(project: Project, seconds: float, steps: int, folder: Path) -> tuple[Candidate, int]:
    """Return the best candidate that a sampler found in the time, and how many it tried."""
    deadline = time.monotonic() + seconds
    facts = probed(project, folder, seconds, deadline, lambda doing, best: None)
    runner = ProcessRunner(project, folder)
    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=0))
    candidates: dict[int, Candidate] = {}
    seen: dict[Candidate, float] = {Candidate(): 1.0}
    try:
        runner.sample(Candidate(), WARM_UP, seconds)
        while (left := deadline - time.monotonic()) > 0:
            trial = study.ask()
            candidate = candidates[trial.number] = sampled(trial, facts)
            if candidate not in seen:
                try:
                    runner.sample(candidate, WARM_UP * (candidate.accumulate or 1), left)
                    rounds = [ratio(runner, candidate, steps, left) for _ in range(TRIAL_ROUNDS)]
                except TimeIsUp:
                    break
                except VariantFailed:
                    rounds = [0.0]
                finally:
                    runner.stop(candidate)
                seen[candidate] = statistics.median(rounds)
            study.tell(trial, seen[candidate])
    finally:
        runner.stop_all()
    best = max(seen, key=lambda one: seen[one])
    return best, len(seen) - 1


def compared(project: Project, candidates: list[Candidate], rounds: int, steps: int, folder: Path) -> list[str]:
    """Return the speed-up of each candidate over the module's own settings: the median and its range."""
    runner = ProcessRunner(project, folder)
    try:
        for candidate in (Candidate(), *candidates):
            runner.sample(candidate, WARM_UP * (candidate.accumulate or 1), 600.0)
        found: dict[Candidate, list[float]] = {candidate: [] for candidate in candidates}
        for _ in range(rounds):
            for candidate in found:
                found[candidate].append(ratio(runner, candidate, steps, 600.0))
    finally:
        runner.stop_all()
    return [f"{statistics.median(found[one]):.2f}x ({min(found[one]):.2f}-{max(found[one]):.2f})" for one in candidates]


def main() -> None:
    """Search in two ways, compare, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modules", nargs="+", default=["LSTM", "tabular MLP"], choices=list(MODULES), metavar="NAME")
    parser.add_argument("--time", type=float, default=100.0)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=40)
    args = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    console = Console(width=140)
    console.print(", ".join(f"{name} {value}" for name, value in machine().items()), f", optuna {optuna.__version__}")
    title = f"two searches, {args.time:.0f} s each; speed over the module's own settings, compared afterwards"
    table = Table("module", "search", "candidates", "chosen", "speed", title=title)
    for name in args.modules:
        model, data = map(imported, MODULES[name])
        result = lightning_ort.tune(model, data, time=args.time, accelerator="cpu")
        greedy = Candidate(**result.best["settings"])
        project = Project(module=model, data=data, accelerator="cpu")
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            best, tried = with_optuna(project, args.time, args.steps, Path(folder))
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            speeds = compared(project, [greedy, best], args.rounds, args.steps, Path(folder))
        table.add_row(name, "greedy", str(len(result.trials) - 1), str(greedy), speeds[0])
        table.add_row(name, "Optuna's TPE", str(tried), str(best), speeds[1])
    console.print(table)


if __name__ == "__main__":
    main()
