"""What optimizers of other packages need of a checkpoint, and save in it; stand-ins count and compute as they do."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn, optim

from lightning_ort.compat.torch_optimizers import load_state_dict_pre_hooks
from lightning_ort.optim import registry
from lightning_ort.optim.anyprecision import AnyPrecisionAdamW
from lightning_ort.optim.registry import Implementation
from lightning_ort.optim.replacement import load_other_forms, replace


class Counting(optim.Optimizer):
    """Steps as AdamW does, with one count for all parameters of a group."""

    def __init__(self, params: Any, lr: float, bias_correction: bool = True, **settings: Any) -> None:
        settings.pop("adam_w_mode")
        super().__init__(params, {"lr": lr, "bias_correction": bias_correction, **settings})

    def count(self, group: dict[str, Any], used: list[dict[str, Any]]) -> int:
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            (beta1, beta2), lr = group["betas"], group["lr"]
            states = [self.state[parameter] for parameter in group["params"]]
            new = [not state for state in states]
            step = self.count(group, states)
            for parameter, state, is_new in zip(group["params"], states, new, strict=True):
                if is_new:
                    state.update(exp_avg=torch.zeros_like(parameter), exp_avg_sq=torch.zeros_like(parameter))
                state["exp_avg"].lerp_(parameter.grad, 1 - beta1)
                state["exp_avg_sq"].mul_(beta2).addcmul_(parameter.grad, parameter.grad, value=1 - beta2)
                corrections = (1 - beta1**step, 1 - beta2**step) if group["bias_correction"] else (1, 1)
                parameter.mul_(1 - lr * group["weight_decay"])
                divisor = (state["exp_avg_sq"] / corrections[1]).sqrt_().add_(group["eps"])
                parameter.addcdiv_(state["exp_avg"], divisor, value=-lr / corrections[0])


class LikeApex(Counting):
    """Counts in the group."""

    def count(self, group: dict[str, Any], used: list[dict[str, Any]]) -> int:
        group["step"] = group.get("step", 0) + 1
        return group["step"]


class LikeDeepSpeed(Counting):
    """Counts in the state of the last parameter, as deepspeed 0.19.8 does if all have one dtype."""

    def count(self, group: dict[str, Any], used: list[dict[str, Any]]) -> int:
        group.setdefault("step", 0)
        for state in used:
            if not state:
                state["step"] = group["step"]
        used[-1]["step"] += 1
        return used[-1]["step"]


CLASSES = {"apex": LikeApex, "deepspeed": LikeDeepSpeed, "anyprecision": AnyPrecisionAdamW}


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], tuple[nn.Module, optim.Optimizer]]:
    targets = {
        "apex": registry.REPLACEMENTS["adamw_apex_fused"],
        "deepspeed": registry.DEEPSPEED["cuda"],
        "anyprecision": registry.REPLACEMENTS["adamw_anyprecision"],
    }

    def load(target: Implementation) -> type[optim.Optimizer]:
        return CLASSES[next(name for name, known in targets.items() if known is target)]

    monkeypatch.setattr(Implementation, "load", load)

    def make(name: str) -> tuple[nn.Module, optim.Optimizer]:
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
        groups = [{"params": module[0].parameters(), "lr": 0.1}, {"params": module[2].parameters()}]
        optimizer = optim.AdamW(groups, lr=0.05, weight_decay=0.1)
        if name == "torch":
            load_other_forms(optimizer)
        elif name != "stock":
            target = targets[name]
            replace(optimizer, target, sorted(target.hyperparameters), target.arguments)
        return module, optimizer

    return make


def train(module: nn.Module, optimizer: optim.Optimizer, first: int, last: int) -> None:
    for step in range(first, last):
        optimizer.zero_grad()
        inputs = torch.randn(5, 4, generator=torch.Generator().manual_seed(step))
        module(inputs).square().sum().backward()
        optimizer.step()


@pytest.mark.parametrize(
    ("saves", "loads"),
    [
        *[("torch", "apex"), ("torch", "deepspeed"), ("apex", "torch"), ("deepspeed", "torch"), ("deepspeed", "stock")],
        *[("apex", "apex"), ("deepspeed", "deepspeed"), ("apex", "deepspeed"), ("deepspeed", "apex")],
        *[("deepspeed", "anyprecision"), ("apex", "anyprecision"), ("anyprecision", "apex")],
    ],
)
def test_a_run_goes_on_in_another_implementation(saves: str, loads: str, make: Callable[..., Any]) -> None:
    whole, uninterrupted = make("torch")
    train(whole, uninterrupted, 0, 8)
    module, optimizer = make(saves)
    train(module, optimizer, 0, 4)
    for name in (loads, saves):  # and back
        saved, weights = optimizer.state_dict(), module.state_dict()
        module, optimizer = make(name)
        module.load_state_dict(weights)
        optimizer.load_state_dict(saved)
        first = 4 if name == loads else 6
        train(module, optimizer, first, first + 2)
        if loads == saves:
            train(module, optimizer, 6, 8)
            break
    tolerance = 2e-3 if "anyprecision" in (saves, loads) else 1e-5  # its states are in bfloat16
    for parameter, expected in zip(module.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(parameter, expected, rtol=tolerance, atol=tolerance)


def test_each_state_that_deepspeed_saves_has_the_count(make: Callable[..., Any]) -> None:
    module, optimizer = make("deepspeed")
    train(module, optimizer, 0, 3)
    assert [state["step"] for state in optimizer.state_dict()["state"].values()] == [3] * 4
    assert [optimizer.state[parameter]["step"] for parameter in module.parameters()] == [0, 3, 0, 3]  # its own, kept
    train(module, optimizer, 3, 4)
    assert [state["step"] for state in optimizer.state_dict()["state"].values()] == [4] * 4


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_anyprecision_loads_what_it_saved(dtype: torch.dtype) -> None:
    parameter = nn.Parameter(torch.ones(4, dtype=dtype))
    optimizer = AnyPrecisionAdamW([parameter])
    for _ in range(3):
        parameter.grad = torch.full_like(parameter, 1e-3)  # its square is less than what float16 can hold
        optimizer.step()
    resumed = AnyPrecisionAdamW([nn.Parameter(parameter.detach().clone())])
    calls: list[int] = []
    resumed.register_load_state_dict_pre_hook(lambda optimizer, saved: calls.append(1))
    resumed.load_state_dict(optimizer.state_dict())
    (expected,), (got,) = optimizer.state.values(), resumed.state.values()
    assert expected["exp_avg_sq"].min() > 0
    assert got.keys() == expected.keys()
    for key, value in expected.items():
        assert got[key].dtype is value.dtype
        assert torch.equal(got[key], value), key
    assert calls == [1]
    assert len(load_state_dict_pre_hooks(resumed)) == 1  # the user's
