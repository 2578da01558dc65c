"""Small gradients of a step as one graph, in memory that stays: :class:`KeptOutputs`.

A session is bound to the addresses of its outputs, which takes three times as long as to allocate them, and four times
as long as a small kernel. A gradient lives until the next step but one, so its memory moves from step to step. Here it
stays, in two sets that take turns: the Trainer runs a step before it drops the gradients of the last one.
"""

import sys
from collections.abc import Iterable, Sequence

import torch
from torch import fx

from lightning_ort.compat.torch import empty_strided_cpu, storage_address, storage_use_count
from lightning_ort.compiler.graphs.nodes import GRADIENTS_FROM, base_of, is_static
from lightning_ort.compiler.regions.region import Region

Spec = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]  # sizes, strides and dtype of a tensor

# to bind a larger one takes little time beside computing it, and its memory is better given back
MAX_BYTES = 65_536
MAX_BYTES_IN_ALL = 4 * 2**20  # of a set


def kept_outputs_of(region: Region) -> frozenset[int]:
    """Return which outputs of a region on the CPU are small gradients of a step as one graph."""
    if storage_use_count is None or empty_strided_cpu is None or not all(map(is_static, region.outputs)):
        return frozenset()
    gradients = _gradients(region.outputs[0].graph) if region.outputs else frozenset()
    values = {index: node.meta["val"] for index, node in enumerate(region.outputs) if node in gradients}
    kept, in_all = [], 0
    for size, index in sorted((val.numel() * val.element_size(), index) for index, val in values.items()):
        in_all += size
        if 0 < size <= MAX_BYTES and in_all <= MAX_BYTES_IN_ALL:
            kept.append(index)
    return frozenset(kept)


def _gradients(graph: fx.Graph) -> frozenset[fx.Node]:
    output = graph.output_node()
    if GRADIENTS_FROM not in output.meta:
        return frozenset()
    results: Sequence[fx.Node | None] = output.args[0]  # type: ignore[assignment]
    return frozenset(base_of(node) for node in results[output.meta[GRADIENTS_FROM] :] if node is not None)


class KeptOutputs:
    """Allocates the outputs of a session, those in ``kept`` in memory that stays."""

    def __init__(self, specs: Iterable[Spec], kept: frozenset[int]) -> None:
        self._specs = [(spec, index in kept) for index, spec in enumerate(specs)]
        self._memory: list[_Memory | None] = [None] * len(self._specs)

    def allocate(self) -> list[torch.Tensor]:
        """Return a new tensor for each output; the memory of some was used before, if nobody refers to it any more."""
        assert empty_strided_cpu is not None
        outputs = []
        for index, (spec, stays) in enumerate(self._specs):
            if not stays:
                outputs.append(empty_strided_cpu(*spec))
                continue
            memory = self._memory[index]
            # free if no tensor, array or storage but ours refers to it, and if it is where it was, such as not shared
            if (
                memory is None
                or storage_use_count(memory.address) != memory.users  # type: ignore[misc]
                or sys.getrefcount(memory.storage) != memory.references
                or memory.tensor.data_ptr() != memory.place
            ):
                memory = self._memory[index] = _Memory(empty_strided_cpu(*spec))
            # another tensor each time: what the last user did to sizes, hooks or attributes of theirs has no effect
            outputs.append(memory.tensor.data)
        return outputs


class _Memory:
    """The memory of an output, with a tensor that nobody else gets."""

    __slots__ = ("address", "place", "references", "storage", "users", "tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        assert storage_use_count is not None
        self.tensor = tensor
        self.storage = tensor.untyped_storage()
        self.address = storage_address(self.storage)
        self.place = tensor.data_ptr()
        self.users = storage_use_count(self.address)
        self.references = sys.getrefcount(self.storage)
