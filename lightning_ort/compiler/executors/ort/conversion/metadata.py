"""What the metadata of FX nodes says about dtypes and shapes, and how ONNX names it."""

from collections.abc import Sequence
from typing import Any

import onnx_ir as ir
import torch
from torch import fx

from lightning_ort.compat.torch_graphs import expression_of
from lightning_ort.compiler.executors.ort.conversion.registry import Unsupported
from lightning_ort.compiler.executors.ort.dtypes import Arg, Scalar, dtype_of, element_type, input_dtype  # noqa: F401  (for converters)
from lightning_ort.compiler.reason import ReasonType

DTYPES: dict[torch.dtype, ir.DataType] = {
    torch.float32: ir.DataType.FLOAT,
    torch.float64: ir.DataType.DOUBLE,
    torch.float16: ir.DataType.FLOAT16,
    torch.bfloat16: ir.DataType.BFLOAT16,
    torch.int64: ir.DataType.INT64,
    torch.int32: ir.DataType.INT32,
    torch.int16: ir.DataType.INT16,
    torch.int8: ir.DataType.INT8,
    torch.uint8: ir.DataType.UINT8,
    torch.bool: ir.DataType.BOOL,
}


def work_dtype(node: fx.Node) -> torch.dtype:
    """The dtype in which torch's kernels compute with a tensor, or keep its statistics: float32 for half types."""
    dtype = dtype_of(node)
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def shape_of(node: fx.Node) -> tuple[int | torch.SymInt, ...]:
    """The sizes of a tensor node; symbolic ones are ``torch.SymInt``."""
    return tuple(node.meta["val"].shape)


def rank_of(node: fx.Node) -> int:
    """The number of dimensions of a tensor node."""
    return int(node.meta["val"].dim())


def onnx_shape(sizes: Sequence[Any]) -> ir.Shape:
    """Sizes as an ONNX shape: a symbolic one becomes a named dimension."""
    return ir.Shape([size if isinstance(size, int) else str(size) for size in sizes])


def static(sizes: Sequence[Any]) -> bool:
    """Whether no size is symbolic."""
    return all(isinstance(size, int) for size in sizes)


def same_shape(x: fx.Node, y: fx.Node) -> bool:
    """Whether two tensor nodes surely have the same shape; unlike ``==`` on symbolic sizes this installs no guard."""
    pairs = list(zip(shape_of(x), shape_of(y), strict=False))
    return rank_of(x) == rank_of(y) and all(_expression(a) == _expression(b) for a, b in pairs)


def _expression(size: int | torch.SymInt) -> Any:
    return size if isinstance(size, int) else expression_of(size)


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
