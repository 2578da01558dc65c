"""Converts regions to ONNX models and builds sessions of them; only what converts loads onnx."""

import functools
import logging
import weakref
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from lightning_ort.compat.cpython import in_forked_children
from lightning_ort.compat.onnxruntime import share_cpu_memory
from lightning_ort.compiler.executors.ort.kernels import Kernels, new_session, session_options
from lightning_ort.compiler.executors.ort.providers import CUDA
from lightning_ort.compiler.executors.ort.streams import handle_of
from lightning_ort.compiler.graphs.nodes import values_of
from lightning_ort.compiler.machine import malloc
from lightning_ort.compiler.reason import ReasonType
from lightning_ort.compiler.regions.region import Region, RegionRejected

if TYPE_CHECKING:
    import onnx
    import onnxruntime


log = logging.getLogger(__name__)

_alive: "weakref.WeakSet[onnxruntime.InferenceSession]" = weakref.WeakSet()
_inherited: "list[onnxruntime.InferenceSession]" = []

# a forked process must not destroy the sessions of its parent: that would wait for threads that it does not have
in_forked_children(lambda: _inherited.extend(_alive))


def convert(region: Region, kernels: Kernels, name: str) -> "onnx.ModelProto":
    """Convert a region to a checked model with inputs ``i0``, ... and outputs ``o0``, ...; or ``RegionRejected``."""
    import onnx
    import onnx_ir as ir

    from lightning_ort.compiler.executors.ort.conversion.graph import GraphBuilder
    from lightning_ort.compiler.executors.ort.conversion.registry import Unsupported

    builder = GraphBuilder(kernels)
    graph = region.module.graph
    try:
        for index, node in enumerate(graph.find_nodes(op="placeholder")):
            builder.add_input(node, f"i{index}")
        for node in graph.nodes:
            if node.op == "call_function":
                builder.convert(node)
        if not builder.on_cpu and (constants := builder.constants(graph.output_node().args[0])):  # type: ignore[arg-type]
            nodes = [region.originals[node] for node in constants]
            raise RegionRejected(ReasonType.BETTER_IN_TORCH, "a constant, copied to the GPU in each run", nodes=nodes)
        model = ir.to_proto(builder.model(graph.output_node().args[0], name))  # type: ignore[arg-type]
    except RegionRejected:
        raise
    except Unsupported as unsupported:  # each node can be converted, but not all of them in one model
        raise RegionRejected(unsupported.reason.type, unsupported.reason.text) from unsupported
    except Exception as error:  # a bug in a converter must not end the run
        raise RegionRejected(ReasonType.CONVERSION_FAILED, error) from error
    try:
        onnx.checker.check_model(model)
    except onnx.checker.ValidationError as error:
        raise RegionRejected(ReasonType.CHECKER_FAILED, error) from error
    return model


def build(
    model: bytes,
    region: Region,
    providers: tuple[str, ...],
    threads: int,
    device: torch.device,
    stream: torch.cuda.Stream | None = None,
) -> "onnxruntime.InferenceSession":
    """Build a session of a region's model, on a GPU to run on ``stream``, or raise ``RegionRejected``."""
    import onnxruntime

    options = session_options(threads)
    if device.type == "cpu":
        _share_memory(options)
        # a pattern is one more block of memory for all results of a run, beside what its first run took piece by piece
        options.enable_mem_pattern = False
    # autograd's order. The default order delays the gradients of weights and keeps their inputs in memory: a GPT's
    # backward pass took 106 MB for intermediate results, with this order 78 MB (onnxruntime 1.19)
    options.execution_order = onnxruntime.ExecutionOrder.PRIORITY_BASED
    if CUDA in providers:
        options.use_deterministic_compute = torch.are_deterministic_algorithms_enabled()
    # no model is quantized: DequantizeLinear scales dropout masks and must not be fused
    options.add_session_config_entry("session.disable_quant_qdq", "1")
    if _has_float64(region):
        # the fusions of higher levels (QuickGelu, FusedMatMul, ...) have float32 kernels only (onnxruntime 1.19)
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    try:
        session = new_session(model, options, providers, device, region, stream)
    except Exception as error:  # onnxruntime's own exceptions derive from Exception directly
        raise RegionRejected(ReasonType.SESSION_FAILED, error) from error
    reason = provider_missing_reason(session, providers[0])
    if reason is None and stream is not None:
        reason = other_stream_reason(session, providers[0], device, stream)
    if reason is not None:
        raise RegionRejected(ReasonType.SESSION_FAILED, reason)
    _alive.add(session)
    return session


def _share_memory(options: "onnxruntime.SessionOptions") -> None:
    _cpu_arena()
    options.add_session_config_entry("session.use_env_allocators", "1")


@functools.cache
def _cpu_arena() -> bool:
    """Return whether the CPU sessions of this process may take memory from an arena, which their first one decides.

    Not where malloc keeps freed memory: what a session took serves torch's next tensors, and the other way round. A GPT
    took 925 MB instead of 1,019, at the same speed.
    """
    in_arena = not malloc.retained.runs
    return not share_cpu_memory(in_arena=in_arena) or in_arena


def release_cpu_memory() -> None:
    """Give the memory of the CPU sessions that no tensor uses back to the system.

    An arena keeps what its largest run took. Only a run can shrink it, of any session that uses it (onnxruntime 1.19).
    """
    if _cpu_arena():
        with suppress(Exception):  # what the program itself has registered may be no arena
            _shrink_arena()
    malloc.trim()


def _shrink_arena() -> None:
    import onnxruntime

    options = onnxruntime.RunOptions()
    options.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0")
    _negation().run(None, {"x": np.zeros(1, dtype=np.float32)}, options)


@functools.cache
def _negation() -> "onnxruntime.InferenceSession":
    import onnx
    import onnxruntime

    x, y = (onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [1]) for name in "xy")
    graph = onnx.helper.make_graph([onnx.helper.make_node("Neg", ["x"], ["y"])], "negation", [x], [y])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8)
    options = session_options(1)
    _share_memory(options)
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    _alive.add(session)
    return session


def provider_missing_reason(session: "onnxruntime.InferenceSession", provider: str) -> str | None:
    """Return why a session does not run on the requested provider, which onnxruntime replaces silently, or ``None``."""
    if session.get_providers()[0] == provider:
        return None
    return f"{provider} did not load; are its libraries installed?"


def other_stream_reason(
    session: "onnxruntime.InferenceSession", provider: str, device: torch.device, stream: torch.cuda.Stream
) -> str | None:
    """Return why a session's kernels would not be in order with torch's, from the options that it was built with."""
    options = session.get_provider_options()[provider]
    wanted = {"device_id": str(device.index or 0), "has_user_compute_stream": "1"}
    wanted["user_compute_stream"] = str(handle_of(stream))
    found = {name: options.get(name) for name in wanted}
    return None if found == wanted else f"it was built with {found}, and torch needs {wanted}"


def _has_float64(region: Region) -> bool:
    values = (value for node in region.module.graph.nodes for value in values_of(node))
    return any(isinstance(value, torch.Tensor) and value.dtype is torch.float64 for value in values)


def save(model: bytes, folder: str, name: str) -> None:
    """Write a model to ``folder/name.onnx``; log a warning if that fails."""
    path = Path(folder) / f"{name.replace('/', '.')}.onnx"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(model)
    except OSError as error:
        log.warning("ORTConfig(save_onnx_dir=%r): %s could not be written: %s", folder, path.name, error)
