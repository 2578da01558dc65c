"""Which nodes of a region may go out of bounds on made-up inputs: :func:`may_go_out_of_bounds`.

Made-up integers are 0, which is a valid index and a valid label, but ``labels - 1`` is none. On a CPU that raises, and
the region is not timed. On a GPU it is an assertion of the device, after which nothing runs there in this process.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from lightning_ort.compat.torch import OpOverload, arguments_of
from lightning_ort.compiler.regions.region import Region

_POSITIONS = ("index", "indices", "target")  # what they are called in the schemas of torch
_ASSERTING = (torch.ops.aten.binary_cross_entropy,)  # that numbers are between 0 and 1


def may_go_out_of_bounds(region: Region) -> list[fx.Node]:
    """Return the nodes of a region that read or write at positions, or whose kernels assert something of values."""
    return [node for node in region.nodes if isinstance(node.target, OpOverload) and _depends_on_values(node)]


def _depends_on_values(node: fx.Node) -> bool:
    if node.target.overloadpacket in _ASSERTING:  # type: ignore[union-attr]
        return True
    arguments = arguments_of(node)
    return any(True for name in _POSITIONS for _ in _integers(arguments.get(name)))


def _integers(argument: Any) -> Iterator[fx.Node]:
    """The integer tensors of an argument, a node or a list of them."""
    for node in argument if isinstance(argument, (list, tuple)) else [argument]:
        val = node.meta.get("val") if isinstance(node, fx.Node) else None
        if isinstance(val, torch.Tensor) and not (val.is_floating_point() or val.dtype is torch.bool):
            yield node
