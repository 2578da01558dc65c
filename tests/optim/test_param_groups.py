"""Weight decay for matrices only."""

import pytest
import torch
from torch import nn

from lightning_ort import param_groups


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 4)
        self.convolution, self.linear = nn.Conv2d(1, 4, 3), nn.Linear(4, 4)
        self.norm, self.batch_norm = nn.LayerNorm((4, 4)), nn.BatchNorm2d(4)
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.embedding.weight
        self.temperature = nn.Parameter(torch.ones(()))
        self.frozen = nn.Linear(2, 2).requires_grad_(False)


def test_groups() -> None:
    model = Model()
    decay, rest = param_groups(model, 0.1)
    names = {id(p): name for name, p in model.named_parameters()}
    assert (decay["weight_decay"], rest["weight_decay"]) == (0.1, 0.0)
    assert {names[id(p)] for p in decay["params"]} == {"convolution.weight", "linear.weight"}
    assert {names[id(p)] for p in rest["params"]} == {
        "embedding.weight",
        "convolution.bias",
        "linear.bias",
        "norm.weight",  # a matrix, and still a norm's
        "norm.bias",
        "batch_norm.weight",
        "batch_norm.bias",
        "temperature",
    }
    torch.optim.AdamW(param_groups(model, 0.1), lr=0.1)


def test_summary() -> None:
    text = str(param_groups(Model(), 0.1))
    assert "no_decay" in text
    assert "Conv2d, Linear" in text
    assert "52" in text  # 4 * 9 + 16 elements decay


def test_bad_input() -> None:
    with pytest.raises(ValueError, match="negative"):
        param_groups(Model(), -1)
    with pytest.raises(ValueError, match="no parameter"):
        param_groups(nn.ReLU(), 0.1)
