"""CUDA without a GPU: what every region becomes; its session and runs are in ``test_cuda_sessions.py``.

On a GPU: ``tests/strategies/test_gpu.py``.
"""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

from lightning_ort.compiler.executors.ort import kernels, support
from lightning_ort.compiler.reason import ReasonType
from tests.compiler.fake_cuda import CUDA, CudaBackend, FakeCuda, autocast, run_op
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


PRECISIONS = ("32-true", "16-true", "bf16-true", "16-mixed", "bf16-mixed")


@pytest.mark.parametrize(
    ("kind", "precision"),
    [
        *((kind, precision) for kind in (GPT, CNN) for precision in PRECISIONS),
        *((kind, "bf16-mixed") for kind in (BERT, ViT, MLP)),
        *(pytest.param(kind, each, marks=pytest.mark.slow) for kind in (BERT, ViT, MLP) for each in PRECISIONS[:-1]),
    ],
)
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


@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
def test_a_layer_norm_is_computed_in_parts(dtype: torch.dtype, cuda: FakeCuda) -> None:
    norm = nn.LayerNorm(8).to(dtype)
    backend = CudaBackend(min_region_nodes=1)
    torch.compile(norm, backend=backend)(torch.randn(2, 4, 8, dtype=dtype, requires_grad=True))
    assert not backend.report.fallbacks
    assert "LayerNormalization" not in region_ops(cuda.sessions[0].model)


def test_a_convolution_of_bfloat16_stays_in_torch(cuda: FakeCuda) -> None:
    for dtype, sessions in ((torch.bfloat16, 0), (torch.float32, 1)):
        conv = nn.Conv2d(2, 3, 3).to(dtype)
        report = run_op(lambda x, conv=conv: conv(x), torch.randn(1, 2, 5, 5).to(dtype))
        assert len(cuda.sessions) == sessions
        assert not report.fallbacks


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
    assert not report.fallbacks
    assert all(dict(probe.configured).keys() == {"CUDAExecutionProvider"} for probe in cuda.probes)
    entry = "session.disable_cpu_ep_fallback"
    assert all(probe.settings.get_session_config_entry(entry) == "1" for probe in cuda.probes)
    (region,) = (region for region in report.graphs[0].regions if region.executor == "torch")
    assert region.ops == {"aten.acos.default": 1}
    assert region.reason is not None
    assert region.reason.type is ReasonType.NO_KERNEL


@pytest.mark.parametrize(
    ("function", "in_torch"),
    [
        (lambda x: (x + torch.arange(4), torch.arange(4)), {"arange"}),
        (lambda x: (x + 1, torch.zeros_like(x)), {"full_like"}),
        (lambda x: (x + 1, x.new_ones(4, 4).tril() > 0), {"full", "tril", "gt", "where", "sub", "le", "arange", "ge"}),
        (lambda x: (x + torch.arange(4).view(1, 4), torch.arange(4).view(4, 1)), {"arange"}),
        (lambda x: (x + torch.arange(4),), set()),
        (lambda x: (x + 1, x.view(-1)), set()),
    ],
)
def test_a_constant_is_no_result_of_a_session(function: Any, in_torch: set[str], cuda: FakeCuda) -> None:
    """It would be copied to the GPU in each run, which waits for that; ONNX Runtime may still use it itself."""
    report = run_op(function, torch.randn(4, 4))
    assert not report.fallbacks
    (session,) = cuda.sessions
    model = session.model.graph
    made_from = {value.name for value in model.input}
    for node in model.node:
        if made_from.intersection(node.input):
            made_from.update(node.output)
    assert {value.name for value in model.output} <= made_from
    regions = [region for region in report.graphs[0].regions if region.executor == "torch"]
    ops = {name.split(".")[1] for region in regions for name in region.ops}
    assert ops <= in_torch
    assert bool(ops) == bool(in_torch)


@pytest.mark.parametrize("shape", [(3,), ()])
def test_results_on_the_cpu_stay_in_torch(shape: tuple[int, ...], cuda: FakeCuda) -> None:
    with FakeTensorMode():
        x = torch.empty(shape, device=CUDA)
    graph = torch.fx.Graph()
    node = graph.call_function(torch.ops.aten.relu.default, (graph.placeholder("x"),))
    for each in graph.nodes:
        each.meta["val"] = torch.zeros(shape) if each is node else x
    available = kernels.Kernels("auto", ("CUDAExecutionProvider", "CPUExecutionProvider"), CUDA)
    answer = support.check(node, available)
    assert answer is not None
    assert answer.type is ReasonType.DEVICE
    node.meta["val"], node.args[0].meta["val"] = x, torch.zeros(shape)  # a number on the CPU may be read
    assert (support.check(node, available) is None) == (shape == ())
