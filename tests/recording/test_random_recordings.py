"""Random modules: a replay on other numbers has the bits of eager, gradients, buffers and random state included."""

import copy
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from torch import Tensor, nn

from lightning_ort.recording.calls import Recorder
from lightning_ort.recording.program import Program as Recorded
from lightning_ort.recording.replay import Replay
from tests.compiler.random_modules import PROGRAMS, Program

COMMON: dict[str, Any] = {"deadline": None, "database": None, "suppress_health_check": list(HealthCheck)}


def results_of(net: nn.Module, x: Tensor) -> list[Tensor]:
    for parameter in net.parameters():
        parameter.grad = None
    loss = net(x).square().mean()
    if loss.requires_grad:
        loss.backward()
    return [loss, *(p.grad for p in net.parameters() if p.grad is not None)]


def same(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.equal(one.nan_to_num(7.0), other.nan_to_num(7.0))


def check(program: Program) -> None:
    net, x = program.build()
    net, x = net.float(), x.float() if x.is_floating_point() else x
    twin, other = copy.deepcopy(net), x.flip(0) * (0.75 if x.is_floating_point() else 1)
    recorder = Recorder([x])
    torch.manual_seed(0)
    with recorder:
        results = results_of(net, x)
    assert not recorder.refusal
    replay = Replay(Recorded.of(recorder, [*map(recorder.value, results)]), recorder)
    torch.manual_seed(0)
    results_of(twin, x)
    torch.manual_seed(1)
    expected, state = results_of(twin, other), torch.get_rng_state()
    torch.manual_seed(1)
    found = replay([other])
    if found is None:  # a value or a size that Python reads is another one
        return
    assert len(found) == len(expected)
    assert all(map(same, found, expected))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(map(same, net.buffers(), twin.buffers()))


@settings(max_examples=40, derandomize=True, **COMMON)
@given(PROGRAMS)
def test_random_modules(program: Program) -> None:
    check(program)


@pytest.mark.slow
@settings(max_examples=1000, **COMMON)
@given(PROGRAMS)
def test_many_random_modules(program: Program) -> None:
    check(program)
