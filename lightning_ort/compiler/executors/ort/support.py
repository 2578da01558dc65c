"""Can ONNX Runtime run this node, and if not, why: the single source of truth.

There is no second list of supported ops: a node is supported if its converter accepts it and the installed onnxruntime
builds a session for what the converter emits.
"""

import operator
from dataclasses import dataclass

import torch
from torch import fx

from lightning_ort.compiler.executors.ort.conversion.graph import GraphBuilder
from lightning_ort.compiler.executors.ort.conversion.metadata import DTYPES
from lightning_ort.compiler.executors.ort.conversion.registry import Unsupported
from lightning_ort.compiler.executors.ort.kernels import Kernels
from lightning_ort.compiler.layouts import IN_ORDER
from lightning_ort.compiler.report import Reason, ReasonType

# views: ONNX Runtime runs them inside a region, none is a reason to make one
VIEWS = {
    torch.ops.aten.view.default,
    torch.ops.aten._unsafe_view.default,
    torch.ops.aten.reshape.default,
    torch.ops.aten.t.default,
    torch.ops.aten.transpose.int,
    torch.ops.aten.permute.default,
    torch.ops.aten.unsqueeze.default,
    torch.ops.aten.squeeze.dim,
    torch.ops.aten.squeeze.dims,
    torch.ops.aten.expand.default,
    torch.ops.aten.slice.Tensor,
    torch.ops.aten.select.int,
    torch.ops.aten.split.Tensor,
    torch.ops.aten.split_with_sizes.default,
    torch.ops.aten.unbind.int,
    torch.ops.aten.as_strided.default,
    torch.ops.aten.alias.default,
    torch.ops.aten.detach.default,
    IN_ORDER,
}
_ALLOCATIONS = {
    torch.ops.aten.empty.memory_format,
    torch.ops.aten.empty_like.default,
    torch.ops.aten.empty_permuted.default,
    torch.ops.aten.empty_strided.default,
}
_SIZES = {torch.ops.aten.sym_size.int, torch.ops.aten.sym_stride.int, torch.ops.aten.sym_numel.default}
_CHECKS = {torch.ops.aten._assert_async.default, torch.ops.aten._assert_async.msg}
_HALF = (torch.float16, torch.bfloat16)


# torch's own kernels are the better ones
_BETTER_IN_TORCH = {
    torch.ops.aten.convolution_backward.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
}


@dataclass(frozen=True)
class Support:
    """The answer for one node.

    Args:
        ok: Whether ONNX Runtime can run it.
        reason: Why not; ``None`` if it can.

    """

    ok: bool
    reason: Reason | None = None


def is_compute(node: fx.Node) -> bool:
    """Whether a node computes something.

    Views, access to tuples, arithmetic on sizes, allocation, checks of values and random draws (which always are
    torch's) do not count.
    """
    return (
        node.op == "call_function"
        and isinstance(node.target, torch._ops.OpOverload)
        and node.target not in VIEWS
        and node.target not in _ALLOCATIONS
        and node.target not in _CHECKS
        and node.target not in _SIZES
        and torch.Tag.nondeterministic_seeded not in node.target.tags
    )


def is_view(node: fx.Node) -> bool:
    """Whether a node only looks at a tensor differently (a tuple of views, and access to it, included)."""
    if node.target is operator.getitem:
        return isinstance(node.args[0], fx.Node) and node.args[0].target in VIEWS
    return node.op == "call_function" and node.target in VIEWS


def values_of(node: fx.Node) -> list[object]:
    """The values (fake tensors, symbolic integers) that a node yields."""
    val = node.meta.get("val")
    return list(val) if isinstance(val, (tuple, list)) else [val]


def is_static(node: fx.Node) -> bool:
    """Whether no size of what a node yields is symbolic."""
    shapes = (value.shape if isinstance(value, torch.Tensor) else [value] for value in values_of(node))
    return not any(isinstance(size, torch.SymInt) for shape in shapes for size in shape)


def check(node: fx.Node, kernels: Kernels, torch_ops: frozenset[str]) -> Support:
    """Decide whether ONNX Runtime can run a node by converting it alone.

    Args:
        node: A ``call_function`` node with ``meta["val"]``.
        kernels: What the installed onnxruntime has.
        torch_ops: Names of ops that the user keeps in torch, with or without overload.

    """
    if node.target is operator.getitem:  # goes where the op that made the tuple goes
        return Support(False, Reason(ReasonType.NO_CONVERTER, "tuple access"))
    if not isinstance(node.target, torch._ops.OpOverload):
        return Support(False, Reason(ReasonType.NO_CONVERTER, str(node.target)))
    if torch_ops and {str(node.target), str(node.target).rpartition(".")[0]} & torch_ops:
        return Support(False, Reason(ReasonType.USER, str(node.target)))
    if torch.Tag.nondeterministic_seeded in node.target.tags:
        return Support(False, Reason(ReasonType.RANDOM, str(node.target)))
    if node.target in _BETTER_IN_TORCH:
        return Support(False, Reason(ReasonType.BETTER_IN_TORCH, str(node.target)))
    for value in (v for n in (node, *node.all_input_nodes) for v in values_of(n)):
        if isinstance(value, torch.Tensor):
            if value.dtype not in DTYPES:
                return Support(False, Reason(ReasonType.DTYPE, f"{node.target} on {value.dtype}"))
            if value.dtype in _HALF and value.device.type == "cpu":
                # onnxruntime would cast to float32 and back; torch has real kernels
                return Support(False, Reason(ReasonType.DTYPE, f"{node.target} on {value.dtype} on CPU"))
            if value.is_sparse or value.layout is not torch.strided:
                return Support(False, Reason(ReasonType.DTYPE, f"{node.target} on layout {value.layout}"))
    try:
        builder = GraphBuilder(kernels)
        for index, source in enumerate(node.all_input_nodes):
            builder.add_input(source, f"i{index}")
        builder.convert(node)
        error = kernels.missing(builder.model([node], "support"))
    except Unsupported as unsupported:
        return Support(False, unsupported.reason)
    except Exception as error:  # a bug in a converter must not lose the run
        text = f"{node.target}: {type(error).__name__}: {error}"
        return Support(False, Reason(ReasonType.CONVERSION_FAILED, text))
    return Support(error is None, None if error is None else Reason(ReasonType.NO_KERNEL, f"{node.target}: {error}"))
