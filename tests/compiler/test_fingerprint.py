"""Texts by which graphs and nodes are recognized."""

import sys
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from lightning_ort import ORTConfig
from lightning_ort.compiler import engines
from lightning_ort.compiler.backend import ORTBackend
from lightning_ort.compiler.cache.fingerprint import captured_fingerprint, node_fingerprint, program, software
from lightning_ort.compiler.executors.ort import support

X, Y = torch.randn(3, 4), torch.randn(4, 4)


def node_of(function: Any, *inputs: torch.Tensor) -> str:
    return node_fingerprint(list(make_fx(function)(*inputs).graph.nodes)[-2])


def test_equal_nodes_of_different_places_have_one_fingerprint() -> None:
    wanted = node_of(lambda x: x.relu() + 1, X)
    assert node_of(lambda x: x + 1, X) == wanted
    assert node_of(lambda x: x.sigmoid().relu() + 1, X) == wanted


@pytest.mark.parametrize(
    "other",
    [
        lambda x: x + 2,
        lambda x: x - 1,
        lambda x: x.double() + 1,
        lambda x: x.t() + 1,
        lambda x: x[:2] + 1,
        lambda x: x + x,
    ],
)
def test_other_nodes_have_another(other: Any) -> None:
    assert node_of(other, X) != node_of(lambda x: x + 1, X)


def test_a_view_among_the_inputs_is_told_from_its_base() -> None:
    texts = {
        node_of(function, Y)
        for function in (
            lambda y: y.relu().mm(y.sigmoid()),
            lambda y: y.t().mm(y),
            lambda y: y.mm(y.t()),
            lambda y: y.mm(y),
            lambda y: y.t().mm(y.t()),
            lambda y: y.t().mm(y.t().t()),
        )
    }
    assert len(texts) == 6


def test_equal_nodes_are_asked_about_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[fx.Node] = []
    check = support.check
    monkeypatch.setattr(support, "check", lambda node, kernels: asked.append(node) or check(node, kernels))
    layers = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh()) for _ in range(6)))
    backend = ORTBackend(ORTConfig(placement="always", cache_dir=None))
    torch.compile(layers, backend=backend)(torch.randn(4, 8)).sum().backward()
    assert backend.report.ort_runs == 2
    nodes = sum(graph.num_nodes for graph in backend.report.graphs)
    assert nodes > 30
    assert len(asked) < nodes


def captured(function: Any, *inputs: Any, **modes: Any) -> str | None:
    texts = []

    def backend(gm: fx.GraphModule, example_inputs: Any) -> Any:
        texts.append(captured_fingerprint(gm.graph, example_inputs))
        return gm.forward

    torch._dynamo.reset()
    torch.compile(function, backend=backend)(*inputs)
    (text,) = texts
    return text


def test_captured_graphs_are_told_apart_by_calls_inputs_and_modes() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.gelu(x) + 1

    first = captured(function, X)
    assert first is not None
    assert captured(lambda y: torch.nn.functional.gelu(y) + 1, torch.zeros(3, 4)) == first
    texts = {first, captured(lambda x: torch.nn.functional.gelu(x) + 2, X), captured(function, X.double())}
    texts |= {captured(function, Y), captured(function, X.clone().requires_grad_())}
    with torch.no_grad():
        texts.add(captured(function, X))
    with torch.autocast("cpu"):
        texts.add(captured(function, X))
    # what torch traces otherwise, or may, though the graph is the same
    texts |= {captured(function, torch.zeros(13)[1:].view(3, 4)), captured(function, torch.nn.Parameter(X))}
    with torch.backends.mkldnn.flags(enabled=False):
        texts.add(captured(function, X))
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        texts.add(captured(function, X))
    torch.use_deterministic_algorithms(True)
    texts.add(captured(function, X))
    torch.use_deterministic_algorithms(False)
    torch.set_default_dtype(torch.float64)
    texts.add(captured(function, X))
    torch.set_default_dtype(torch.float32)
    assert len(texts) == 13


def test_a_graph_with_a_constant_tensor_has_none() -> None:
    graph = fx.Graph()
    graph.output(graph.get_attr("constant"))
    assert captured_fingerprint(graph, []) is None


@pytest.mark.parametrize("name", ["pointwise.py", "backend.py"])
def test_a_changed_source_of_the_compiler_is_other_software(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    read = Path.read_bytes
    before = software.__wrapped__()
    assert software.__wrapped__() == before
    monkeypatch.setattr(Path, "read_bytes", lambda self: read(self) + b"\n" * (self.name == name))
    assert software.__wrapped__() != before


def test_another_version_of_an_engine_is_other_software(monkeypatch: pytest.MonkeyPatch) -> None:
    before = software.__wrapped__()
    monkeypatch.setitem(engines.ENGINES, "new", engines.Engine(label="new", package="packaging"))
    assert metadata.version("packaging") in set(software.__wrapped__()) - set(before)


@pytest.mark.parametrize(
    ("folder", "counts"),
    [("project", True), ("lib/site-packages/package", False), ("lib/dist-packages/package", False)],
)
def test_a_program_is_its_own_files(folder: str, counts: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not those of packages, wherever they are installed."""
    before = program([*sys.modules.values()])
    file = tmp_path / folder / "models.py"
    file.parent.mkdir(parents=True)
    file.write_text("")
    module = ModuleType("models")
    module.__file__ = str(file)
    monkeypatch.setitem(sys.modules, "models", module)
    loaded = program([*sys.modules.values()])
    file.write_text("changed = True")
    assert (loaded != before, program([*sys.modules.values()]) != loaded) == (counts, counts)
