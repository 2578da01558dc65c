"""The settings: one frozen dataclass, checked when it is created.

A field says all that there is to know of a setting: its annotation which values are allowed, its default, and, by
:func:`_setting`, what of an earlier run it makes useless.
"""

import dataclasses
import difflib
import functools
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from lightning_ort._arguments import (
    check_choice,
    check_integer,
    check_mapping,
    check_path,
    check_share,
    check_type,
    check_writable,
    closest,
    names_its_arguments,
    passed,
)

EngineSetting = Literal["auto", "ort", "recorded", "torch"]
DropoutMasks = Literal["exact", "fast"]
Placement = Literal["measured", "always"]
Start = Literal["amortized", "now"]
DEFAULT_BUDGET = 0.05  # of the time of a run's steps, on a CPU
DEFAULT_START: Start = "amortized"  # under a strategy, where nothing that the user asks for needs compiled graphs
Kernels = Literal["auto", "training", "standard"]
Fallback = Literal["warn", "raise"]
StepGraph = Literal["auto", "joint", "split"]
Capture = Literal["auto", "step", "modules"]
Audit = Literal["auto", "off"]
TrainerLoop = Literal["lean", "stock"]
MAX_THREADS = 1024  # per session; onnxruntime starts all of them at once

# What a run finds and later ones use: times and models of regions, what is decided of a graph, and how long a step
# takes on each engine. A setting changes one of them, those after it, and none before it.
Found = Literal["regions", "graphs", "steps"]


def _setting(default: Any, changes: Found | None = "steps") -> Any:
    """Return a field that changes what runs find; ``None`` for one that changes nothing, such as a path."""
    return field(default=default, metadata={"changes": changes})


@dataclass(frozen=True, kw_only=True)
class DebugSettings:
    """Settings for finding faults, and for measuring one part of the compiler alone.

    Args:
        capture: What is compiled: ``"step"`` the step methods, ``"modules"`` the child modules, ``"auto"`` steps first
            and modules if a step cannot be captured or keeps recompiling.
        step_graph: How a captured graph with a loss is run: ``"joint"`` computes the loss and all gradients in one
            graph, ``"split"`` has a graph for the forward and one for the backward pass, ``"auto"`` takes one graph for
            the ``training_step`` of a LightningModule with automatic optimization.
        kernels: ``"training"`` uses the gradient kernels of ``onnxruntime-training``, ``"standard"`` only those that
            every onnxruntime has, ``"auto"`` whichever the installed build offers.
        providers: ONNX Runtime execution providers in order of preference; ``None`` picks by the device of the
            tensors (CPU or CUDA).
        torch_ops: ATen ops to keep in torch, as ``"aten.gelu.default"`` or, for all overloads, ``"aten.gelu"``.
        min_region_nodes: Regions with fewer compute nodes than this stay in torch.
        intra_op_threads: Threads per session, at most 1024; ``None`` times one thread against as many as torch uses.
        check_against_eager: Compare the first run of every region with torch, and treat a difference beyond tolerance
            as a failure of that region.
        trainer_loop: ``"lean"`` lets the Trainer do in each batch what somebody asked for, and no more, where its code
            is known; ``"stock"`` leaves its loops, ``self.log`` and progress bars as they are.
        save_onnx_dir: Folder to write every region's ONNX model to, as ``<graph>.<region>.onnx``.

    Raises:
        ValueError: If a value is not one of the allowed ones, or a path cannot be written.
        TypeError: If a value has the wrong type, or a field does not exist; the message names the closest one.
    """

    capture: Capture = _setting("auto")
    step_graph: StepGraph = _setting("auto")
    kernels: Kernels = _setting("auto", changes="regions")
    providers: tuple[str, ...] | None = _setting(None, changes="graphs")
    torch_ops: tuple[str, ...] = _setting((), changes="graphs")
    min_region_nodes: int = _setting(2, changes="graphs")
    intra_op_threads: int | None = _setting(None, changes="regions")
    check_against_eager: bool = _setting(False)
    trainer_loop: TrainerLoop = _setting("lean", changes=None)
    save_onnx_dir: str | None = _setting(None, changes=None)

    def __post_init__(self) -> None:
        _check_choices(self)
        for name in ("torch_ops", "providers"):
            value = getattr(self, name)
            if isinstance(value, Sequence) and not isinstance(value, str):  # from YAML, JSON or OmegaConf
                object.__setattr__(self, name, value := tuple(value))
            if value is not None and not (isinstance(value, tuple) and all(isinstance(v, str) for v in value)):
                raise TypeError(f"{passed(name, value, _DEBUG)}: pass a list of strings.")
        if self.torch_ops is None:
            raise TypeError(f"{_DEBUG}(torch_ops=None): pass a list of ATen op names, or leave it out.")
        for op in self.torch_ops:
            _check_op(op)
        if self.providers is not None:
            _check_providers(self.providers)
        for name, most in (("min_region_nodes", None), ("intra_op_threads", MAX_THREADS)):
            if (value := getattr(self, name)) is not None or name == "min_region_nodes":
                object.__setattr__(self, name, check_integer(name, value, 1, most, _DEBUG))
        if self.save_onnx_dir is not None:
            path = os.path.expanduser(check_path("save_onnx_dir", self.save_onnx_dir, _DEBUG, "a path or None"))
            object.__setattr__(self, "save_onnx_dir", path)
            check_writable("save_onnx_dir", path, True, _DEBUG)


@dataclass(frozen=True, kw_only=True)
class ORTConfig:
    """Settings of the ONNX Runtime compiler.

    Args:
        engine: What may run a step of a LightningModule: ``"torch"`` PyTorch alone, which compiles nothing (the
            optimizer and the memory of the strategy stay); ``"recorded"`` also recordings of steps, which compile
            nothing either; ``"ort"`` ONNX Runtime and not recordings; ``"auto"`` all of these, and the other
            compilers of whole steps, and the fastest is kept. On a CPU they are tried after ONNX Runtime, with
            ``start="amortized"`` once that is expected to pay; on a GPU before it. ``None`` is ``"auto"`` with
            ``placement="measured"`` on a GPU, and on a CPU if one of them can compile there and ``start`` is
            ``"amortized"``; else ``"ort"``.
        placement: ``"measured"`` times every region on ONNX Runtime and in torch on the real shapes, and each step of
            a LightningModule with and without capture, and keeps the faster one; ``"always"`` runs on ONNX Runtime
            what it supports, except single operations (``debug.min_region_nodes``).
        start: ``"amortized"`` leaves each step of a LightningModule unchanged until compiling it is expected to take
            no more than a share of what the steps still to come take; ``"now"`` compiles after one step, which runs
            unchanged to show errors early, or at once if there is only one. ``None`` is ``"amortized"``, but ``"now"``
            with ``placement="always"`` and where ``debug`` checks or saves compiled graphs.
        compile_budget: With ``start="amortized"``, the share of the time of a run's steps, those so far and, where the
            Trainer knows the run's length, those to come, that compiling and trying may take. Above 0, at most 1.
            ``None`` is 0.05 on a CPU, or half of what was saved in an earlier run of the same program; on a GPU a
            way may cost a quarter of what it is expected to save.
        fallback: ``"warn"`` leaves a graph or region that cannot run on ONNX Runtime in torch, with one warning that
            names the reason; ``"raise"`` makes it an error.
        dynamic: Passed to :func:`torch.compile`: ``None`` compiles a size as dynamic once it has changed, ``True``
            from the start, ``False`` never.
        activation_memory_budget: Makes memory the aim. The training step is compiled before it first runs, by inductor
            where that can compile, and stays so; times are not compared. A loss over many classes is computed in
            pieces. Of what inductor would keep for the backward pass, at most this share is kept and the rest computed
            again, in graphs that draw no random numbers. On ONNX Runtime a share below 1 recomputes elementwise ops,
            below 0.5 everything except matrix products, convolutions, reductions and random numbers. 0 to 1; ``None``
            makes time the aim.
        audit: ``"auto"`` compares the first runs of each graph that dynamo has captured with eager; what differs goes
            on in PyTorch, with a warning. ``"off"`` does not. Recordings are always checked.
        dropout_masks: In steps that another compiler runs, ``"exact"`` draws the masks that eager would, ``"fast"``
            lets it draw other ones inside its kernels.
        cache_dir: Folder where ONNX models and placement decisions are kept between runs; ``"auto"`` is the folder in
            ``LIGHTNING_ORT_CACHE_DIR``, or ``lightning-ort`` in the user's cache folder; ``None`` keeps nothing.
        report: ``"log"`` logs the report at the end of each Trainer run, a path writes it as JSON, ``None`` does
            neither (it is always at ``trainer.strategy.report``). Both send its figures to the Trainer's loggers.
        debug: Settings for finding faults, as a mapping with fields of :class:`DebugSettings`.

    Raises:
        ValueError: If a value is not one of the allowed ones, or a path cannot be written.
        TypeError: If a value has the wrong type, or a field does not exist; the message names the closest one.
    """

    engine: EngineSetting | None = _setting(None)
    placement: Placement = _setting("measured", changes="graphs")
    start: Start | None = _setting(None, changes=None)
    compile_budget: float | None = _setting(None, changes=None)
    fallback: Fallback = _setting("warn", changes=None)
    dynamic: bool | None = _setting(None)
    activation_memory_budget: float | None = _setting(None, changes="graphs")
    audit: Audit | Literal[False] = _setting("auto", changes=None)  # False is what YAML makes of `off`
    dropout_masks: DropoutMasks = _setting("exact")
    cache_dir: str | None = _setting("auto", changes=None)
    report: str | None = _setting(None, changes=None)
    debug: DebugSettings = field(default_factory=DebugSettings)

    def __post_init__(self) -> None:
        owner = "ORTConfig"
        if self.audit is False:
            object.__setattr__(self, "audit", "off")
        if self.engine in ("off", False):  # False is what YAML makes of `off`
            raise ValueError(f"ORTConfig(engine={self.engine!r}): engine='torch' compiles nothing; write that.")
        _check_choices(self)
        if self.engine in ("auto", "recorded") and self.placement == "always":
            given = f"engine={self.engine!r}"
            raise ValueError(f"ORTConfig({given}, placement='always'): {given} needs placement='measured'.")
        if self.dropout_masks == "fast" and (self.engine in ("ort", "recorded", "torch") or self.placement == "always"):
            raise ValueError(
                "ORTConfig(dropout_masks='fast') is for steps that another compiler runs: it needs engine='auto' or"
                " None, and placement='measured'."
            )
        if self.compile_budget is not None:
            check_share("compile_budget", self.compile_budget, owner)
        if self.activation_memory_budget is not None:
            check_share("activation_memory_budget", self.activation_memory_budget, owner, may_be_0=True)
            if self.engine in ("recorded", "torch"):
                given = passed("activation_memory_budget", self.activation_memory_budget, owner)
                raise ValueError(f"{given}: engine={self.engine!r} compiles nothing; leave one of them out.")
        for name, word in (("cache_dir", "auto"), ("report", "log")):
            value = getattr(self, name)
            if value is None or (isinstance(value, str) and value == word):
                continue
            path = os.path.expanduser(check_path(name, value, owner, f"a path or None, or {word!r}"))
            object.__setattr__(self, name, path)
            check_writable(name, path, name != "report", owner)
        if isinstance(self.debug, Mapping):
            debug = check_mapping("debug", self.debug, "a mapping with fields of DebugSettings", owner)
            object.__setattr__(self, "debug", DebugSettings(**debug))
        check_type("debug", self.debug, DebugSettings, "a mapping with fields of DebugSettings", owner)

    def key(self, found: Found, **resolved: Any) -> tuple[str, ...]:
        """Return a text for each setting on which what runs find depends; runs with equal ones share it.

        ``resolved`` are values that a run has found for settings that leave the choice to it.
        """
        order = get_args(Found)
        return tuple(
            f"{each.name}={resolved.get(each.name, getattr(settings, each.name))!r}"
            for settings in (self, self.debug)
            for each in dataclasses.fields(settings)
            if (changes := each.metadata.get("changes")) and order.index(changes) <= order.index(found)
        )

    @classmethod
    def parse(cls, value: Union["ORTConfig", Mapping[str, Any], None]) -> "ORTConfig":
        """Return a config for what a user passed.

        Args:
            value: A config, a mapping with its fields (as from YAML), or ``None`` for the defaults.

        Raises:
            ValueError: If the mapping has a key that is not a field; the message names the closest field.
            TypeError: If ``value`` is something else.
        """
        if value is None:
            return cls()
        if isinstance(value, cls):
            return value
        if not isinstance(value, Mapping):
            raise TypeError(f"config={value!r}: pass an ORTConfig, a mapping with its fields, or None.")
        fields = [each.name for each in dataclasses.fields(cls)]
        for key in value:
            if key not in fields:
                raise ValueError(f"ORTConfig has no field {key!r}: {_hint(key, value[key], fields)}")
        return cls(**value)


_DEBUG = "DebugSettings"


def _check_choices(settings: Any) -> None:
    """Check the fields that only a few values are allowed for."""
    kind: Any = type(settings)
    for name, choices in _choices_by_name(kind).items():
        check_choice(name, getattr(settings, name), choices, kind.__name__)


@functools.cache
def _choices_by_name(kind: type) -> dict[str, tuple[Any, ...]]:
    return {name: found for name, annotation in get_type_hints(kind).items() if (found := _choices(annotation))}


def _choices(annotation: Any) -> tuple[Any, ...]:
    """Return the values that an annotation allows; nothing if there are more than can be listed."""
    if get_origin(annotation) is Literal:
        return get_args(annotation)
    if annotation is bool:
        return (True, False)
    if annotation is type(None):
        return (None,)
    parts = [_choices(each) for each in get_args(annotation)] if get_origin(annotation) in (Union, UnionType) else []
    return tuple(value for part in parts for value in part) if all(parts) else ()


def _hint(name: object, value: Any, fields: Collection[str]) -> str:
    """Return what to do instead of passing a field that does not exist."""
    if name == "capture" and value in ("off", False):
        return "pass engine='torch', which compiles nothing."
    if name in [each.name for each in dataclasses.fields(DebugSettings)]:
        return f"it is one of the settings for finding faults, debug={{{name!r}: {value!r}}}."
    return closest(name, fields, "fields")


def _check_op(name: str) -> None:
    from lightning_ort.compat.torch import aten_op_names  # loads torch

    if name in (names := aten_op_names()):
        return
    close = difflib.get_close_matches(f"aten.{name.removeprefix('aten').lstrip('.:')}", names, n=1)
    hint = f"Did you mean {close[0]!r}? " if close else ""
    raise ValueError(
        f"{passed('torch_ops', (name,), _DEBUG)}: ATen has no {name!r}. {hint}Pass names such as"
        " 'aten.gelu.default' or, for all overloads, 'aten.gelu'."
    )


def _check_providers(providers: tuple[str, ...]) -> None:
    if not providers:
        raise ValueError(f"{_DEBUG}(providers=()): pass at least one execution provider, or None.")
    for provider in providers:
        # whether the installed onnxruntime has it is checked when onnxruntime is loaded
        if not provider.endswith("ExecutionProvider") or providers.count(provider) > 1:
            raise ValueError(
                f"{passed('providers', providers, _DEBUG)}: pass the names of execution providers, each once, such"
                " as 'CUDAExecutionProvider' and 'CPUExecutionProvider'."
            )


names_its_arguments(ORTConfig, "field", _hint)
names_its_arguments(DebugSettings, "field", _hint)
