"""One way to train: :class:`Candidate`, what it changes in a LightningCLI configuration, and that as YAML."""

import copy
import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml

from lightning_ort import _strategies
from lightning_ort._arguments import closest
from lightning_ort._imports import LIGHTNING, LightningNamespace
from lightning_ort._text import plain
from lightning_ort.optim.registry import check_name

Path = tuple[str | int, ...]  # of a value in a configuration

MATMUL_PRECISIONS = ("high", "medium")
_PRECISIONS = (
    *MATMUL_PRECISIONS,
    *("bf16-mixed", "16-mixed", "bf16-true", "16-true", "32-true", "64-true", "bf16", "16", "32", "64"),
    *("transformer-engine", "transformer-engine-float16"),
)
_OF_LOADER = ("num_workers", "pin_memory", "persistent_workers", "prefetch_factor")
_OF_CALLBACK = (*_OF_LOADER, "channels_last", "threads", "checkpoint_blocks")


@dataclass(frozen=True)
class StrategyChoice:
    """What the engine of a candidate stands for."""

    strategy: str  # Lightning's name, or a class of this package
    is_ours: bool = False
    config: Mapping[str, Any] = field(default_factory=dict)  # settings of ORTConfig
    has_several_processes: bool = False


# Candidates name settings of ORTConfig here, and nowhere else.
STRATEGIES = {
    "stock": StrategyChoice("auto"),
    "compile": StrategyChoice("auto"),  # and torch.compile for the module's children
    "torch": StrategyChoice("ORTStrategy", True, {"engine": "torch"}),  # these three are named as their setting
    "ort": StrategyChoice("ORTStrategy", True),
    "auto": StrategyChoice("ORTStrategy", True, {"engine": "auto"}),
    "ddp": StrategyChoice("ddp", has_several_processes=True),
    **{
        names.name: StrategyChoice(kind, True, has_several_processes=True)
        for kind, names in _strategies.STRATEGIES.items()
        if names.several_processes
    },
}
# fields of a candidate: where they are among the strategy's arguments
_OF_STRATEGY = {
    "activation_memory_budget": ("config", "activation_memory_budget"),
    "host_memory": ("host_memory",),
    "optim": ("optim",),
}
# compiling is what is measured, and the Trainer does not know how many steps it will be asked for
MEASURED = {"start": "now"}
NAMED = MEASURED | {"engine": "ort"}  # for candidates that somebody names: inductor is one of its own, "auto"
NOT_COMPILED = {"engine": "torch"}


class TuneError(ValueError):
    """Why nothing can be tuned, and what to do."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One way to train. What is ``None`` stays as the user has it."""

    engine: str | None = None  # one of :data:`STRATEGIES`
    # a ``Trainer(precision=...)``, or ``"high"`` or ``"medium"`` for :class:`~lightning_ort.ORTMatmulPrecision`
    precision: str | None = None
    optim: str | None = None  # an implementation of the optimizer
    batch_size: int | None = None  # examples in a batch of one process
    accumulate: int | None = None  # batches whose gradients are added up
    activation_memory_budget: float | None = None
    host_memory: str | None = None  # as in ``ORTStrategy``
    num_workers: int | None = None  # this and the others as in ``ORTTrainingSettings``
    pin_memory: bool | None = None  # have the data in memory from which a GPU copies faster
    persistent_workers: bool | None = None  # keep the processes from epoch to epoch
    prefetch_factor: int | None = None  # batches that each of the processes has ready
    channels_last: bool | None = None  # the memory layout of convolutions
    threads: int | None = None  # threads of torch's operations
    checkpoint_blocks: bool | None = None  # recompute repeated blocks

    @classmethod
    def parse(cls, text: str) -> "Candidate":
        """Read what people write, ``ENGINE[+OPTIM][@PRECISION]``; ``ValueError`` if one of them is unknown."""
        rest, _, precision = text.partition("@")
        engine, _, optim = rest.partition("+")
        allowed = [name for name, one in STRATEGIES.items() if not one.has_several_processes]
        if engine not in allowed:
            raise ValueError(
                f"Variant {text!r}: unknown engine {engine!r}; allowed are {', '.join(allowed)}. "
                "Write ENGINE[+OPTIM][@PRECISION], such as ort+adamw_bnb_8bit@bf16-mixed."
            )
        optim = "auto" if optim == "fused" else optim  # "auto" alone is an engine
        if optim:
            check_name(optim, f"variant {text!r}: optim")
        if precision and precision not in _PRECISIONS:
            text = f"Variant {text!r}: unknown precision {precision!r}: {closest(precision, _PRECISIONS, 'precisions')}"
            raise ValueError(text)
        return cls(engine=engine, optim=optim or None, precision=precision or None)

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
        return self.engine is not None and STRATEGIES[self.engine].is_ours

    @property
    def has_several_processes(self) -> bool:
        """Whether its strategy is one for several processes."""
        return self.engine is not None and STRATEGIES[self.engine].has_several_processes

    @property
    def changes_loader(self) -> bool:
        """Whether it needs another DataLoader."""
        return not self.settings.keys().isdisjoint(("batch_size", *_OF_LOADER))

    def processes(self, devices: int) -> int:
        """Return how many processes it trains with, where the user allows so many."""
        return devices if self.has_several_processes else 1

    def __str__(self) -> str:
        words = [str(self.settings[name]) for name in ("engine", "precision") if name in self.settings]
        others = {name: value for name, value in self.settings.items() if name not in ("engine", "precision")}
        words += [name if value is True else f"{name}={value}" for name, value in others.items()]
        return " ".join(words) or "yours"


@dataclass
class Configured:
    """A configuration with what a candidate changes, and which setting is at which path."""

    config: dict[str, Any]
    paths: dict[Path, str] = field(default_factory=dict)

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
    ort_config: Mapping[str, Any] | None = None,
) -> Configured:
    """Return a LightningCLI configuration that trains as a candidate says, made of the user's, if there is one.

    ``batch_argument`` is where the data's ``batch_size`` is, if it has such an argument. ``devices`` count if the
    candidate's strategy is one for several processes, ``ort_config`` if it is of this package and the candidate has no
    other.
    """
    made = Configured(copy.deepcopy(dict(config)))
    prefix = "lightning_ort." if namespace is LIGHTNING else f"{namespace.module}."
    made.config.setdefault("trainer", {})
    if candidate.engine is not None:
        _put_strategy(made, candidate, prefix, devices, ort_config or {})
    _put_precision(made, candidate, prefix)
    if candidate.optim is not None and not candidate.is_ours:
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


def _put_strategy(
    made: Configured, candidate: Candidate, prefix: str, devices: int, ort_config: Mapping[str, Any]
) -> None:
    assert candidate.engine is not None
    engine, trainer = STRATEGIES[candidate.engine], made.config["trainer"]
    if engine.is_ours:
        _put_ours(made, candidate, f"{prefix}{engine.strategy}", ort_config)
    else:
        made.put(("trainer", "strategy"), engine.strategy, "engine")
    if trainer.get("num_nodes"):
        trainer["num_nodes"] = 1  # where it was measured
    trainer["devices"] = candidate.processes(devices)
    if trainer["devices"] > 1:
        made.paths[("trainer", "devices")] = "engine"


def _put_ours(made: Configured, candidate: Candidate, path: str, ort_config: Mapping[str, Any]) -> None:
    assert candidate.engine is not None
    before = made.config["trainer"].get("strategy")
    same = isinstance(before, Mapping) and before.get("class_path") == path  # with settings of the user's
    arguments = dict(before.get("init_args") or {}) if same else {}
    if config := {**(arguments.pop("config", None) or {}), **ort_config}:
        arguments["config"] = config
    made.config["trainer"]["strategy"] = {"class_path": path} | ({"init_args": arguments} if arguments else {})
    at: Path = ("trainer", "strategy")
    made.paths[(*at, "class_path")] = "engine"
    for name, value in STRATEGIES[candidate.engine].config.items():
        made.put((*at, "init_args", "config", name), value, "engine")
    for name, place in _OF_STRATEGY.items():
        if (value := getattr(candidate, name)) is not None:
            made.put((*at, "init_args", *place), value, name)


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


# as YAML

_WIDTH = 10_000  # characters: a line for a value, so that its comment is on it


def commented(made: Configured, comments: Mapping[str, str], head: list[str]) -> str:
    """Return the configuration as YAML, below ``head``, with a comment where each setting is: why it has its value."""
    text = yaml.safe_dump(made.config, sort_keys=False, width=_WIDTH, allow_unicode=True)
    lines = text.splitlines()
    places = _lines_of(yaml.compose(text, Loader=yaml.SafeLoader), ())
    for path, setting in made.paths.items():
        if setting in comments and path in places:
            lines[places[path]] += f"  # {_one_line(comments[setting])}"
    return "\n".join([*(f"# {_one_line(line)}" for line in head), *lines]) + "\n"


def _lines_of(node: Any, above: Path) -> dict[Path, int]:
    """Return the line of each value's key, or of the value itself in a list."""
    found: dict[Path, int] = {}
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            path = (*above, key.value)
            found[path] = key.start_mark.line
            found |= _lines_of(value, path)
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            path = (*above, index)
            found[path] = value.start_mark.line
            found |= _lines_of(value, path)
    return found


def _one_line(text: str) -> str:
    return " ".join(plain(text, "utf-8").split())
