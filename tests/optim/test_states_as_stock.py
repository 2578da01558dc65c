"""Optimizers that are swapped for torch's own loops keep the states of those that the user configured, step by step."""

import copy
import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn, optim

from lightning_ort.optim.swap import OptimizerSwap

STEPS = 6
_COMMON = {"lr": (0.1, 0.01), "weight_decay": (0, 0.1), "maximize": (False, True)}
_ADAM = {**_COMMON, "betas": ((0.9, 0.99), (0.5, 0.9)), "eps": (1e-8, 1e-3), "amsgrad": (False, True)}
CHOICES: dict[type[optim.Optimizer], dict[str, tuple[Any, ...]]] = {
    optim.SGD: {**_COMMON, "momentum": (0, 0.9, 0.5), "nesterov": (False, True)},
    optim.Adam: _ADAM,
    optim.AdamW: _ADAM,
    optim.Adagrad: {**_COMMON, "lr_decay": (0, 0.1), "eps": (1e-10, 1e-3)},
}


@dataclass
class Scenario:
    """A run, drawn: groups that differ, gradients that are there in some steps, and what happens between the steps."""

    cls: type[optim.Optimizer]
    seed: int

    def __post_init__(self) -> None:
        draw = random.Random(self.seed)
        self.groups = [self._group(draw) for _ in range(draw.choice((1, 2, 3)))]
        self.added = self._group(draw)
        self.events = [draw.choice(("", "load", "schedule", "add", "no gradients")) for _ in range(STEPS)]
        self.has_gradient = [[draw.random() < 0.7 for _ in range(8)] for _ in range(STEPS)]
        self.later = {"momentum": draw.choice((0, 0.9)), "nesterov": False} if self.cls is optim.SGD else {"lr": 0.03}

    def _group(self, draw: random.Random) -> dict[str, Any]:
        group = {name: draw.choice(values) for name, values in CHOICES[self.cls].items()}
        if not group.get("momentum"):
            group.pop("nesterov", None)
        return group

    def run(self, swap: str) -> list[dict[str, Any]]:
        """What the optimizer saves and the parameters are after each step."""
        torch.manual_seed(self.seed)
        parameters = nn.ParameterList([torch.randn(3, 4), torch.randn(5)] * 4)
        groups = [{"params": [*parameters[2 * i : 2 * i + 2]], **group} for i, group in enumerate(self.groups)]
        optimizer: Any = self.cls(copy.copy(groups), lr=0.1)  # type: ignore[call-arg]
        OptimizerSwap(swap).apply(parameters, [optimizer], torch.device("cpu"))
        if swap != "keep":
            assert optimizer.param_groups[0]["foreach" if "foreach" in swap else "fused"]
        after = []
        for event, has_gradient in zip(self.events, self.has_gradient, strict=True):
            if event == "load":
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            if event == "schedule":
                optimizer.param_groups[0].update(self.later)
            if event == "add" and len(optimizer.param_groups) == len(self.groups):
                optimizer.add_param_group({"params": [*parameters[6:]], **self.added})
            for parameter, wanted in zip(parameters, has_gradient, strict=True):
                gradient = torch.randn(parameter.shape)
                parameter.grad = gradient if wanted and event != "no gradients" else None
            optimizer.step()
            after.append(
                {**copy.deepcopy(optimizer.state_dict()), "parameters": [p.detach().clone() for p in parameters]}
            )
        return after


def kinds(value: Any) -> Any:
    """The same with the dtypes of tensors in their places."""
    if isinstance(value, dict):
        return {key: kinds(entry) for key, entry in value.items()}
    return value.dtype if isinstance(value, torch.Tensor) else value


SWAPS = [
    # an older Adagrad makes its states in the constructor alone, and then lacks some
    *(pytest.param(cls, "auto", marks=[pytest.mark.new_torch] * (cls is optim.Adagrad)) for cls in CHOICES),
    *((cls, f"adamw_torch_{flag}") for cls in (optim.Adam, optim.AdamW) for flag in ("fused", "foreach")),
]


@pytest.mark.parametrize(("cls", "swap"), SWAPS)
def test_states_and_parameters_after_each_step(cls: type[optim.Optimizer], swap: str) -> None:
    for seed in range(12):
        scenario = Scenario(cls, seed)
        for number, (mine, stock) in enumerate(zip(scenario.run(swap), scenario.run("keep"), strict=True)):
            told = f"{scenario}, step {number}: {scenario.groups}, {scenario.events}"
            assert mine["param_groups"] == stock["param_groups"], told
            assert kinds(mine["state"]) == kinds(stock["state"]), told
            for got, want in zip(tensors(mine), tensors(stock), strict=True):
                torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5, msg=told)


def tensors(saved: dict[str, Any]) -> list[torch.Tensor]:
    states = [value for _, state in sorted(saved["state"].items()) for _, value in sorted(state.items())]
    return [*saved["parameters"], *states]
