"""Prepare graphs for the executors: decompositions for AOTAutograd, then ordered passes over its graphs.

- :mod:`.decompositions`: which ops are split into simpler ones while AOTAutograd traces
- :mod:`.eager_layouts`: results that torch traces with another memory layout than eager's
- :mod:`.joint_passes`: over the joint graph, before it is split into forward and backward, and over the two halves
- :mod:`.separate_results`: over the joint graph, so that a result that is not differentiated spoils no gradient
- :mod:`.final_passes`: over each forward, backward or inference graph

A pass has the signature ``(gm) -> None`` and edits the graph in place.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Any

from torch import fx

from lightning_ort.compat.torch import OpOverload, split_joint_graph
from lightning_ort.compiler.lowering import final_passes, joint_passes
from lightning_ort.compiler.lowering.decompositions import decompositions, traced_as_eager
from lightning_ort.compiler.lowering.separate_results import separate_results

__all__ = ["decompositions", "lower", "split_joint", "traced_as_eager"]

JOINT_PASSES = (joint_passes.drop_detach, joint_passes.keep_statistics_wide, joint_passes.drop_casts)
FINAL_PASSES = (
    final_passes.divide_as_eager,
    final_passes.draw_masks_first,
    joint_passes.drop_casts,
    final_passes.cancel_transposes,
    final_passes.drop_kept_dims,
    final_passes.stack_selections,
    final_passes.trust_no_view,
    final_passes.mark_foreign_booleans,
    final_passes.mark_mixed_gradients,
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
    separate_results(joint)
    joint_passes.recompute_views(joint)
    joint.graph.lint()
    joint.recompile()
    min_cut = next(settings for least, settings in _MIN_CUT if (1.0 if budget is None else budget) >= least)
    halves = split_joint_graph(joint, inputs, min_cut, num_fwd_outputs=num_fwd_outputs, **kwargs)
    joint_passes.save_contiguous(*halves, num_fwd_outputs, converted)
    return halves


def lower(gm: fx.GraphModule) -> None:
    """Apply the passes to one final graph."""
    for graph_pass in FINAL_PASSES:
        graph_pass(gm)
    gm.graph.lint()
    gm.recompile()
