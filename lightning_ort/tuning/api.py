"""``lightning_ort.tune``: probes a module, searches, and returns what was found."""

import dataclasses
import platform
import tempfile
import time
import time as clock
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from lightning_ort.compiler.executors.ort.kernels import DISTRIBUTIONS, installed
from lightning_ort.tuning.candidate import commented, configured
from lightning_ort.tuning.measuring import trial_of
from lightning_ort.tuning.probe import Facts, start_probe
from lightning_ort.tuning.project import ProcessRunner, Project
from lightning_ort.tuning.result import TuneResult
from lightning_ort.tuning.search import Outcome, Search, too_short
from lightning_ort.tuning.space import Limits, TuneError, base, memory_stage, stages
from lightning_ort.tuning.trainer_process import TimeIsUp, VariantFailed
from lightning_ort.tuning.trials import Trial, in_words, nothing_faster, speed, while_busy

__all__ = ["TuneError", "TuneResult", "tune"]

Listener = Callable[[str, str], None]


def tune(
    module: Any = None,
    datamodule: Any = None,
    *,
    config: Mapping[str, Any] | None = None,
    time: float = 300.0,
    memory: int | None = None,
    effective_batch: int | None = None,
    keep_numerics: bool = False,
    devices: int = 1,
    accelerator: str = "auto",
    seed: int = 0,
    tolerance: float = 0.01,
    listen: Listener = lambda doing, best: None,
) -> TuneResult:
    """Find the fastest way to train a module on this machine.

    Candidates are trained in processes of their own, alternately, for a few seconds each. Ctrl-C ends the search with
    the best so far.

    Args:
        module: A LightningModule, or a class or function without arguments that makes one; ``functools.partial``
            gives arguments. ``None`` if the configuration names it.
        datamodule: A LightningDataModule or DataLoader, or what makes one; ``None`` if the module or the configuration
            has it.
        config: A LightningCLI configuration as a mapping.
        time: Seconds until it returns.
        memory: Bytes that the process, or what it has on the GPU, may take.
        effective_batch: Examples between two steps of the optimizer; ``None`` keeps the number that there is.
        keep_numerics: Keep float32 and the algorithm of the optimizer.
        devices: Processes; with more than one, strategies for several are tried too.
        accelerator: The Trainer's, if there is no configuration.
        seed: For the initial weights and the order of the data.
        tolerance: Largest relative difference of the loss to that of float32.
        listen: Called with what is being done, and the best so far.

    Returns:
        What was found.

    Raises:
        TuneError: A ``ValueError`` that says why nothing can be tuned and what to do: the module does not train,
            nothing fits into the memory, the time is too short, the data cannot be batched as asked for.
        ValueError: If an argument has a value that is not allowed.
        TypeError: If an argument has a wrong type.

    Example::

        result = lightning_ort.tune(MyModule(), MyDataModule(), time=120)
        trainer = Trainer(max_epochs=3, **result.trainer_arguments())
    """
    started = clock.monotonic()
    limits = Limits(
        seconds=time,
        memory=memory,
        effective_batch=effective_batch,
        keep_numerics=keep_numerics,
        devices=devices,
        tolerance=tolerance,
    )
    if module is None and not (config or {}).get("model"):
        raise ValueError("Nothing to train: pass a module, or a configuration that names one.")
    if trainer := next((each for each in (module, datamodule) if hasattr(each, "fit")), None):
        raise TypeError(
            f"tune({type(trainer).__name__}): pass a LightningModule, and what the Trainer is made with as"
            ' config={"trainer": {...}}.'
        )
    project = Project(
        module=module, data=datamodule, config=config, accelerator=accelerator, devices=devices, seed=seed
    )
    if project.lacks_data:
        raise ValueError(
            f"tune({getattr(module, '__name__', type(module).__name__)}): there is no data to train with: pass a"
            " LightningDataModule or a DataLoader, or give the module a train_dataloader."
        )
    return tune_project(project, limits, started + limits.seconds, listen)


def tune_project(
    project: Project, limits: Limits, deadline: float, listen: Listener = lambda doing, best: None
) -> TuneResult:
    """Do what :func:`tune` does with arguments that are checked, until a time of ``time.monotonic``."""
    project.namespace.load()  # which processes inherit
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True)))
        facts = probed(project, folder, limits.seconds, deadline, listen)
        runner = ProcessRunner(project, folder)
        stack.callback(runner.stop_all)
        outcome = Search(facts, limits, is_plain(project), runner, deadline, listen).run()
    outcome.notes += while_busy(outcome.trials)
    outcome.notes += notes_on(project, outcome, facts.given_loader)
    return result_of(project, limits, facts, outcome)


def devices_of(project: Project) -> str | None:
    """Return how many devices the user's own settings have, in words; ``None`` for one."""
    trainer = project.base()["trainer"] if project.config is None else project.config.get("trainer") or {}
    devices = trainer.get("devices") or "auto"
    if devices in (1, "1"):
        return None
    if devices not in ("auto", -1, "-1"):
        return f"devices: {devices}"
    if trainer.get("accelerator", "auto") not in ("auto", "gpu", "cuda") or torch.cuda.device_count() < 2:
        return None  # on a CPU "auto" is one process
    return f"all {torch.cuda.device_count()} GPUs"


def notes_on(project: Project, outcome: Outcome, given_loader: bool = False) -> list[str]:
    """Return what the user has to know of a result."""
    notes = []
    if devices := devices_of(project):
        notes.append(f"your own settings were measured on one device, not on {devices}; --devices tries several")
    nodes = ((project.config or {}).get("trainer") or {}).get("num_nodes") or 1
    if nodes not in (1, "1") and outcome.best.candidate.engine is not None:
        notes.append(f"it was measured on one node, so that num_nodes is 1 in place of {nodes}")
    if given_loader and outcome.best.candidate.changes_loader:
        notes.append(
            "ORTTrainingSettings cannot change a DataLoader that is passed to Trainer.fit: return it from"
            " train_dataloader of your module or of a LightningDataModule"
        )
    if outcome.best.candidate.batch_size is not None and project.batch_argument is None:
        notes.append(
            "the data takes no batch_size, so ORTTrainingSettings changes its DataLoader; if your DataModule computes"
            " with a batch size of its own, give it an argument batch_size and tune again"
        )
    return notes


def probed(project: Project, folder: Path, seconds: float, deadline: float, listen: Listener) -> Facts:
    """Return the facts of a project, or raise ``TuneError`` if it cannot train or the time is too short."""
    listen("looking at the module and its data", "")
    if (left := deadline - clock.monotonic()) <= 0:
        raise TuneError(too_short(seconds, "it was over before anything could be trained", 4 * (seconds - left)))
    process = start_probe(project, folder / "probe")
    try:
        return process.finish(left)
    except VariantFailed as error:
        raise TuneError(
            f"The module does not train as it is, so there is nothing to tune: {error}. First make a few steps work"
            " with Trainer.fit (or main.py fit), then tune."
        ) from None
    except TimeIsUp:
        raise TuneError(too_short(seconds, "two steps of the module took longer", 5 * seconds)) from None
    finally:
        process.stop()


def is_plain(project: Project) -> bool:
    """Return whether the user's own settings are stock Lightning in float32."""
    trainer = (project.config or {}).get("trainer") or {}
    in_float32 = trainer.get("precision") in (None, 32, "32", "32-true")
    return in_float32 and not trainer.get("plugins") and trainer.get("strategy") in (None, "auto")


def planned(facts: Facts, limits: Limits, plain: bool) -> list[Trial]:
    """Return what would be tried if nothing were faster than what there is, with its memory; or ``TuneError``."""
    start = base(facts, limits)
    found = [] if limits.memory is None else [memory_stage(facts, limits)]
    made = []
    for stage in [*found, *stages(facts, limits, plain)]:
        for option in stage.options(start):
            trial = trial_of(option, stage.name, facts, limits)
            if facts.memory is not None:
                trial.predicted_peak = facts.memory.peak(trial.batch_size, trial.candidate.optim)
            made.append(trial)
    return made


def result_of(project: Project, limits: Limits, facts: Facts, outcome: Outcome) -> TuneResult:
    """Return an outcome with its configuration."""
    best, own = outcome.best, outcome.own
    made = configured(project.base(), best.candidate, project.batch_argument, project.namespace, limits.devices)
    return TuneResult(
        trials=[trial.to_dict(own) for trial in outcome.trials],
        chosen=next(place for place, trial in enumerate(outcome.trials) if trial is best),
        yaml=commented(made, comments_of(outcome), head_of(project, outcome)),
        module=facts.module,
        memory={"measured": None if facts.memory is None else dataclasses.asdict(facts.memory.step)},
        notes=[*facts.notes, *outcome.notes],
        settings=dataclasses.asdict(limits),
        machine=machine(),
    )


def comments_of(outcome: Outcome) -> dict[str, str]:
    """Return for each setting of the best candidate why it has its value: from the first winner that had it."""
    comments: dict[str, str] = {}
    winners = [trial for trial in outcome.trials if trial.verdict == "won"]
    for trial in winners:
        for name, value in trial.candidate.settings.items():
            if name not in comments and outcome.best.candidate.settings.get(name) == value:
                comments[name] = f"{trial.reason}: {trial.why}"
    return comments


def head_of(project: Project, outcome: Outcome) -> list[str]:
    """Return what stands above the configuration."""
    best, own = outcome.best, outcome.own
    found = speed(best, own)
    head = ["Written by lightning-ort tune; the reasons are in the .json beside it (lightning-ort tune --explain)."]
    if best is own or found is None:
        head.append(nothing_faster(any(speed(trial, own) for trial in outcome.trials if trial is not own)))
    else:
        on = " on one device" if devices_of(project) else ""
        times = f"{found.median:.2f} times as fast as before{on} ({found.low:.2f} to {found.high:.2f})"
        head.append(f"{times} on this machine:")
        head.append(in_words(machine()))
        head += while_busy(outcome.trials)
    if project.config is None:
        head.append("For a main.py that calls LightningCLI(); where that names the classes, leave class_path out.")
    return head


def machine() -> dict[str, str]:
    """Return what a measurement depends on: date, processor, threads, versions."""
    found = {
        "date": time.strftime("%Y-%m-%d"),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "threads": str(torch.get_num_threads()),
    }
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
    names = ("torch", "lightning", "pytorch-lightning", *DISTRIBUTIONS, "lightning-ort")
    return found | {name: number for name in names if (number := installed(name))}
