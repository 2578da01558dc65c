"""Inputs of the op table, described rather than made: the same description serves every dtype."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch


@dataclass(frozen=True)
class Sample:
    """One tensor input.

    Args:
        make: Makes the tensor in a dtype; drawing uses torch's generator.
        grad: Whether it takes part in the backward pass.
        change: A view to take of it, such as a transpose.
    """

    make: Callable[[torch.dtype], torch.Tensor]
    grad: bool = True
    change: Callable[[torch.Tensor], torch.Tensor] | None = None

    def __call__(self, dtype: torch.dtype) -> torch.Tensor:
        tensor = self.make(dtype)
        if self.change is not None:
            tensor = self.change(tensor)
        return tensor.requires_grad_(self.grad and tensor.is_floating_point())

    def fixed(self) -> "Sample":
        """The same without a gradient."""
        return replace(self, grad=False)

    def viewed(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "Sample":
        """The same as a view, which is usually not contiguous."""
        return replace(self, change=change)


def normal(*shape: int, scale: float = 1.0, shift: float = 0.0) -> Sample:
    """Normally distributed."""
    return Sample(lambda dtype: torch.randn(shape).mul(scale).add(shift).to(dtype))


def uniform(*shape: int, low: float = 0.0, high: float = 1.0) -> Sample:
    """Uniformly distributed."""
    return Sample(lambda dtype: torch.rand(shape).mul(high - low).add(low).to(dtype))


def ints(*shape: int, high: int, low: int = 0, dtype: torch.dtype = torch.int64) -> Sample:
    """Integers from ``low`` up to but without ``high``."""
    return Sample(lambda _: torch.randint(low, high, shape, dtype=dtype), grad=False)


def bools(*shape: int) -> Sample:
    """True or false at even odds."""
    return Sample(lambda _: torch.rand(shape) > 0.5, grad=False)


def values(data: Any, dtype: torch.dtype | None = None) -> Sample:
    """These very values; in the dtype of the test where none is given."""
    return Sample(lambda tested: torch.tensor(data, dtype=dtype or tested))


def distinct(*shape: int) -> Sample:
    """Every value once, so that an extremum is where everybody finds it."""

    def make(dtype: torch.dtype) -> torch.Tensor:
        size = torch.Size(shape).numel()
        numbers = torch.randperm(size).sub(size // 2).reshape(shape)
        return numbers.div(3).to(dtype) if dtype.is_floating_point else numbers.to(dtype)

    return Sample(make)


def build(inputs: Sequence[Any], dtype: torch.dtype) -> list[Any]:
    """The inputs as tensors; the same at every call."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return [x(dtype) if isinstance(x, Sample) else x for x in inputs]
