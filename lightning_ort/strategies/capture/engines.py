"""Which engines a step is tried on, and in which order: :func:`engines_for`, :func:`stages_for`.

On a CPU ONNX Runtime comes first. Inductor takes several times as long to compile: where steps wait until compiling
pays, it waits longer, and is tried against what has won by then.

On a GPU ONNX Runtime's standard kernels fuse few elementwise operations and no gradients, so a training step is several
times as many kernels as in eager. There eager and inductor are tried first; ONNX Runtime has its turn in steps without
a backward pass, and in others where it may still win.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from lightning_ort.compiler.executors.inductor import GRAPHS, NAME, cpp_compiler
from lightning_ort.config import Engine as Setting
from lightning_ort.config import ORTConfig
from lightning_ort.strategies.capture.autotuner import Engine
from lightning_ort.strategies.capture.budget import prior_fraction
from lightning_ort.strategies.capture.gate import Stage, is_amortized
from lightning_ort.strategies.capture.outlook import TRAINING


@dataclass(frozen=True)
class Candidates:
    """Engines in their order; ``last`` is tried after them, if ``worth_trying`` says so of their times in ms."""

    engines: Sequence[Engine]
    last: Engine | None = None
    worth_trying: Callable[[Mapping[str, float]], bool] = lambda ms: True


def setting_for(config: ORTConfig, device: torch.device) -> Setting:
    """Return the engine that a config asks for.

    By default it is ``"auto"`` if timing decides: on a GPU; on a CPU where steps wait and inductor can compile.
    """
    if config.engine is not None:
        return config.engine
    if config.placement != "measured":
        return "ort"
    tries_inductor = device.type == "cuda" or (is_amortized(config) and cpp_compiler() is not None)
    return "auto" if tries_inductor else "ort"


def stages_for(config: ORTConfig, device: torch.device) -> tuple[Stage, ...]:
    """Return what waits to be tried, each until it is expected to pay: an engine, or ``"all"`` of them together."""
    if device.type == "cuda":
        return ("all",)
    return ("ort", NAME) if setting_for(config, device) == "auto" else ("ort",)


def engines_for(config: ORTConfig, device: torch.device, step: str, may_record: bool) -> Candidates:
    """Return the candidates for a step; ``may_record`` tells whether what it leaves behind is gone by its next call."""
    if setting_for(config, device) == "ort":
        return Candidates(["ort", "torch"])
    if device.type != "cuda":
        return Candidates(["ort", "torch", NAME])
    engines: list[Engine] = ["torch", NAME]
    if may_record and config.dynamic is not True:  # a recording is of fixed sizes
        engines.append(GRAPHS)
    if step != TRAINING:
        return Candidates([*engines, "ort"])
    return Candidates(engines, "ort", ort_may_win)


def ort_may_win(ms: Mapping[str, float]) -> bool:
    """Return whether ONNX Runtime's projected time is the shortest: eager's, less what capture is expected to save."""
    return ms["torch"] * (1 - prior_fraction(ms["torch"] / 1000)) < min(ms.values())
