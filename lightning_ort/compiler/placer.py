"""Time a region on ONNX Runtime and in torch, and decide who runs it.

Both run on tensors of the region's real shapes, dtypes and strides, in interleaved rounds; medians are compared. Under
``torch.use_deterministic_algorithms`` (``Trainer(deterministic=True)``) nothing is timed: a fixed rule on the size of
the region's matrix products decides.
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry

from lightning_ort.compiler.layouts import int_hint
from lightning_ort.compiler.regions import Region, Timing, Variant

# below this many floating-point operations in matrix products one thread is enough: waking a second costs 20-40 us
ONE_THREAD_FLOPS = 2e6
# above it one thread need not be tried
ALL_THREADS_FLOPS = 2e8
# above this many for each thread torch's threads had better rest meanwhile, which takes about 0.1 ms for each
REST_FLOPS = 1e7
TORCH = "torch"  # among the names of what is timed
_SECONDS = 0.25
_MIN_ROUNDS = 3  # one round alone would let a single interruption of the process decide
_MAX_ROUNDS = 15
_Name = TypeVar("_Name")


def thread_candidates(region: Region, intra_op_threads: int | None) -> list[int]:
    """Numbers of intra-op threads worth trying; one of them where there is nothing to try."""
    available = torch.get_num_threads()
    if intra_op_threads is not None:
        return [intra_op_threads]
    if available == 1:
        return [1]
    flops = count_flops(region)
    if torch.are_deterministic_algorithms_enabled():
        return [1 if flops < ONE_THREAD_FLOPS else available]
    if flops > ALL_THREADS_FLOPS:
        return [available]
    return [1, available]


def count_flops(region: Region) -> float:
    """Floating-point operations of the region's matrix products and convolutions, for the sizes seen at tracing."""
    total = 0.0
    for node in region.nodes:
        packet = getattr(node.target, "overloadpacket", None)
        if packet in flop_registry:
            args = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
            total += int_hint(flop_registry[packet](*args[0], **args[1], out_val=node.meta["val"]))
    return total


def worth_resting(region: Region, threads: int) -> bool:
    """Whether torch's threads should end before the region runs with several of its own."""
    return threads > 1 and count_flops(region) >= REST_FLOPS * threads


def loses_by_rule(region: Region) -> bool:
    """The static rule: a region without a matrix product or convolution is left to torch."""
    return count_flops(region) == 0


def samples(region: Region) -> list[Any]:
    """Inputs to time a region with: ones like it will get, drawn without touching torch's generators."""
    generator = torch.Generator().manual_seed(0)
    return [_sample(node.meta["val"], generator) for node in region.inputs]


def _sample(val: Any, generator: torch.Generator) -> Any:
    if not isinstance(val, torch.Tensor):
        return float(val.node.hint) if isinstance(val, torch.SymFloat) else int_hint(val)
    sizes = [int_hint(size) for size in val.shape]
    strides = [int_hint(stride) for stride in val.stride()]
    extent = 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True)) if 0 not in sizes else 0
    # zeros are valid indices and labels; floats away from zero keep logarithms and roots finite
    if val.dtype.is_floating_point:
        flat = torch.rand(extent, generator=generator).add_(0.1).to(val.dtype)
    else:
        flat = torch.zeros(extent, dtype=val.dtype)
    return flat.to(val.device).as_strided(sizes, strides)


def measure(
    sessions: Mapping[Variant, Callable[..., Any]], torch_forward: Callable[..., Any] | None, args: Sequence[Any]
) -> Timing:
    """Time the candidates of a region against each other.

    Args:
        sessions: How it is made -> callable.
        torch_forward: The region in torch; ``None`` to compare the sessions alone.
        args: What to call them with.

    Returns:
        The fastest session's time and how it is made, and torch's time.

    """
    if torch_forward is None and len(sessions) == 1:
        return Timing({}, next(iter(sessions)))
    candidates: dict[Any, Callable[..., Any]] = dict(sessions)
    if torch_forward is not None:
        candidates[TORCH] = torch_forward
    medians = race(candidates, args)
    fastest = min(sessions, key=medians.__getitem__)
    ms = {"ort": medians[fastest]}
    if TORCH in medians:
        ms[TORCH] = medians[TORCH]
    return Timing(ms, fastest)


def race(
    candidates: Mapping[_Name, Callable[..., Any]], args: Sequence[Any], before: Callable[[], None] | None = None
) -> dict[_Name, float]:
    """Time functions in turns.

    Args:
        candidates: By name.
        args: What to call them with.
        before: Called before each of them, outside its time.

    Returns:
        The median time of each in ms.

    """
    times: dict[_Name, list[float]] = {name: [] for name in candidates}
    for call in candidates.values():  # first calls allocate
        call(*args)
    start = time.perf_counter()
    for rounds in range(_MAX_ROUNDS):
        if rounds >= _MIN_ROUNDS and time.perf_counter() - start > _SECONDS:
            break
        for name, call in candidates.items():
            if before is not None:
                before()
            times[name].append(_timed(call, args))
    return {name: statistics.median(values) * 1e3 for name, values in times.items()}


def _timed(call: Callable[..., Any], args: Sequence[Any]) -> float:
    on_cuda = any(isinstance(arg, torch.Tensor) and arg.is_cuda for arg in args)
    if on_cuda:
        torch.cuda.synchronize()
    start = time.perf_counter()
    call(*args)
    if on_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - start
