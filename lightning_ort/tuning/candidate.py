"""One way to train: :class:`Candidate`, and what it changes in a LightningCLI configuration."""

import copy
import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lightning_ort._imports import LIGHTNING, LightningNamespace

Path = tuple[str | int, ...]  # of a value in a configuration

STRATEGIES = {
    "ort": "ORTStrategy",
    "auto": "ORTStrategy",
    "ort_ddp": "ORTDDPStrategy",
    "ort_zero1": "ORTZeRO1Strategy",
    "ort_zero1_native": "ORTNativeZeRO1Strategy",
}
SEVERAL_PROCESSES = ("ddp", "ort_ddp", "ort_zero1", "ort_zero1_native")
MATMUL_PRECISIONS = ("high", "medium")
_OF_STRATEGY = ("recompute", "host_memory")
_OF_LOADER = ("whole_batches", "num_workers", "pin_memory", "persistent_workers", "prefetch_factor")
_OF_CALLBACK = (*_OF_LOADER, "channels_last", "threads", "checkpoint_blocks")


class TuneError(ValueError):
    """Why nothing can be tuned, and what to do."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One way to train. What is ``None`` stays as the user has it.

    Args:
        engine: ``"stock"`` or ``"ddp"`` (Lightning's own strategies), ``"ort"``, ``"auto"`` (the same with
            ``engine="auto"``), ``"ort_ddp"``, ``"ort_zero1"`` or ``"ort_zero1_native"``.
        precision: A ``Trainer(precision=...)``, or ``"high"`` or ``"medium"`` for
            :class:`~lightning_ort.ORTMatmulPrecision`.
        optim: An implementation of the optimizer.
        batch_size: Examples in a batch of one process.
        accumulate: Batches whose gradients are added up.
        recompute: As in ``ORTConfig``.
        host_memory: As in ``ORTStrategy``.
        whole_batches: This and the others as in ``ORTTrainingSettings``.
        num_workers: Processes that load data.
        pin_memory: Have the data in memory from which a GPU copies faster.
        persistent_workers: Keep the processes from epoch to epoch.
        prefetch_factor: Batches that each of the processes has ready.
        channels_last: The memory layout of convolutions.
        threads: Threads of torch's operations.
        checkpoint_blocks: Recompute repeated blocks.

    """

    engine: str | None = None
    precision: str | None = None
    optim: str | None = None
    batch_size: int | None = None
    accumulate: int | None = None
    recompute: int | None = None
    host_memory: str | None = None
    whole_batches: bool | None = None
    num_workers: int | None = None
    pin_memory: bool | None = None
    persistent_workers: bool | None = None
    prefetch_factor: int | None = None
    channels_last: bool | None = None
    threads: int | None = None
    checkpoint_blocks: bool | None = None

    def but(self, **changes: Any) -> "Candidate":
        """Return a candidate with some settings changed."""
        return dataclasses.replace(self, **changes)

    @property
    def settings(self) -> dict[str, Any]:
        """What it sets."""
        return {name: value for name, value in dataclasses.asdict(self).items() if value is not None}

    @property
    def is_ours(self) -> bool:
        """Whether its strategy is one of this package."""
        return self.engine in STRATEGIES

    @property
    def changes_loader(self) -> bool:
        """Whether it needs another DataLoader."""
        return not self.settings.keys().isdisjoint(("batch_size", *_OF_LOADER))

    def processes(self, devices: int) -> int:
        """Return how many processes it trains with, where the user allows so many."""
        return devices if self.engine in SEVERAL_PROCESSES else 1

    def __str__(self) -> str:
        words = [str(self.settings[name]) for name in ("engine", "precision") if name in self.settings]
        others = {name: value for name, value in self.settings.items() if name not in ("engine", "precision")}
        words += [name if value is True else f"{name}={value}" for name, value in others.items()]
        return " ".join(words) or "yours"


@dataclass
class Configured:
    """A configuration with what a candidate changes, and which setting is at which path."""

    config: dict[str, Any]
    paths: dict[Path, str] = dataclasses.field(default_factory=dict)

    def put(self, path: Path, value: Any, setting: str) -> None:
        """Set a value, and the mappings above it."""
        where: Any = self.config
        for part in path[:-1]:
            if isinstance(where, dict) and not isinstance(where.get(part), (dict, list)):
                where[part] = {}
            where = where[part]
        where[path[-1]] = value
        self.paths[path] = setting


def configured(
    config: Mapping[str, Any],
    candidate: Candidate,
    batch_argument: Path | None = None,
    namespace: LightningNamespace = LIGHTNING,
    devices: int = 1,
) -> Configured:
    """Return a LightningCLI configuration that trains as a candidate says.

    Args:
        config: The user's configuration, or nothing.
        candidate: What to change.
        batch_argument: Where the data's ``batch_size`` is; ``None`` if it has no such argument.
        namespace: Whose classes it names.
        devices: Processes, if the candidate's strategy is one for several.

    """
    made = Configured(copy.deepcopy(dict(config)))
    prefix = "lightning_ort." if namespace is LIGHTNING else f"{namespace.module}."
    made.config.setdefault("trainer", {})
    if candidate.engine is not None:
        _put_strategy(made, candidate, prefix, devices)
    _put_precision(made, candidate, prefix)
    if candidate.optim is not None:
        if candidate.is_ours:
            made.put(("trainer", "strategy", "init_args", "optim"), candidate.optim, "optim")
        else:
            _put_callback(made, f"{prefix}ORTOptimizer", {"name": candidate.optim}, {"name": "optim"})
    if candidate.accumulate is not None:
        made.put(("trainer", "accumulate_grad_batches"), candidate.accumulate, "accumulate")
    settings = {name: candidate.settings[name] for name in _OF_CALLBACK if name in candidate.settings}
    if candidate.batch_size is not None:
        if batch_argument is not None:
            made.put(batch_argument, candidate.batch_size, "batch_size")
        else:
            settings = {"batch_size": candidate.batch_size, **settings}
    if settings:
        _put_callback(made, f"{prefix}ORTTrainingSettings", settings, {name: name for name in settings})
    return made


def _put_strategy(made: Configured, candidate: Candidate, prefix: str, devices: int) -> None:
    assert candidate.engine is not None
    trainer = made.config["trainer"]
    if not candidate.is_ours:
        made.put(("trainer", "strategy"), {"stock": "auto"}.get(candidate.engine, candidate.engine), "engine")
    else:
        path = f"{prefix}{STRATEGIES[candidate.engine]}"
        before = trainer.get("strategy")
        same = isinstance(before, Mapping) and before.get("class_path") == path  # with settings of the user's
        trainer["strategy"] = {"class_path": path}
        made.paths[("trainer", "strategy", "class_path")] = "engine"
        arguments = dict(before.get("init_args") or {}) if same else {}
        if candidate.engine == "auto" or candidate.recompute is not None:
            config = dict(arguments.get("config") or {})
            config |= {"engine": "auto"} if candidate.engine == "auto" else {}
            config |= {"recompute": candidate.recompute} if candidate.recompute is not None else {}
            arguments["config"] = config
        if candidate.host_memory is not None:
            arguments["host_memory"] = candidate.host_memory
        if arguments:
            trainer["strategy"]["init_args"] = arguments
        at: Path = ("trainer", "strategy", "init_args")
        where = {"recompute": (*at, "config", "recompute"), "host_memory": (*at, "host_memory")}
        made.paths |= {where[name]: name for name in _OF_STRATEGY if getattr(candidate, name) is not None}
        if candidate.engine == "auto":
            made.paths[(*at, "config", "engine")] = "engine"
    if trainer.get("num_nodes"):
        trainer["num_nodes"] = 1  # where it was measured
    trainer["devices"] = candidate.processes(devices)
    if trainer["devices"] > 1:
        made.paths[("trainer", "devices")] = "engine"


def _put_precision(made: Configured, candidate: Candidate, prefix: str) -> None:
    if candidate.precision in MATMUL_PRECISIONS:
        made.config["trainer"].pop("precision", None)
        plugins = _listed(made.config["trainer"], "plugins")
        plugins.append({"class_path": f"{prefix}ORTMatmulPrecision", "init_args": {"level": candidate.precision}})
        made.paths[("trainer", "plugins", len(plugins) - 1, "init_args", "level")] = "precision"
    elif candidate.precision is not None:
        made.put(("trainer", "precision"), candidate.precision, "precision")


def _put_callback(made: Configured, path: str, arguments: dict[str, Any], settings: Mapping[str, str]) -> None:
    callbacks = _listed(made.config["trainer"], "callbacks")
    kept = [one for one in callbacks if isinstance(one, Mapping) and one.get("class_path") == path]
    for one in kept:  # of an earlier run of this command
        arguments = {**(one.get("init_args") or {}), **arguments}
        callbacks.remove(one)
    callbacks.append({"class_path": path, "init_args": arguments})
    at: Path = ("trainer", "callbacks", len(callbacks) - 1, "init_args")
    made.paths |= {(*at, name): setting for name, setting in settings.items()}


def _listed(trainer: dict[str, Any], name: str) -> list[Any]:
    value = trainer.get(name)
    trainer[name] = list(value) if isinstance(value, list) else [] if value is None else [value]
    return trainer[name]
