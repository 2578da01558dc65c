"""Torch as an executor: it supports every op, and runs what no other executor runs."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import fx
from typing_extensions import override

from lightning_ort.compiler.executors.base import Executor
from lightning_ort.compiler.regions.region import TORCH, Region, Support, Variant


class TorchExecutor(Executor):
    """Runs regions in torch."""

    name = TORCH
    title = "torch"

    @override
    def supports(self, node: fx.Node) -> Support:
        return Support(True)

    @override
    def build(self, region: Region, artifact: bytes = b"", variant: Variant | None = None) -> Callable[..., Any]:
        return TorchRegion(region)


class TorchRegion:
    """A torch region as the compiled graph calls it."""

    def __init__(self, region: Region) -> None:
        # how it appears in the code of the compiled graph
        self.__name__, self.__module__ = region.name, __name__
        self._module = region.module

    def __call__(self, *args: Any) -> Sequence[Any]:
        """Run the region."""
        return self._module.forward(*args)
