"""Small results of a step as one graph, in memory that stays: :class:`KeptOutputs`.

A session is bound to the addresses of its outputs, which takes three times as long as to allocate them, and four times
as long as a small kernel. A gradient lives until the next step but one, so its memory moves from step to step. Here it
stays, in two sets that take turns: the Trainer runs a step before it drops the gradients of the last one.
"""

import operator
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch

from lightning_ort.compat.torch import empty_strided_cpu, storage_address, storage_use_count
from lightning_ort.compiler.graphs.nodes import GRADIENTS_FROM, base_of, is_static
from lightning_ort.compiler.regions.region import Region

Spec = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]  # sizes, strides and dtype of a tensor

# to bind a larger one takes little time beside computing it, and its memory is better given back
MAX_BYTES = 65_536
MAX_BYTES_IN_ALL = 4 * 2**20  # of a set

_ADDRESS: Callable[[torch.Tensor], int] = torch.Tensor.data_ptr
_DATA: Callable[[torch.Tensor], torch.Tensor] = operator.attrgetter("data")


def kept_outputs_of(region: Region) -> frozenset[int]:
    """Return which outputs of a region on the CPU are small results of a step as one graph."""
    if storage_use_count is None or empty_strided_cpu is None or not all(map(is_static, region.outputs)):
        return frozenset()
    output = region.outputs[0].graph.output_node() if region.outputs else None
    if output is None or GRADIENTS_FROM not in output.meta:
        return frozenset()
    results = {base_of(node) for node in output.all_input_nodes}
    values = {index: node.meta["val"] for index, node in enumerate(region.outputs) if node in results}
    kept, in_all = [], 0
    for size, index in sorted((val.numel() * val.element_size(), index) for index, val in values.items()):
        in_all += size
        if 0 < size <= MAX_BYTES and in_all <= MAX_BYTES_IN_ALL:
            kept.append(index)
    return frozenset(kept)


class KeptOutputs:
    """Allocates the outputs of a session, those in ``kept`` in memory that stays."""

    def __init__(self, specs: Iterable[Spec], kept: frozenset[int]) -> None:
        pairs = list(enumerate(specs))
        self._kept = [spec for index, spec in pairs if index in kept]
        self._others = [(index, spec) for index, spec in pairs if index not in kept]
        self._tensors: list[Any] = [None] * len(self._kept)  # that nobody else gets
        self._storages: list[Any] = [None] * len(self._kept)
        self._addresses = [0] * len(self._kept)
        self._users: tuple[list[int], ...] = ()  # as long as nobody else refers to the memory

    def allocate(self) -> list[torch.Tensor]:
        """Return a new tensor for each output; the memory of some was used before, if nobody refers to it any more."""
        assert empty_strided_cpu is not None
        if not self._users or self._see() != self._users:
            self._renew()
        # another tensor each time: what the last user did to sizes, hooks or attributes of theirs has no effect
        outputs = [*map(_DATA, self._tensors)]
        for index, spec in self._others:
            outputs.insert(index, empty_strided_cpu(*spec))
        return outputs

    def _see(self) -> tuple[list[int], ...]:
        """How many tensors, and how many storages, refer to the memory, and where it is, which changes if shared."""
        return (
            [*map(storage_use_count, self._addresses)],  # type: ignore[arg-type]
            [*map(sys.getrefcount, self._storages)],
            [*map(_ADDRESS, self._tensors)],
        )

    def _renew(self) -> None:
        """Take other memory where somebody refers to it."""
        assert empty_strided_cpu is not None
        taken: Iterable[int] = range(len(self._kept))
        if self._users:
            rows = zip(zip(*self._see(), strict=True), zip(*self._users, strict=True), strict=True)
            taken = [index for index, (now, before) in enumerate(rows) if now != before]
        for index in taken:
            self._tensors[index] = empty_strided_cpu(*self._kept[index])
            self._storages[index] = self._tensors[index].untyped_storage()
            self._addresses[index] = storage_address(self._storages[index])
        self._users = self._see()
