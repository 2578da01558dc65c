"""What a user can set: one frozen dataclass, checked when it is made."""

import dataclasses
import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Union, get_args

Engine = Literal["ort", "auto"]
Placement = Literal["measured", "always"]
Kernels = Literal["auto", "training", "standard"]
Fallback = Literal["warn", "raise"]
Recompute = Literal[0, 1, 2]
Capture = Literal["auto", "step", "modules", "off"]
MAX_THREADS = 1024  # of a session; each is made at once


@dataclass(frozen=True, kw_only=True)
class ORTConfig:
    """Settings of the ONNX Runtime compiler.

    Args:
        engine: ``"ort"`` chooses between ONNX Runtime and torch; ``"auto"`` tries each step of a LightningModule
            compiled by inductor too, which needs a C++ compiler, and keeps the fastest of the three.
        placement: ``"measured"`` times every region against torch on the real shapes, and each step of a
            LightningModule captured and as it is, and keeps what is faster; ``"always"`` runs on ONNX Runtime all that
            it supports.
        kernels: ``"training"`` uses the gradient kernels of ``onnxruntime-training``, ``"standard"`` only what every
            onnxruntime has, ``"auto"`` whichever the installed build offers.
        fallback: ``"warn"`` leaves a graph or region that cannot run on ONNX Runtime in torch, with one warning that
            names the reason; ``"raise"`` makes it an error.
        torch_ops: ATen ops to keep in torch, as ``"aten.gelu.default"`` or, for all overloads, ``"aten.gelu"``.
        min_region_nodes: Regions with fewer compute nodes than this stay in torch.
        dynamic: Passed to :func:`torch.compile`: ``None`` compiles a size as dynamic once it has changed, ``True``
            from the start, ``False`` never.
        recompute: What the backward pass computes again instead of keeping it in memory: ``0`` views alone, ``1`` ops
            on single elements too, ``2`` all but matrix products, convolutions, reductions and random numbers.
        capture: What is compiled: ``"step"`` the step methods, ``"modules"`` the child modules, ``"auto"`` steps first
            and modules where a step keeps recompiling, ``"off"`` nothing.
        providers: ONNX Runtime execution providers in order of preference; ``None`` picks by the device of the
            tensors (CPU or CUDA).
        intra_op_threads: Threads of each session; ``None`` measures one thread against torch's number.
        check_against_eager: Compare the first run of every region with torch, and treat a difference beyond tolerance
            as a failure of that region.
        cuda_graphs: On a GPU, time each region of fixed sizes recorded as a CUDA graph too, and keep that where it is
            faster. It copies the region's inputs and outputs and has memory of its own for them.
        cache_dir: Folder where ONNX models and placement decisions are kept between runs; ``"auto"`` is the one that
            ``LIGHTNING_ORT_CACHE_DIR`` names, or ``lightning-ort`` in the user's cache folder; ``None`` keeps nothing.
        save_onnx_dir: Folder to write every region's ONNX model to, as ``<graph>.<region>.onnx``.
        report: ``"log"`` logs the report at the end of each Trainer run, a path writes it as JSON, ``None`` does
            neither (it is always at ``trainer.strategy.report``). Both give its figures to the Trainer's loggers.

    Raises:
        ValueError: If a value is not one of the allowed ones.
        TypeError: If a value has the wrong type.

    """

    engine: Engine = "ort"
    placement: Placement = "measured"
    kernels: Kernels = "auto"
    fallback: Fallback = "warn"
    torch_ops: tuple[str, ...] = ()
    min_region_nodes: int = 2
    dynamic: bool | None = None
    recompute: Recompute = 0
    capture: Capture = "auto"
    providers: tuple[str, ...] | None = None
    intra_op_threads: int | None = None
    check_against_eager: bool = False
    cuda_graphs: bool = False
    cache_dir: str | None = "auto"
    save_onnx_dir: str | None = None
    report: str | None = None

    def __post_init__(self) -> None:
        for name, choices in (
            ("engine", get_args(Engine)),
            ("placement", get_args(Placement)),
            ("kernels", get_args(Kernels)),
            ("fallback", get_args(Fallback)),
            ("recompute", get_args(Recompute)),
            ("capture", get_args(Capture)),
            ("dynamic", (None, True, False)),
            ("check_against_eager", (True, False)),
            ("cuda_graphs", (True, False)),
        ):
            value = getattr(self, name)
            # `1 == True`: identity keeps integers out of the booleans
            if not any(value is choice or (isinstance(choice, str) and value == choice) for choice in choices):
                raise ValueError(f"ORTConfig({name}={value!r}): choose one of {', '.join(map(repr, choices))}.")
        if self.engine == "auto" and self.placement == "always":
            raise ValueError("ORTConfig(engine='auto', placement='always'): engine='auto' needs placement='measured'.")
        for name in ("torch_ops", "providers"):
            value = getattr(self, name)
            if isinstance(value, list):  # what YAML and JSON give
                object.__setattr__(self, name, value := tuple(value))
            if value is not None and not (isinstance(value, tuple) and all(isinstance(v, str) for v in value)):
                raise TypeError(f"ORTConfig({name}={value!r}): pass a list of strings.")
        if self.torch_ops is None:
            raise TypeError("ORTConfig(torch_ops=None): pass a list of ATen op names, or leave it out.")
        for name, lowest in (("min_region_nodes", 1), ("intra_op_threads", 1)):
            value = getattr(self, name)
            if value is None and name == "intra_op_threads":
                continue
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"ORTConfig({name}={value!r}): pass an integer.")
            if value < lowest:
                raise ValueError(f"ORTConfig({name}={value!r}): must be at least {lowest}.")
        for name in ("cache_dir", "save_onnx_dir", "report"):
            value = getattr(self, name)
            if value is not None:
                if not isinstance(value, str) and not hasattr(value, "__fspath__"):
                    raise TypeError(f"ORTConfig({name}={value!r}): pass a path or None.")
                object.__setattr__(self, name, str(value))

    @classmethod
    def parse(cls, value: Union["ORTConfig", Mapping[str, Any], None]) -> "ORTConfig":
        """Make a config of what a user passed.

        Args:
            value: A config, a mapping with the same keys (as YAML gives it), or ``None`` for the defaults.

        Raises:
            ValueError: If the mapping has a key that is not a field; the message names the closest field.
            TypeError: If ``value`` is none of the three.

        """
        if value is None:
            return cls()
        if isinstance(value, cls):
            return value
        if not isinstance(value, Mapping):
            raise TypeError(f"config={value!r}: pass an ORTConfig, a mapping with its fields, or None.")
        fields = [field.name for field in dataclasses.fields(cls)]
        for key in value:
            if key not in fields:
                close = difflib.get_close_matches(str(key), fields, n=1)
                hint = f"did you mean {close[0]!r}?" if close else f"the fields are {', '.join(fields)}."
                raise ValueError(f"ORTConfig has no field {key!r}: {hint}")
        return cls(**value)
