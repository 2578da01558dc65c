"""Fused optimizers: gaps in memory, other layouts, gradients that come late, hooks and groups that are added."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning_utilities.core.imports import RequirementCache
from torch import nn

from lightning_ort.compat.torch_optimizers import shard_of
from lightning_ort.optim.fused import auto_unsupported_reason, fused_unsupported_reason, set_flag
from lightning_ort.optim.sharded import ShardedOptimizer
from lightning_ort.optim.swap import OptimizerSwap


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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [5, 100])
def test_half_types_are_updated(dtype: torch.dtype, size: int) -> None:
    """Where torch's fused SGD for CPUs leaves them as they are, the plain loop runs."""
    modules = [Holds(torch.ones(size, dtype=dtype)) for _ in range(2)]
    for module, name in zip(modules, ("keep", "auto"), strict=True):
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
        OptimizerSwap(name).apply(module, [optimizer], torch.device("cpu"))
        for _ in range(3):
            step(module, optimizer)
    assert not torch.equal(modules[0].weight, torch.ones(size, dtype=dtype))
    rounds_less_often = {"rtol": 0.02, "atol": 0.01} if RequirementCache("torch>=2.14") else {}
    torch.testing.assert_close(modules[1].weight, modules[0].weight, **rounds_less_often)


CLASSES: list[Callable[..., Any]] = [torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad]


@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize("channels_last", [False, True])
def test_gradients_of_another_layout(cls: Callable[..., Any], channels_last: bool) -> None:
    torch.manual_seed(0)
    plain = nn.Conv2d(3, 4, 3)
    modules = [copy.deepcopy(plain) for _ in range(2)]
    optimizers = [cls(module.parameters(), lr=0.1) for module in modules]
    set_flag(optimizers[1], "fused")
    for module, optimizer in zip(modules, optimizers, strict=True):
        step(module, optimizer)  # the states have the layout of before
        if channels_last:
            module.to(memory_format=torch.channels_last)
        for _ in range(2):
            memory_format = torch.contiguous_format if channels_last else torch.channels_last
            module.weight.grad = torch.randn(4, 3, 3, 3, generator=torch.Generator().manual_seed(1)).to(
                memory_format=memory_format
            )
            optimizer.step()
        module.to(memory_format=torch.contiguous_format)
        step(module, optimizer)
    torch.testing.assert_close(modules[1].weight, modules[0].weight)


@pytest.mark.parametrize("cls", [torch.optim.SGD, torch.optim.Adagrad])
def test_a_sparse_gradient_in_a_later_step(cls: Callable[..., Any]) -> None:
    modules = [Holds(torch.ones(4, 2)) for _ in range(2)]
    optimizers = [cls(module.parameters(), lr=0.1) for module in modules]
    set_flag(optimizers[1], "fused")
    for module, optimizer in zip(modules, optimizers, strict=True):
        step(module, optimizer)
        optimizer.zero_grad()
        nn.functional.embedding(torch.tensor([1, 2]), module.weight, sparse=True).square().sum().backward()
        optimizer.step()
    torch.testing.assert_close(modules[1].weight, modules[0].weight)
    assert not optimizers[1].param_groups[0]["fused"]


def test_a_complex_group_that_is_added() -> None:
    torch.manual_seed(0)
    plain = nn.ParameterList([torch.randn(3), torch.randn(3, dtype=torch.complex64)])
    modules = [copy.deepcopy(plain) for _ in range(2)]
    optimizers = [torch.optim.AdamW([module[0]], lr=0.1) for module in modules]
    set_flag(optimizers[1], "fused")
    for module, optimizer in zip(modules, optimizers, strict=True):
        optimizer.add_param_group({"params": [module[1]]})
        for _ in range(2):
            optimizer.zero_grad()
            (module[0] * module[1].abs()).sum().backward()
            optimizer.step()
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for mine, theirs in zip(modules[1], modules[0], strict=True):
        torch.testing.assert_close(mine, theirs)
    assert optimizers[1].param_groups[0]["fused"]


def test_a_shard_with_gradients_of_another_layout(tmp_path: Any) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        modules = [Holds(torch.ones(4, 3)) for _ in range(2)]
        plain = torch.optim.AdamW(modules[0].parameters(), lr=0.1)
        sharded = ShardedOptimizer(modules[1].parameters(), torch.optim.AdamW, lr=0.1)
        set_flag(sharded, "fused")
        for module, optimizer in zip(modules, (plain, sharded), strict=True):
            for _ in range(2):
                module.weight.grad = torch.arange(12.0).sub(6).view(3, 4).t()
                optimizer.step()
        assert shard_of(sharded).param_groups[0]["fused"]
        torch.testing.assert_close(modules[1].weight, modules[0].weight)
    finally:
        torch.distributed.destroy_process_group()


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
