"""What lets inductor keep less of a training step: :func:`views_before_casts`, :func:`draws_nothing`."""

import torch
from torch import fx

from lightning_ort.compat.torch import arguments_of, half_of
from lightning_ort.compiler.graphs.nodes import insert_call, is_random, is_static

aten, prims = torch.ops.aten, torch.ops.prims
_SHAPES = {aten.view.default, aten._unsafe_view.default, aten.reshape.default}
_CAST = prims.convert_element_type.default


def views_before_casts(joint: fx.GraphModule) -> None:
    """Turn views of views into one, and a view of a cast of a view into a cast of a view.

    Hugging Face's models cast logits of three dimensions, and view them as two for the loss. torch's chunker follows a
    matrix product to its loss and back, in pieces of rows, and does not see through such a view (2.13).
    """
    for node in joint.graph.nodes:
        if _is_shape(node) and _is_shape(node.args[0]):
            node.replace_all_uses_with(_view(joint, node, node.args[0].args[0]))
        elif node.target is _CAST and _is_shape(node.args[0]):
            views = list(node.users)
            if all(_is_shape(view) and half_of(view) == half_of(node) for view in views):
                for view in views:
                    view.replace_all_uses_with(_view(joint, view, node.args[0].args[0], node.args[1]))
    joint.graph.eliminate_dead_code()


def _is_shape(node: fx.Node) -> bool:
    return node.target in _SHAPES and is_static(node)


def _view(joint: fx.GraphModule, view: fx.Node, source: fx.Node, dtype: torch.dtype | None = None) -> fx.Node:
    """Return what a view is of a source, and with a dtype its cast, in front of the view."""
    made = []
    with joint.graph.inserting_before(view):
        if view.meta["val"].shape != source.meta["val"].shape:
            made.append(source := insert_call(joint, aten.view.default, source, view.args[1]))
        if dtype is not None:
            made.append(source := insert_call(joint, _CAST, source, dtype))
    for node in made:
        node.meta = {**view.meta, "val": node.meta["val"]}
    return source


def draws_nothing(joint: fx.GraphModule) -> bool:
    """Return whether a graph draws no random numbers; attention without dropout draws none."""
    return all(arguments_of(node).get("dropout_p") == 0 for node in joint.graph.nodes if is_random(node))
