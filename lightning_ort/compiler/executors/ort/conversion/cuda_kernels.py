"""What onnxruntime's CUDA provider has no kernels for (1.31.1; found by loading models of one node, without a GPU)."""

from collections.abc import Sequence

import torch

from lightning_ort.compiler.executors.ort.conversion.registry import Unsupported
from lightning_ort.compiler.reason import ReasonType

# at opset 18. They compute in float32 between two casts, as torch's own kernels of these dtypes do inside
_BFLOAT16 = """
    Equal Less Greater LessOrEqual GreaterOrEqual
    Ceil Cos Elu Floor HardSigmoid IsInf LeakyRelu Log LogSoftmax Reciprocal Round Sin Softplus
    ArgMax ArgMin AveragePool Clip CumSum Pad ReduceMax ReduceMin ReduceProd Resize TopK
"""
_IN_FLOAT32: dict[torch.dtype, set[str]] = {
    torch.float16: {"IsInf", "LogSoftmax"},  # the latter for its sum
    torch.bfloat16: {*_BFLOAT16.split()},
}

# from opset 22 on, in any dtype
ENDED = {"Elu", "EyeLike", "MaxPool"}


# what ScatterND can add up, or reduce otherwise; it loads in any dtype, and fails when it runs
_SCATTERED = (torch.float32, torch.float16)


def dtype_without_kernel(op_type: str, dtypes: Sequence[torch.dtype], reduction: str | None) -> torch.dtype | None:
    """Return which dtype of the inputs has to be cast to float32, if any; ``Unsupported`` if that would not do."""
    if op_type == "ScatterND" and reduction is not None and dtypes[0] not in _SCATTERED:
        if dtypes[0] is not torch.bfloat16:
            raise Unsupported(f"ScatterND that reduces {dtypes[0]} on a GPU", ReasonType.NO_KERNEL)
        return dtypes[0]
    return next((dtype for dtype in dtypes if op_type in _IN_FLOAT32.get(dtype, ())), None)
