"""Makes one function of a graph's regions."""

import logging
import operator
from collections.abc import Callable
from typing import Any

from torch import fx

from lightning_ort.compat.torch import generate_boxed_code
from lightning_ort.compiler.placement.placer import PlacedGraph
from lightning_ort.compiler.regions.region import copy_with_views

log = logging.getLogger(__name__)


def assemble(placed: PlacedGraph) -> Callable[[list[Any]], Any]:
    """Return a boxed function that calls the regions in order, by name, and frees what is no longer needed."""
    gm = placed.gm
    graph = fx.Graph()
    generate_boxed_code(graph)
    outer: dict[fx.Node, fx.Node] = {}
    for node in gm.graph.nodes:
        if node.op in ("placeholder", "get_attr"):
            outer[node] = graph.node_copy(node)
    for region, run in zip(placed.regions, placed.calls, strict=True):
        inputs = tuple(copy_with_views(source, graph, outer) for source in region.inputs)
        call = graph.call_function(run, inputs)
        for index, node in enumerate(region.outputs):
            outer[node] = graph.call_function(operator.getitem, (call, index))
    output = gm.graph.output_node()
    for node in output.all_input_nodes:
        copy_with_views(node, graph, outer)
    graph.output(fx.map_arg(output.args[0], outer.__getitem__))
    if log.isEnabledFor(logging.DEBUG):
        log.debug("%s", str(graph))  # the text: whoever keeps the record would keep the sessions too
    return fx.GraphModule(gm, graph).forward
