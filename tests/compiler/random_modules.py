"""Random small modules: chains of layers and functions that fit each other's shapes, as a hypothesis strategy."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import nn

Shape = tuple[int, ...]
MAX_ELEMENTS = 2000


class Call(nn.Module):
    """A function as a layer."""

    def __init__(self, fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.fn = fn

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fn(x)


class Scale(nn.Module):
    """A weight and a bias of its own for each entry of the last dimension."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(size)), nn.Parameter(torch.randn(size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.addcmul(self.bias, x, self.weight)


@dataclass(frozen=True)
class Rule:
    """How to draw one kind of layer.

    Args:
        fits: Whether it takes an input of a shape.
        make: The layer, for the shape and three drawn numbers from 0 to 11.
    """

    fits: Callable[[Shape], bool]
    make: Callable[[Shape, int, int, int], nn.Module]


def of_rank(low: int, high: int = 5) -> Callable[[Shape], bool]:
    return lambda shape: low <= len(shape) <= high


def function(fn: Callable[..., torch.Tensor], low: int = 1) -> Rule:
    """A function of the input and three drawn numbers."""
    return Rule(of_rank(low), lambda shape, i, j, k: Call(lambda x: fn(x, i, j, k)))


def along(fn: Callable[[torch.Tensor, int], torch.Tensor], low: int = 1) -> Rule:
    """A function of the input and one of its dimensions, counted from either end."""
    return function(lambda x, i, j, k: fn(x, i % (2 * x.dim()) - x.dim()), low)


def convolution(rank: int, layer: Callable[..., nn.Module]) -> Rule:
    return Rule(
        lambda shape: len(shape) == rank and min(shape[2:]) >= 3,
        lambda shape, i, j, k: layer(shape[1], 1 + i % 4, 1 + j % 3, stride=1 + k % 2, padding=k % 2),
    )


def batch_norm(shape: Shape, i: int, j: int, k: int) -> nn.Module:
    layer = (nn.BatchNorm2d if len(shape) == 4 else nn.BatchNorm1d)(shape[1])
    layer.train(i % 3 != 0)
    if 1 in shape:  # such strides fit several layouts, and eager's gradients are wrong if it takes two (torch 2.13)
        return nn.Sequential(Call(torch.Tensor.contiguous), layer)
    return layer


def permuted(x: torch.Tensor, i: int, j: int, k: int) -> torch.Tensor:
    dims = sorted(range(x.dim()), key=lambda dim: (dim * (1 + i % 3) + j) % (x.dim() + 1))
    return x.permute(dims)


def attention(x: torch.Tensor, i: int, j: int, k: int) -> torch.Tensor:
    scores = x @ x.transpose(-1, -2) / math.sqrt(x.shape[-1])
    if i % 2:
        scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -math.inf)
    return scores.softmax(-1) @ x


ACTIVATIONS = (F.relu, F.gelu, F.silu, torch.tanh, torch.sigmoid, F.elu, F.leaky_relu, F.softplus, F.mish, F.hardswish)
UNARY = (torch.sin, torch.cos, torch.erf, torch.atan, torch.abs, torch.asinh, torch.square, torch.neg)

RULES: dict[str, Rule] = {
    "linear": Rule(of_rank(1), lambda shape, i, j, k: nn.Linear(shape[-1], 1 + i % 6, bias=j % 3 > 0)),
    "scale": Rule(of_rank(1), lambda shape, i, j, k: Scale(shape[-1])),
    "conv1d": convolution(3, nn.Conv1d),
    "conv2d": convolution(4, nn.Conv2d),
    "layer_norm": Rule(
        lambda shape: shape != () and shape[-1] > 2,
        lambda shape, i, j, k: nn.LayerNorm(shape[-1], elementwise_affine=i % 3 > 0),
    ),
    "rms_norm": Rule(of_rank(1), lambda shape, i, j, k: nn.RMSNorm(shape[-1])),
    "group_norm": Rule(
        lambda shape: len(shape) >= 3 and math.prod(shape[2:]) > 2,
        lambda shape, i, j, k: nn.GroupNorm(1 if shape[1] % 2 else 2, shape[1]),
    ),
    "batch_norm": Rule(lambda shape: 2 <= len(shape) <= 4 and math.prod(shape) // shape[1] > 2, batch_norm),
    "dropout": Rule(of_rank(1), lambda shape, i, j, k: nn.Dropout(0.1 + i / 20)),
    "activation": function(lambda x, i, j, k: ACTIVATIONS[i % len(ACTIVATIONS)](x)),
    "unary": function(lambda x, i, j, k: UNARY[i % len(UNARY)](x)),
    "root": function(lambda x, i, j, k: (x.square() + 1).sqrt() if i % 2 else (x.square() + 1).log()),
    "clamp": function(lambda x, i, j, k: x.clamp(-1 - i / 4, 0.5 + j / 4)),
    "arithmetic": function(lambda x, i, j, k: (x + i, x * (j + 1) - 1, x / (k + 1), i - x)[j % 4]),
    "where": function(lambda x, i, j, k: torch.where(x > 0.1, x, x * 0.3)),
    "residual": function(lambda x, i, j, k: x + torch.tanh(x)),
    "softmax": along(lambda x, dim: x.softmax(dim)),
    "log_softmax": along(lambda x, dim: x.log_softmax(dim)),
    "sum": along(lambda x, dim: x.sum(dim), 2),
    "mean": along(lambda x, dim: x.mean(dim, keepdim=True)),
    "amax": along(lambda x, dim: x.amax(dim, keepdim=True)),
    "logsumexp": along(lambda x, dim: x.logsumexp(dim), 2),
    "std": along(lambda x, dim: (x.var(dim, keepdim=True, correction=0) + 0.1).sqrt()),
    "norm": along(lambda x, dim: x / (1 + x.norm(dim=dim, keepdim=True))),
    "cumsum": along(lambda x, dim: x.cumsum(dim)),
    "sort": along(lambda x, dim: x.sort(dim).values),
    "centered": along(lambda x, dim: x - x.mean(dim, keepdim=True)),
    "flip": along(lambda x, dim: x.flip(dim)),
    "roll": function(lambda x, i, j, k: x.roll(i, j % x.dim())),
    "unsqueeze": Rule(of_rank(1, 4), lambda shape, i, j, k: Call(lambda x: x.unsqueeze(i % x.dim()))),
    "squeeze": Rule(of_rank(2), lambda shape, i, j, k: Call(lambda x: x.squeeze(i % x.dim()))),
    "transpose": function(lambda x, i, j, k: x.transpose(i % x.dim(), j % x.dim())),
    "permute": function(permuted),
    "flatten": function(lambda x, i, j, k: x.flatten(i % x.dim()), 2),
    "reshape": function(lambda x, i, j, k: x.reshape(-1, x.shape[i % x.dim()]), 2),
    "expand": function(lambda x, i, j, k: x.unsqueeze(0).expand(2, *x.shape).flatten(0, 1)),
    "cat": along(lambda x, dim: torch.cat([x, x.tanh()], dim)),
    "stack": function(lambda x, i, j, k: torch.stack([x, -x], i % (x.dim() + 1)).sum(i % (x.dim() + 1))),
    "split": Rule(
        lambda shape: shape != () and shape[-1] % 2 == 0,
        lambda shape, i, j, k: Call(lambda x: (lambda a, b: a * b.sigmoid())(*x.split(x.shape[-1] // 2, -1))),
    ),
    "slice": Rule(
        lambda shape: shape != () and shape[-1] > 3, lambda shape, i, j, k: Call(lambda x: x[..., i % 3 :: 1 + j % 2])
    ),
    "pad": function(lambda x, i, j, k: F.pad(x, (i % 3, j % 3), value=0.5)),
    "index_select": along(lambda x, dim: x.index_select(dim, torch.arange(x.shape[dim]).flip(0) // 2)),
    "matmul": function(lambda x, i, j, k: (x @ x.transpose(-1, -2)) / x.shape[-1], 2),
    "attention": function(attention, 3),
    "tril": function(lambda x, i, j, k: x.tril(i % 3 - 1), 2),
    "max_pool2d": Rule(lambda s: len(s) == 4 and min(s[2:]) >= 2, lambda s, i, j, k: nn.MaxPool2d(2, 1 + i % 2)),
    "avg_pool2d": Rule(lambda s: len(s) == 4 and min(s[2:]) >= 2, lambda s, i, j, k: nn.AvgPool2d(2)),
}


@dataclass(frozen=True)
class Program:
    """A random module, described.

    Args:
        shape: Of its input.
        embedded: Whether the input are indices, which an embedding turns into vectors first.
        layers: A rule's name and the three numbers for its ``make``, for each layer.
        seed: Of the input and the parameters.
    """

    shape: Shape
    embedded: bool
    layers: tuple[tuple[str, int, int, int], ...]
    seed: int

    def build(self) -> tuple[nn.Sequential, torch.Tensor]:
        """The module and an input in float64."""
        torch.manual_seed(self.seed)
        first: list[nn.Module] = [nn.Embedding(5, 4)] if self.embedded else []
        x = torch.randint(5, self.shape) if self.embedded else torch.randn(self.shape)
        net, out = nn.Sequential(*first), x
        for layer in first:
            out = layer(out)
        for name, *numbers in self.layers:
            # what no longer fits, as where hypothesis has left out a layer before it, is left out too
            layer = (
                RULES[name].make(tuple(out.shape), *numbers)
                if RULES[name].fits(tuple(out.shape))
                else Call(torch.clone)
            )
            with torch.no_grad():
                result = layer(out)
            if 0 < result.numel() <= MAX_ELEMENTS and result.dim() <= 5:
                net.append(layer)
                out = result
        for parameter in net.parameters():  # norms start as 1 and 0, which hides what is wrong with them
            parameter.data.add_(torch.randn_like(parameter), alpha=0.1)
        return net.double(), x.double() if x.is_floating_point() else x


_NUMBER = st.integers(0, 11)
PROGRAMS: st.SearchStrategy[Any] = st.builds(
    Program,
    shape=st.lists(st.integers(1, 6), min_size=1, max_size=4).map(tuple),
    embedded=st.booleans(),
    layers=st.lists(st.tuples(st.sampled_from(sorted(RULES)), _NUMBER, _NUMBER, _NUMBER), min_size=1, max_size=8).map(
        tuple
    ),
    seed=st.integers(0, 99),
)
