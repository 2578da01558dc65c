"""A step as one graph is traced in one run, and found by later ones, if it is the same in every respect."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_ort import ORTConfig
from lightning_ort.compiler import compilation
from lightning_ort.compiler.backend import ORTBackend
from lightning_ort.compiler.cache import cache
from lightning_ort.compiler.cache.cache import Cache
from lightning_ort.compiler.executors.ort import session, support
from lightning_ort.compiler.running.step_graph import GraphSource


class Net(nn.Module):
    """Dropout shows the random numbers, the batch norm what is written, the last layer ties a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.GELU(), nn.Dropout(0.4), nn.Linear(8, 6))
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(self.layers(x), self.layers[0].weight) * self.scale


def losses(module: nn.Module, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    logits = module(x)
    return F.cross_entropy(logits, y), logits.argmax(-1)


class Run:
    """Three steps of a module in a new run: what they compute, and how many graphs were traced."""

    def __init__(self, cache_dir: Path, step: Callable[..., Any] = losses, dynamic: bool | None = None) -> None:
        torch._dynamo.reset()
        torch.manual_seed(0)
        module = Net()
        self.backend = ORTBackend({"placement": "always", "debug": {"step_graph": "joint"}, "cache_dir": cache_dir})
        compiled = torch.compile(step, backend=self.backend, dynamic=dynamic)
        before, self.found = len(traced), []
        for _ in range(3):
            loss, *others = compiled(module, torch.randn(12, 6), torch.randint(8, (12,)))
            loss.backward()
            self.found += [loss.detach(), *others]
        self.found += [*module.buffers(), *(p.grad for p in module.parameters() if p.grad is not None)]
        self.traced = len(traced) - before
        assert self.backend.report.ort_runs > 0
        assert not self.backend.report.fallbacks

    @property
    def graphs(self) -> list[str]:
        return [graph.name for graph in self.backend.report.graphs]


traced: list[Any] = []


@pytest.fixture(autouse=True)
def counts_traces(monkeypatch: pytest.MonkeyPatch) -> None:
    aot_backend = compilation.aot_backend
    monkeypatch.setattr(compilation, "aot_backend", lambda **kw: [traced.append(kw), aot_backend(**kw)][1])


def entries(folder: Path) -> list[Path]:
    return sorted(folder.glob("step-*.json"))


def test_a_step_is_traced_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The second run computes the same, bit for bit, and converts nothing."""
    first = Run(cache_dir=tmp_path)
    assert (first.traced, first.graphs, len(entries(tmp_path))) == (1, ["step_0"], 1)
    for module, name in ((session, "convert"), (support, "check")):
        monkeypatch.setattr(module, name, lambda *args: pytest.fail("done in spite of the cache"))
    second = Run(cache_dir=tmp_path)
    assert (second.traced, second.graphs) == (0, ["step_0"])
    assert all(map(torch.equal, second.found, first.found))
    assert len(second.found) == len(first.found) > 12
    own, kept = (run.backend.report.graphs[0].regions for run in (first, second))
    assert [(region.name, region.ops) for region in own] == [(region.name, region.ops) for region in kept]
    assert all(region.cached for region in kept if region.executor == "ort")


@torch.library.custom_op("lightning_ort_tests::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


twice.register_fake(torch.empty_like)
twice.register_autograd(lambda ctx, gradient: 2 * gradient)


@pytest.mark.parametrize(
    "kind",
    [
        {"step": lambda module, x, y: (F.cross_entropy(twice(module(x)), y),)},  # a program's own operation
        {"step": lambda module, x, y: (F.cross_entropy(module(x) + torch.tensor([1.0] * 8), y),)},
        {"dynamic": True},
    ],
    ids=["operation", "constant", "sizes"],
)
def test_what_its_graph_does_not_say_is_traced_again(kind: Any, tmp_path: Path) -> None:
    assert Run(cache_dir=tmp_path, **kind).traced
    assert not entries(tmp_path)


def test_damaged_entries_count_as_absent(tmp_path: Path) -> None:
    first = Run(cache_dir=tmp_path)
    (path,) = entries(tmp_path)
    whole = path.read_bytes()
    content = json.loads(whole)["content"]
    path.write_bytes(whole.replace(b"aten.mm", b"aten.mv"))
    run = Run(cache_dir=tmp_path)
    assert run.traced == 1
    assert all(map(torch.equal, run.found, first.found))
    assert path.read_bytes() == whole  # written again
    node = content["graph"][0]
    for other in (None, [], {}, {**content, "graph": [node[:2]]}, {**content, "graph": [["call_module", *node[1:]]]}):
        sealed = {"sha256": cache._checksum(path.stem, other), "content": other}
        path.write_text(json.dumps(sealed))
        source = GraphSource(0, 0)
        assert not Cache(ORTConfig(cache_dir=str(tmp_path))).load_step(path.stem, source.restore)
        assert source.gm is None
