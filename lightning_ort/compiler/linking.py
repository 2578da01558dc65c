"""From regions and what runs them to one function."""

import dataclasses
import logging
import operator
from collections.abc import Callable
from typing import Any

from torch import fx
from torch.fx.graph import _BoxedCodeGen

from lightning_ort.compiler.executors.torch import TorchRegion
from lightning_ort.compiler.guarded_region import GuardedRegion
from lightning_ort.compiler.regions import Partition, copy_with_views

log = logging.getLogger(__name__)


@dataclasses.dataclass
class Placed:
    """A cut graph and what runs each of its regions, in the same order."""

    parts: Partition
    executables: list[GuardedRegion | TorchRegion]


def link(placed: Placed) -> Callable[[list[Any]], Any]:
    """Make one boxed function of the regions: it calls them in order, by name, and frees what is no longer needed."""
    gm = placed.parts.gm
    graph = fx.Graph()
    graph.set_codegen(_BoxedCodeGen())
    outer: dict[fx.Node, fx.Node] = {}
    for node in gm.graph.nodes:
        if node.op in ("placeholder", "get_attr"):
            outer[node] = graph.node_copy(node)
    for region, executable in zip(placed.parts.regions, placed.executables, strict=True):
        call = graph.call_function(executable, tuple(outer[source] for source in region.inputs))
        for index, node in enumerate(region.outputs):
            outer[node] = graph.call_function(operator.getitem, (call, index))
    output = gm.graph.output_node()
    for node in output.all_input_nodes:
        copy_with_views(node, graph, outer)
    graph.output(fx.map_arg(output.args[0], outer.__getitem__))
    log.debug("%s", graph)
    return fx.GraphModule(gm, graph).forward
