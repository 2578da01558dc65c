"""What the compiler asks of an executor."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import fx

from lightning_ort.compat.torch_graphs import OpOverload
from lightning_ort.compiler.reason import Reason
from lightning_ort.compiler.regions.region import Region
from lightning_ort.config import ORTConfig


class Executor(ABC):
    """Runs regions of graphs on one device.

    An executor needs names, :meth:`refusal` and :meth:`build`, and a line in
    :mod:`~lightning_ort.compiler.executors.registry`; ``tests/compiler/test_executors.py`` has one of twenty lines.

    A region is a graph of ATen ops, ``region.module``, of which ``region.inputs`` and ``region.outputs`` are the nodes
    that it reads and returns; their ``meta["val"]`` has shapes, strides and dtypes as traced, and a size may be
    symbolic. Whoever cannot build a region raises :class:`.RegionRejected`, and the next
    executor gets it, or torch. The same happens if it fails in a run, or is slower than torch: timing, cache and report
    are not its business.
    """

    name: ClassVar[str]  # in the report and in the names of regions, such as "ort"
    title: ClassVar[str]  # for people, such as "ONNX Runtime"

    def __init__(self, config: ORTConfig, device: torch.device) -> None:
        self.config = config
        self.device = device

    @classmethod
    def whole_ops(cls) -> frozenset[OpOverload]:
        """Return the ops to leave whole that torch could decompose into simpler ones."""
        return frozenset()

    @property
    def cache_key(self) -> tuple[str, ...]:
        """What its answers, artifacts and times depend on besides the graph, the config and installed versions."""
        return (self.name,)

    def unsupported_reason(self) -> Reason | None:
        """Return why it can run nothing on its device, or ``None``."""
        return None

    @abstractmethod
    def refusal(self, node: fx.Node) -> Reason | None:
        """Return why it cannot run a ``call_function`` node, neither random nor in ``torch_ops``, or ``None``."""

    @classmethod
    def timed_ops(cls) -> frozenset[OpOverload]:
        """Return the ops that torch may run much faster: where they are large, they are timed by themselves too."""
        return frozenset()

    def thread_counts(self, region: Region) -> Sequence[int]:
        """Return the numbers of threads that are worth timing; the first is used where nothing is timed."""
        return (1,)

    def convert(self, region: Region) -> bytes:
        """Return what a region is built from, which is kept in the cache; may reject the region."""
        return b""

    def onnx_providers(self, region: Region) -> list[tuple[str, dict[str, str]]]:
        """Return the providers of onnxruntime that run a region, with options; nothing if artifacts are no models."""
        return []

    def untrusted_reason(self, artifact: bytes) -> str | None:
        """Return why a cached artifact cannot have been written by :meth:`convert`, or ``None``."""
        return None

    def save(self, artifact: bytes, name: str) -> None:  # noqa: B027  (most executors have no such option)
        """Write the artifact of a region to a file for the user, if the config says so."""

    @abstractmethod
    def build(self, region: Region, artifact: bytes, threads: int) -> Callable[..., Sequence[Any]]:
        """Return a function that takes the region's inputs and returns its outputs; may reject the region."""

    def release_memory(self) -> None:  # noqa: B027  (most executors keep none)
        """Give back the memory that timing took and nothing uses any more; called when a graph is placed."""
