"""Prepare graphs for the executors: decompositions for AOTAutograd, then ordered passes over its graphs.

- :mod:`.decompositions`: which ops are split into simpler ones while AOTAutograd traces, and results that get another
  memory layout then than in eager
- :mod:`.passes`: over the joint graph, before it is split into forward and backward, and over the two halves; then over
  each forward, backward or inference graph

A pass has the signature ``(gm) -> None`` and edits the graph in place.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Any

from torch import fx

from lightning_ort.compat.aot_autograd import split_joint_graph
from lightning_ort.compat.torch_graphs import OpOverload
from lightning_ort.compiler.lowering import passes
from lightning_ort.compiler.lowering.decompositions import decompositions, traced_as_eager

__all__ = ["decompositions", "lower", "split_joint", "traced_as_eager"]

JOINT_PASSES = (passes.drop_detach, passes.keep_statistics_wide, passes.drop_casts)
FINAL_PASSES = (
    passes.divide_as_eager,
    passes.draw_masks_first,
    passes.drop_casts,
    passes.cancel_transposes,
    passes.drop_kept_dims,
    passes.stack_selections,
    passes.trust_no_view,
    passes.mark_foreign_booleans,
    passes.mark_mixed_gradients,
)

# Settings of torch's min-cut partitioner, and the budget from which they hold. Not its `activation_memory_budget`,
# which may draw random numbers anew (2.13).
_MIN_CUT: tuple[tuple[float, dict[str, bool] | None], ...] = (
    (1.0, None),
    (0.5, {"ban_recompute_materialized_backward": False}),
    (0.0, {"aggressive_recomputation": True}),
)


def split_joint(
    joint: fx.GraphModule,
    inputs: Sequence[Any],
    *,
    budget: float | None,
    converted: Collection[OpOverload],
    see_joint: Callable[[fx.GraphModule, int], None],
    num_fwd_outputs: int,
    **kwargs: Any,
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """AOTAutograd's ``partition_fn``: prepare the joint graph, then split it with one of torch's partitioners.

    ``budget`` is ``ORTConfig.activation_memory_budget``. ``see_joint`` gets the graph before it is split, and the
    number of its outputs that are not gradients.
    """
    for joint_pass in JOINT_PASSES:
        joint_pass(joint)
    see_joint(joint, num_fwd_outputs)
    passes.separate_results(joint)
    passes.recompute_views(joint)
    joint.graph.lint()
    joint.recompile()
    min_cut = next(settings for least, settings in _MIN_CUT if (1.0 if budget is None else budget) >= least)
    halves = split_joint_graph(joint, inputs, min_cut, num_fwd_outputs=num_fwd_outputs, **kwargs)
    passes.save_contiguous(*halves, num_fwd_outputs, converted)
    return halves


def lower(gm: fx.GraphModule) -> None:
    """Apply the passes to one final graph."""
    for graph_pass in FINAL_PASSES:
        graph_pass(gm)
    gm.graph.lint()
    gm.recompile()
