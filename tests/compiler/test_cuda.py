"""CUDA without a GPU: what every region becomes, how its session is built, and how its runs are ordered with torch's.

On a GPU: ``tests/strategies/test_gpu.py``.
"""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import onnx_ir as ir
import pytest
import torch
import torch.nn.functional as F
from packaging.version import Version
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

from lightning_ort import ORTConfig
from lightning_ort.compiler import fingerprint
from lightning_ort.compiler.cache import Cache
from lightning_ort.compiler.executors.ort import cuda_graphs, kernels, session, streams, support
from lightning_ort.compiler.executors.ort.executor import OrtExecutor
from lightning_ort.compiler.executors.ort.streams import OrderedRun
from lightning_ort.compiler.regions import Region
from lightning_ort.compiler.report import ReasonType
from lightning_ort.onnx_export.session import OnnxSession, Value
from tests.compiler.fake_cuda import CUDA, CudaBackend, FakeCuda, Stream, autocast
from tests.strategies.parity_models import BERT, CLASSES, CNN, GPT, MLP, Block


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    return FakeCuda(monkeypatch)


class ViT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 32, 4, 4)
        self.first, self.places = nn.Parameter(torch.zeros(1, 1, 32)), nn.Parameter(torch.zeros(1, 17, 32))
        self.blocks = nn.ModuleList(Block(32, 4, dropout=0.1) for _ in range(2))
        self.head = nn.Linear(32, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.first.expand(len(x), -1, -1), tokens], 1) + self.places
        mask = torch.zeros(17, 17, dtype=torch.bool, device=x.device)
        for block in self.blocks:
            x = block(x, mask)
        return self.head(x[:, 0])


def step_of(kind: Any) -> tuple[nn.Module, Any, tuple[Tensor, ...]]:
    """A module, its loss, and a batch."""
    module, labels = kind(), torch.zeros(2, dtype=torch.long)
    if kind is GPT:
        tokens = torch.zeros(2, 12, dtype=torch.long)
        return module, lambda x: F.cross_entropy(module(x).flatten(0, 1), x.flatten()), (tokens,)
    if kind is BERT:
        return (
            module,
            lambda x, y: module.bert(input_ids=x, labels=y).loss,
            (torch.zeros(2, 8, dtype=torch.long), labels),
        )
    shape = (3, 16, 16) if kind is ViT else kind.shape
    return module, lambda x, y: F.cross_entropy(module(x), y), (torch.randn(2, *shape), labels)


@pytest.mark.parametrize("precision", ["32-true", "16-true", "bf16-true", "16-mixed", "bf16-mixed"])
@pytest.mark.parametrize("kind", [GPT, BERT, ViT, CNN, MLP], ids=lambda kind: kind.__name__)
def test_every_region_converts(kind: Any, precision: str, cuda: FakeCuda, caplog: pytest.LogCaptureFixture) -> None:
    if kind is BERT:
        pytest.importorskip("transformers")
    dtype = {"16": torch.float16, "bf": torch.bfloat16}.get(precision[:2])
    is_true = precision.endswith("true")
    module, loss_of, batch = step_of(kind)
    if dtype is not None and is_true:
        module.to(dtype)
        batch = tuple(x.to(dtype) if x.is_floating_point() else x for x in batch)
    backend = CudaBackend()
    with autocast(None if is_true else dtype):
        loss = torch.compile(loss_of, backend=backend)(*batch)
    loss.backward()
    report = backend.report
    assert not report.fallbacks
    assert not [record for record in caplog.records if record.levelname == "WARNING"]
    regions = [region for graph in report.graphs for region in graph.regions if region.executor == "ort"]
    assert len(cuda.sessions) == len(regions) >= 2  # forward and backward; each model went through the checker
    reasons = [reason for graph in report.graphs for region in graph.regions for reason in region.node_reasons.values()]
    allowed = {ReasonType.BETTER_IN_TORCH, ReasonType.RANDOM, ReasonType.NO_KERNEL, ReasonType.NO_CONVERTER}
    assert {reason.type for reason in reasons} <= allowed | {ReasonType.TOO_SMALL, ReasonType.UNSUPPORTED_ARGUMENTS}
    assert report.ort_node_fraction > 0.6


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_batch_norm_of_varying_batches(dtype: torch.dtype, cuda: FakeCuda) -> None:
    module, backend = nn.Sequential(nn.Conv1d(2, 4, 3), nn.BatchNorm1d(4), nn.ReLU()), CudaBackend(dynamic=True)
    with autocast(dtype):
        torch.compile(module, backend=backend, dynamic=True)(torch.randn(3, 2, 8)).sum().backward()
    on_ort = {
        op
        for graph in backend.report.graphs
        for region in graph.regions
        if region.executor == "ort"
        for op in region.ops
    }
    assert {"aten._native_batch_norm_legit_functional.default", "aten.native_batch_norm_backward.default"} <= on_ort
    assert not backend.report.fallbacks


# single operations


def region_ops(model: Any) -> list[str]:
    return [node.op_type for node in model.graph.node]


def run_op(function: Any, *inputs: Tensor, **settings: Any) -> Any:
    backend = CudaBackend(min_region_nodes=1, **settings)
    with torch.no_grad():
        torch.compile(lambda *args: function(*args), backend=backend)(*inputs)
    return backend.report


HALF = [torch.float16, torch.bfloat16]


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.eq(0.5) | (x < 1),
        lambda x: x**1.5,
        lambda x: torch.maximum(x, x * 2) + torch.minimum(x, x / 3),
        lambda x: (x.gelu() if hasattr(x, "gelu") else F.gelu(x)) + F.gelu(x, approximate="tanh"),
        lambda x: F.silu(x) * x.sigmoid() + x.tanh(),
        lambda x: x.clamp(-1, 1) / 3 + (x.abs() + 1).log(),
        lambda x: x.amax(1) + x.argmax(1) + x.sort().values[:, 0],
        lambda x: F.softplus(x).cumsum(1).round() + F.pad(x, (1, 0))[:, 1:],
        lambda x: x.isinf() | x.isnan(),
    ],
)
def test_half_types(function: Any, dtype: torch.dtype, cuda: FakeCuda) -> None:
    report = run_op(function, torch.randn(4, 8).to(dtype))
    assert not report.fallbacks
    assert report.ort_node_fraction == 1, report.to_text()
    assert len(cuda.sessions) == 1


@pytest.mark.parametrize("dtype", HALF)
def test_log_softmax_is_computed_in_float32(dtype: torch.dtype, cuda: FakeCuda) -> None:
    report = run_op(lambda x: F.log_softmax(x, -1), torch.randn(4, 8).to(dtype))
    (session,) = cuda.sessions
    assert region_ops(session.model) == ["Cast", "LogSoftmax", "Cast"]
    assert not report.fallbacks


@pytest.mark.parametrize(("newest", "opsets"), [(22, [22]), (18, [])])
def test_a_convolution_of_bfloat16_needs_a_newer_opset(
    newest: int, opsets: list[int], cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "_reads_opset", lambda number: number <= newest)
    conv = nn.Conv2d(2, 3, 3).bfloat16()
    report = run_op(lambda x: conv(x).relu(), torch.randn(1, 2, 5, 5).bfloat16(), torch_ops=["aten.relu"])
    assert [model.opset_import[0].version for model in (session.model for session in cuda.sessions)] == opsets
    assert not report.fallbacks
    conv = nn.Conv2d(2, 3, 3)
    cuda.sessions.clear()
    run_op(lambda x: conv(x).relu(), torch.randn(1, 2, 5, 5), torch_ops=["aten.relu"])
    assert [session.model.opset_import[0].version for session in cuda.sessions] == [18]


def test_onnxruntime_that_cannot_bind_bfloat16(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "binds_bfloat16", lambda: False)
    report = run_op(lambda x: x.relu() + 1, torch.randn(4).bfloat16())
    assert not cuda.sessions
    assert not report.fallbacks
    reasons = [reason for region in report.graphs[0].regions for reason in region.node_reasons.values()]
    assert {reason.type for reason in reasons} == {ReasonType.DTYPE}
    assert all("cannot bind a tensor of bfloat16" in reason.text for reason in reasons)


def test_an_op_without_a_cuda_kernel_stays_in_torch(cuda: FakeCuda) -> None:
    report = run_op(lambda x: x.relu().acos(), torch.randn(4))
    assert all(dict(probe.configured).keys() == {"CUDAExecutionProvider"} for probe in cuda.probes)
    (region,) = (region for region in report.graphs[0].regions if region.executor == "torch")
    assert region.ops == {"aten.acos.default": 1}
    assert region.reason is not None
    assert region.reason.type is ReasonType.NO_KERNEL


def test_results_on_the_cpu_stay_in_torch(cuda: FakeCuda) -> None:
    x = torch.empty(3, device="meta")
    graph = torch.fx.Graph()
    node = graph.call_function(torch.ops.aten.relu.default, (graph.placeholder("x"),))
    for each in graph.nodes:
        each.meta["val"] = torch.zeros(3) if each is node else x
    available = kernels.Kernels("auto", ("CUDAExecutionProvider", "CPUExecutionProvider"), CUDA)
    answer = support.check(node, available)
    assert answer.reason is not None
    assert answer.reason.type is ReasonType.DEVICE


# sessions


def build_one(cuda: FakeCuda, function: Any = lambda x: x.relu() + 1, **settings: Any) -> Any:
    run_op(function, torch.randn(4, 4), **settings)
    return cuda.sessions[-1]


def test_torchs_default_stream_has_a_name(cuda: FakeCuda) -> None:
    options = cuda.options(build_one(cuda))
    assert (options["user_compute_stream"], options["device_id"]) == ("1", "0")


def test_a_stream_that_onnxruntime_did_not_take_is_refused(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "LEGACY_STREAM", 0)  # as it was
    report = run_op(lambda x: x.relu() + 1, torch.randn(4, 4))
    (fallback,) = report.fallbacks
    assert fallback.reason.type is ReasonType.SESSION_FAILED
    assert "'has_user_compute_stream': '0'" in fallback.reason.text


def relu_model() -> ir.Model:
    float32, shape = ir.TensorType(ir.DataType.FLOAT), ir.Shape([1])
    node = ir.node("Relu", [ir.Value(name="i0", type=float32, shape=shape)])
    node.outputs[0].name, node.outputs[0].type, node.outputs[0].shape = "o0", float32, shape
    return ir.Model(
        ir.Graph(node.inputs, node.outputs, nodes=[node], opset_imports={"": 18}, name="relu"), ir_version=10
    )


@pytest.mark.parametrize("current", [0, 1])
def test_probes_are_on_the_device_and_leave_the_current_one(current: int, cuda: FakeCuda) -> None:
    cuda.device, device = current, torch.device("cuda", 1)
    assert OrtExecutor(ORTConfig(), device).kernels.missing(relu_model()) is None
    (probe,) = cuda.probes
    assert cuda.options(probe)["device_id"] == "1"
    assert (probe.built_on, cuda.device) == (1, current)


def test_one_thread_is_enough_on_a_gpu(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    region = Region("ort", 1)
    assert [variant.threads for variant in OrtExecutor(ORTConfig(), CUDA).variants(region)] == [1]
    assert [variant.threads for variant in OrtExecutor(ORTConfig(), torch.device("cpu")).variants(region)] == [1, 8]


@pytest.mark.parametrize(
    ("ops", "matmul", "conv", "expected"),
    [
        (["mm"], "tf32", "ieee", "1"),
        (["mm"], "ieee", "tf32", "0"),
        (["convolution"], "ieee", "tf32", "1"),
        (["convolution"], "tf32", "ieee", "0"),
        (["convolution", "mm"], "ieee", "tf32", "0"),
        (["convolution", "mm"], "tf32", "tf32", "1"),
    ],
)
def test_tf32_follows_torchs_two_settings(
    ops: list[str], matmul: str, conv: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    backends = SimpleNamespace(
        cuda=SimpleNamespace(matmul=SimpleNamespace(fp32_precision=matmul)),
        cudnn=SimpleNamespace(conv=SimpleNamespace(fp32_precision=conv)),
    )
    monkeypatch.setattr(torch, "backends", backends)
    graph = torch.fx.Graph()
    for name in ops:
        graph.call_function(getattr(torch.ops.aten, name).default)
    region = Region("ort", 1)
    region.module = SimpleNamespace(graph=graph)  # type: ignore[assignment]
    assert session._cuda_options(region, Stream(5, []), records=False)["use_tf32"] == expected  # type: ignore[arg-type]


# runs


def ordered(cuda: FakeCuda) -> OrderedRun:
    return OrderedRun(lambda: cuda.log.append("run"), CUDA, cuda.default)  # type: ignore[arg-type]


def test_on_the_stream_of_the_session_nobody_waits(cuda: FakeCuda) -> None:
    ordered(cuda)()
    assert cuda.log == ["run"]


def test_on_another_stream_both_sides_wait(cuda: FakeCuda) -> None:
    run = ordered(cuda)
    cuda.current = Stream(9, cuda.log)
    run()
    assert cuda.log == [(0, "waits for", 9), "run", (9, "waits for", 0)]


def test_a_run_leaves_torchs_current_device(cuda: FakeCuda) -> None:
    def run() -> None:
        cuda.device = 0  # as onnxruntime does

    cuda.device = 3
    OrderedRun(run, CUDA, cuda.default)()  # type: ignore[arg-type]
    assert cuda.device == 3


# CUDA graphs


def test_older_builds_and_pinning_threads_record_nothing(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cuda_graphs.unsupported_reason(CUDA) is None
    monkeypatch.setattr(cuda_graphs, "pins_memory", lambda: True)
    assert "pins memory" in str(cuda_graphs.unsupported_reason(CUDA))
    executor = OrtExecutor(ORTConfig(cuda_graphs=True), CUDA)
    monkeypatch.setattr(cuda_graphs, "can_record", lambda region: True)
    assert len(executor.variants(Region("ort", 1))) == 1
    monkeypatch.setattr(cuda_graphs, "pins_memory", lambda: False)
    assert len(executor.variants(Region("ort", 1))) == 2
    monkeypatch.setattr(cuda_graphs, "installed_version", lambda: Version("1.19.2"))
    assert "waits for the GPU after each replay" in str(cuda_graphs.unsupported_reason(CUDA))


def test_a_recording_has_its_own_stream(cuda: FakeCuda) -> None:
    build_one(cuda, cuda_graphs=True, intra_op_threads=1)
    plain, recorded = map(cuda.options, cuda.sessions)
    assert (plain["enable_cuda_graph"], plain["user_compute_stream"]) == ("0", "1")
    assert (recorded["enable_cuda_graph"], recorded["user_compute_stream"]) == ("1", "77")


# what is kept


def test_times_are_those_of_a_gpu_its_driver_and_its_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    name = Cache(ORTConfig(cache_dir=None)).name("graph", ("ort",))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    names: list[str] = []
    for gpus, matmul in ((("A", "1"), "ieee"), (("B", "1"), "ieee"), (("B", "2"), "ieee"), (("B", "2"), "tf32")):
        monkeypatch.setattr(fingerprint, "_gpus", lambda gpus=gpus: gpus)
        monkeypatch.setattr(torch.backends.cuda, "matmul", SimpleNamespace(fp32_precision=matmul))
        names.append(Cache(ORTConfig(cache_dir=None)).name("graph", ("ort",)))
    assert len({name, *names}) == 5


def test_plug_ins_are_providers_too(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    device = SimpleNamespace(ep_name="PlugInExecutionProvider")
    monkeypatch.setattr(kernels, "ep_devices", lambda: {"PlugInExecutionProvider": [device]})
    assert kernels.available_providers()[-1] == "PlugInExecutionProvider"
    kernels.check_config(ORTConfig(providers=("CPUExecutionProvider",)))
    with pytest.raises(ValueError, match="PlugInExecutionProvider"):
        kernels.check_config(ORTConfig(providers=("OtherExecutionProvider",)))
    added: list[Any] = []
    monkeypatch.setattr("onnxruntime.InferenceSession", lambda *args, **kwargs: args)
    options = SimpleNamespace(add_provider_for_devices=lambda *args: added.append(args))
    kernels.new_session(b"", options, ("PlugInExecutionProvider",), torch.device("cpu"))  # type: ignore[arg-type]
    assert added == [([device], {})]


# a model for prediction


def test_a_predictor_binds_tensors_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[Any] = []
    found = object.__new__(OnnxSession)
    binding = SimpleNamespace(
        bind_input=lambda *args: log.append(("input", *args[:3])),
        bind_output=lambda *args: log.append(("output", *args[:3])),
        get_outputs=lambda: [None],
    )
    found._session = SimpleNamespace(
        io_binding=lambda: binding,
        run_with_iobinding=lambda binding: log.append("run"),
        get_provider_options=lambda: {"CUDAExecutionProvider": {"device_id": "0"}},
    )
    found.providers, found._structure, found._used = ("CUDAExecutionProvider",), "y", {"x"}
    found.inputs = (Value("x", torch.float32, (2, 3)),)
    found.outputs = (Value("y", torch.float32, (2, 3)),)
    assert found._memory_for(torch.device("cuda", 1)) == torch.device("cpu")  # another GPU's
    assert found._memory_for(torch.device("cpu")) == torch.device("cpu")
    stream = SimpleNamespace(synchronize=lambda: log.append("torch is done"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    with FakeTensorMode(), monkeypatch.context() as context:
        context.setattr(torch.Tensor, "data_ptr", lambda self: 0)
        result = found({"x": torch.empty(2, 3, device="cuda")})
    assert result.device == CUDA
    assert log == [("input", "x", "cuda", 0), ("output", "y", "cuda", 0), "torch is done", "run"]
