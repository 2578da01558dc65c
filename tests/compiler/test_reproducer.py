"""``save_reproducer`` writes a script that runs one region alone, in another process."""

import copy
import gc
import json
import pickle
import re
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn

from lightning_ort import CompileReport
from lightning_ort.compiler.backend import ORTBackend
from lightning_ort.compiler.regions.reproducer import Reproducer
from lightning_ort.compiler.regions.reproducer_script import in_float64, make_input
from lightning_ort.compiler.report import RegionReport


def regions_of(module: nn.Module, x: torch.Tensor, **options: bool) -> tuple[list[RegionReport], ORTBackend, object]:
    backend = ORTBackend({"placement": "always", "cache_dir": None, "debug": {"torch_ops": ["aten.cumsum"]}})
    compiled = torch.compile(module, backend=backend, **options)
    compiled(x).cumsum(0).sum().backward()
    return [region for graph in backend.report.graphs for region in graph.regions], backend, compiled


class Net(nn.Module):
    """Dropout (drawn by torch), a layer that needs another memory layout, an infinity, a function on symbolic sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.5), nn.Linear(16, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layers(x)
        y = y.masked_fill(y > 100, float("-inf")).softmax(1).cumsum(1)
        return (y.t() * 2).exp() / x.shape[0]


RUN = "import runpy, sys; [(print(), runpy.run_path(path, run_name='__main__')) for path in sys.argv[1:]]"
LINE = r"^(torch|onnxruntime|largest difference): (\S+)(?: ms$| of the largest value(?:$|; of torch to float64: \d))"


def run(*scripts: Path) -> list[dict[str, float]]:
    """What each script prints, all in one fresh interpreter."""
    found = subprocess.run([sys.executable, "-c", RUN, *map(str, scripts)], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    printed = [re.findall(LINE, part, re.M) for part in found.stdout.split("\ntorch: ")[1:]]
    return [{"torch": 0.0} | {name: float(value) for name, value in lines} for lines in printed]


@pytest.mark.parametrize("dynamic", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_script_of_each_region_runs(tmp_path: Path, dynamic: bool) -> None:
    regions, *_ = regions_of(Net(), torch.randn(6, 8), dynamic=dynamic)
    assert {region.executor for region in regions} == {"ort", "torch"}
    scripts = [region.save_reproducer(tmp_path / str(index)) for index, region in enumerate(regions)]
    for region, script, printed in zip(regions, scripts, run(*scripts), strict=True):
        assert (script.parent / "region.onnx").exists() == (region.executor == "ort")
        assert ("onnxruntime" in printed) == (region.executor == "ort")
        if region.executor == "ort":
            assert printed["largest difference"] < 1e-5


def test_difference_is_shown(tmp_path: Path) -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    regions, *_ = regions_of(module, torch.randn(2, 4))
    script = regions[0].save_reproducer(tmp_path)
    text = script.read_text()
    assert "torch.ops.aten.tanh.default" in text
    script.write_text(text.replace("torch.ops.aten.tanh.default", "torch.ops.aten.sigmoid.default"))
    (printed,) = run(script)
    assert printed["largest difference"] > 1e-3


def test_made_up_inputs_are_the_same_each_time_and_take_no_random_numbers() -> None:
    before, specs = torch.get_rng_state(), [((3, 2), (2, 1), torch.float32, "cpu"), ((2,), (1,), torch.int64, "cpu"), 5]
    one, other = ([make_input(spec, torch.Generator().manual_seed(0)) for spec in specs] for _ in range(2))
    assert torch.equal(one[0], other[0])
    assert one[0].unique().numel() == 6
    assert torch.equal(torch.get_rng_state(), before)
    (found,) = in_float64(lambda _, x, index, number: [x[index] * number], one)
    torch.testing.assert_close(found, one[0].double()[one[1]] * 5)


def test_report_keeps_no_graph_alive(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    graphs = []
    of = Reproducer.of

    def recorded(graph: torch.fx.Graph, *model: object) -> Reproducer:
        graphs.append(weakref.ref(graph))
        return of(graph, *model)  # type: ignore[arg-type]

    monkeypatch.setattr(Reproducer, "of", recorded)
    module = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    regions, backend, compiled = regions_of(module, torch.randn(2, 4))
    assert backend.report.ort_runs > 0
    assert graphs
    assert all(graph() is not None for graph in graphs)
    alive = [weakref.ref(module[0].weight), *graphs]
    report = backend.report
    del module, backend, compiled
    torch._dynamo.reset()
    gc.collect()
    assert [reference() for reference in alive] == [None] * len(alive)
    for again in (regions[0], copy.deepcopy(report).graphs[0].regions[0], pickle.loads(pickle.dumps(regions[0]))):
        assert "aten.tanh" in again.save_reproducer(tmp_path).read_text()


def test_text_is_made_when_it_is_asked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made = []
    original = torch.fx.Graph.python_code
    regions, backend, _ = regions_of(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), torch.randn(2, 4))
    assert backend.report.ort_runs > 0
    monkeypatch.setattr(torch.fx.Graph, "python_code", lambda *args: made.append(args) or original(*args))
    for _ in range(2):
        assert "aten.tanh" in regions[0].save_reproducer(tmp_path).read_text()
    assert len(made) == 1


def test_report_of_a_file_says_that_it_has_no_code(tmp_path: Path) -> None:
    _, backend, _ = regions_of(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), torch.randn(2, 4))
    report = CompileReport.from_dict(json.loads(json.dumps(backend.report.to_dict())))
    assert report == backend.report
    with pytest.raises(RuntimeError, match="loaded from JSON"):
        report.graphs[0].regions[0].save_reproducer(tmp_path)
