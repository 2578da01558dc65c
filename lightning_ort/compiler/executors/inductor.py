"""Inductor as an executor of whole graphs: under ``engine="auto"`` it is timed against the others on whole steps."""

import functools
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch

from lightning_ort.compat.torch import inductor_cache_folder, tree_map
from lightning_ort.config import DropoutMasks

NAME: Final = "inductor"
GRAPHS: Final = "inductor-graphs"  # with its kernels recorded as CUDA graphs: torch.compile's mode "reduce-overhead"
ENGINES: Final = (NAME, GRAPHS)


def cpp_compiler_name() -> str:
    """Return the name of the one C++ compiler that inductor looks for on a CPU."""
    return os.environ.get("CXX", {"darwin": "clang++", "win32": "cl"}.get(sys.platform, "g++"))


def cpp_compiler() -> str | None:
    """Return where that compiler is, or ``None`` if there is none."""
    return shutil.which(cpp_compiler_name())


def has_cache() -> bool:
    """Return whether torch has kept graphs that inductor has compiled; its folder is a temporary one by default."""
    return Path(inductor_cache_folder(), "fxgraph").is_dir()


def compile_arguments(engine: str, masks: DropoutMasks) -> dict[str, Any]:
    """Return the arguments of ``torch.compile``; with ``"exact"`` masks random numbers are the same as in eager."""
    options: dict[str, Any] = {"fallback_random": masks == "exact"}
    if engine == GRAPHS:
        options["triton.cudagraphs"] = True  # what the mode sets; torch.compile takes options or a mode, not both
    return {"backend": NAME, "options": options}


def with_own_results(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function whose results outlive its next call; a recording writes to the same memory in each."""

    @functools.wraps(compiled)
    def run(*args: Any, **kwargs: Any) -> Any:
        torch.compiler.cudagraph_mark_step_begin()
        return tree_map(_copied, compiled(*args, **kwargs))

    return run


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value
