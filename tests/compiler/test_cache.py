"""What is kept between runs: found again, checked, shared by processes, and never in the way."""

import logging
import multiprocessing
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

from lightning_ort import ORTConfig
from lightning_ort.compiler import cache, placement, session, support
from lightning_ort.compiler.backend import ORTBackend
from lightning_ort.compiler.cache import Cache, Entry, Timing, describe


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 4))


def train(backend: ORTBackend, module: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    torch._dynamo.reset()
    module.zero_grad()
    y = torch.compile(module, backend=backend)(x)
    y.sum().backward()
    return [y, *(parameter.grad.clone() for parameter in module.parameters())]


def regions(backend: ORTBackend) -> list[Any]:
    return [region for graph in backend.report.graphs for region in graph.regions]


def forbid_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "measure", lambda *args: pytest.fail("timed in spite of the cache"))
    monkeypatch.setattr(session, "convert", lambda *args: pytest.fail("converted in spite of the cache"))
    monkeypatch.setattr(support, "check", lambda *args: pytest.fail("asked in spite of the cache"))


@pytest.mark.parametrize("choices", [{"placement": "always"}, {"placement": "measured"}])
def test_second_run_converts_and_times_nothing(monkeypatch, choices):
    """Its results are the first one's, bit for bit."""
    module, x = mlp(), torch.randn(4, 8)
    first, second = ORTBackend(choices), ORTBackend(choices)
    expected = train(first, module, x)
    assert cache.files(cache.default_folder())
    forbid_work(monkeypatch)
    for got, wanted in zip(train(second, module, x), expected, strict=True):
        assert torch.equal(got, wanted)
    placed = [[(region.name, region.executor, region.threads) for region in regions(b)] for b in (first, second)]
    assert placed[0] == placed[1]
    assert not any(region.cached for region in regions(first))
    assert all(region.cached for region in regions(second) if region.executor == "ort")
    if choices["placement"] == "always":
        assert second.report.ort_runs == 2
    assert not second.report.fallbacks


def test_nothing_is_kept_without_a_folder():
    train(ORTBackend({"placement": "always", "cache_dir": None}), mlp(), torch.randn(4, 8))
    assert not cache.default_folder().exists()


def test_threads_and_shapes_have_their_own_entries(tmp_path, monkeypatch):
    options = {"placement": "always", "cache_dir": tmp_path}
    train(ORTBackend(options), mlp(), torch.randn(4, 8))
    count = len(cache.files(tmp_path))
    other_shape = ORTBackend(options)
    train(other_shape, mlp(), torch.randn(6, 8))
    assert len(cache.files(tmp_path)) == 2 * count
    other_threads = ORTBackend({**options, "intra_op_threads": 2})
    train(other_threads, mlp(), torch.randn(4, 8))
    kept_in_torch = ORTBackend({**options, "torch_ops": ["aten.gelu"]})
    train(kept_in_torch, mlp(), torch.randn(4, 8))
    for backend in (other_shape, other_threads, kept_in_torch):
        # the backward graph is the same one whoever runs the forward graph's gelu
        changed = backend.report.graphs[:1] if backend is kept_in_torch else backend.report.graphs
        assert not any(region.cached for graph in changed for region in graph.regions)
        assert backend.report.ort_runs


@pytest.mark.parametrize("pattern", ["graph-*.json", "region-*.json", "region-*.onnx"])
@pytest.mark.parametrize("content", [b"", b"[1]", b'{"model": "", "timing": {"ort_ms": 1}}', b'[["NONSENSE", 1]]'])
def test_damaged_files_count_as_absent(tmp_path, pattern, content):
    module, x = mlp(), torch.randn(4, 8)
    options = {"placement": "always", "cache_dir": tmp_path}
    expected = train(ORTBackend(options), module, x)
    whole = {path: path.read_bytes() for path in tmp_path.glob(pattern)}
    assert whole
    for path in whole:
        path.write_bytes(content)
    backend = ORTBackend(options)
    for got, wanted in zip(train(backend, module, x), expected, strict=True):
        assert torch.equal(got, wanted)
    assert not backend.report.fallbacks
    assert backend.report.ort_runs == 2
    if pattern != "region-*.onnx":  # a model is the same each time but for the order of some of its bytes
        assert {path: path.read_bytes() for path in tmp_path.glob(pattern)}.keys() == whole.keys()
    assert all(path.read_bytes() != content for path in whole), "not mended"


def test_a_folder_that_cannot_be_written(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    backend = ORTBackend({"placement": "always", "cache_dir": tmp_path / "file" / "cache"})
    with caplog.at_level(logging.WARNING):
        train(backend, mlp(), torch.randn(4, 8))
    assert backend.report.ort_runs == 2
    assert not backend.report.fallbacks
    assert len([record for record in caplog.records if "Nothing is kept between runs" in record.message]) == 1


def _store_again_and_again(folder: Path, models: list[bytes]) -> None:
    kept = Cache(ORTConfig(cache_dir=str(folder)))
    for number in range(200):
        kept.store("region-0", Entry(models[number % 2], Timing(1.0, 2.0, 1)))


def test_processes_share_a_folder(tmp_path):
    """A reader finds a whole entry or none, whatever the writers do."""
    models = [bytes(5000), b"1" * 7000]
    fork = multiprocessing.get_context("fork")
    writers = [fork.Process(target=_store_again_and_again, args=(tmp_path, models)) for _ in range(2)]
    for writer in writers:
        writer.start()
    reader = Cache(ORTConfig(cache_dir=str(tmp_path)))
    found = 0
    while any(writer.is_alive() for writer in writers):
        if (entry := reader.load("region-0")) is not None:
            found += 1
            assert entry.model in models
            assert entry.timing == Timing(1.0, 2.0, 1)
    assert found
    assert not list(tmp_path.glob("*.tmp"))
    assert [writer.exitcode for writer in writers] == [0, 0]


def traced(function: Any, *args: Any, dynamic: bool = False) -> fx.Graph:
    return make_fx(function, tracing_mode="symbolic" if dynamic else "fake")(*args).graph


def test_description_is_of_what_is_computed():
    """Neither names nor the order in which sizes were numbered matter; all else does."""
    x, y = torch.randn(3, 5), torch.randn(5, 7)
    same = traced(lambda a, b: torch.relu(a @ b), x, y)
    text = describe(same)
    for number, node in enumerate(list(same.nodes)):
        node.name = f"renamed_{number}"
    assert describe(same) == text
    others = [
        traced(lambda a, b: torch.tanh(a @ b), x, y),
        traced(lambda a, b: torch.relu(a @ b), x.double(), y.double()),
        traced(lambda a, b: torch.relu(a @ b), x, torch.randn(5, 8)),
        traced(lambda a, b: torch.relu(a @ b), x, torch.randn(7, 5).t()),
        traced(lambda a, b: torch.relu(a @ b), x, y, dynamic=True),
        traced(lambda a, b: torch.relu(a @ b) * 2.0, x, y),
        traced(lambda a, b: torch.relu(a @ b) * 2.5, x, y),
        traced(lambda a, b: torch.relu(a @ b) * 2, x, y),
    ]
    assert len({text, *map(describe, others)}) == 1 + len(others)
    symbolic = traced(lambda a, b: torch.relu(a @ b), x, y, dynamic=True)
    assert describe(symbolic) == describe(others[4])
    assert "n0=3" in describe(symbolic)
