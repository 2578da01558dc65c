"""Call a function on sizes that change, as those of the last batch of an epoch do, and compare each call with eager."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lightning_ort.compiler.backend import ORTBackend
from lightning_ort.compiler.report import CompileReport
from tests.conversion.harness import as_tuple, assert_alike, copies, run
from tests.ort_settings import config_of


@dataclass(frozen=True)
class Sizes:
    """Calls of one function, whose inputs differ in one size.

    Args:
        first: The size at first.
        inputs: Of each call, the first one's first.
    """

    first: int
    inputs: list[list[Any]]


def other_sizes(size: int, few: bool = True) -> list[int]:
    """Two other sizes, for which one graph is compiled, and, if ``few``, one and none, for which others are."""
    others = [size + 3, size - 1 if size > 2 else size + 1]
    return [*others, *(number for number in (1, 0) if number not in (size, *others))] if few else others


def sizes_of(inputs: Sequence[Any]) -> list[int]:
    """The sizes of all dimensions without repetition, those of first dimensions first."""
    shapes = [x.shape for x in inputs if isinstance(x, torch.Tensor)]
    first = [shape[0] for shape in shapes if shape]
    return [size for size in dict.fromkeys([*first, *(size for shape in shapes for size in shape)]) if size > 1]


def resized(inputs: Sequence[Any], size: int, new: int) -> list[Any]:
    """The inputs with ``new`` entries in each dimension that has ``size``, and strides in the same order."""
    fresh = {id(x): _resized(x, size, new) for x in inputs if isinstance(x, torch.Tensor) and size in x.shape}
    return [fresh.get(id(x), x) for x in inputs]


def _resized(x: torch.Tensor, size: int, new: int) -> torch.Tensor:
    order = sorted(range(x.dim()), key=lambda dim: (-x.stride(dim), dim))
    value = x.detach().permute(order)
    for dim in range(x.dim()):
        if value.shape[dim] == size:
            places = torch.arange(new, device=x.device)
            value = value.index_select(dim, places % size)
            if value.is_floating_point():  # what is repeated is another number
                turns = (1 - (places // size) / 16).to(value.dtype)
                value = value * turns.view(-1, *[1] * (value.dim() - dim - 1))
    value = value.contiguous().permute([order.index(dim) for dim in range(x.dim())])
    return value.requires_grad_(x.requires_grad)


def changes(fn: Callable[..., Any], inputs: Sequence[Any], few: bool, with_empty: bool = True) -> Iterator[Sizes]:
    """Calls for each size of the inputs that a function takes in other values too; ``few`` is for all that it takes.

    Args:
        fn: The function.
        inputs: Of the first call.
        few: Whether to call it with one and none as well.
        with_empty: Whether eager takes none; its kernels may end the process.
    """
    for size in sizes_of(inputs):
        calls = [resized(inputs, size, new) for new in other_sizes(size, few) if new or with_empty]
        taken = [given for given in calls if _eager_runs(fn, given)]
        if taken:
            yield Sizes(size, [list(inputs), *taken])


def _eager_runs(fn: Callable[..., Any], inputs: Sequence[Any]) -> bool:
    try:
        run(as_tuple(fn), copies(inputs))
        run(as_tuple(fn), copies(inputs, torch.float64))
    except Exception:  # whatever it says, such as for a size that is a number in the function
        return False
    return True


def compile_for(fn: Callable[..., Any], first: int, **config: Any) -> tuple[Callable[..., Any], ORTBackend]:
    """Compile a function that returns a tuple as dynamo does once the size that was ``first`` has changed."""
    plain = {"placement": "always", "cache_dir": None, "debug": {"min_region_nodes": 1, "intra_op_threads": 1}}
    backend = ORTBackend(config_of(**{**plain, **config}))
    compiled = torch.compile(fn, backend=backend)

    def call(*given: Any) -> Any:
        for x in given:
            for dim in range(x.dim() if isinstance(x, torch.Tensor) else 0):
                if x.shape[dim] == first:
                    torch._dynamo.maybe_mark_dynamic(x, dim)
        return compiled(*given)

    return call, backend


def check_sizes(
    fn: Callable[..., Any], sizes: Sizes, *, tolerance: tuple[float, float], **config: Any
) -> CompileReport:
    """Assert that each of the calls gives what eager gives, and that none fails."""
    eager = as_tuple(fn)
    compiled, backend = compile_for(eager, sizes.first, **{"fallback": "raise", **config})
    for inputs in sizes.inputs:
        expected, same = run(eager, copies(inputs, torch.float64)), run(eager, copies(inputs))
        assert_alike(run(compiled, copies(inputs)), expected, same, tolerance)
    return backend.report
