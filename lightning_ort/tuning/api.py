"""``lightning_ort.tune``: probes a module, searches, and returns what was found."""

import dataclasses
import math
import platform
import tempfile
import time
import time as clock
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import yaml

from lightning_ort._imports import OPTUNA, absence
from lightning_ort._text import plain
from lightning_ort.compiler.executors.ort.kernels import DISTRIBUTIONS, installed
from lightning_ort.tuning.candidate import Candidate, TuneError, configured
from lightning_ort.tuning.probe import probed
from lightning_ort.tuning.project import ProcessRunner, Project
from lightning_ort.tuning.result import TuneResult
from lightning_ort.tuning.space import Limits
from lightning_ort.tuning.trainer_process import TimeIsUp, VariantFailed
from lightning_ort.tuning.trials import Outcome, in_words, while_busy

__all__ = ["TuneError", "TuneResult", "tune"]

Listener = Callable[[str, str], None]
_ENOUGH = 4  # times what was too short


def tune(
    module: Any = None,
    datamodule: Any = None,
    *,
    config: Mapping[str, Any] | None = None,
    time: float = 300.0,
    keep_numerics: bool = False,
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
        keep_numerics: Keep float32 and the algorithm of the optimizer.
        accelerator: The Trainer's, if there is no configuration.
        seed: For the initial weights and the order of the data.
        tolerance: Largest relative difference of the loss to that of float32.
        listen: Called with what is being done, and the best so far.

    Returns:
        What was found.

    Raises:
        TuneError: A ``ValueError`` that says why nothing can be tuned and what to do: the module does not train, or
            the time is too short.
        ValueError: If an argument has a value that is not allowed.
        TypeError: If an argument has a wrong type.
        ModuleNotFoundError: If Optuna is not installed.

    Example::

        result = lightning_ort.tune(MyModule(), MyDataModule(), time=120)
        trainer = Trainer(max_epochs=3, **result.trainer_arguments())
    """
    started = clock.monotonic()
    limits = Limits(seconds=time, keep_numerics=keep_numerics, tolerance=tolerance)
    if module is None and not (config or {}).get("model"):
        raise ValueError("Nothing to train: pass a module, or a configuration that names one.")
    if trainer := next((each for each in (module, datamodule) if hasattr(each, "fit")), None):
        raise TypeError(
            f"tune({type(trainer).__name__}): pass a LightningModule, and what the Trainer is made with as"
            ' config={"trainer": {...}}.'
        )
    project = Project(module=module, data=datamodule, config=config, accelerator=accelerator, seed=seed)
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
    if not OPTUNA:
        raise ModuleNotFoundError(f"tune searches with Optuna: pip install optuna, the extra `tune`. {absence(OPTUNA)}")
    from lightning_ort.tuning.search import Search

    project.namespace.load()  # which processes inherit
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True)))
        runner = ProcessRunner(project, folder)
        stack.callback(runner.stop_all)
        try:
            listen("looking at the module and its data", "")
            facts = probed(project, folder / "probe", deadline)
            outcome = Search(facts, limits, is_plain(project), runner, deadline, listen).run()
        except VariantFailed as error:
            raise TuneError(
                f"The module does not train as it is, so there is nothing to tune: {error}. First make a few steps work"
                " with Trainer.fit (or main.py fit), then tune."
            ) from None
        except TimeIsUp:
            needed = _ENOUGH * (limits.seconds + max(0.0, clock.monotonic() - deadline))
            raise TuneError(
                f"--time {limits.seconds:.3g}s is too short: it was over before anything could be compared with your"
                f" own settings. Pass about {math.ceil(needed / 60)}m."
            ) from None
    best, own = outcome.best, outcome.own
    made = configured(project.base(), best.candidate, project.batch_argument, project.namespace)
    result = TuneResult(
        trials=[trial.to_dict(own) for trial in outcome.trials],
        chosen=outcome.trials.index(best),
        yaml=yaml.safe_dump(made, sort_keys=False, allow_unicode=True),
        module=facts.module,
        notes=[*outcome.notes, *while_busy(outcome.trials), *notes_on(project, best.candidate)],
        settings=dataclasses.asdict(limits),
        machine=machine(),
    )
    head = (f"# {' '.join(plain(line, 'utf-8').split())}\n" for line in head_of(project, outcome, result))
    return dataclasses.replace(result, yaml="".join(head) + result.yaml)


def head_of(project: Project, outcome: Outcome, result: TuneResult) -> list[str]:
    """Return what stands above the configuration: how fast it is, where that was measured, and why it is so."""
    head = [f"Written by lightning-ort tune. {result.conclusion}", in_words(result.machine), *result.notes]
    for trial in outcome.trials:
        if trial.verdict == "won" and trial.candidate.settings.items() <= outcome.best.candidate.settings.items():
            head.append(f"{trial.candidate}: {trial.reason}: {trial.why}")
    if project.config is None:
        head.append("For a main.py that calls LightningCLI(); where that names the classes, leave class_path out.")
    return head


def notes_on(project: Project, best: Candidate) -> Iterator[str]:
    """Yield what the user has to know of a result."""
    trainer = (project.config or {}).get("trainer") or {}
    alone = (1, "1", None, *(["auto"] if torch.cuda.device_count() < 2 else []))
    devices = {name: value for name in ("devices", "num_nodes") if (value := trainer.get(name)) not in alone}
    if devices:
        given = ", ".join(f"{name} {value}" for name, value in devices.items())
        yield f"all was measured on one device of one node, not with your {given}"
    if best.batch_size is not None and project.batch_argument is None:
        yield (
            "the data takes no batch_size, so ORTTrainingSettings changes its DataLoader; if your DataModule computes"
            " with a batch size of its own, give it an argument batch_size and tune again"
        )


def is_plain(project: Project) -> bool:
    """Return whether the user's own settings are stock Lightning in float32."""
    trainer = (project.config or {}).get("trainer") or {}
    in_float32 = trainer.get("precision") in (None, 32, "32", "32-true")
    return in_float32 and not trainer.get("plugins") and trainer.get("strategy") in (None, "auto")


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
