"""From an ONNX model to an ``onnxruntime.InferenceSession``."""

import logging
import math
import os
import weakref
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import onnx
import onnx_ir as ir
import torch

from lightning_ort.compiler.cache import Timing
from lightning_ort.compiler.executors.ort.conversion.graph import MICROSOFT, GraphBuilder
from lightning_ort.compiler.nodes import values_of
from lightning_ort.compiler.regions import Region
from lightning_ort.compiler.report import Reason, ReasonType

if TYPE_CHECKING:
    import onnxruntime

    from lightning_ort.compiler.executors.ort.kernels import Kernels

log = logging.getLogger(__name__)

# operators of onnxruntime that run code or read files besides the model
_REACH_OUT = {"ATen", "EPContext", "PythonOp", "PythonOpGrad"}
_ATTRIBUTES = (
    *(onnx.AttributeProto.FLOAT, onnx.AttributeProto.INT, onnx.AttributeProto.STRING, onnx.AttributeProto.TENSOR),
    *(onnx.AttributeProto.FLOATS, onnx.AttributeProto.INTS, onnx.AttributeProto.STRINGS, onnx.AttributeProto.TENSORS),
)
_MAX_CONSTANT = 1 << 24  # elements: constants are shapes, scalars and tables of indices

_alive: "weakref.WeakSet[onnxruntime.InferenceSession]" = weakref.WeakSet()
_inherited: "list[onnxruntime.InferenceSession]" = []


def _keep_forever() -> None:
    """In a forked process: never destroy what was inherited, which would wait for threads that were not."""
    _inherited.extend(_alive)


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_keep_forever)


class RegionRejected(Exception):
    """A region does not run on ONNX Runtime.

    Args:
        type: At which stage it was given up.
        error: What happened there.
        timing: What it took, where it was timed.

    """

    def __init__(self, type: ReasonType, error: BaseException | str, timing: Timing | None = None) -> None:
        text = error if isinstance(error, str) else f"{error.__class__.__name__}: {error}"
        self.reason = Reason(type, text.strip().splitlines()[0])
        self.timing = timing
        super().__init__(str(self.reason))


def convert(region: Region, kernels: "Kernels", name: str) -> onnx.ModelProto:
    """Convert a region to a checked ONNX model.

    Inputs are named ``i0``, ``i1``, ... and outputs ``o0``, ``o1``, ... in the region's order.

    Raises:
        RegionRejected: If conversion or the ONNX checker fails.

    """
    builder = GraphBuilder(kernels)
    graph = region.module.graph
    try:
        for index, node in enumerate(graph.find_nodes(op="placeholder")):
            builder.add_input(node, f"i{index}")
        for node in graph.nodes:
            if node.op == "call_function":
                builder.convert(node)
        model = ir.to_proto(builder.model(graph.output_node().args[0], name))  # type: ignore[arg-type]
    except Exception as error:  # a bug in a converter must not lose the run
        raise RegionRejected(ReasonType.CONVERSION_FAILED, error) from error
    try:
        onnx.checker.check_model(model)
    except onnx.checker.ValidationError as error:
        raise RegionRejected(ReasonType.CHECKER_FAILED, error) from error
    return model


def why_refused(model: bytes) -> str | None:
    """Return why a model that was kept is not one that :func:`convert` makes, or ``None``.

    onnxruntime 1.19 reads whatever file a model given as bytes names for a tensor.
    """
    from google.protobuf.message import DecodeError

    if model[4:8] == b"ORTM":
        return "it is in onnxruntime's own format"
    try:
        proto = onnx.ModelProto.FromString(model)
    except DecodeError as error:
        return f"it is no ONNX model: {error}"
    if proto.functions or proto.training_info or proto.metadata_props or proto.graph.sparse_initializer:
        return "it has functions, training information, metadata or sparse constants"
    domains = {opset.domain for opset in proto.opset_import} | {node.domain for node in proto.graph.node}
    if unknown := domains - {"", MICROSOFT}:
        return f"it has operators of {', '.join(sorted(unknown))}"
    if found := _REACH_OUT & {node.op_type for node in proto.graph.node}:
        return f"it has the operator {', '.join(sorted(found))}"
    tensors = list(proto.graph.initializer)
    for attribute in (attribute for node in proto.graph.node for attribute in node.attribute):
        tensors += [attribute.t, *attribute.tensors]
        if attribute.type not in _ATTRIBUTES:
            return f"the attribute {attribute.name!r} is a graph, or something else that is never written"
    for tensor in tensors:
        if tensor.external_data or tensor.data_location != onnx.TensorProto.DEFAULT:
            return f"the constant {tensor.name!r} lies in another file"
        if math.prod(tensor.dims) > _MAX_CONSTANT or min(tensor.dims, default=0) < 0:
            return f"the constant {tensor.name!r} has the shape {list(tensor.dims)}"
    return None


def build(
    model: bytes,
    region: Region,
    providers: tuple[str, ...],
    threads: int,
    device: torch.device,
    stream: torch.cuda.Stream | None = None,
) -> "onnxruntime.InferenceSession":
    """Build a session.

    Args:
        model: The serialized model.
        region: What it was made of.
        providers: Execution providers in order of preference.
        threads: Intra-op threads.
        device: Where the tensors are.
        stream: Record CUDA graphs on this stream; ``None``: run on torch's and record nothing.

    Raises:
        RegionRejected: If onnxruntime refuses the model, as one with nodes on the CPU where it is to be recorded.

    """
    import onnxruntime

    options = session_options(threads)
    if device.type == "cpu":
        _share_arena()
        options.add_session_config_entry("session.use_env_allocators", "1")
    # as autograd ordered them; by itself it puts off the gradients of the weights and holds what they need meanwhile:
    # a GPT's backward pass took 106 MB for intermediate results where this takes 78 (onnxruntime 1.19)
    options.execution_order = onnxruntime.ExecutionOrder.PRIORITY_BASED
    # nothing is quantized here: DequantizeLinear scales masks, and has to stay what it is
    options.add_session_config_entry("session.disable_quant_qdq", "1")
    if _has_float64(region):
        # the fusions of higher levels (QuickGelu, FusedMatMul, ...) have kernels for float32 alone (1.19)
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    configured: list[Any] = [
        (provider, _cuda_options(device, stream)) if provider == "CUDAExecutionProvider" else provider
        for provider in providers
    ]
    try:
        session = onnxruntime.InferenceSession(model, options, providers=configured)
    except Exception as error:  # onnxruntime raises classes of its own that derive from Exception alone
        raise RegionRejected(ReasonType.SESSION_FAILED, error) from error
    if (obstacle := why_not_on(session, providers[0])) is not None:
        raise RegionRejected(ReasonType.SESSION_FAILED, obstacle)
    _alive.add(session)
    return session


def session_options(threads: int) -> "onnxruntime.SessionOptions":
    """Return what every session that shares the process with torch is set to.

    Args:
        threads: Intra-op threads.

    """
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 4  # what goes wrong is raised, and reported by us
    # threads that wait for the next kernel awake, but not after the last one, when torch needs the cores
    options.add_session_config_entry("session.intra_op.allow_spinning", "1")
    options.add_session_config_entry("session.force_spinning_stop", "1")
    return options


def why_not_on(session: "onnxruntime.InferenceSession", provider: str) -> str | None:
    """Return why a session does not run on the provider that was asked for; onnxruntime replaces it silently."""
    if session.get_providers()[0] == provider:
        return None
    return f"{provider} did not load; are its libraries installed?"


@cache
def _share_arena() -> None:
    """Have all sessions of the process take their memory for intermediates from one place.

    By itself each session keeps a place of its own, which grows by powers of two: a GPT's two took 1,179 MB where this
    takes 950 and eager 855 (onnxruntime 1.19). Sessions run one after the other, so what one has freed serves the next.
    """
    from onnxruntime.capi import onnxruntime_pybind11_state as ort

    place = ort.OrtMemoryInfo("Cpu", ort.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, ort.OrtMemType.DEFAULT)
    as_requested = ort.OrtArenaCfg(
        {"max_mem": 0, "arena_extend_strategy": 1, "initial_chunk_size_bytes": -1, "max_dead_bytes_per_chunk": -1}
    )
    with suppress(RuntimeError):  # the program has registered one of its own, which serves as well
        ort.create_and_register_allocator(place, as_requested)


def _has_float64(region: Region) -> bool:
    values = (value for node in region.module.graph.nodes for value in values_of(node))
    return any(isinstance(value, torch.Tensor) and value.dtype is torch.float64 for value in values)


def _cuda_options(device: torch.device, stream: torch.cuda.Stream | None) -> dict[str, str]:
    # on torch's stream, so that neither side has to wait for the other
    used = torch.cuda.current_stream(device) if stream is None else stream
    return {
        "device_id": str(device.index or 0),
        "user_compute_stream": str(used.cuda_stream),
        "enable_cuda_graph": "0" if stream is None else "1",
        "do_copy_in_default_stream": "1",
        # not by powers of two: torch's allocator needs the rest
        "arena_extend_strategy": "kSameAsRequested",
        # onnxruntime's own default is to use it
        "use_tf32": "1" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "0",
    }


def save(model: bytes, folder: str, name: str) -> None:
    """Write a model to ``folder/name.onnx``; a run is not lost where that fails."""
    path = Path(folder) / f"{name.replace('/', '.')}.onnx"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(model)
    except OSError as error:
        log.warning("ORTConfig(save_onnx_dir=%r): %s could not be written: %s", folder, path.name, error)
