"""Time callables against each other on inputs that resemble the real ones, in interleaved rounds; medians count."""

import re
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from time import perf_counter
from typing import Any, TypeVar

import torch
from torch import fx

from lightning_ort._busy import Stopwatch
from lightning_ort.compat.torch_graphs import OpOverload, arguments_of
from lightning_ort.compiler.regions.region import TORCH, Region, Timing
from lightning_ort.compiler.regions.reproducer import spec_of
from lightning_ort.compiler.regions.reproducer_script import extent, make_input

_LARGE = 1 << 18  # elements of an input whose memory is shared
_SHARED_ELEMENTS = 1 << 24  # more than the processor's caches hold: no input may be in one because another was read
_SECONDS = 0.25
_MIN_ROUNDS = 3  # after a single round, one interruption of the process would decide
_MAX_ROUNDS = 15
CLEAR_ROUNDS = 2  # if one is far ahead in each
_CLEAR = 1.5  # if each time of a candidate is so much longer than each of the fastest, it is not timed any more
_OUT_OF_BOUNDS = re.compile("out of data bounds|invalid index|out of bounds")  # onnxruntime's words (1.19)
_Name = TypeVar("_Name")
_Call = Callable[..., Any]


def samples(region: Region) -> list[Any]:
    """Make inputs to time a region with, of its real shapes, dtypes and strides, without using torch's generators.

    Large ones share memory: a second copy of a large module's parameters may not fit beside the first.
    """
    generator = torch.Generator().manual_seed(0)
    specs = [spec_of(node.meta["val"]) for node in region.inputs]
    large: dict[Any, list[int]] = {}
    for spec in specs:
        if _is_large(spec):
            large.setdefault(spec[2:], []).append(extent(*spec[:2]))
    shared = {}
    for (dtype, device), extents in large.items():
        elements = max(*extents, min(sum(extents), _SHARED_ELEMENTS), 1)
        shared[dtype, device] = make_input(((elements,), (1,), dtype, device), generator)
    start, made = 0, []
    for spec in specs:
        if not _is_large(spec):
            made.append(make_input(spec, generator))
            continue
        memory = shared[spec[2:]]
        start = start if start + extent(*spec[:2]) <= memory.numel() else 0
        made.append(memory.as_strided(*spec[:2], start))
        start += extent(*spec[:2])
    return made


def _is_large(spec: Any) -> bool:
    return isinstance(spec, tuple) and spec[2].is_floating_point and extent(*spec[:2]) >= _LARGE


def measure(
    executor: str,
    calls: Mapping[int, _Call],
    torch_forward: _Call | None,
    args: Sequence[Any],
    on_failure: Callable[[Any, Exception], None],
    check_budget: Callable[[], None] = lambda: None,
    before: Callable[[], None] = lambda: None,
) -> Timing:
    """Time a region with each number of threads in ``calls``, and in torch unless ``torch_forward`` is ``None``.

    Return the fastest number, and the times if there was anything to compare. ``on_failure`` is that of
    :func:`warm_up`; it has to raise for the last number. ``check_budget`` and ``before`` are those of :func:`race`.
    """
    candidates: dict[Any, _Call] = dict(calls)
    if torch_forward is not None:
        candidates[TORCH] = torch_forward
    if len(candidates) > 1:
        candidates = warm_up(candidates, args, on_failure)
    working = [threads for threads in calls if threads in candidates]
    if len(candidates) == 1:
        return Timing({}, working[0])
    medians = race(candidates, args, before, check_budget)
    fastest = min(working, key=medians.__getitem__)
    ms = {executor: medians[fastest]}
    if TORCH in medians:
        ms[TORCH] = medians[TORCH]
    return Timing(ms, fastest)


def warm_up(
    candidates: Mapping[_Name, _Call], args: Sequence[Any], on_failure: Callable[[_Name, Exception], None]
) -> dict[_Name, _Call]:
    """Call each candidate once, since first calls allocate and compile; return those for which nothing is raised."""
    working = {}
    for name, call in candidates.items():
        try:
            call(*args)
        except Exception as error:  # onnxruntime's own exceptions derive from Exception directly
            on_failure(name, error)
        else:
            working[name] = call
    return working


def is_due_to_samples(error: Exception, torch_forward: _Call, args: Sequence[Any]) -> bool:
    """Whether a run failed because of its made-up inputs: numbers that become indices may lead out of bounds."""
    if _OUT_OF_BOUNDS.search(str(error)):  # on a GPU, such an index in torch would end the process
        return True
    try:
        torch_forward(*args)
    except Exception:
        return True
    return False


def race(
    candidates: Mapping[_Name, _Call],
    args: Sequence[Any],
    before: Callable[[], None] = lambda: None,
    check_budget: Callable[[], None] = lambda: None,
) -> dict[_Name, float]:
    """Return the median time of each candidate in ms, without what other programs took.

    Outside of the times ``before`` is called before each run, and ``check_budget``, which may raise, before each round.
    """
    times: dict[_Name, list[float]] = {name: [] for name in candidates}
    if not candidates:
        return {}
    racing = list(candidates)
    start = perf_counter()
    for rounds in range(_MAX_ROUNDS):
        if rounds >= CLEAR_ROUNDS:
            racing = not_far_behind({name: times[name] for name in racing})
        if (rounds and len(racing) == 1) or (rounds >= _MIN_ROUNDS and perf_counter() - start > _SECONDS):
            break
        check_budget()
        for name in racing:
            before()
            times[name].append(_timed(candidates[name], args))
    return {name: statistics.median(values) * 1e3 for name, values in times.items()}


def not_far_behind(times: Mapping[_Name, Sequence[float]]) -> list[_Name]:
    """Return the candidates that may still be the fastest: one interruption of the process rules out none."""
    slowest_run_of_fastest = max(min(times.values(), key=statistics.median))
    return [name for name, values in times.items() if min(values) <= _CLEAR * slowest_run_of_fastest]


def _timed(call: _Call, args: Sequence[Any]) -> float:
    if (device := _gpu_of(args)) is not None:
        torch.cuda.synchronize(device)  # which need not be the current one
    watch = Stopwatch()
    results = call(*args)
    if (device := device or _gpu_of(results)) is not None:  # of numbers alone, tensors may be made there
        torch.cuda.synchronize(device)
    seconds, waited = watch.read()
    return seconds - waited


def _gpu_of(values: Any) -> torch.device | None:
    values = values if isinstance(values, (list, tuple)) else [values]
    return next((value.device for value in values if isinstance(value, torch.Tensor) and value.is_cuda), None)


_POSITIONS = ("index", "indices", "target")  # what they are called in the schemas of torch
_ASSERTING = (torch.ops.aten.binary_cross_entropy,)  # that numbers are between 0 and 1


def may_go_out_of_bounds(region: Region) -> list[fx.Node]:
    """Return the nodes of a region that read or write at positions, or whose kernels assert something of values.

    Made-up integers are 0, a valid index and a valid label, but ``labels - 1`` is none. On a CPU that raises, and the
    region is not timed. On a GPU it is an assertion of the device, after which nothing runs there in this process.
    """
    return [node for node in region.nodes if isinstance(node.target, OpOverload) and _depends_on_values(node)]


def _depends_on_values(node: fx.Node) -> bool:
    if node.target.overloadpacket in _ASSERTING:  # type: ignore[union-attr]
        return True
    arguments = arguments_of(node)
    return any(True for name in _POSITIONS for _ in _integers(arguments.get(name)))


def _integers(argument: Any) -> Iterator[fx.Node]:
    for node in argument if isinstance(argument, (list, tuple)) else [argument]:
        val = node.meta.get("val") if isinstance(node, fx.Node) else None
        if isinstance(val, torch.Tensor) and not (val.is_floating_point() or val.dtype is torch.bool):
            yield node
