"""What :func:`update` does is what torch's own step does, and it leaves alone what is more than that."""

import copy
import functools
import warnings
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn, optim

from lightning_ort.optim import fused, fused_update
from lightning_ort.optim.fused_update import FusedUpdate, may_update

CASES: dict[str, Any] = {
    "adamw": functools.partial(optim.AdamW, lr=0.01),
    "adam, decay in the gradient, amsgrad": functools.partial(optim.Adam, lr=0.01, weight_decay=0.1, amsgrad=True),
    "adam, decoupled, maximize": functools.partial(
        optim.Adam, lr=0.01, weight_decay=0.1, decoupled_weight_decay=True, maximize=True
    ),
    "sgd": functools.partial(optim.SGD, lr=0.1),
    "sgd, nesterov": functools.partial(optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adagrad": functools.partial(optim.Adagrad, lr=0.1, lr_decay=0.01),
}
MARKS = {"adam, decoupled, maximize": pytest.mark.new_torch}


def made(make: Any) -> tuple[nn.Module, optim.Optimizer, optim.lr_scheduler.LRScheduler]:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(8, 300), nn.ReLU(), nn.Linear(300, 200), nn.Linear(200, 3))  # one is large
    groups = [{"params": module[0].parameters()}, {"params": [*module[2:].parameters()], "lr": 0.02}]
    optimizer = make(groups)
    fused.set_flag(optimizer, "fused")
    return module, optimizer, optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.5)


def trained(make: Any, step: Any) -> tuple[nn.Module, optim.Optimizer]:
    module, optimizer, scheduler = made(make)
    for number in range(8):
        optimizer.zero_grad()
        x = torch.randn(4 + number, 8)
        (module(x).square().mean() if number % 4 else module[:3](x).mean()).backward()  # the last layer gets none
        step(optimizer)
        scheduler.step()
    return module, optimizer


@pytest.mark.parametrize(
    "make", [pytest.param(make, marks=MARKS.get(name, ())) for name, make in CASES.items()], ids=CASES
)
def test_updates_and_states_are_those_of_torch(make: Any) -> None:
    updated, known = [], list[FusedUpdate]()

    def direct(optimizer: optim.Optimizer) -> None:
        assert may_update(optimizer)
        known.extend([] if known else [FusedUpdate(optimizer)])  # what it knows lasts, as in a fit
        updated.append(known[0]())
        if not updated[-1]:
            optimizer.step()

    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a scheduler warns if the optimizer has made no step
        module, optimizer = trained(make, direct)
    assert sum(updated) >= 5
    expected, stock = trained(make, lambda optimizer: optimizer.step())
    for (name, own), (_, other) in zip(module.named_parameters(), expected.named_parameters(), strict=True):
        assert torch.equal(own, other), name
    saved, of_stock = optimizer.state_dict(), stock.state_dict()
    assert saved["param_groups"] == of_stock["param_groups"]
    for key, state in of_stock["state"].items():
        assert all(torch.equal(saved["state"][key][name], value) for name, value in state.items())


def test_steps_of_small_tensors_use_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    module, optimizer, _ = made(CASES["adamw"])
    threads = []
    kernel = fused_update.FUSED_KERNELS[optim.AdamW]

    def noting(params: Any, *args: Any, **kwargs: Any) -> None:
        largest = max(p.numel() for p in params)
        threads.append((largest <= fused_update.SMALL, torch.get_num_threads()))
        kernel(params, *args, **kwargs)

    monkeypatch.setitem(fused_update.FUSED_KERNELS, optim.AdamW, noting)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        module(torch.randn(4, 8)).sum().backward()
        optimizer.step()
        assert FusedUpdate(optimizer)()
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert set(threads) == {(True, 1), (False, 2)}


def test_what_is_more_than_the_kernels_is_left_to_torch() -> None:
    module, optimizer, _ = made(CASES["adamw"])
    assert may_update(optimizer)
    hooked = copy.deepcopy(optimizer)
    hooked.register_step_post_hook(lambda *_: None)
    assert not may_update(hooked)
    hooked = copy.deepcopy(optimizer)
    hooked.register_step_pre_hook(lambda *_: None)
    assert not may_update(hooked)
    replaced = copy.deepcopy(optimizer)
    replaced.step = lambda closure=None: None  # type: ignore[method-assign]
    assert not may_update(replaced)
    assert not may_update(optim.RMSprop(module.parameters()))
    with mock.patch.object(optim.AdamW, "step") as step:
        assert not may_update(optimizer)
    assert step.mock_calls == []

    class Own(optim.AdamW):
        pass

    assert not may_update(Own(module.parameters(), fused=True))
    module(torch.randn(4, 8)).sum().backward()
    assert not FusedUpdate(optim.AdamW(module.parameters(), fused=True))()  # which has no states yet
    optimizer.step()
    optimizer.param_groups[0]["lr"] = torch.tensor(0.1)
    assert not FusedUpdate(optimizer)()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert not may_update(optimizer)
