"""Another executor is one class and one line in the registry: nothing else knows it."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from torch import Tensor, fx, nn
from typing_extensions import override

from lightning_ort.compiler.backend import ORTBackend, ORTFallbackError
from lightning_ort.compiler.executors import registry
from lightning_ort.compiler.executors.base import Executor
from lightning_ort.compiler.executors.ort import kernels, providers
from lightning_ort.compiler.executors.ort.conversion import GraphBuilder
from lightning_ort.compiler.executors.ort.providers import Provider
from lightning_ort.compiler.placement import timing
from lightning_ort.compiler.reason import Reason, ReasonType
from lightning_ort.compiler.regions.region import Region, RegionRejected
from lightning_ort.compiler.report import CompileReport, RegionReport

aten = torch.ops.aten
FUNCTIONS: dict[Any, Callable[..., Any]] = {aten.sin.default: np.sin, aten.neg.default: np.negative}


class NumpyExecutor(Executor):
    """Computes sines with numpy."""

    name = "numpy"
    title = "NumPy"

    @override
    def refusal(self, node: fx.Node) -> Reason | None:
        return None if node.target in FUNCTIONS else Reason(ReasonType.NO_CONVERTER, str(node.target))

    @override
    def build(self, region: Region, artifact: bytes, threads: int) -> Callable[..., list[Tensor]]:
        def run(*args: Any) -> list[Tensor]:
            values = dict(zip(region.inputs, (np.asarray(arg) for arg in args), strict=True))
            for node in region.nodes:
                values[node] = FUNCTIONS[node.target](values[node.args[0]])
            return [torch.from_numpy(values[node]) for node in region.outputs]

        return run


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "EXECUTORS", (NumpyExecutor, *registry.EXECUTORS))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(-torch.sin(self.first(x)))


def compare(backend: ORTBackend, x: Tensor) -> list[RegionReport]:
    """Compare a step with eager; return the regions of the forward graph."""
    torch._dynamo.reset()
    results = []
    for compiled in (False, True):
        module = Net()
        y = (torch.compile(module, backend=backend) if compiled else module)(x)
        y.square().sum().backward()
        results.append([y.detach(), *(parameter.grad for parameter in module.parameters())])
    torch.testing.assert_close(results[0], results[1], rtol=1e-4, atol=1e-5)
    return backend.report.graphs[0].regions


def prefer(monkeypatch: pytest.MonkeyPatch, executor: str) -> None:
    """Have an executor win against torch, and the other one lose."""
    measure = timing.measure

    def judge(name: str, *args: Any) -> Any:
        measured = measure(name, *args)
        assert measured.ms.keys() == {name, "torch"}
        measured.ms[name] = measured.ms["torch"] * (0.5 if name == executor else 2)
        return measured

    monkeypatch.setattr(timing, "measure", judge)


@pytest.mark.parametrize("dynamic", [False, True])
def test_it_runs_what_it_supports(dynamic: bool) -> None:
    backend = ORTBackend(
        {"placement": "always", "cache_dir": None, "dynamic": dynamic, "debug": {"min_region_nodes": 1}}
    )
    regions = compare(backend, torch.randn(4, 6))
    assert [region.executor for region in regions] == ["ort", "numpy", "ort"]
    assert [region.name for region in regions] == ["ort_1", "numpy_2", "ort_3"]
    assert regions[1].ops == {"aten.sin.default": 1, "aten.neg.default": 1}
    assert regions[1].runs == 1
    assert not backend.report.fallbacks
    assert "numpy_2" in backend.report.to_text(width=160)


def test_timing_decides_and_is_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    prefer(monkeypatch, "numpy")
    first, second = (ORTBackend({"debug": {"min_region_nodes": 1}}) for _ in range(2))
    x = torch.randn(4, 6)
    compare(first, x)
    monkeypatch.setattr(timing, "measure", lambda *args: pytest.fail("timed in spite of the cache"))
    compare(second, x)
    for backend, cached in ((first, False), (second, True)):
        (region,) = [region for region in backend.report.graphs[0].regions if region.executor == "numpy"]
        assert region.ms["numpy"] == pytest.approx(region.ms["torch"] / 2)
        assert region.cached is cached
        assert "numpy ms" in backend.report.to_text(width=160)
    written = json.loads(json.dumps(first.report.to_dict()))
    assert CompileReport.from_dict(written).to_dict() == written


def test_the_next_executor_takes_what_it_loses(monkeypatch: pytest.MonkeyPatch) -> None:
    prefer(monkeypatch, "ort")
    backend = ORTBackend({"cache_dir": None, "debug": {"min_region_nodes": 1}})
    regions = compare(backend, torch.randn(4, 6))
    assert [region.executor for region in regions] == ["ort"]
    assert regions[0].ops["aten.sin.default"] == 1
    assert not backend.report.fallbacks


def test_torch_takes_over_where_it_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(x: Any) -> Any:
        raise ArithmeticError("no sines today")

    monkeypatch.setitem(FUNCTIONS, aten.sin.default, fail)
    options = {"placement": "always", "cache_dir": None, "debug": {"min_region_nodes": 1}}
    backend = ORTBackend(options)
    regions = compare(backend, torch.randn(4, 6))
    assert [region.executor for region in regions] == ["ort", "torch", "ort"]
    (fallback,) = backend.report.fallbacks
    assert fallback.where == "forward_0/numpy_2"
    assert "no sines today" in str(fallback.reason)
    with pytest.raises(ORTFallbackError, match="no sines today"):
        compare(ORTBackend({**options, "fallback": "raise"}), torch.randn(4, 6))


def test_torch_takes_what_cannot_be_built(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: NumpyExecutor, *args: Any) -> Any:
        raise RegionRejected(ReasonType.SESSION_FAILED, "not built")

    monkeypatch.setattr(NumpyExecutor, "build", refuse)
    options = {"placement": "always", "cache_dir": None, "debug": {"min_region_nodes": 1, "torch_ops": ["aten.neg"]}}
    backend = ORTBackend(options)
    regions = compare(backend, torch.randn(4, 6))
    assert [(region.executor, *region.ops) for region in regions if "aten.neg.default" in region.ops] == [
        ("torch", "aten.neg.default")
    ]
    assert {region.executor for region in regions} == {"ort", "torch"}
    assert {fallback.reason.type for fallback in backend.report.fallbacks} == {ReasonType.SESSION_FAILED}


def test_what_the_user_keeps_in_torch_is_no_ones() -> None:
    options = {
        "placement": "always",
        "cache_dir": None,
        "debug": {"min_region_nodes": 1, "torch_ops": ["aten.sin", "aten.neg"]},
    }
    regions = compare(ORTBackend(options), torch.randn(4, 6))
    assert [region.executor for region in regions] == ["ort", "torch", "ort"]
    assert {reason.type for reason in regions[1].node_reasons.values()} == {ReasonType.USER}


def test_views_that_it_cannot_repeat_are_taken_in_torch() -> None:
    def function(x: Tensor) -> Tensor:
        return torch.sin(torch.sin(x + 1).t()).t() * 2

    backend = ORTBackend({"placement": "always", "cache_dir": None, "debug": {"min_region_nodes": 1}})
    x = torch.randn(4, 6)
    torch.testing.assert_close(torch.compile(function, backend=backend)(x), function(x))
    (graph,) = backend.report.graphs
    assert [region.executor for region in graph.regions] == ["ort", "numpy", "numpy", "ort"]
    assert not backend.report.fallbacks


def test_an_entry_of_the_table_makes_a_provider_the_default(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    new = Provider(tensors="cpu", by_default=True, options=lambda region, stream: {"device_type": "NPU"})
    installed = ["NewExecutionProvider", "CPUExecutionProvider"]
    for module in (providers, kernels):
        monkeypatch.setattr(module, "PROVIDERS", {installed[0]: new, **providers.PROVIDERS})
    assert kernels.providers_for(torch.device("cpu")) == ("CPUExecutionProvider",)
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: installed)
    built = []

    class Session(onnxruntime.InferenceSession):  # type: ignore[misc]
        def __init__(self, *args: Any, providers: Any, **kwargs: Any) -> None:
            built.append(dict(providers))
            super().__init__(*args, providers=["CPUExecutionProvider"], **kwargs)

        def get_providers(self) -> list[str]:
            return installed

    monkeypatch.setattr(onnxruntime, "InferenceSession", Session)
    backend = ORTBackend({"placement": "always", "cache_dir": None, "debug": {"min_region_nodes": 1}})
    compare(backend, torch.randn(4, 6))
    assert backend.report.ort_runs > 0
    assert built[-1] == {"NewExecutionProvider": {"device_type": "NPU"}, "CPUExecutionProvider": {}}
    region = next(each for each in backend.report.graphs[0].regions if each.executor == "ort")
    script = region.save_reproducer(tmp_path).read_text()
    assert "[('NewExecutionProvider', {'device_type': 'NPU'}), ('CPUExecutionProvider', {})]" in script


def test_a_plug_in_gets_its_options(monkeypatch: pytest.MonkeyPatch) -> None:
    device, given = SimpleNamespace(ep_name="PlugIn"), []
    options = SimpleNamespace(add_provider_for_devices=lambda *args: given.append(args))
    monkeypatch.setattr(onnxruntime, "get_ep_devices", lambda: [device], raising=False)
    monkeypatch.setattr(onnxruntime, "InferenceSession", lambda *args, **kwargs: None)
    monkeypatch.setattr(kernels, "provider_of", lambda name: Provider(options=lambda *args: {"device_type": "NPU"}))
    kernels.new_session(b"", options, ["PlugIn"], torch.device("cpu"), Region)
    assert given == [([device], {"device_type": "NPU"})]


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (("CPUExecutionProvider",), True),
        (("OpenVINOExecutionProvider", "CPUExecutionProvider"), True),  # which gets what OpenVINO has no kernel for
        (("TensorrtExecutionProvider", "CUDAExecutionProvider", "CPUExecutionProvider"), False),
        (("CUDAExecutionProvider",), False),
    ],
)
def test_regions_are_converted_for_kernels_of_the_cpu_that_may_run_them(names: tuple[str, ...], expected: bool) -> None:
    assert GraphBuilder(kernels.Kernels("auto", names)).on_cpu is expected
