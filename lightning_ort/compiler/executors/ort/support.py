"""Can ONNX Runtime run this node, and if not, why: the single source of truth.

There is no second list of supported ops: a node is supported if its converter accepts it and the installed onnxruntime
builds a session for what the converter emits.
"""

import operator

import torch
from torch import fx

from lightning_ort.compat.torch_graphs import OpOverload
from lightning_ort.compiler.executors.ort.conversion.graph import GraphBuilder
from lightning_ort.compiler.executors.ort.conversion.metadata import DTYPES
from lightning_ort.compiler.executors.ort.conversion.registry import TAKES_EMPTY, Unsupported
from lightning_ort.compiler.executors.ort.kernels import Kernels
from lightning_ort.compiler.graphs.nodes import is_empty, values_of
from lightning_ort.compiler.reason import Reason, ReasonType

_HALF = (torch.float16, torch.bfloat16)


# torch's own kernels are the better ones
_BETTER_IN_TORCH = {
    torch.ops.aten.convolution_backward.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
}


def check(node: fx.Node, kernels: Kernels) -> Reason | None:
    """Return why ONNX Runtime cannot run a ``call_function`` node, or ``None``, by converting it alone."""
    if node.target is operator.getitem:  # goes where the op that made the tuple goes
        return Reason(ReasonType.NO_CONVERTER, "tuple access")
    if not isinstance(node.target, OpOverload):
        return Reason(ReasonType.NO_CONVERTER, str(node.target))
    if node.target in _BETTER_IN_TORCH:
        return Reason(ReasonType.BETTER_IN_TORCH, str(node.target))
    for value in (v for n in (node, *node.all_input_nodes) for v in values_of(n)):
        if isinstance(value, torch.Tensor):
            if value.device.type != kernels.device.type and (value.dim() or any(value is x for x in values_of(node))):
                # a number on the CPU may be read, and no more
                return Reason(ReasonType.DEVICE, f"{node.target} with a tensor on {value.device}")
            if value.dtype not in DTYPES:
                return Reason(ReasonType.DTYPE, f"{node.target} on {value.dtype}")
            if value.dtype in _HALF and value.device.type == "cpu":
                # onnxruntime would cast to float32 and back; torch has real kernels
                return Reason(ReasonType.DTYPE, f"{node.target} on {value.dtype} on CPU")
            if value.dtype is torch.bfloat16 and (missing := kernels.bfloat16_missing()) is not None:
                return Reason(ReasonType.DTYPE, missing)
            if value.is_sparse or value.layout is not torch.strided:
                return Reason(ReasonType.DTYPE, f"{node.target} on layout {value.layout}")
    if _is_emptied(node, node.target):
        return Reason(ReasonType.UNSUPPORTED_ARGUMENTS, f"{node.target} with an empty tensor")
    try:
        builder = GraphBuilder(kernels)
        for index, source in enumerate(node.all_input_nodes):
            builder.add_input(source, f"i{index}")
        builder.convert(node)
        error = kernels.missing(builder.model([node], "support"))
    except Unsupported as unsupported:
        return unsupported.reason
    except Exception as error:  # a bug in a converter must not lose the run
        text = f"{node.target}: {type(error).__name__}: {error}"
        return Reason(ReasonType.CONVERSION_FAILED, text)
    return None if error is None else Reason(ReasonType.NO_KERNEL, f"{node.target}: {error}")


def _is_emptied(node: fx.Node, op: OpOverload) -> bool:
    """Whether a tensor is empty, other than of an elementwise op.

    For it, kernels of onnxruntime have no result, a wrong one, or end the process (TopK, SoftmaxGrad_13 in 1.19), and
    there is nothing to compute. For a symbolic size that turns out to be 0, see
    :func:`~lightning_ort.compiler.regions.region.is_emptied_fn`.
    """
    if torch.Tag.pointwise in op.tags:
        return False
    if op in TAKES_EMPTY:
        return is_empty(values_of(node)[0])
    return any(is_empty(value) for source in (node, *node.all_input_nodes) for value in values_of(source))
