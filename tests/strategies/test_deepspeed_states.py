"""Optimizer states between torch's form and the flat one that DeepSpeed's optimizers have, without DeepSpeed."""

import copy
from itertools import chain
from typing import Any

import pytest
import torch
from torch import nn, optim

from lightning_ort.strategies.deepspeed import states
from lightning_ort.strategies.deepspeed.states import _ELEMENTWISE, DeepSpeedStates

SHAPES = [(3, 2), (), (4,)], [()], [(2,)]  # of the parameters of each group
PADDING = 3


class Flat:
    """One process whose groups are flattened as DeepSpeed does it, with padding at the end."""

    def __init__(self, groups: list[list[nn.Parameter]], cls: type[optim.Optimizer]) -> None:
        self.groups = groups
        parts = [[p.detach().flatten() for p in group] + [torch.zeros(PADDING)] for group in groups]
        self.masters = [nn.Parameter(torch.cat(part)) for part in parts]
        self.optimizer = cls([{"params": [master]} for master in self.masters], lr=0.1)

    def flattened(self) -> list[list[tuple[nn.Parameter, int]]]:
        places = []
        for group in self.groups:
            sizes = [parameter.numel() for parameter in group]
            places.append([(parameter, sum(sizes[:index])) for index, parameter in enumerate(group)])
        return places

    def step(self) -> None:
        for master, group in zip(self.masters, self.groups, strict=True):
            master.grad = torch.cat([*(parameter.grad.flatten() for parameter in group), torch.zeros(PADDING)])
        self.optimizer.step()


@pytest.fixture
def one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(states.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(states.dist, "get_world_size", lambda: 1)
    for name, function in {
        "flattened_groups": Flat.flattened,
        "wrapped_optimizer": lambda flat: flat.optimizer,
        "partition_size": lambda flat, index: flat.masters[index].numel(),
        "parameter_device": lambda flat: torch.device("cpu"),
    }.items():
        monkeypatch.setattr(states.deepspeed, name, function)


def set_gradients(parameters: list[nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=generator)


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("cls", _ELEMENTWISE, ids=lambda cls: cls.__name__)
def test_every_optimizer_goes_on_from_a_plain_checkpoint(cls: Any) -> None:
    groups = [[nn.Parameter(torch.ones(shape)) for shape in shapes] for shapes in SHAPES]
    parameters = list(chain(*groups))
    plain = cls([{"params": group} for group in groups], lr=0.1)
    for step in range(3):
        set_gradients(parameters, step)
        plain.step()
    flat = Flat(groups, cls)
    converted = DeepSpeedStates(flat, groups)
    converted.load_state_dict(copy.deepcopy(plain.state_dict()))  # torch does not copy what it need not cast
    set_gradients(parameters, 3)
    plain.step()
    flat.step()
    for master, group in zip(flat.masters, groups, strict=True):
        torch.testing.assert_close(master[:-PADDING], torch.cat([p.flatten() for p in group]))
    saved, expected = converted.state_dict(), plain.state_dict()
    assert saved["param_groups"] == expected["param_groups"]
    torch.testing.assert_close(saved["state"], expected["state"] if cls is not optim.SGD else {})


@pytest.mark.usefixtures("one_process")
def test_states_that_are_missing_and_counts_that_differ(caplog: pytest.LogCaptureFixture) -> None:
    group = [nn.Parameter(torch.ones(2)) for _ in range(3)]
    saved = optim.NAdam(group).state_dict()
    state = {"exp_avg": torch.ones(2), "exp_avg_sq": torch.ones(2)}
    saved["state"] = {
        0: {**state, "step": torch.tensor(1.0), "mu_product": torch.tensor(0.9)},
        1: {**state, "step": torch.tensor(5.0), "mu_product": torch.tensor(0.5)},
        2: dict.fromkeys(("exp_avg", "exp_avg_sq", "step", "mu_product")),
    }
    flat = Flat([group], optim.NAdam)
    DeepSpeedStates(flat, [group]).load_state_dict(saved)
    (loaded,) = flat.optimizer.state.values()
    assert (loaded["step"], loaded["mu_product"]) == (5, 0.5)  # of the same parameter
    assert loaded["exp_avg"].tolist() == [1] * 4 + [0] * (2 + PADDING)
    assert "several step counts" in caplog.text
