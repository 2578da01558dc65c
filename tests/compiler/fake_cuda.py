"""The CUDA path without a GPU: graphs traced on the CPU and moved to fake CUDA tensors, and a provider that records.

What the provider answers is what onnxruntime-gpu 1.31.1 answered when its models of one node were loaded.
"""

import copy
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from types import SimpleNamespace
from typing import Any

import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto
from ort_settings import config_of
from torch import fx
from torch._subclasses import FakeTensorMode
from torch.utils._pytree import tree_flatten, tree_map

from lightning_ort.compat.torch_graphs import boxed, fake_mode_of
from lightning_ort.compiler.backend import ORTBackend
from lightning_ort.compiler.compilation import Compilation
from lightning_ort.compiler.executors.ort import kernels

CUDA = torch.device("cuda", 0)
_Session = onnxruntime.InferenceSession

_NEVER = "Cosh Sinh Acos Acosh Asin Asinh Atanh Tan Atan"
_BFLOAT16 = (
    "Ceil Elu Floor LeakyRelu Log LogSoftmax Reciprocal Round NonZero Equal Less Greater LessOrEqual GreaterOrEqual"
    " ReduceMax ReduceMin ReduceProd ConvTranspose MaxPool GlobalAveragePool Pad CumSum Range TopK ArgMax ArgMin Clip"
    " Resize DequantizeLinear EyeLike Einsum"
)
# by the dtype of a node's inputs: operators of opset 18 without a CUDA kernel
MISSING: dict[int, set[str]] = {
    TensorProto.FLOAT: {*_NEVER.split()},
    TensorProto.FLOAT16: {*_NEVER.split(), "IsInf", "Range", "DequantizeLinear", "EyeLike"},
    TensorProto.BFLOAT16: {
        *_NEVER.split(),
        *_BFLOAT16.split(),
        *("Cos", "Sin", "Softplus", "HardSigmoid", "IsInf", "Conv", "AveragePool"),
    },
}
SCATTERED = (TensorProto.FLOAT, TensorProto.FLOAT16)  # what ScatterND reduces


class Stream:
    """A CUDA stream: its number, and for whom it waited and what ran, in order."""

    def __init__(self, number: int, log: list[Any]) -> None:
        self.cuda_stream = number
        self.log = log

    def wait_stream(self, other: "Stream") -> None:
        self.log.append((self.cuda_stream, "waits for", other.cuda_stream))

    def synchronize(self) -> None:
        self.log.append((self.cuda_stream, "is waited for"))


class FakeCuda:
    """A GPU with its current device and stream, and an onnxruntime that has the CUDA provider and records sessions."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[Any] = []
        self.default = self.current = Stream(0, self.log)
        self.device = 0
        self.sessions: list[Session] = []
        self.probes: list[Session] = []
        Session.cuda = self
        patch = monkeypatch.setattr
        patch(onnxruntime, "get_available_providers", lambda: ["CUDAExecutionProvider", "CPUExecutionProvider"])
        patch(onnxruntime, "InferenceSession", Session)
        patch(torch.cuda, "current_stream", lambda device=None: self.current)
        patch(torch.cuda, "device", lambda device: Current(self, torch.device(device).index or 0))
        patch(kernels, "binds_bfloat16", lambda: True)
        patch(kernels, "_load_errors", {})
        patch(kernels, "_has_training_kernel", lambda op, providers, device: False)

    def options(self, session: "Session") -> dict[str, str]:
        return {"device_id": "0", **dict(session.configured)["CUDAExecutionProvider"]}  # its default


class Current:
    """``torch.cuda.device``."""

    def __init__(self, cuda: FakeCuda, index: int) -> None:
        self.cuda, self.index = cuda, index

    def __enter__(self) -> None:
        self.before, self.cuda.device = self.cuda.device, self.index

    def __exit__(self, *exc_info: object) -> None:
        self.cuda.device = self.before


class Session:
    """``onnxruntime.InferenceSession`` on CUDA: it records how it was built, with the kernels of 1.31.1."""

    cuda: FakeCuda

    def __new__(cls, model: Any, options: Any = None, providers: Any = (), **kwargs: Any) -> Any:
        configured = [entry if isinstance(entry, tuple) else (entry, {}) for entry in providers]
        if "CUDAExecutionProvider" not in dict(configured):
            return _Session(model, options, providers=providers, **kwargs)
        self = super().__new__(cls)
        self.model = onnx.ModelProto.FromString(model)
        self.settings, self.configured = options, configured
        self.built_on = cls.cuda.device
        cls.cuda.device = int(dict(configured)["CUDAExecutionProvider"].get("device_id", 0))  # and leaves it so
        alone = len(configured) == 1
        (cls.cuda.probes if alone else cls.cuda.sessions).append(self)
        onnx.checker.check_model(self.model, full_check=True)  # types too, which onnxruntime refuses to mix
        if missing := self.without_kernel():
            if not alone:
                raise AssertionError(f"{missing} would run on the CPU")
            if options.get_session_config_entry("session.disable_cpu_ep_fallback") == "1":
                raise RuntimeError("This session contains graph nodes that are assigned to the default CPU EP")
        return self

    def without_kernel(self) -> list[str]:
        graph = onnx.shape_inference.infer_shapes(self.model).graph
        types = {value.name: value.type.tensor_type.elem_type for value in (*graph.input, *graph.value_info)}
        types |= {constant.name: constant.data_type for constant in graph.initializer}
        return [
            node.op_type
            for node in graph.node
            if any(node.op_type in MISSING.get(types.get(name, 0), ()) for name in node.input)
            # it loads in any dtype, and fails when it runs
            or (node.op_type == "ScatterND" and node.attribute and types[node.input[0]] not in SCATTERED)
        ]

    def get_providers(self) -> list[str]:
        return [name for name, _ in self.configured]

    def get_provider_options(self) -> dict[str, dict[str, str]]:
        found = {name: dict(options) for name, options in self.configured}
        on_cuda = found["CUDAExecutionProvider"] = {"device_id": "0", **found["CUDAExecutionProvider"]}
        # as in CUDAExecutionProviderInfo: a stream of number 0 is none
        on_cuda["has_user_compute_stream"] = str(int(on_cuda.get("user_compute_stream", "0") != "0"))
        return found

    def get_inputs(self) -> Sequence[Any]:
        return self.model.graph.input

    def io_binding(self) -> Any:
        self.bound: list[tuple[Any, ...]] = []
        note = lambda *args: self.bound.append(args)  # noqa: E731
        return SimpleNamespace(_iobinding=SimpleNamespace(bind_input=note, bind_output=note))

    @property
    def _sess(self) -> Any:
        def run(binding: Any, options: Any) -> None:
            self.cuda.device = int(dict(self.configured)["CUDAExecutionProvider"].get("device_id", 0))
            self.cuda.log.append((self, "runs"))

        return SimpleNamespace(run_with_iobinding=run)


def on_cuda(value: Any, mode: FakeTensorMode) -> Any:
    """A fake tensor as it would be on the GPU; anything else as it is."""
    if not isinstance(value, torch.Tensor):
        return value
    with fake_mode_of(value) or mode:
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=CUDA)


def move_to_cuda(gm: fx.GraphModule) -> None:
    """Change a graph that was traced on the CPU to the one of the same step on the GPU, with the results it has there.

    Some have other shapes, such as the statistics of a batch norm in eval mode.
    """
    before = tree_flatten([node.meta.get("val") for node in gm.graph.nodes])[0]
    modes = (fake_mode_of(value) for value in before if isinstance(value, torch.Tensor))
    mode = next((mode for mode in modes if mode is not None), None) or FakeTensorMode()
    for node in gm.graph.nodes:
        if "device" in node.kwargs:
            node.kwargs = {**node.kwargs, "device": CUDA}
        if "val" not in node.meta:
            continue
        node.meta["val"] = tree_map(lambda value: on_cuda(value, mode), node.meta["val"])
        if node.op == "call_function" and "cpu" not in str(node.target):
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda source: source.meta["val"])
            with mode, suppress(RuntimeError):  # a few ask for CUDA itself
                node.meta["val"] = node.target(*args, **kwargs)


class CudaCompilation(Compilation):
    """Compiles each graph as if its tensors were on the GPU, and runs it on the CPU in torch."""

    def compile_graph(self, kind: str, gm: fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        as_traced = copy.deepcopy(gm)
        move_to_cuda(gm)
        placeholders = gm.graph.find_nodes(op="placeholder")
        super().compile_graph(kind, gm, [node.meta["val"] for node in placeholders])
        return self.monitor.watch(boxed(as_traced.forward))


class CudaBackend(ORTBackend):
    """A backend of these."""

    compilation = CudaCompilation

    def __init__(self, **settings: Any) -> None:
        super().__init__(config_of(**{"placement": "always", "cache_dir": None, **settings}))


def run_op(function: Any, *inputs: torch.Tensor, **settings: Any) -> Any:
    backend = CudaBackend(min_region_nodes=1, **settings)
    with torch.no_grad():
        torch.compile(lambda *args: function(*args), backend=backend)(*inputs)
    return backend.report


def autocast(dtype: torch.dtype | None) -> Any:
    return nullcontext() if dtype is None else torch.autocast("cpu", dtype=dtype)
