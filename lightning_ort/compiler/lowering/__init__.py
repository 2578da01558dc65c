"""Prepare graphs for ONNX Runtime: decompositions for AOTAutograd, then ordered passes over its graphs.

Passes over the joint graph (before it is split into forward and backward) and over each final graph share one
signature, ``(gm) -> None``, and edit in place.
"""

import contextlib
import functools
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx
from torch._decomp import core_aten_decompositions
from torch._functorch import config as functorch_config
from torch._functorch.partitioners import default_partition, min_cut_rematerialization_partition
from torch._ops import OpOverload
from torch._prims_common import suggest_memory_format

from lightning_ort.compiler.executors.ort.conversion import CONVERTERS
from lightning_ort.compiler.executors.ort.conversion.graph import ANY_BYTE
from lightning_ort.compiler.layouts import IN_ORDER, memory_order
from lightning_ort.compiler.nodes import is_static, is_view
from lightning_ort.config import Recompute

aten = torch.ops.aten

# torch runs these whole and well; taken apart they would be slower there and no better on ORT
_WHOLE = {
    aten.bernoulli.default,
    aten.convolution_backward.default,
    aten.embedding_dense_backward.default,
    aten.native_dropout.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten.native_batch_norm_backward.default,
    aten.native_group_norm_backward.default,
    aten.max_pool2d_with_indices_backward.default,
    aten.max_unpool2d.default,  # nor would its result be channels_last any more
    aten.nll_loss_forward.default,
    aten.nll_loss_backward.default,
    aten.nll_loss2d_forward.default,
    aten.nll_loss2d_backward.default,
    aten.upsample_bilinear2d.vec,
    aten.upsample_nearest2d.vec,
}

_BATCH_NORMS = (
    aten._native_batch_norm_legit_functional.default,
    aten._native_batch_norm_legit_no_training.default,
    aten._native_batch_norm_legit.no_stats,
)

_SHRINKAGES = (aten.hardshrink.default, aten.softshrink.default)
_SHRINKAGE_GRADIENTS = (aten.hardshrink_backward.default, aten.softshrink_backward.default)

# what `stack_selections` replaces
_SELECTIONS = {aten.add.Tensor, aten.select_backward.default}

# settings of torch's min-cut; not its `activation_memory_budget`, which draws dropout masks anew (2.13)
_RECOMPUTE = {1: {"ban_recompute_materialized_backward": False}, 2: {"aggressive_recomputation": True}}


@functools.cache
def decompositions() -> dict[OpOverload, Callable[..., Any]]:
    """Return torch's decompositions to core ATen, without the ops that have a converter or run well whole."""
    needed = {
        op: decomposition
        for op, decomposition in core_aten_decompositions().items()
        if op not in CONVERTERS and op not in _WHOLE
    }
    needed |= {aten.sgn.default: _sign, aten.take.default: _take, aten.put.default: _put}
    return needed | {op: functools.partial(_as_eager_lays_out, op) for op in _BATCH_NORMS}


def _take(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """``take`` by an index of any shape: torch's own decomposition asks for the value of a scalar one."""
    return aten.index.Tensor(x.reshape(-1), [index.reshape(-1)]).reshape(index.shape)


def _put(x: torch.Tensor, index: torch.Tensor, source: torch.Tensor, accumulate: bool = False) -> torch.Tensor:
    """``put``, likewise."""
    flat = aten.index_put.default(x.reshape(-1), [index.reshape(-1)], source.reshape(-1), accumulate)
    return flat.reshape(x.shape)


def _sign(x: torch.Tensor) -> Any:
    """``sgn`` of real numbers. That of complex ones stays whole: divided by its size, a denormal becomes NaN."""
    return NotImplemented if x.is_complex() else aten.sign.default(x)


def _as_eager_lays_out(op: OpOverload, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """A batch norm whose result lies as eager's does: contiguous, or channels_last. When traced, it lies as its input.

    In which order a dropout that follows fills its mask depends on it (torch 2.13).
    """
    memory_format = suggest_memory_format(x)
    if x.device.type != "cpu" or x.is_contiguous(memory_format=memory_format):
        return NotImplemented  # as it is
    return op(x.contiguous(memory_format=memory_format), *args, **kwargs)


@contextlib.contextmanager
def whole_shrinkages() -> Iterator[None]:
    """Trace ``hardshrink`` and ``softshrink`` as they are.

    torch (2.13) takes them apart above autograd, whatever the table of decompositions says, and the gradients of the
    parts are not eager's at a NaN. It knows the shape of those gradients only where no size is symbolic.
    """
    keys = torch._C.DispatchKey
    taken = [(op, keys.Autograd, None) for op in _SHRINKAGES]
    known = [(op, keys.Meta, lambda grad, x, lambd: torch.empty_like(x)) for op in _SHRINKAGE_GRADIENTS]
    before = [(op, key, op.py_kernels.get(key)) for op, key, _ in (*taken, *known)]
    try:
        for op, key, kernel in (*taken, *known):
            _set_kernel(op, key, kernel)
        yield
    finally:
        for op, key, kernel in before:
            _set_kernel(op, key, kernel)


def _set_kernel(op: OpOverload, key: Any, kernel: Callable[..., Any] | None) -> None:
    op.py_kernels.pop(key, None)
    if kernel is not None:
        op.py_kernels[key] = kernel
    op._dispatch_cache.clear()


def split_joint(
    joint: fx.GraphModule, inputs: Sequence[Any], *, recompute: Recompute, num_fwd_outputs: int, **kwargs: Any
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """AOTAutograd's ``partition_fn``: prepare the joint graph, then split it as one of torch's own does."""
    for joint_pass in (drop_detach, drop_casts, recompute_views):
        joint_pass(joint)
    joint.graph.lint()
    joint.recompile()
    if recompute == 0:
        halves = default_partition(joint, inputs, num_fwd_outputs=num_fwd_outputs, **kwargs)
    else:
        with functorch_config.patch(_RECOMPUTE[recompute]):
            halves = min_cut_rematerialization_partition(joint, inputs, num_fwd_outputs=num_fwd_outputs, **kwargs)
    save_contiguous(*halves, num_fwd_outputs)
    return halves


def save_contiguous(forward: fx.GraphModule, backward: fx.GraphModule, num_fwd_outputs: int) -> None:
    """Save contiguous tensors for the backward pass, which is what ONNX Runtime makes and reads.

    What is computed of a transposed tensor, such as an attention's scaled queries, is transposed in memory as well: it
    would be copied to that layout in the one pass, and from it in the other. Torch, where it reads one, reads it as it
    was traced: its group norm gives wrong gradients for tensors of different layouts (2.13, CPU).
    """
    results: list[Any] = list(forward.graph.output_node().args[0])  # type: ignore[arg-type]
    placeholders = {node.name: node for node in backward.graph.find_nodes(op="placeholder")}
    transposed = [
        (index, node)
        for index, node in enumerate(results)
        if index >= num_fwd_outputs
        and isinstance(node, fx.Node)
        and _is_transposed(node)
        and node.name in placeholders
        and any(user.target in CONVERTERS or is_view(user) for user in placeholders[node.name].users)
    ]
    border = next(node for node in backward.graph.nodes if node.op != "placeholder")
    for index, node in transposed:
        with forward.graph.inserting_after(node):
            results[index] = _call(forward, aten.clone.default, (node,), {"memory_format": torch.contiguous_format})
        saved = placeholders[node.name]
        with backward.graph.inserting_before(border):
            as_before = backward.graph.call_function(IN_ORDER, (saved, memory_order(node.meta["val"])))
        as_before.meta = dict(saved.meta)
        saved.replace_all_uses_with(as_before, delete_user_cb=lambda user, mine=as_before: user is not mine)
        saved.meta["val"] = results[index].meta["val"]
    forward.graph.output_node().args = (tuple(results),)
    forward.recompile()
    backward.recompile()


def _is_transposed(node: fx.Node) -> bool:
    """Whether a node that ONNX Runtime may run computes a tensor that is not contiguous."""
    val = node.meta.get("val")
    if node.target not in CONVERTERS or node.target is operator.getitem or not isinstance(val, torch.Tensor):
        return False
    return not is_view(node) and is_static(node) and not val.is_contiguous()


def lower(gm: fx.GraphModule) -> None:
    """Apply the passes for one final graph."""
    for graph_pass in (
        divide_as_eager,
        draw_masks_first,
        drop_casts,
        cancel_transposes,
        drop_kept_dims,
        stack_selections,
        trust_no_view,
        mark_foreign_booleans,
    ):
        graph_pass(gm)
    gm.graph.lint()
    gm.recompile()


def divide_as_eager(gm: fx.GraphModule) -> None:
    """Divide symbolic numbers as C++ does in eager's gradients, where a division by 0 is no error.

    The gradient of a variance of n numbers divides by n less the correction.
    """
    for node in gm.graph.find_nodes(op="call_function", target=operator.truediv):
        node.target = quotient


def quotient(x: Any, y: Any) -> Any:
    """``x / y``, infinite or NaN where ``y`` is 0."""
    if isinstance(y, (int, float)) and y == 0:
        return math.copysign(math.inf, x) * math.copysign(1.0, y) if x else math.nan
    return x / y


def drop_detach(gm: fx.GraphModule) -> None:
    """Read the tensor instead of its detached alias: the joint graph has no autograd left to detach from.

    A detached graph output stays, since AOTAutograd tells outputs apart by identity.
    """
    for node in gm.graph.find_nodes(op="call_function", target=aten.detach.default):
        node.replace_all_uses_with(node.args[0], delete_user_cb=lambda user: user.op != "output")
        if not node.users:
            gm.graph.erase_node(node)


def drop_casts(gm: fx.GraphModule) -> None:
    """Cast once what is cast to one dtype several times, and nothing to a wider dtype and back.

    Autocast casts the input of each of an attention's projections anew. A float16 or bfloat16 number stays the same on
    its way to float32 and back; the other way round is rounding, which stays.
    """
    made: dict[tuple[Any, ...], fx.Node] = {}
    casts = gm.graph.find_nodes(op="call_function", target=aten._to_copy.default)
    for node in casts:
        if set(node.kwargs) != {"dtype"}:
            continue
        source = node.args[0]
        replacement = _before_widening(node)
        if replacement is None:
            # in the joint graph: what the backward half casts again need not be saved for it
            key = (source, node.kwargs["dtype"], node.meta.get("partitioner_tag"))
            replacement = made.setdefault(key, node)
        if replacement is not node:  # an output stays a tensor of its own
            node.replace_all_uses_with(replacement, delete_user_cb=lambda user: user.op != "output")
    for node in reversed(casts):
        if not node.users:
            gm.graph.erase_node(node)


def _before_widening(node: fx.Node) -> fx.Node | None:
    """Return what a cast gives back if it undoes one to a wider dtype; ``None`` if it does not."""
    widening = node.args[0]
    assert isinstance(widening, fx.Node)
    if widening.target is not aten._to_copy.default or set(widening.kwargs) != {"dtype"}:
        return None
    source = widening.args[0]
    assert isinstance(source, fx.Node)
    before, wide, after = (value.meta["val"] for value in (source, widening, node))
    if not (before.dtype == after.dtype and before.is_floating_point() and wide.is_floating_point()):
        return None
    exact = torch.finfo(wide.dtype).bits > torch.finfo(before.dtype).bits
    return source if exact and str(before.stride()) == str(after.stride()) else None


def recompute_views(gm: fx.GraphModule) -> None:
    """Take views again in the backward graph instead of saving them.

    A saved view, such as a transposed weight, would become a real copy in ONNX.
    """
    nodes = list(gm.graph.nodes)
    border = max(index for index, node in enumerate(nodes) if _is_forward(node))
    position = {node: index for index, node in enumerate(nodes)}
    anchor = nodes[border + 1]
    for node in reversed(nodes[: border + 1]):
        later = [user for user in node.users if position.get(user, border + 1) > border and user.op != "output"]
        if not later or not is_view(node):
            continue
        with gm.graph.inserting_before(anchor):
            anchor = copy = gm.graph.node_copy(node)
        copy.meta["partitioner_tag"] = "is_backward"
        node.replace_all_uses_with(copy, delete_user_cb=set(later).__contains__)


def _is_forward(node: fx.Node) -> bool:
    return node.meta.get("partitioner_tag") == "is_forward" or (
        node.op == "placeholder" and "tangents" not in str(node.target)
    )


def draw_masks_first(gm: fx.GraphModule) -> None:
    """Draw every dropout mask from its size alone, so that drawing never cuts an ORT region in two.

    The CPU kernel of ``native_dropout`` is ``input * mask.bernoulli_(1 - p) * scale``; the same generator gives that
    mask here. On other devices the kernel fuses both, so it stays whole. In float32 ``mask * scale`` comes first, which
    rounds as little and takes a pass over memory less; in half precision it would round the scale.
    """
    for node in gm.graph.find_nodes(op="call_function", target=aten.native_dropout.default):
        x, p, train = node.args
        val = x.meta["val"]
        sizes = _sizes_without(x, gm)
        if not train or p in (0, 1) or val.device.type != "cpu" or sizes is None:
            continue
        with val.fake_mode:
            order = memory_order(torch.empty_like(val))  # in which eager fills the mask
        with gm.graph.inserting_before(node):
            shape = [sizes[dim] for dim in order]
            empty = _call(gm, aten.empty.memory_format, (shape,), {"dtype": torch.bool, "device": val.device})
            mask = _call(gm, aten.bernoulli.p, (empty, 1 - p))
            if order != sorted(order):
                mask = _call(gm, aten.permute.default, (mask, [order.index(dim) for dim in range(len(order))]))
            if val.dtype is torch.float32 is torch.get_default_dtype():
                scaled = _call(gm, aten.mul.Tensor, (x, _call(gm, aten.mul.Tensor, (mask, 1 / (1 - p)))))
            else:
                scaled = _call(gm, aten.mul.Tensor, (_call(gm, aten.mul.Tensor, (x, mask)), 1 / (1 - p)))
        for user in list(node.users):  # all getitem
            user.replace_all_uses_with((scaled, mask)[user.args[1]])
            gm.graph.erase_node(user)
        gm.graph.erase_node(node)


def _sizes_without(x: fx.Node, gm: fx.GraphModule) -> list[Any] | None:
    """The sizes of a tensor as constants and placeholders of the graph, known before the tensor is."""
    symbols = {
        node.meta["val"].node.expr: node
        for node in gm.graph.find_nodes(op="placeholder")
        if isinstance(node.meta["val"], torch.SymInt)
    }
    sizes = [size if isinstance(size, int) else symbols.get(size.node.expr) for size in x.meta["val"].shape]
    return None if None in sizes else sizes


def _call(
    gm: fx.GraphModule, target: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
) -> fx.Node:
    node = gm.graph.call_function(target, args, kwargs or {})
    fake_args, fake_kwargs = fx.map_arg((args, kwargs or {}), lambda n: n.meta["val"])
    mode = next(v.fake_mode for n in gm.graph.nodes if hasattr(v := n.meta.get("val"), "fake_mode"))
    with mode:
        node.meta["val"] = target(*fake_args, **fake_kwargs)
    return node


def cancel_transposes(gm: fx.GraphModule) -> None:
    """``t(t(x))`` is ``x``: autograd transposes every weight gradient twice."""
    for node in gm.graph.find_nodes(op="call_function", target=aten.t.default):
        source = node.args[0]
        if source.target is aten.t.default:
            node.replace_all_uses_with(source.args[0])
            gm.graph.erase_node(node)
            if not source.users:
                gm.graph.erase_node(source)


def drop_kept_dims(gm: fx.GraphModule) -> None:
    """``view(sum(x, dims, keepdim=True), sizes without dims)`` is ``sum(x, dims)``: autograd's bias gradient."""
    for node in gm.graph.find_nodes(op="call_function", target=aten.view.default):
        source = node.args[0]
        if source.target is not aten.sum.dim_IntList or len(source.args) < 3 or len(source.users) > 1:
            continue
        x, dims = source.args[:2]
        rank = x.meta["val"].dim()
        kept = [size for dim, size in enumerate(x.meta["val"].shape) if dim - rank not in dims and dim not in dims]
        if dims and source.args[2] is True and str(kept) == str(list(node.meta["val"].shape)):
            source.args = (x, dims)
            source.meta["val"] = node.meta["val"]
            node.replace_all_uses_with(source)
            gm.graph.erase_node(node)


def stack_selections(gm: fx.GraphModule) -> None:
    """Stack the gradients of ``x[0]``, ``x[1]``, ... instead of padding each with zeros and adding them up.

    So an attention gives the gradients of queries, keys and values to the projection that made the three.
    """
    for node in reversed(gm.graph.find_nodes(op="call_function", target=aten.add.Tensor)):
        leaves = _added_selections(node)
        if len(leaves) < 2:
            continue
        sizes, dim = leaves[0].args[1:3]
        dim %= len(sizes)
        if not isinstance(sizes[dim], int) or len(leaves) != sizes[dim]:
            continue
        alike = all(leaf.args[1] == sizes and leaf.args[2] % len(sizes) == dim for leaf in leaves)
        parts = {leaf.args[3] % sizes[dim]: leaf.args[0] for leaf in leaves}
        if not alike or len(parts) != sizes[dim]:
            continue
        with gm.graph.inserting_before(node):
            stacked = _call(gm, aten.stack.default, ([parts[index] for index in sorted(parts)], dim))
        node.replace_all_uses_with(stacked)
    gm.graph.eliminate_dead_code(lambda node: node.op != "call_function" or node.target not in _SELECTIONS)


def trust_no_view(gm: fx.GraphModule) -> None:
    """Write ``reshape`` for ``view``: it is one where it can be, and copies where a layout is not as it was traced."""
    for view in (aten.view.default, aten._unsafe_view.default):
        for node in gm.graph.find_nodes(op="call_function", target=view):
            node.target = aten.reshape.default


def mark_foreign_booleans(gm: fx.GraphModule) -> None:
    """Mark booleans that were not computed here: ``bytes.view(torch.bool)`` is true wherever a byte is not 0."""
    for node in gm.graph.nodes:
        given = node.op == "placeholder" and node.name.startswith(("primals", "arg"))
        val = node.meta.get("val")
        if (given or node.target is aten.view.dtype) and isinstance(val, torch.Tensor) and val.dtype is torch.bool:
            node.meta[ANY_BYTE] = True


def _added_selections(node: fx.Node, root: bool = True) -> list[Any]:
    """The ``select_backward`` nodes that a tree of additions adds up; none if it adds anything else."""
    if not root and len(node.users) > 1:
        return []
    if node.target is aten.select_backward.default:
        return [node]
    if node.target is not aten.add.Tensor or node.kwargs:
        return []
    added = [_added_selections(arg, False) if isinstance(arg, fx.Node) else [] for arg in node.args]
    return sum(added, []) if all(added) else []
