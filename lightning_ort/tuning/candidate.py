"""One way to train: :class:`Candidate`, and what it changes in a LightningCLI configuration, :func:`configured`."""

import copy
import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lightning_ort._imports import LIGHTNING, LightningNamespace

Path = tuple[str, ...]  # of a value in a configuration

MATMUL_PRECISIONS = ("high", "medium")
_OF_LOADER = ("num_workers", "pin_memory", "persistent_workers", "prefetch_factor")
_OF_CALLBACK = ("batch_size", *_OF_LOADER, "channels_last", "threads")
# names of `ORTConfig(engine=...)` for strategy="ort", and Lightning's own strategy, as it is and with torch.compile
OURS = ("torch", "ort", "auto")
ENGINES = ("stock", "compile", *OURS)
# compiling is what is measured, and the Trainer does not know how many steps it will be asked for
MEASURED = {"start": "now"}


class TuneError(ValueError):
    """Why nothing can be tuned, and what to do."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One way to train. What is ``None`` stays as the user has it."""

    engine: str | None = None  # one of :data:`ENGINES`
    # a ``Trainer(precision=...)``, or ``"high"`` or ``"medium"`` for :class:`~lightning_ort.ORTMatmulPrecision`
    precision: str | None = None
    optim: str | None = None  # an implementation of the optimizer
    batch_size: int | None = None  # examples in a batch
    accumulate: int | None = None  # batches whose gradients are added up
    num_workers: int | None = None  # this and the others as in ``ORTTrainingSettings``
    pin_memory: bool | None = None  # have the data in memory from which a GPU copies faster
    persistent_workers: bool | None = None  # keep the processes from epoch to epoch
    prefetch_factor: int | None = None  # batches that each of the processes has ready
    channels_last: bool | None = None  # the memory layout of convolutions
    threads: int | None = None  # threads of torch's operations

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
        return self.engine in OURS

    def __str__(self) -> str:
        words = [str(self.settings[name]) for name in ("engine", "precision") if name in self.settings]
        others = {name: value for name, value in self.settings.items() if name not in ("engine", "precision")}
        words += [name if value is True else f"{name}={value}" for name, value in others.items()]
        return " ".join(words) or "yours"


def configured(
    config: Mapping[str, Any],
    candidate: Candidate,
    batch_argument: Path | None = None,
    namespace: LightningNamespace = LIGHTNING,
    ort_config: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return a LightningCLI configuration that trains as a candidate says, made of the user's, if there is one.

    ``batch_argument`` is where the data's ``batch_size`` is, if it has such an argument. ``ort_config`` counts if the
    candidate's strategy is of this package and the candidate says nothing else.
    """
    made = copy.deepcopy(dict(config))
    trainer = made["trainer"] = made.get("trainer") or {}
    prefix = "lightning_ort." if namespace is LIGHTNING else f"{namespace.module}."
    if candidate.is_ours:
        trainer["strategy"] = _ours(trainer.get("strategy"), candidate, f"{prefix}ORTStrategy", ort_config or {})
    elif candidate.engine is not None:
        trainer["strategy"] = "auto"
    if candidate.engine is not None:  # one device of one node is measured
        trainer |= {"devices": 1} | ({"num_nodes": 1} if trainer.get("num_nodes") else {})
    if candidate.precision in MATMUL_PRECISIONS:
        trainer.pop("precision", None)
        _add(trainer, "plugins", f"{prefix}ORTMatmulPrecision", {"level": candidate.precision})
    elif candidate.precision is not None:
        trainer["precision"] = candidate.precision
    if candidate.optim is not None and not candidate.is_ours:
        _add(trainer, "callbacks", f"{prefix}ORTOptimizer", {"name": candidate.optim})
    if candidate.accumulate is not None:
        trainer["accumulate_grad_batches"] = candidate.accumulate
    settings = {name: candidate.settings[name] for name in _OF_CALLBACK if name in candidate.settings}
    if batch_argument is not None and candidate.batch_size is not None:
        where = made
        for part in batch_argument[:-1]:
            where[part] = where.get(part) or {}
            where = where[part]
        where[batch_argument[-1]] = settings.pop("batch_size")
    if settings:
        _add(trainer, "callbacks", f"{prefix}ORTTrainingSettings", settings)
    return made


def _ours(before: Any, candidate: Candidate, path: str, ort_config: Mapping[str, Any]) -> dict[str, Any]:
    same = isinstance(before, Mapping) and before.get("class_path") == path  # with settings of the user's
    arguments = dict(before.get("init_args") or {}) if same else {}
    config = {**(arguments.pop("config", None) or {}), **ort_config}
    if candidate.engine != "ort":  # which is what is the default, or what `ort_config` says
        config["engine"] = candidate.engine
    arguments |= {"config": config} if config else {}
    arguments |= {"optim": candidate.optim} if candidate.optim is not None else {}
    return {"class_path": path} | ({"init_args": arguments} if arguments else {})


def _add(trainer: dict[str, Any], name: str, path: str, arguments: Mapping[str, Any]) -> None:
    """Add a callback or plugin; one of that class that an earlier run of this command has added gets the arguments."""
    value = trainer.get(name)
    kept = list(value) if isinstance(value, list) else [] if value is None else [value]
    mine = [one for one in kept if isinstance(one, Mapping) and one.get("class_path") == path]
    for one in mine:
        arguments = {**(one.get("init_args") or {}), **arguments}
        kept.remove(one)
    trainer[name] = [*kept, {"class_path": path, "init_args": dict(arguments)}]
