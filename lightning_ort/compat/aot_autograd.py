"""Private names of AOTAutograd, one small function per use.

Each function names the torch version that it was read in.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import fx
from torch._functorch import config as functorch_config
from torch._functorch._aot_autograd.schemas import OutputType, SubclassCreationMeta
from torch._guards import TracingContext
from torch._ops import HigherOrderOperator

# a context in which autocast casts nothing, as AOTAutograd has it around its graphs (torch 2.13)
without_autocast: Callable[[], AbstractContextManager[None]] = torch._C._DisableAutocast


def backward_at_once(autocast: bool) -> AbstractContextManager[Any]:
    """Within the block, AOTAutograd compiles a backward graph together with its forward graph (torch 2.13).

    ``autocast``: whether the backward pass will be run under the autocast that is on now, as one that a step calls for.
    Otherwise it has the dtypes of the forward pass, also of parts in which autocast was off.
    """
    mode = "same_as_forward" if autocast else "off"
    return functorch_config.patch(force_non_lazy_backward_lowering=True, backward_pass_autocast=mode)


def split_joint_graph(
    joint: fx.GraphModule, inputs: Sequence[Any], min_cut: Mapping[str, Any] | None, **kwargs: Any
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Split a joint graph, without recomputation or by a min-cut with these settings (torch 2.13)."""
    from torch._functorch import partitioners  # not loaded with torch: 0.2 s

    if min_cut is None:
        return partitioners.default_partition(joint, inputs, **kwargs)
    with functorch_config.patch(dict(min_cut)):
        return partitioners.min_cut_rematerialization_partition(joint, inputs, **kwargs)


def half_of(node: fx.Node) -> str | None:
    """``"forward"``, ``"backward"``, or ``None`` for a node of a joint graph that may go to both (torch 2.13)."""
    if node.op == "placeholder":
        return "backward" if "tangents" in str(node.target) else "forward"
    tag = node.meta.get("partitioner_tag")
    return None if tag is None else tag.removeprefix("is_")


def assign_to_backward(node: fx.Node) -> None:
    """Make a node of a joint graph one of the backward graph (torch 2.13)."""
    node.meta["partitioner_tag"] = "is_backward"


def is_graph_argument(node: fx.Node) -> bool:
    """Whether a node is an argument of the traced function, not a saved tensor or a gradient (torch 2.13)."""
    return node.op == "placeholder" and node.name.startswith(("primals", "arg"))


def is_checkpoint(node: fx.Node) -> bool:
    """Whether a node of dynamo's graph calls a function that is computed again in the backward pass (torch 2.13)."""
    return node.target is torch.ops.higher_order.tag_activation_checkpoint


def is_higher_order(node: fx.Node) -> bool:
    """Whether a node calls an operation that takes functions, such as a branch or a hook (torch 2.13)."""
    return isinstance(node.target, HigherOrderOperator)


def _metadata() -> Any:
    context = TracingContext.try_get()
    return None if context is None else context.fw_metadata


class GraphFacts(NamedTuple):
    """What AOTAutograd found out about the graph that it traces."""

    num_inputs: int  # inputs, each tensor counted once
    written: list[int]  # indices of the inputs that the graph writes to
    separate: bool  # whether no output is an input or a view of one, and no input that it writes to needs a gradient


def traced_graph_facts() -> GraphFacts | None:
    """What AOTAutograd found out about the graph that is being compiled (torch 2.13)."""
    if (meta := _metadata()) is None:
        return None
    inputs = meta.input_info
    aliases = (OutputType.alias_of_input, OutputType.is_input)
    separate = not any(info.output_type in aliases for info in meta.output_info) and not any(
        info.mutates_metadata or (info.mutates_data and info.requires_grad) for info in inputs
    )
    return GraphFacts(len(inputs), [index for index, info in enumerate(inputs) if info.mutates_data], separate)


def allow_retain_graph() -> None:
    """Declare that the backward graph being compiled writes to no saved tensor, or torch 2.13 runs it only once."""
    if (meta := _metadata()) is not None:
        meta.bw_donated_idxs = []


class JointFacts(NamedTuple):
    """What AOTAutograd found out about a joint graph that can be run at once."""

    written: list[int]  # indices of the inputs that the graph writes to, whose new values are its first outputs
    differentiable: list[int]  # indices of the outputs after those that have a tangent, in the order of the tangents


def joint_facts(num_inputs: int) -> JointFacts | None:
    """What AOTAutograd found out about the joint graph it compiles, if all are plain, separate tensors (torch 2.13)."""
    if (meta := _metadata()) is None:
        return None
    own = (OutputType.non_alias, OutputType.unsafe_view_alias, OutputType.custom_function_view)
    plain = (
        len(meta.input_info) == num_inputs
        and not any(info.mutates_metadata or (info.mutates_data and info.requires_grad) for info in meta.input_info)
        and all(info.output_type in own for info in meta.output_info)
        and not meta.num_intermediate_bases
        and not meta.tokens
        and not meta.is_rng_op_functionalized
        and meta.grad_enabled_mutation is None
        and not any(
            isinstance(one, SubclassCreationMeta) for one in [*meta.subclass_inp_meta, *meta.subclass_fw_graph_out_meta]
        )
    )
    if not plain:
        return None
    differentiable = [
        index
        for index, info in enumerate(meta.output_info)
        if issubclass(info.raw_type, torch.Tensor) and info.requires_grad_for_backward
    ]
    return JointFacts(list(meta.mutated_inp_runtime_indices), differentiable)


def adds_guards() -> bool:
    """Whether AOTAutograd has a condition of its own on the inputs of the graph that it traced last (torch 2.13)."""
    context = TracingContext.try_get()
    return context is None or bool(context.guards_context.aotautograd_guards)


def tracing_modes() -> tuple[Any, ...]:
    """What decides how AOTAutograd traces a graph, beside gradients and autocast (torch 2.13)."""
    attention = torch.backends.cuda
    return (
        torch.get_default_dtype(),
        torch.get_default_device(),
        torch.are_deterministic_algorithms_enabled(),
        torch.backends.mkldnn.enabled,
        torch.backends.cudnn.enabled,
        torch.backends.mha.get_fastpath_enabled(),
        attention.flash_sdp_enabled(),
        attention.mem_efficient_sdp_enabled(),
        attention.math_sdp_enabled(),
        attention.cudnn_sdp_enabled(),
        functorch_config.get_hash().hex(),
    )


# kernels of nn.TransformerEncoderLayer and nn.MultiheadAttention for inference (torch 2.13)
_CAST_WITHIN = tuple(
    getattr(torch, name)
    for name in ("_transformer_encoder_layer_fwd", "_native_multi_head_attention")
    if hasattr(torch, name)
)


def casts_within(gm: Any) -> bool:
    """Whether a graph captured under autocast calls a kernel whose inner operations autocast casts (torch 2.13).

    The captured graph runs without autocast, since what it casts is in the graph; inside these kernels nothing is.
    """
    entered = any(str(getattr(node.target, "__name__", "")) == "_enter_autocast" for node in gm.graph.nodes)
    casts = entered or any(map(torch.is_autocast_enabled, ("cpu", "cuda")))
    return casts and any(node.target is kernel for node in gm.graph.nodes for kernel in _CAST_WITHIN)
