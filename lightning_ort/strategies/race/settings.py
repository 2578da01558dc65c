"""What a config says of the races of steps: which engines run, whether steps wait, what compiling may take."""

import torch

from lightning_ort.compiler import engines
from lightning_ort.config import DEFAULT_BUDGET, DEFAULT_START, EngineSetting, ORTConfig
from lightning_ort.strategies.race.race import NO_LIMIT


def is_amortized(config: ORTConfig) -> bool:
    """Return whether steps wait until compiling pays."""
    wants_graphs = (
        config.placement == "always" or config.debug.check_against_eager or config.debug.save_onnx_dir is not None
    )
    return (config.start or ("now" if wants_graphs else DEFAULT_START)) == "amortized"


def setting_for(config: ORTConfig, device: torch.device) -> EngineSetting:
    """Return the engine that a config asks for.

    By default it is ``"auto"`` if timing decides: on a GPU; on a CPU where steps wait and another engine can compile.
    """
    if config.engine is not None:
        return config.engine
    if config.placement != "measured":
        return "ort"
    waits = is_amortized(config) or config.activation_memory_budget is not None
    tries_others = device.type == "cuda" or (waits and engines.others_on_cpu())
    return "auto" if tries_others else "ort"


def share_for(config: ORTConfig, device: torch.device) -> float:
    """Return the share of a run's steps that compiling may take; on a GPU, by default, the stake alone decides."""
    if not is_amortized(config):
        return NO_LIMIT
    if config.compile_budget is not None:
        return config.compile_budget
    return 1.0 if device.type == "cuda" else DEFAULT_BUDGET
