"""What the metadata of FX nodes says about dtypes and shapes, and how ONNX names it."""

from collections.abc import Sequence
from typing import Any

import onnx_ir as ir
import torch
from torch import fx

from lightning_ort.compat.torch import expression_of
from lightning_ort.compiler.graphs.nodes import ANY_BYTE

Scalar = bool | int | float
Arg = fx.Node | Scalar

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


def element_type(dtype: torch.dtype) -> Any:
    """The type that onnxruntime's IO binding takes: numpy's, or ONNX's number for bfloat16, which numpy lacks."""
    data_type = DTYPES[dtype]
    return int(data_type) if data_type is ir.DataType.BFLOAT16 else data_type.numpy()


def dtype_of(arg: Arg) -> torch.dtype:
    """The dtype of an argument; a Python integer is int64, a float float32, a symbolic float float64."""
    if isinstance(arg, fx.Node):
        val = arg.meta["val"]
        if isinstance(val, torch.Tensor):
            return val.dtype
        return {torch.SymBool: torch.bool, torch.SymFloat: torch.float64}.get(type(val), torch.int64)
    if isinstance(arg, bool):
        return torch.bool
    return torch.int64 if isinstance(arg, int) else torch.float32


def work_dtype(node: fx.Node) -> torch.dtype:
    """The dtype in which torch's kernels compute with a tensor, or keep its statistics: float32 for half types."""
    dtype = dtype_of(node)
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def input_dtype(node: fx.Node) -> torch.dtype:
    """The dtype of a region's input: that of the node, or uint8 for booleans that may be any byte."""
    return torch.uint8 if node.meta.get(ANY_BYTE) else dtype_of(node)


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
