"""The gradients of a step that were computed with its results: :class:`WaitingGradients`."""

import itertools
import operator
from collections.abc import Callable, Sequence

import torch

from lightning_ort.compat.autograd import at_gradient, have_gradient_hooks, is_share, keeps_graph

Expected = tuple[float, torch.Tensor]
_GRAD = operator.attrgetter("grad")
_STRIDE: Callable[[torch.Tensor], tuple[int, ...]] = torch.Tensor.stride
TWICE = (
    "Trying to backward through the graph a second time. Specify retain_graph=True if you need to backward through the"
    " graph a second time."
)


class WaitingGradients:
    """The gradients of a run whose loss is a leaf, which need nothing of autograd's engine.

    ``expected`` is the gradient of the loss for which they were computed, as a number too, NaN if nobody knows that.
    ``taken`` is called when they are asked for, with the gradient of the loss if that may be another one.
    """

    def __init__(
        self,
        loss: torch.Tensor,
        expected: Expected,
        parameters: Sequence[torch.Tensor],
        gradients: list[torch.Tensor],
        taken: Callable[[torch.Tensor | None], None],
    ) -> None:
        self._loss: torch.Tensor | None = loss
        self._expected, self._parameters, self._gradients, self._taken = expected, parameters, gradients, taken
        loss.requires_grad_()
        # for whoever calls `backward` himself, or has done something with the loss before
        at_gradient(loss, self._take)

    def are_of(self, loss: torch.Tensor) -> bool:
        """Return whether they are what ``loss.backward()`` computes, where it is the loss or a share of it."""
        expected = self._expected[0]
        return loss is self._loss if expected == 1 and loss.is_leaf else is_share(loss, self._loss, expected)

    def hand_over(self) -> None:
        """Do what ``backward()`` does."""
        self._loss = None  # which refers to this object
        self._taken(None)
        gradients, self._gradients = self._gradients, []
        accumulate_in_any_case(self._parameters, gradients)

    def _take(self, loss: torch.Tensor) -> None:
        if not self._gradients:
            raise RuntimeError(TWICE)
        gradients = [gradient.clone() for gradient in self._gradients] if keeps_graph() else self._gradients
        tangent, loss.grad = loss.grad, None
        assert tangent is not None
        number, expected = self._expected
        # on another device, to compare would wait for it
        if tangent.device.type != "cpu" or float(tangent) != number:
            torch._foreach_mul_(gradients, tangent / expected)
        self._taken(tangent)
        if gradients is self._gradients:
            self._gradients = []
        accumulate_in_any_case(self._parameters, gradients)


def accumulate_in_any_case(parameters: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]) -> None:
    """Add gradients to those of the parameters as autograd's engine does, or have it do that."""
    if not accumulate(parameters, gradients):
        torch.autograd.backward(parameters, gradients)


def accumulate(parameters: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]) -> bool:
    """Add gradients to those of the parameters as autograd's engine does; return whether that was possible."""
    # where parameters are tied after the step was compiled, one gets two gradients
    if len({*map(id, parameters)}) < len(parameters) or have_gradient_hooks(parameters):
        return False
    before = [*map(_GRAD, parameters)]
    is_new = [*map(operator.is_, before, itertools.repeat(None))]
    new, first = [*itertools.compress(parameters, is_new)], [*itertools.compress(gradients, is_new)]
    if [*map(_STRIDE, new)] != [*map(_STRIDE, first)]:
        return False
    if len(new) < len(before):
        sums = [one for one in before if one is not None]
        if any(one.layout is not torch.strided for one in sums):
            return False
        with torch.no_grad():
            torch._foreach_add_(sums, [one for one, alone in zip(gradients, is_new, strict=True) if not alone])
    for parameter, gradient in zip(new, first, strict=True):
        parameter.grad = gradient
    return True
