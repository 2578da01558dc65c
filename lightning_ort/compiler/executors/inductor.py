"""Inductor as an executor of whole graphs: under ``engine="auto"`` it is timed against the others on whole steps."""

import os
import shutil
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from torch import fx, nn

from lightning_ort.compat.torch import copies_of, inductor_backend, inductor_cache_folder, storage_of
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
    if engine == GRAPHS:  # what the mode sets; torch.compile takes options or a mode, not both
        return {"backend": RecordingBackend({**options, "triton.cudagraphs": True})}
    return {"backend": NAME, "options": options}


class RecordingBackend:
    """Inductor with its kernels recorded as CUDA graphs, and results that are not overwritten.

    A recording has the results of each run at the same addresses, and torch raises no error when one of an earlier run
    is read (2.13). So whatever leaves a graph is copied: what a step returns, and what it keeps, as in a list.
    """

    def __init__(self, options: dict[str, Any]) -> None:
        self.options = options

    def __call__(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """Compile a graph that dynamo has captured."""
        copied = _not_of_inputs(gm)
        compiled = inductor_backend(self.options)(gm, inputs)

        def run(*args: Any) -> list[Any]:
            results = list(compiled(*args))
            for index in copied:
                if isinstance(results[index], torch.Tensor):
                    results[index] = results[index].clone()
            return results

        return run


def _not_of_inputs(gm: fx.GraphModule) -> list[int]:
    """Return which results of a graph have memory of their own, and are no views of its inputs."""
    inputs = {storage_of(node) for node in gm.graph.find_nodes(op="placeholder")}
    results: Any = gm.graph.output_node().args[0]
    return [index for index, node in enumerate(results) if (found := storage_of(node)) is None or found not in inputs]


def begin_recorded_step() -> None:
    """Let recordings overwrite what their last runs have left; once a step, which may consist of several."""
    torch.compiler.cudagraph_mark_step_begin()


def own_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Copy the gradients of parameters that had none before a backward pass: they are in a recording's memory."""
    new = [(parameter, parameter.grad) for parameter in parameters if parameter.grad is not None]
    if new:
        with torch.no_grad():
            copies = copies_of([gradient for _, gradient in new])
        for (parameter, _), copy in zip(new, copies, strict=True):
            parameter.grad = copy
