"""Arguments as ONNX takes them: plain sizes, lists of dimensions, permutations."""

from collections.abc import Sequence
from typing import Any

from torch import fx

from lightning_ort.compiler.executors.ort.conversion.metadata import rank_of, shape_of, static
from lightning_ort.compiler.executors.ort.conversion.registry import Unsupported
from lightning_ort.compiler.reason import ReasonType

Dims = int | Sequence[int] | None


def static_sizes(sizes: Sequence[Any], what: str) -> list[int]:
    """The sizes as plain integers; refused if one is symbolic."""
    if not static(sizes):
        raise Unsupported(f"{what} of symbolic size", ReasonType.DYNAMIC_SHAPE)
    return [int(size) for size in sizes]


def axis_of(dim: int, rank: int) -> int:
    """A dimension as a number from 0 on, or an ``IndexError``."""
    if not -rank <= dim < rank:
        raise IndexError(f"dimension {dim} of a tensor with {rank}")
    return dim % rank


def static_axis(x: fx.Node, dim: int, what: str) -> tuple[int, int]:
    """A dimension as a number from 0 on, and its size; refused if that is symbolic."""
    axis = axis_of(dim, rank_of(x))
    return axis, static_sizes([shape_of(x)[axis]], what)[0]


def refuse_scalars(name: str, *nodes: fx.Node) -> None:
    """Refuse tensors without dimensions."""
    if any(rank_of(node) == 0 for node in nodes):
        raise Unsupported(f"{name} on a scalar")


def as_list(dims: Dims) -> list[int]:
    """Dimensions as a list; an empty one stands for all, as in torch."""
    return [dims] if isinstance(dims, int) else list(dims or [])


def per_dimension(values: Any, rank: int, what: str) -> list[int]:
    """One number per spatial dimension; in torch a single one stands for all."""
    numbers = static_sizes([values] if isinstance(values, int) else values, what)
    return numbers * rank if len(numbers) == 1 else numbers


def front(dims: Sequence[int], rank: int) -> list[int]:
    """The permutation that brings ``dims`` to the front."""
    return [*dims, *(dim for dim in range(rank) if dim not in dims)]


def inverse(perm: Sequence[int]) -> list[int]:
    """The permutation that undoes another."""
    return [list(perm).index(dim) for dim in range(len(perm))]
