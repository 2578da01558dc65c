"""Private names of AOTAutograd and autograd's engine, one small function or class per use.

Each function names the torch version that it was read in.
"""

import math
import operator
import sys
import threading
import types
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import fx
from torch._dynamo import eval_frame
from torch._functorch import config as functorch_config
from torch._functorch import eager_transforms
from torch._functorch._aot_autograd.schemas import OutputType, SubclassCreationMeta
from torch._guards import TracingContext
from torch._ops import HigherOrderOperator
from typing_extensions import override

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
        if issubclass(info.raw_type, torch.Tensor) and _is_differentiable(info)
    ]
    return JointFacts(list(meta.mutated_inp_runtime_indices), differentiable)


def _is_differentiable(output: Any) -> bool:
    # torch 2.11 has the second name only
    return getattr(output, "requires_grad_for_backward", output.requires_grad)


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


_HOOKS = operator.attrgetter("_backward_hooks"), operator.attrgetter("_post_accumulate_grad_hooks")


def have_gradient_hooks(parameters: Sequence[torch.Tensor]) -> bool:
    """Whether any of these leaves has hooks that autograd's engine runs when its gradient arrives (torch 2.13)."""
    before, after = _HOOKS
    return any(map(before, parameters)) or any(map(after, parameters))


def version_of(tensor: torch.Tensor) -> int:
    """How often a tensor was written to (torch 2.13)."""
    return tensor._version


# the number of the next node that autograd records in this thread (torch 2.13)
next_number: Callable[[], int] = torch.autograd._get_sequence_nr


def is_recorded_before(value: Any, number: int) -> bool:
    """Whether a tensor was computed before autograd recorded the node of a number, in this thread (torch 2.13)."""
    return isinstance(value, torch.Tensor) and value.grad_fn is not None and value.grad_fn._sequence_nr() < number


def is_share(value: torch.Tensor, leaf: torch.Tensor | None, share: float) -> bool:
    """Whether a tensor is a leaf, divided by one number, and its gradient that of the leaf times this share (2.13)."""
    node: Any = value.grad_fn
    return (
        type(node).__name__ == "DivBackward0"
        and getattr(node.next_functions[0][0], "variable", None) is leaf
        and node.next_functions[1][0] is None
        and math.isclose(share * float(node._saved_other), 1, rel_tol=1e-7)  # a share is rounded to float32
    )


def at_gradient(leaf: torch.Tensor, call: Callable[[torch.Tensor], None]) -> None:
    """Call a function when a new leaf has got a gradient, by a hook that nothing can remove (torch 2.13)."""
    leaf._post_accumulate_grad_hooks = OrderedDict({0: call})


# what ``torch.no_grad`` calls, which takes ten times as long (torch 2.13)
set_gradients: Callable[[bool], None] = torch._C._set_grad_enabled


def keeping_versions(tensors: tuple[torch.Tensor, ...]) -> AbstractContextManager[None]:
    """A context in which tensors can be written to without a check of autograd noticing it (torch 2.13)."""
    return torch.autograd._unsafe_preserve_version_counter(tensors)


# whether the backward pass that runs is to be repeated, ``retain_graph=True`` (torch 2.13)
keeps_graph: Callable[[], bool] = torch._C._autograd._get_current_graph_task_keep_graph


class WatchedCalls(AbstractContextManager["WatchedCalls"]):
    """Within the block, notices calls in this thread that no compiled graph can stand for (torch 2.13).

    Of gradients, what a backward pass calls is not noticed, nor what graphs may hold (``torch.func``) or are told to
    leave out (``torch.compiler.disable``).

    Attributes:
        own: Whether `torch.autograd.grad` was called.
        second: Whether gradients are to be differentiated, as by ``create_graph=True``.
        reads_callers: Whether a function read local variables of its callers, as pandas' ``DataFrame.query`` does:
            after a graph break only those that the callers name are left.
    """

    def __init__(self) -> None:
        self.own = self.second = self.reads_callers = False

    @override
    def __enter__(self) -> "WatchedCalls":
        self._thread, self._frame = threading.get_ident(), sys._getframe(1)
        with _watch_lock:
            if not _watching:
                _replaced[:] = [torch.autograd._engine_run_backward, sys._getframe]
                torch.autograd._engine_run_backward = _watched_run  # type: ignore[assignment]
                sys._getframe = _watched_frame
            self._outer = _watching.get(self._thread)
            _watching[self._thread] = self
        return self

    @override
    def __exit__(self, *exc_info: object) -> None:
        del self._frame  # which has this object: what the step returned would stay until garbage is collected
        with _watch_lock:
            del _watching[self._thread]
            if self._outer is not None:
                _watching[self._thread] = self._outer
            elif not _watching and torch.autograd._engine_run_backward is _watched_run:
                torch.autograd._engine_run_backward, sys._getframe = _replaced

    def see_gradient(self, create_graph: bool, accumulates: bool) -> None:
        """Note a call of autograd's engine."""
        if self._callers():
            self.own = self.own or not accumulates
            self.second = self.second or create_graph

    def see_frame(self) -> None:
        """Note that somebody asks for a frame."""
        self.reads_callers = self.reads_callers or any("f_locals" in code.co_names for code in self._callers())

    def _callers(self) -> list[types.CodeType]:
        """What has called within the block; nothing if graphs hold or leave it out."""
        frame, found = _frame(3), list[types.CodeType]()
        while frame is not None and frame is not self._frame:
            if frame.f_code.co_filename in (eval_frame.__file__, eager_transforms.__file__):
                return []
            found.append(frame.f_code)
            frame = frame.f_back
        return found


_frame: Callable[[int], Any] = sys._getframe
_watch_lock = threading.Lock()
_watching: dict[int, WatchedCalls] = {}  # by thread
_replaced: list[Any] = []  # the functions that are replaced meanwhile


def _watched_run(tensors: Any, gradients: Any, retain: Any, create_graph: Any, *args: Any, **kwargs: Any) -> Any:
    watch = _watching.get(threading.get_ident())
    if watch is not None and torch._C._current_graph_task_id() == -1:
        watch.see_gradient(bool(create_graph), kwargs.get("accumulate_grad", True))
    return _replaced[0](tensors, gradients, retain, create_graph, *args, **kwargs)


def _watched_frame(depth: int = 0, /) -> types.FrameType:
    if (watch := _watching.get(threading.get_ident())) is not None:
        watch.see_frame()
    return _replaced[1](depth + 1)


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
