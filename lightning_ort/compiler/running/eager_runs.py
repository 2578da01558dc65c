"""Runs a captured graph again in eager, from the state that it had: :class:`RunState`, :func:`gradients_by_eager`."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from lightning_ort.compat.autograd import version_of


class RunState:
    """What a graph depends on besides its inputs: the states of torch's generators, and autocast."""

    def __init__(self, args: Sequence[Any]) -> None:
        self._devices = sorted({arg.device.index for arg in args if isinstance(arg, torch.Tensor) and arg.is_cuda})
        self._cpu = torch.get_rng_state()
        self._cuda = [torch.cuda.get_rng_state(device) for device in self._devices]
        self._autocast = [
            (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
            for kind in ("cpu", "cuda")[: 1 + bool(self._devices)]
        ]

    @property
    def casts(self) -> list[torch.dtype]:
        """The dtypes that autocast casts to."""
        return [dtype for _, dtype, enabled in self._autocast if enabled]

    def restore_random_numbers(self) -> None:
        """Restore the states of the generators."""
        torch.set_rng_state(self._cpu)
        for device, state in zip(self._devices, self._cuda, strict=True):
            torch.cuda.set_rng_state(state, device)

    @contextmanager
    def again(self) -> Iterator[None]:
        """Within the block all is as it was, and gradients are recorded; after it the generators are where they are."""
        with ExitStack() as stack:
            stack.enter_context(torch.random.fork_rng(self._devices))
            stack.enter_context(torch.enable_grad())
            for kind, dtype, enabled in self._autocast:
                stack.enter_context(torch.autocast(kind, dtype, enabled))
            self.restore_random_numbers()
            yield


def gradients_by_eager(
    eager: Callable[..., Any],
    args: Sequence[Any],
    written: Mapping[int, torch.Tensor],
    state: RunState | None,
    gradients: Sequence[Any],
) -> list[Any]:
    """The gradient of each input; eager does the forward pass again.

    With ``create_graph=True`` they are functions of inputs and ``gradients``. ``written`` has the values that inputs
    had, by index, which the pass writes to.
    """
    differentiable = torch.is_grad_enabled()
    inner = [written.get(index, arg) for index, arg in enumerate(args)]
    if not differentiable:
        inner = leaves(inner)
    with state.again() if state is not None else torch.enable_grad():
        if differentiable:  # views, so that hooks of the inputs themselves do not run twice
            inner = [arg.view_as(arg) if needs_gradient(arg) else arg for arg in inner]
        outputs = eager(*inner)
    return gradients_of(outputs, inner, gradients, create_graph=differentiable)


class GradientsOnce(torch.autograd.Function):
    """Gradients that cannot be differentiated again, which AOTAutograd's say of themselves as well."""

    @staticmethod
    def forward(ctx: Any, count: int, *gradients_and_inputs: Any) -> Any:
        """Return the gradients; the inputs are there so that they need one."""
        return tuple(None if gradient is None else gradient.detach() for gradient in gradients_and_inputs[:count])

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Raise ``RuntimeError``."""
        raise RuntimeError("torch.compile with aot_autograd does not currently support double backward")


def needs_gradient(arg: Any) -> bool:
    """Whether an input is a tensor that a gradient is wanted of."""
    return isinstance(arg, torch.Tensor) and arg.requires_grad


def versions_of(args: Sequence[Any]) -> list[int]:
    """How often each tensor was written to; 0 for what is none, and for those of inference mode, which do not count."""
    return [version_of(arg) if isinstance(arg, torch.Tensor) and not arg.is_inference() else 0 for arg in args]


def leaves(args: Sequence[Any]) -> list[Any]:
    """The same values as leaves of another autograd graph, parameters as parameters."""
    return [leaf_like(arg, arg.detach()) if isinstance(arg, torch.Tensor) else arg for arg in args]


def leaf_like(tensor: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return a value as a leaf of another autograd graph, a parameter if the tensor is one."""
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(value, tensor.requires_grad)
    return value.requires_grad_(tensor.requires_grad)


def gradients_of(
    outputs: Sequence[Any],
    inputs: Sequence[Any],
    gradients: Sequence[Any],
    keeps: bool = False,
    create_graph: bool = False,
) -> list[Any]:
    """The gradient of each input; ``None`` for one that has none."""
    pairs = [(out, gradient) for out, gradient in zip(outputs, gradients, strict=True) if gradient is not None]
    wanted = [index for index, x in enumerate(inputs) if needs_gradient(x)]
    found = torch.autograd.grad(
        [out for out, _ in pairs],
        [inputs[index] for index in wanted],
        [gradient if create_graph else gradient.detach() for _, gradient in pairs],
        retain_graph=keeps or create_graph,
        create_graph=create_graph,
        allow_unused=True,
    )
    by_index = dict(zip(wanted, found, strict=True))
    return [by_index.get(index) for index in range(len(inputs))]
