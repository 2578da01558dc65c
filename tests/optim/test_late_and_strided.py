"""Fused optimizers: gaps in memory, other layouts in checkpoints, gradients that come late, hooks that are added."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from lightning_ort.optim.fused import auto_unsupported_reason, fused_unsupported_reason, set_flag
from lightning_ort.optim.sharded import ShardedOptimizer


class Holds(nn.Module):
    """A parameter as it is."""

    def __init__(self, data: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(data)


def test_a_parameter_with_gaps_is_not_fused() -> None:
    gaps, whole = Holds(torch.ones(3, 4)[:, :2]), Holds(torch.ones(4, 3).t())
    reason = auto_unsupported_reason(gaps, torch.optim.AdamW(gaps.parameters()))
    assert reason is not None
    assert "weight has gaps in its memory" in reason
    assert auto_unsupported_reason(whole, torch.optim.AdamW(whole.parameters())) is None


def step(module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    torch.manual_seed(3)
    for parameter in module.parameters():
        parameter.grad = torch.empty_like(parameter).copy_(torch.randn(parameter.shape))
    optimizer.step()


def test_a_checkpoint_of_another_memory_layout() -> None:
    torch.manual_seed(0)
    plain = nn.Conv2d(3, 4, 3)
    first = torch.optim.AdamW(plain.parameters(), lr=0.1)
    step(plain, first)
    saved = copy.deepcopy(first.state_dict())
    modules = [copy.deepcopy(plain).to(memory_format=torch.channels_last) for _ in range(2)]
    optimizers = [torch.optim.AdamW(module.parameters(), lr=0.1) for module in modules]
    set_flag(optimizers[1], "fused")
    for module, optimizer in zip(modules, optimizers, strict=True):
        optimizer.load_state_dict(copy.deepcopy(saved))
        step(module, optimizer)
    torch.testing.assert_close(modules[1].weight, modules[0].weight)
    moment = optimizers[1].state[modules[1].weight]["exp_avg"]
    assert moment.stride() == modules[1].weight.stride()


@pytest.mark.parametrize("closure", [False, True])
def test_momentum_of_a_gradient_that_comes_late(closure: bool) -> None:
    pairs = [nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)]) for _ in range(2)]
    pairs[1].load_state_dict(pairs[0].state_dict())
    optimizers = [torch.optim.SGD(pair.parameters(), lr=0.1, momentum=0.9) for pair in pairs]
    set_flag(optimizers[1], "fused")
    x = torch.randn(5, 3)
    for number in range(4):
        for pair, optimizer in zip(pairs, optimizers, strict=True):

            def loss(pair: Any = pair, optimizer: Any = optimizer, number: int = number) -> Any:
                optimizer.zero_grad()
                result = pair[0](x) if number < 2 else pair[1](pair[0](x))
                value = result.square().mean()
                value.backward()
                return value

            if closure:
                optimizer.step(loss)
            else:
                loss()
                optimizer.step()
    for mine, theirs in zip(pairs[1].parameters(), pairs[0].parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_dampening_is_left_to_the_plain_loop() -> None:
    module = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9, dampening=0.5)
    assert "dampening" in str(fused_unsupported_reason(module, optimizer))


@pytest.mark.parametrize("cls", [torch.optim.SGD, torch.optim.Adagrad])
def test_hooks_that_are_added_later(cls: Callable[..., Any]) -> None:
    module, called = nn.Linear(2, 2), []
    optimizer = cls(module.parameters(), lr=0.1)
    set_flag(optimizer, "fused")
    optimizer.register_step_pre_hook(lambda *args: called.append(1))
    for _ in range(2):
        module(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    assert len(called) == 2


def test_groups_that_the_closure_changes(tmp_path: Any) -> None:
    """Lightning runs the training step within the closure; a hand-made schedule changes the group there."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        results = []
        for sharded in (False, True):
            module = Holds(torch.ones(1))
            optimizer: Any = torch.optim.SGD
            optimizer = (
                ShardedOptimizer(module.parameters(), optimizer, lr=1.0)
                if sharded
                else optimizer(module.parameters(), lr=1.0)
            )

            def closure(module: Any = module, optimizer: Any = optimizer) -> Any:
                optimizer.param_groups[0]["lr"] *= 0.1
                optimizer.zero_grad()
                loss = module.weight.sum()
                loss.backward()
                return loss

            losses = [optimizer.step(closure).item() for _ in range(3)]
            results.append((module.weight.item(), optimizer.param_groups[0]["lr"], losses))
        assert results[1][:2] == pytest.approx(results[0][:2])
        assert results[1][2] == pytest.approx(results[0][2])
        assert results[1][0] == pytest.approx(1 - 0.1 - 0.01 - 0.001)
    finally:
        torch.distributed.destroy_process_group()
