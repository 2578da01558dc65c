"""Random numbers: all are made of uniform and normal ones, which are inputs of a model that its runner draws.

The same functions stand for torch's operations in a trace (:func:`drawn`), where ``aten.rand`` and ``aten.randn`` are
left, and in eager while a model is compared with its module (:class:`Recorded`), which notes what was drawn.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx
from typing_extensions import override

from lightning_ort.compat.torch_graphs import OpOverload, TorchDispatchMode
from lightning_ort.compiler.executors.ort.conversion.graph import Value
from lightning_ort.compiler.executors.ort.conversion.metadata import dtype_of
from lightning_ort.compiler.executors.ort.conversion.registry import form
from lightning_ort.onnx_export.training.graph import PortableGraph

aten = torch.ops.aten

_DRAWN: dict[OpOverload, Callable[..., Any]] = {}
_MEANS: dict[OpOverload, Callable[..., Any]] = {}
_BASES = {aten.rand.default: "uniform", aten.randn.default: "normal"}
_noted: list["Recorded"] = []  # who notes what eager draws


def drawn(means: bool) -> dict[OpOverload, Callable[..., Any]]:
    """Return what is traced in place of operations that draw; with ``means``, dropout's numbers are their means."""
    return {**_DRAWN, **_MEANS} if means else dict(_DRAWN)


class Recorded(TorchDispatchMode):
    """Within the block torch draws by the functions of a trace; entering returns a list of the numbers, as it grows."""

    def __init__(self, means: bool) -> None:
        super().__init__()
        self._kernels = drawn(means)
        self._numbers: list[np.ndarray] = []

    def __enter__(self) -> list[np.ndarray]:
        super().__enter__()
        return self._numbers

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kernel, kwargs = self._kernels.get(func), kwargs or {}
        if func in _BASES:
            return self.note(func(*args, **kwargs))
        if kernel is None:
            return func(*args, **kwargs)
        _noted.append(self)
        try:
            result = kernel(*args, **kwargs)
        finally:
            _noted.pop()
        return args[0].copy_(result) if func.overloadpacket.__name__.endswith("_") else result

    def note(self, numbers: Tensor) -> Tensor:
        """Add numbers to the list."""
        self._numbers.append(numbers.detach().float().cpu().numpy().copy())
        return numbers


def _uniform(size: Sequence[Any], device: Any) -> Tensor:
    return _base(torch.rand, size, device)


def _normal(size: Sequence[Any], device: Any) -> Tensor:
    return _base(torch.randn, size, device)


def _base(function: Any, size: Sequence[Any], device: Any) -> Tensor:
    numbers: Tensor = function(size, device=device, dtype=torch.float32)
    return _noted[-1].note(numbers) if _noted else numbers


@form(aten.rand.default, aten.randn.default)
def base(ctx: PortableGraph, node: fx.Node, size: Sequence[Any], **_: Any) -> Value:
    """rand(SymInt[] size, *, ScalarType? dtype, Layout? layout, Device? device, bool? pin_memory) -> Tensor"""
    return ctx.draw(_BASES[node.target], node.meta["val"].shape).cast(dtype_of(node))  # type: ignore[index]


def _draws(*overloads: str, mean: bool = False) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register how operations, by name, are made of the base numbers, or what their means are."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any, generator: Any = None, **kwargs: Any) -> Any:  # a trace has none
            return function(*args, **kwargs)

        for name in overloads:
            packet, _, overload = name.partition(".")
            (_MEANS if mean else _DRAWN)[getattr(getattr(aten, packet), overload or "default")] = called
        return function

    return register


# dropout


@_draws("native_dropout")
def _dropout(x: Tensor, p: float, train: bool | None) -> tuple[Tensor, Tensor]:
    if train is False or p == 0:
        return _kept(x, p, train)
    if p == 1:  # of which eager draws nothing
        return x * 0.0, torch.zeros_like(x, dtype=torch.bool)
    mask = _uniform(x.shape, x.device) < 1 - p
    return x * mask * (1 / (1 - p)), mask


@_draws("native_dropout", mean=True)
def _kept(x: Tensor, p: float, train: bool | None) -> tuple[Tensor, Tensor]:
    return x.clone(), torch.ones_like(x, dtype=torch.bool)


@_draws("native_dropout_backward")
def _dropout_backward(grad: Tensor, mask: Tensor, scale: float) -> Tensor:
    return grad * mask * scale


@_draws("native_dropout_backward", mean=True)
def _kept_backward(grad: Tensor, mask: Tensor, scale: float) -> Tensor:
    return grad.clone()


@_draws("bernoulli.p", "bernoulli_.float", "bernoulli.Tensor", "bernoulli_.Tensor")
def _bernoulli(x: Tensor, p: Any = 0.5) -> Tensor:
    return (_uniform(x.shape, x.device) < p).to(x.dtype)


@_draws("bernoulli.p", "bernoulli_.float", "bernoulli.Tensor", "bernoulli_.Tensor", mean=True)
def _chance(x: Tensor, p: Any = 0.5) -> Tensor:
    return p.to(x.dtype).expand_as(x).clone() if isinstance(p, Tensor) else torch.full_like(x, p)


@_draws("bernoulli")
def _bernoulli_of(p: Tensor) -> Tensor:
    return _bernoulli(p, p)


@_draws("bernoulli", mean=True)
def _chance_of(p: Tensor) -> Tensor:
    return p.clone()


# other distributions; of some torch has a form that writes and one that does not


@_draws("uniform", "uniform_")
def _uniform_between(x: Tensor, low: float = 0.0, high: float = 1.0) -> Tensor:
    return (_uniform(x.shape, x.device) * (high - low) + low).to(x.dtype)


def _scaled(like: Tensor, mean: Any, std: Any) -> Tensor:
    return (_normal(like.shape, like.device) * std + mean).to(like.dtype)


_draws("normal_functional", "normal_")(lambda x, mean=0.0, std=1.0: _scaled(x, mean, std))
_draws("normal.Tensor_float", "normal.Tensor_Tensor")(
    lambda mean, std=1.0: _scaled(torch.broadcast_tensors(mean, std)[0] if isinstance(std, Tensor) else mean, mean, std)
)
_draws("normal.float_Tensor")(lambda mean, std: _scaled(std, mean, std))


@_draws("exponential", "exponential_")
def _exponential(x: Tensor, rate: float = 1.0) -> Tensor:
    return (-torch.log1p(-_uniform(x.shape, x.device)) / rate).to(x.dtype)


def _new(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Of a function of a size and a device one that has the arguments of torch's factories."""

    def make(*args: Any, dtype: Any = None, device: Any = None, **_: Any) -> Tensor:
        found = function(*args, device=device)
        wanted = dtype or (torch.get_default_dtype() if found.is_floating_point() else None)
        return found if wanted is None else found.to(wanted)

    return make


_draws("rand.generator")(_new(_uniform))
_draws("randn.generator")(_new(_normal))
_draws("normal.float_float")(_new(lambda mean, std, size, device: _normal(size, device) * std + mean))


def _like(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def make(x: Tensor, *args: Any, dtype: Any = None, device: Any = None, **_: Any) -> Tensor:
        return function(x, *args).to(device=device or x.device, dtype=dtype or x.dtype)

    return make


_draws("rand_like")(_like(lambda x: _uniform(x.shape, x.device)))
_draws("randn_like")(_like(lambda x: _normal(x.shape, x.device)))


def _integers(low: Any, high: Any, size: Sequence[Any], device: Any) -> Tensor:
    # in float64, since a product in float32 may round up to the end
    return (_uniform(size, device).double() * (high - low)).floor().to(torch.int64) + low


_draws("randint", "randint.generator")(_new(lambda high, size, device: _integers(0, high, size, device)))
_draws("randint.low", "randint.low_generator")(_new(_integers))
_draws("randint_like")(_like(lambda x, high: _integers(0, high, x.shape, x.device)))
_draws("randint_like.low_dtype")(_like(lambda x, low, high: _integers(low, high, x.shape, x.device)))
_draws("random.from", "random_.from")(lambda x, low, high: _integers(low, high, x.shape, x.device).to(x.dtype))
_draws("random.to", "random_.to")(lambda x, high: _integers(0, high, x.shape, x.device).to(x.dtype))
_draws("randperm", "randperm.generator")(_new(lambda count, device: torch.argsort(_uniform([count], device))))


@_draws("multinomial")
def _multinomial(chances: Tensor, count: int, replacement: bool = False) -> Tensor:
    if replacement or count == 1:
        ends = (chances / chances.sum(-1, keepdim=True)).cumsum(-1)
        numbers = _uniform([*chances.shape[:-1], count], chances.device)
        found = (numbers.unsqueeze(-1) >= ends.unsqueeze(-2)).sum(-1)
        return found.clamp(max=chances.shape[-1] - 1)
    # the largest of the logarithms with Gumbel's noise are a draw without replacement
    numbers = _uniform(chances.shape, chances.device).clamp(min=1e-20)
    return (chances.log() - (-numbers.log()).log()).topk(count, -1)[1]
