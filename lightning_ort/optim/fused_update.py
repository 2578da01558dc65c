"""The update of one of torch's fused optimizers on a CPU, without what torch has around its kernels.

Eight tensors of up to 4,096 elements took 66 microseconds in ``step``, of which the kernels take 22. The kernels open a
parallel region for each tensor, whatever its size, and wake all threads for it: that takes longer than a small update,
and while other programs use the cores it takes milliseconds. So small tensors are updated by one thread.
"""

import itertools
import operator
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, optim

from lightning_ort.compat.autograd import set_gradients
from lightning_ort.compat.torch_optimizers import FUSED_KERNELS, note_step, only_hooks_before_steps, only_step_hooks
from lightning_ort.compiler.machine.openmp import OneThread

# elements of a tensor that one thread updates in less time than it takes to wake another
SMALL = 2**15

_ADAM = ("exp_avg", "exp_avg_sq", "step")
_AMSGRAD = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "step")
_STATES: Mapping[type[optim.Optimizer], tuple[str, ...]] = {
    optim.Adam: _ADAM,
    optim.AdamW: _ADAM,
    optim.SGD: ("momentum_buffer",),
    optim.Adagrad: ("sum", "step"),
}
_OF_ADAM = ("lr", "weight_decay", "eps", "amsgrad", "maximize")
_SETTINGS: Mapping[type[optim.Optimizer], tuple[str, ...]] = {
    optim.Adam: _OF_ADAM,
    optim.AdamW: _OF_ADAM,
    optim.SGD: ("lr", "weight_decay", "momentum", "dampening", "nesterov", "maximize"),
    optim.Adagrad: ("lr", "lr_decay", "weight_decay", "eps", "maximize"),
}
_ONE = torch.ones(())
_Call = tuple[Callable[..., Any], list[list[Tensor]], dict[str, Any], bool]  # kernel, tensors, settings, on one thread

# marks the hook of an optimizer's step that :class:`FusedUpdate` calls by itself: the attribute has what it does
CHECK = "before_fused_update"


def may_update(optimizer: optim.Optimizer) -> bool:
    """Return whether ``optimizer.step()`` only calls torch's fused kernels, as far as its class and hooks tell."""
    if type(optimizer) not in _STATES or (hooks := only_step_hooks(optimizer)) is None:
        return False
    for hook in hooks:  # noqa: SIM110 (a generator takes longer)
        if not hasattr(hook, CHECK):
            return False
    return True


def only_own_hooks(optimizer: optim.Optimizer) -> AbstractContextManager[None]:
    """Within the block an optimizer has none of the hooks that came since :func:`may_update`."""
    return only_hooks_before_steps(optimizer, lambda hook: hasattr(hook, CHECK))


class FusedUpdate:
    """Does what ``optimizer.step()`` does, if :func:`may_update`, with lists that are made once."""

    def __init__(self, optimizer: optim.Optimizer) -> None:
        self.optimizer = optimizer
        self._adds = type(optimizer) is not optim.SGD
        self._groups: list[_Group] = []
        self._seen: list[Any] = []  # parameters, and their states

    def __call__(self) -> bool:
        """Update; return whether it was done: the first step of a parameter, which makes its states, is torch's.

        Hooks of the optimizer may have come since :func:`may_update`.
        """
        optimizer = self.optimizer
        if (hooks := only_step_hooks(optimizer)) is None:
            return False
        for hook in hooks:
            if not hasattr(hook, CHECK):
                return False
            getattr(hook, CHECK)()
        if (calls := self._calls()) is None:
            return False
        takes_gradients = torch.is_grad_enabled()
        set_gradients(False)
        try:
            for kernel, tensors, settings, is_small in calls:
                _run(kernel, tensors, settings, is_small, tensors[-1] if self._adds else [])
        finally:
            set_gradients(takes_gradients)
        note_step(optimizer)
        return True

    def with_gradients(self, parameters: Sequence[Tensor]) -> "UpdateWith | None":
        """Return what does what the last call did, with other gradients of these parameters, and of them alone."""
        place_of = {id(parameter): place for place, parameter in enumerate(parameters)}
        if (calls := self._calls()) is None or len(place_of) < len(parameters):
            return None
        updated = [id(parameter) for _, (own, *_), _, _ in calls for parameter in own]
        if len(updated) != len(parameters) or {*updated} != place_of.keys():
            return None
        update = UpdateWith(self.optimizer)
        groups = {id(parameter): group for group in self.optimizer.param_groups for parameter in group["params"]}
        for kernel, tensors, _, is_small in calls:
            places = [place_of[id(parameter)] for parameter in tensors[0]]
            update.add(places, groups[id(tensors[0][0])], kernel, [*tensors], is_small)
        return update

    def _calls(self) -> list[_Call] | None:
        states, groups, kind = self.optimizer.state, self.optimizer.param_groups, type(self.optimizer)
        seen = [*states, *states.values(), *itertools.chain.from_iterable(map(_VALUES, states.values()))]
        for group in groups:
            seen += group["params"]
        is_known = len(seen) == len(self._seen) and len(groups) == len(self._groups)
        if not is_known or not all(map(operator.is_, seen, self._seen)):
            self._seen, self._groups = seen, [_Group(kind, group, states) for group in groups]
        calls: list[_Call] = []
        for index, group in enumerate(groups):
            if not self._groups[index].add_calls(calls, group):
                self._groups[index] = one = _Group(kind, group, states)
                if not one.add_calls(calls, group):
                    return None
        return calls


class UpdateWith:
    """Updates again and again as one step did, with gradients that it is given.

    Nobody may change groups, states or hooks meanwhile, but for settings such as the learning rate; states that count
    steps are those of the last one after :meth:`end`.
    """

    def __init__(self, optimizer: optim.Optimizer) -> None:
        self._optimizer, self._kind = optimizer, type(optimizer)
        self._rows: list[Any] = []
        self._counts: list[tuple[Tensor, list[Tensor]]] = []  # a count for all states that are equal

    def add(self, places: list[int], group: Any, kernel: Any, tensors: list[Any], is_small: bool) -> None:
        """Add a call of a kernel, and where the gradients of its parameters are."""
        steps = tensors[-1] if self._kind is not optim.SGD else []
        if len({*map(Tensor.item, steps)}) == 1:
            count = steps[0].clone()
            self._counts.append((count, steps))
            tensors[-1], steps = [count] * len(steps), [count]
        self._rows.append((places, group, kernel, tensors, is_small, steps))

    def __call__(self, gradients: Sequence[Tensor]) -> None:
        """Update with these gradients."""
        takes_gradients = torch.is_grad_enabled()
        set_gradients(False)
        try:
            for places, group, kernel, tensors, is_small, steps in self._rows:
                tensors[1] = [*map(gradients.__getitem__, places)]
                _run(kernel, tensors, _settings_of(self._kind, group), is_small, steps)
                tensors[1] = ()  # whose memory is for the next ones
        finally:
            set_gradients(takes_gradients)

    def end(self) -> None:
        """Write what is kept apart to the states of the optimizer."""
        for count, steps in self._counts:
            torch._foreach_copy_(steps, [count] * len(steps))
        note_step(self._optimizer)


def _run(
    kernel: Callable[..., Any], tensors: list[Any], settings: dict[str, Any], is_small: bool, steps: list[Tensor]
) -> None:
    """Count a step, and call a kernel."""
    if steps:
        torch._foreach_add_(steps, [_ONE] * len(steps))  # to add a number takes three times as long
    if is_small:
        with OneThread():
            kernel(*tensors, **settings)
    else:
        kernel(*tensors, **settings)


class _Group:
    """The lists of one group of parameters, whose states stay the same tensors."""

    def __init__(self, kind: Any, group: dict[str, Any], states: Mapping[Tensor, Any]) -> None:
        self._kind = kind
        self._form = group.get("amsgrad"), not group.get("momentum")
        names = _STATES[kind]
        if kind is optim.SGD and not group["momentum"]:
            names = ()
        elif names is _ADAM and group["amsgrad"]:
            names = _AMSGRAD
        self._without = [p for p in group["params"] if p.grad is None]
        self._parts: list[tuple[list[Tensor], list[list[Any]], bool]] = []  # parameters, states, whether small
        rows = [(p, states.get(p) or {}) for p in group["params"] if p.grad is not None]
        for is_small in (False, True):
            if part := [row for row in rows if (row[0].numel() <= SMALL) == is_small]:
                lists = [[own.get(name) for _, own in part] for name in names] or [[]]
                if names is _ADAM:
                    lists.insert(2, [])
                self._parts.append(([p for p, _ in part], lists, is_small))
        self._has_states = all(type(one) is Tensor for _, lists, _ in self._parts for each in lists for one in each)

    def add_calls(self, calls: list[_Call], group: dict[str, Any]) -> bool:
        """Add the calls of kernels; return whether there are only such as torch would make, for what is known here."""
        kind = self._kind
        if self._form != (group.get("amsgrad"), not group.get("momentum")) or not self._has_states:
            return False
        settings, kernel = _settings_of(kind, group), FUSED_KERNELS[kind]
        if kind is optim.Adam and group.get("decoupled_weight_decay"):  # newer than torch 2.6
            kernel = FUSED_KERNELS[optim.AdamW]
        if not group.get("fused") or group.get("capturable") or Tensor in map(type, settings.values()):
            return False  # torch converts it first
        if self._without and not _NOTHING.issuperset(map(type, map(_GRAD, self._without))):
            return False
        own_calls: list[_Call] = []
        for parameters, lists, is_small in self._parts:
            gradients = [*map(_GRAD, parameters)]
            if not _TENSOR.issuperset(map(type, gradients)):
                return False
            own_calls.append((kernel, [parameters, gradients, *lists], settings, is_small))
        calls += own_calls
        return True


def _settings_of(kind: Any, group: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a kernel that are no tensors."""
    names = _SETTINGS[kind]
    settings = dict(zip(names, map(group.__getitem__, names), strict=True))  # a comprehension is a call
    if kind is optim.SGD:
        settings["is_first_step"] = False
    elif kind is not optim.Adagrad:
        settings["beta1"], settings["beta2"] = group["betas"]
    return settings


_GRAD, _VALUES = operator.attrgetter("grad"), operator.methodcaller("values")
_TENSOR, _NOTHING = frozenset({Tensor}), frozenset({type(None)})
