"""What of inductor is not public."""

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from packaging.version import Version
from torch import fx


def inductor_cache_folder() -> str:
    """Where inductor keeps what it has compiled; torch's own function creates the folder (torch 2.13)."""
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir  # torch does not load it with itself

    return os.environ.get("TORCHINDUCTOR_CACHE_DIR") or default_cache_dir()


def inductor_repairs(exact_masks: bool) -> dict[str, Any]:
    """The options without which inductor computes something wrong, of those that this version has (torch 2.13 to 2.15).

    ``exact_masks``: whether random numbers are to be those of eager.
    """
    from torch._inductor import config  # not loaded with torch: 0.2 s

    known, version = config.get_config_copy(), Version(torch.__version__)
    wanted: dict[str, Any] = {}
    if version < Version("2.15.dev0"):  # parts of a gradient that layer norms share are not written, pytorch #193061
        wanted["triton.mix_order_reduction"] = False
    if not exact_masks:  # else four elements in a row may get the same mask, pytorch #198333
        wanted["align_random_eager"] = True
    return {name: value for name, value in wanted.items() if name in known}


def inductor_backend(
    options: Mapping[str, Any], before_each: Callable[[], None] = lambda: None
) -> Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]]:
    """Return what compiles graphs for ``torch.compile(backend="inductor", options=options)`` (torch 2.13).

    ``before_each`` is called before the graph of each pass is compiled, which takes nearly all of the time.
    """
    config = torch._TorchCompileInductorWrapper(None, dict(options), None).config

    def compile(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        from torch._inductor import compile_fx

        def inner_compile(*args: Any, **kwargs: Any) -> Any:
            before_each()
            return compile_fx.compile_fx_inner(*args, **kwargs)

        made: Callable[..., Any] = compile_fx.compile_fx(gm, inputs, inner_compile=inner_compile, config_patches=config)
        return made

    return compile


def joint_pass(
    edits: Sequence[Callable[[fx.GraphModule], None]],
    budget: float | None = None,
    may_recompute: Callable[[fx.GraphModule], bool] = lambda joint: False,
) -> Any:
    """What edits joint graphs first, as the option ``joint_custom_pre_pass`` (torch 2.13).

    ``budget``: what the partitioner, which comes next, may keep of the activations of graphs that ``may_recompute``
    takes; whoever compiles is within :func:`keeping_budget`.
    """
    from torch._functorch import config
    from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files  # not loaded with torch

    class JointPass(CustomGraphPass):
        def __call__(self, graph: fx.Graph) -> None:
            joint = graph.owning_module
            assert joint is not None
            for edit in edits:
                edit(joint)
            if budget is not None and may_recompute(joint):
                config.activation_memory_budget = budget

        def uuid(self) -> Any:  # for the caches of inductor and AOTAutograd
            return get_hash_for_files(tuple(map(inspect.getfile, (*edits, may_recompute))), str(budget))

    return JointPass()


def keeping_budget() -> AbstractContextManager[None]:
    """After the block, the partitioner's budget is as it was (torch 2.13)."""
    from torch._functorch import config

    kept: AbstractContextManager[None] = config.patch(activation_memory_budget=config.activation_memory_budget)
    return kept


def chunking() -> dict[str, Any]:
    """The option that computes a loss over many classes in pieces, where this version has it (torch 2.13)."""
    from torch._inductor import config  # not loaded with torch: 0.2 s

    return {"auto_chunker.enable": True} if "auto_chunker.enable" in config.get_config_copy() else {}


def has_triton() -> bool:
    """Whether inductor can compile for a GPU here (torch 2.13)."""
    from torch.utils._triton import has_triton

    return bool(has_triton())
