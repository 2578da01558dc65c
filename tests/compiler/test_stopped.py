"""What has taken too long is stopped from within, between two stages or trials, and eager goes on."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from lightning_ort.compiler.backend import ORTBackend
from lightning_ort.compiler.executors import inductor
from lightning_ort.compiler.placement import timing
from lightning_ort.compiler.request import CompileRequest, Stopped
from lightning_ort.config import ORTConfig


def stops_at(number: int, asked: list[int]) -> Callable[[], None]:
    counts = itertools.count()

    def check_budget() -> None:
        asked.append(next(counts))
        if asked[-1] == number:
            raise Stopped

    return check_budget


def step(backend: Any) -> list[torch.Tensor]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Softmax(-1), nn.Linear(64, 3))
    for parameter in model.parameters():
        nn.init.constant_(parameter, 0.1)
    loss = torch.compile(lambda x: model(x).square().mean(), backend=backend)(torch.ones(1100, 64))
    loss.backward()
    return [loss, *(p.grad for p in model.parameters() if p.grad is not None)]


def test_a_compilation_for_onnxruntime_ends_wherever_it_is(monkeypatch: pytest.MonkeyPatch, regions_win: None) -> None:
    expected = step("eager")
    asked: list[int] = []
    config = ORTConfig(cache_dir=None)
    whole = ORTBackend(config, lambda: CompileRequest(check_budget=stops_at(-1, asked)))
    torch.testing.assert_close(step(whole), expected)
    assert whole.report.ort_runs > 0
    late = 8
    assert len(asked) > late  # graphs, operations with variants, regions, rounds of trials: their number differs
    runs: list[int] = []
    timed = timing.race
    monkeypatch.setattr(timing, "race", lambda *args, **kwargs: (runs.append(1), timed(*args, **kwargs))[1])
    for number in (0, 1, late // 2, late):
        asked = []
        runs.clear()
        backend = ORTBackend(config, lambda: CompileRequest(check_budget=stops_at(number, asked)))  # noqa: B023
        torch.testing.assert_close(step(backend), expected)
        assert len(asked) == number + 1  # nothing more is begun
        assert runs or number < 2
        assert backend.report.graphs == []
        assert not backend.report.fallbacks


def test_a_compilation_by_inductor_ends_before_a_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch._inductor.compile_fx

    def not_reached(*args: Any, **kwargs: Any) -> None:
        raise AssertionError

    monkeypatch.setattr(torch._inductor.compile_fx, "compile_fx_inner", not_reached)
    failed: list[Exception] = []
    asked: list[int] = []
    request = CompileRequest(check_budget=stops_at(0, asked), refuse=lambda reason: None)
    backend = inductor.backend_for("exact", False, failed.append, lambda: request)
    torch.testing.assert_close(step(backend), step("eager"))
    assert asked == [0]
    assert failed == []
