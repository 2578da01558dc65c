"""The execution providers of onnxruntime that this package knows: :data:`PROVIDERS`, with what is particular to each.

One that is not listed works too where ``debug={"providers": [...]}`` names it, with its own defaults. Another, such as
``"OpenVINOExecutionProvider"``, is one more entry, before that of the CPU, which runs what it leaves: that can make it
the default for a type of device, and has its options. Nothing else changes. Sessions are built with the options, and
reproducers (``RegionReport.save_reproducer``) and plug-ins get them too. What a provider has no kernel for is found out
by loading small models (:mod:`~lightning_ort.compiler.executors.ort.kernels`), so that it needs no list of operators.
A provider that computes in fewer bits than the tensors have by default needs an option against it, as ``use_tf32`` is
one of CUDA's: a region differs from eager no more than rounding of its dtype explains
(``debug={"check_against_eager": True}`` compares each).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from lightning_ort.compat.onnxruntime import cuda_provider_error
from lightning_ort.compiler.executors.ort.streams import handle_of

if TYPE_CHECKING:
    from lightning_ort.compiler.regions.region import Region

CPU, CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"

_CONVOLUTION = torch.ops.aten.convolution.default
_PRODUCTS = {getattr(torch.ops.aten, name).default for name in ("mm", "bmm", "addmm", "baddbmm", "linear", "mv", "dot")}


@dataclass(frozen=True, kw_only=True)
class Provider:
    """How a provider is used.

    Args:
        tensors: The type of torch's device whose tensors it reads and writes where they are; ``""`` if nobody knows.
        by_default: Whether it runs regions on such tensors where the config names no provider; the first entry that
            does and that the installed onnxruntime has. onnxruntime's CPU provider runs what it has no kernel for.
        options: Takes a region and torch's stream, if the session is for one; returns options by name.
        takes_number: Whether it takes the number of the device, as ``device_id``.
        takes_stream: Whether it runs on torch's stream; if not, each waits for the other.
        asked_alone: Whether a node stays in torch that it has no kernel for, since tensors would be copied. If not, the
            next provider runs it, at last that of the CPU, for whose kernels regions are then converted.
        load_error: Returns why its library does not load, in more words than onnxruntime has.
    """

    tensors: str = ""
    by_default: bool = False
    options: "Callable[[Region, torch.cuda.Stream | None], dict[str, str]]" = lambda region, stream: {}
    takes_number: bool = False
    takes_stream: bool = False
    asked_alone: bool = False
    load_error: Callable[[], str | None] | None = None


def _cuda_options(region: "Region", stream: torch.cuda.Stream | None) -> dict[str, str]:
    # on torch's stream the kernels of both are in order
    on_stream = {} if stream is None else {"user_compute_stream": str(handle_of(stream))}
    searches = torch.backends.cudnn.benchmark and not torch.are_deterministic_algorithms_enabled()
    return {
        **on_stream,
        "do_copy_in_default_stream": "1",
        # not by powers of two: torch's allocator needs the rest of the memory
        "arena_extend_strategy": "kSameAsRequested",
        # onnxruntime uses TF32 by default, and has one setting where torch has two
        "use_tf32": "1" if _may_use_tf32(region) else "0",
        # as torch: onnxruntime's default times each algorithm for each new shape, in all memory that is free
        "cudnn_conv_algo_search": "EXHAUSTIVE" if searches else "HEURISTIC",
    }


def _may_use_tf32(region: "Region") -> bool:
    """Whether torch computes all matrix products and convolutions of a region with TF32."""
    targets = {node.target for node in region.module.graph.nodes}
    convolves, multiplies = (not targets.isdisjoint(ops) for ops in ({_CONVOLUTION}, _PRODUCTS))
    conv: Any = torch.backends.cudnn.conv  # type: ignore[attr-defined]  # torch makes it with a class for modules
    backends = ((convolves, conv), (multiplies, torch.backends.cuda.matmul))
    return all(backend.fp32_precision == "tf32" for is_used, backend in backends if is_used)


PROVIDERS: Mapping[str, Provider] = {
    CUDA: Provider(
        tensors="cuda",
        by_default=True,
        options=_cuda_options,
        takes_number=True,
        takes_stream=True,
        asked_alone=True,
        load_error=cuda_provider_error,
    ),
    "TensorrtExecutionProvider": Provider(takes_number=True),
    CPU: Provider(tensors="cpu", by_default=True),
}


def provider_of(name: str) -> Provider:
    """Return how a provider is used."""
    return PROVIDERS.get(name) or Provider()
