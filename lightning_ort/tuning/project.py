"""What is trained, :class:`Project`, and how: :func:`train`."""

import importlib
import inspect
import json
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import yaml

from lightning_ort._imports import LightningNamespace, is_inherited, namespace_of, preferred_namespace
from lightning_ort.callbacks.export_onnx import ExportOnnxCallback
from lightning_ort.tuning import candidate as candidates
from lightning_ort.tuning.candidate import MEASURED, Candidate, TuneError, configured
from lightning_ort.tuning.trainer_process import ENDLESS, Sample, TrainerProcess, make_sampler, namespace_of_class

# of Lightning: those end a run, write files, or show what nobody sees in a trial
_DROPPED = ("EarlyStopping", "Checkpoint", "ProgressBar", "ModelSummary", "Timer", "DeviceStatsMonitor")


@dataclass(frozen=True, kw_only=True)
class Project:
    """A module and its data."""

    # a LightningModule, or a class or function that makes one; ``None`` if the configuration names it
    module: Any = None
    args: Mapping[str, Any] = field(default_factory=dict)  # keyword arguments for it
    # a LightningDataModule or DataLoader, or what makes one; ``None`` if the module or configuration has it
    data: Any = None
    data_args: Mapping[str, Any] = field(default_factory=dict)  # keyword arguments for it
    config: Mapping[str, Any] | None = None  # a LightningCLI configuration, or ``None``
    accelerator: str = "auto"  # the Trainer's, if there is no configuration
    seed: int = 0  # for the initial weights and the order of the data
    # settings of ``ORTConfig`` for the candidates that train under a strategy of this package
    ort_config: Mapping[str, Any] = field(default_factory=dict)

    @property
    def namespace(self) -> LightningNamespace:
        """The namespace of Lightning that the module is of, as far as that is known without making it."""
        kind: Any = self.module
        if kind is None and self.config is not None:
            kind = _imported((self.config.get("model") or {}).get("class_path"))
        kind = kind if isinstance(kind, type) or kind is None else type(kind)
        return (namespace_of(kind) if kind is not None else None) or preferred_namespace()

    @property
    def lacks_data(self) -> bool:
        """Whether no data is named, and the module has no ``train_dataloader`` but Lightning's own."""
        named = self.data is not None or (self.config or {}).get("data")
        return not named and is_inherited(getattr(self.module, "train_dataloader", None))

    @property
    def batch_argument(self) -> candidates.Path | None:
        """Where in a configuration the data's ``batch_size`` is; ``None`` if no class has such an argument."""
        section = (self.config or {}).get("data")
        path = section.get("class_path") if isinstance(section, Mapping) else None
        kind = _imported(path) if path else self.data
        if not isinstance(kind, type) or "batch_size" not in inspect.signature(kind).parameters:
            return None
        return ("data", "init_args", "batch_size") if path or self.config is None else ("data", "batch_size")

    def base(self) -> dict[str, Any]:
        """Return the user's configuration, or one with what a configuration can name of the module and the data."""
        if self.config is not None:
            return dict(self.config)
        made: dict[str, Any] = {"seed_everything": self.seed, "trainer": {"accelerator": self.accelerator}}
        for name, kind, args in (("model", self.module, self.args), ("data", self.data, self.data_args)):
            if isinstance(kind, type):
                made[name] = {"class_path": f"{kind.__module__}.{kind.__qualname__}"}
                if args:
                    made[name]["init_args"] = dict(args)
        return made


def start(
    project: Project, candidate: Candidate, folder: Path, after: Callable[[Any], Any] | None = None
) -> TrainerProcess:
    """Start a process that trains as a candidate says, and waits to be told how many steps.

    Its ``finish`` returns what ``after``, which is pickled, returns for its Trainer.
    """
    return TrainerProcess(partial(_trial, project, candidate, after), folder)


def _trial(
    project: Project, candidate: Candidate, after: Callable[[Any], Any] | None, connection: Connection, folder: Path
) -> Any:
    steps = connection.recv()
    os.environ.setdefault("LIGHTNING_ORT_CONFIG", json.dumps(MEASURED))
    trainer = train(project, candidate, folder, lambda namespace: [make_sampler(namespace, connection, steps)])
    return after and after(trainer)


def train(
    project: Project, candidate: Candidate, folder: Path, callbacks: Callable[[LightningNamespace], list[Any]]
) -> Any:
    """Train until a callback ends it, and return the Trainer."""
    namespace = project.namespace
    made = configured(project.base(), candidate, project.batch_argument, namespace, project.ort_config)
    logger = namespace.submodule("loggers").CSVLogger(str(folder))
    limits = {**ENDLESS, "devices": 1, "default_root_dir": folder, "logger": logger}
    if project.config is not None:
        return _train_configured(project, candidate, made, callbacks(namespace), limits, folder)
    namespace.load().seed_everything(project.seed, workers=True, verbose=False)
    module = project.module(**project.args) if _makes(project.module) else project.module
    namespace = namespace_of_class(type(module))
    data_args = {**project.data_args}
    if project.batch_argument is not None and candidate.batch_size is not None:
        data_args["batch_size"] = candidate.batch_size
    data = project.data(**data_args) if _makes(project.data) else project.data
    settings = {name: built(value) for name, value in made["trainer"].items()}
    settings["callbacks"] = [*settings.get("callbacks", []), *callbacks(namespace)]
    trainer = namespace.load().Trainer(**settings | limits)
    _prepare(trainer, module, candidate, namespace)
    trainer.fit(module, data)
    return trainer


def _train_configured(
    project: Project,
    candidate: Candidate,
    config: dict[str, Any],
    callbacks: list[Any],
    limits: dict[str, Any],
    folder: Path,
) -> Any:
    """Do what ``python project.py fit --config`` does."""
    namespace = project.namespace
    config["trainer"]["logger"] = False  # until the Trainer is made
    config.pop("ckpt_path", None)
    (folder / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")

    class Cli(namespace.submodule("cli").LightningCLI):  # type: ignore[misc]
        model: Any
        trainer: Any

        def before_fit(self) -> None:
            _prepare(self.trainer, self.model, candidate, namespace)

        def instantiate_trainer(self, **kwargs: Any) -> Any:
            return super().instantiate_trainer(**kwargs, **limits)

    return Cli(
        project.module,
        project.data,
        save_config_callback=None,
        trainer_defaults={"callbacks": callbacks},
        args=["fit", f"--config={folder / 'config.yaml'}", f"--seed_everything={project.seed}"],
    ).trainer


def _prepare(trainer: Any, module: Any, candidate: Candidate, namespace: LightningNamespace) -> None:
    if candidate.engine == "compile":
        from lightning_ort.compat.dynamo import compile_isolated  # not at the top: not every torch has what it needs
        from lightning_ort.strategies.capture.shims import ModuleShims, callable_children

        # not torch.compile(module), which captures training_step: in Lightning 2.6 self.log cannot be traced
        # isolated: the frames around children are one function to dynamo, which leaves all after the eighth as they are
        ModuleShims(callable_children(module), compile_isolated).install()
    trainer.callbacks = _kept(trainer.callbacks, namespace)
    module.configure_callbacks = partial(_callbacks_of, module.configure_callbacks, namespace)


def _callbacks_of(configure_callbacks: Callable[[], Any], namespace: LightningNamespace) -> list[Any]:
    found = configure_callbacks()
    return _kept(found if isinstance(found, Sequence) else [found], namespace)


def _kept(callbacks: Sequence[Any], namespace: LightningNamespace) -> list[Any]:
    known = namespace.submodule("callbacks")
    dropped = (*(getattr(known, name) for name in _DROPPED), ExportOnnxCallback)
    return [one for one in callbacks if not isinstance(one, dropped)]


def _makes(value: Any) -> bool:
    """Whether a value is a class or function rather than a module or data: a LightningModule can be called too."""
    return isinstance(value, (type, partial)) or inspect.isroutine(value)


def _imported(path: str | None) -> Any:
    """Return what a ``class_path`` names; ``None`` for a bare name, which only LightningCLI knows."""
    module, _, name = (path or "").rpartition(".")
    if not module:
        return None
    try:
        return getattr(importlib.import_module(module), name)
    except Exception as error:  # of the user's own file, too
        raise TuneError(f"class_path {path}: it cannot be imported: {type(error).__name__}: {error}") from error


def built(value: Any) -> Any:
    """Make the objects that a part of a configuration describes."""
    if isinstance(value, Mapping) and "class_path" in value:
        return _imported(value["class_path"])(**(value.get("init_args") or {}))
    return [built(part) for part in value] if isinstance(value, list) else value


class ProcessRunner:
    """Trains each candidate in a process of its own, which waits while others have their turn."""

    def __init__(self, project: Project, folder: Path) -> None:
        self._project, self._folder = project, folder
        self._processes: dict[Candidate, TrainerProcess] = {}

    def clock(self) -> float:
        """Return the time in seconds."""
        return time.monotonic()

    def sample(self, candidate: Candidate, steps: int, timeout: float) -> Sample:
        """Let a candidate train for so many batches; the errors are those of :class:`TrainerProcess`."""
        if candidate not in self._processes:
            folder = Path(tempfile.mkdtemp(dir=self._folder))
            self._processes[candidate] = start(self._project, candidate, folder)
        return self._processes[candidate].sample(steps, timeout)

    def stop(self, candidate: Candidate) -> None:
        """End a candidate's process."""
        if (process := self._processes.pop(candidate, None)) is not None:
            process.stop()

    def stop_all(self) -> None:
        """End all processes."""
        for candidate in list(self._processes):
            self.stop(candidate)
