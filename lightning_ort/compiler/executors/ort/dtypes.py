"""The dtypes of a region's inputs and outputs, and how onnxruntime's IO binding names them; nothing here loads onnx."""

from typing import Any

import numpy as np
import torch
from torch import fx

from lightning_ort.compiler.graphs.nodes import ANY_BYTE

Scalar = bool | int | float
Arg = fx.Node | Scalar

_BFLOAT16 = 16  # ONNX's number


def element_type(dtype: torch.dtype) -> Any:
    """The type that onnxruntime's IO binding takes: numpy's, or ONNX's number for bfloat16, which numpy lacks."""
    return _BFLOAT16 if dtype is torch.bfloat16 else np.dtype(str(dtype).removeprefix("torch."))


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


def input_dtype(node: fx.Node) -> torch.dtype:
    """The dtype of a region's input: that of the node, or uint8 for booleans that may be any byte."""
    return torch.uint8 if node.meta.get(ANY_BYTE) else dtype_of(node)
