"""ONNX Runtime as an executor."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from typing_extensions import override

from lightning_ort.compat.torch_graphs import OpOverload
from lightning_ort.compiler.executors.base import Executor
from lightning_ort.compiler.executors.ort import kept_models, kernels, session
from lightning_ort.compiler.executors.ort.binding import BoundSession
from lightning_ort.compiler.executors.ort.providers import provider_of
from lightning_ort.compiler.reason import Reason, ReasonType
from lightning_ort.compiler.regions.region import Region, count_flops
from lightning_ort.config import ORTConfig

# below this many floating-point operations in matrix products one thread is enough: waking a second costs 20-40 us
ONE_THREAD_FLOPS = 2e6
# above this many, one thread need not be tried
ALL_THREADS_FLOPS = 2e8
# above this many per thread, ending torch's threads for the run pays, which takes about 0.1 ms for each
PAUSE_OPENMP_FLOPS = 1e7


class OrtExecutor(Executor):
    """Converts regions to ONNX models and runs them in sessions."""

    name = "ort"
    title = "ONNX Runtime"

    def __init__(self, config: ORTConfig, device: torch.device) -> None:
        super().__init__(config, device)
        self.providers = config.debug.providers or kernels.providers_for(device) or ()

    @classmethod
    @override
    def whole_ops(cls) -> frozenset[OpOverload]:
        from lightning_ort.compiler.executors.ort.conversion import CONVERTERS  # not at the top: it loads onnx

        return frozenset(CONVERTERS)

    @functools.cached_property
    def kernels(self) -> kernels.Kernels:
        """What the installed onnxruntime has for the device."""
        return kernels.Kernels(self.config.debug.kernels, self.providers, self.device)

    @property
    @override
    def cache_key(self) -> tuple[str, ...]:
        return (self.name, *self.providers)

    @override
    def unsupported_reason(self) -> Reason | None:
        if not self.providers:
            return Reason(ReasonType.DEVICE, f"no execution provider for {self.device} in this onnxruntime")
        reads = {provider_of(name).tensors for name in self.providers}
        if self.device.type != "cpu" and reads.isdisjoint(("", self.device.type)):
            return Reason(ReasonType.DEVICE, f"{' and '.join(self.providers)} computes nothing on {self.device}")
        failure = self.kernels.provider_failure()
        return None if failure is None else Reason(ReasonType.DEVICE, failure)

    @override
    def refusal(self, node: fx.Node) -> Reason | None:
        from lightning_ort.compiler.executors.ort import support  # not at the top: it loads onnx

        return support.check(node, self.kernels)

    @classmethod
    @override
    def timed_ops(cls) -> frozenset[OpOverload]:
        from lightning_ort.compiler.executors.ort.conversion.registry import TIMED  # not at the top: as above

        return frozenset(TIMED)

    @override
    def thread_counts(self, region: Region) -> Sequence[int]:
        if self.config.debug.intra_op_threads is not None:
            return [self.config.debug.intra_op_threads]
        available = torch.get_num_threads()
        if available == 1 or self.device.type != "cpu":  # there a thread launches kernels, and computes little
            return [1]
        flops = count_flops(region)
        if torch.are_deterministic_algorithms_enabled():
            return [1 if flops < ONE_THREAD_FLOPS else available]
        return [available] if flops > ALL_THREADS_FLOPS else [1, available]

    @override
    def convert(self, region: Region) -> bytes:
        return session.convert(region, self.kernels, region.name).SerializeToString()

    @override
    def onnx_providers(self, region: Region) -> list[tuple[str, dict[str, str]]]:
        return kernels.with_options(self.providers, self.device, region)

    @override
    def untrusted_reason(self, artifact: bytes) -> str | None:
        return kept_models.untrusted_reason(artifact)

    @override
    def save(self, artifact: bytes, name: str) -> None:
        if self.config.debug.save_onnx_dir is not None:
            session.save(artifact, self.config.debug.save_onnx_dir, name)

    @override
    def build(self, region: Region, artifact: bytes, threads: int) -> Callable[..., Sequence[Any]]:
        stream = self._stream()
        built = session.build(artifact, region, self.providers, threads, self.device, stream)
        several_threads = self.device.type == "cpu" and threads > 1
        pause = several_threads and count_flops(region) >= PAUSE_OPENMP_FLOPS * threads
        return BoundSession(region, built, self.device, pause, stream)

    @override
    def release_memory(self) -> None:
        if self.device.type == "cpu":
            session.release_cpu_memory()
        elif self.device.type == "cuda" and torch.cuda.is_initialized():
            torch.cuda.empty_cache()

    def _stream(self) -> torch.cuda.Stream | None:
        """The stream of a session: torch's current one; ``None`` on the CPU, and where a provider has its own."""
        on_stream = self.device.type == "cuda" and provider_of(self.providers[0]).takes_stream
        return torch.cuda.current_stream(self.device) if on_stream else None
