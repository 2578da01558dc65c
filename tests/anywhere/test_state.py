"""What a step keeps in Python is found, however slowly it makes a difference, and undone."""

import array
import collections
import contextvars
import functools
import itertools
import queue
import random
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_ort.onnx_export.failure import ExportFailed
from lightning_ort.onnx_export.training.state import check_repeats, many_steps, python_kept

number = 0


def of_module() -> None:
    global number
    number += 1


class Counter:
    """Counts in its class."""

    count = 0

    def __call__(self) -> None:
        Counter.count += 1


class Slotted:
    """Counts in a slot."""

    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = torch.zeros(())

    def __call__(self) -> None:
        self.count = self.count + 1


def nonlocal_counter() -> Callable[[], None]:
    count = 0

    def function() -> None:
        nonlocal count
        count += 1

    return function


def with_default(seen: list[int] = [0]) -> None:  # noqa: B006
    seen[0] += 1


def ones() -> Iterator[int]:
    yield from [1] * 1000


@functools.cache
def kept(_: int) -> Callable[[], None]:
    return nonlocal_counter()


def per_thread() -> threading.local:
    made = threading.local()
    made.count = 0
    return made


def queued() -> queue.Queue[int]:
    made: queue.Queue[int] = queue.Queue()
    for number in range(10):
        made.put(number)
    return made


class Keeping(nn.Module):
    """Has something that its step may change."""

    def __init__(self, thing: Any, change: Callable[[Any], Any]) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)
        self.thing, self.change = thing, change

    def step(self, number: int) -> dict[str, Tensor]:
        self.change(self)
        loss = self.layer(torch.ones(3, 2)).sum()
        loss.backward()
        return {"loss": loss.detach()}


def next_of(module: Any) -> None:
    next(module.thing)


def called(module: Any) -> None:
    module.thing()


CHANGED: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "cycle": (lambda: itertools.cycle([1, 1, 2]), next_of),
    "count": (itertools.count, next_of),
    "list's iterator": (lambda: iter([1] * 1000), next_of),
    "map": (lambda: map(abs, range(1000)), next_of),
    "enumerate": (lambda: enumerate(itertools.repeat(1)), next_of),
    "generator": (ones, next_of),
    "generator expression": (lambda: (1 for _ in range(1000)), next_of),
    "closure": (nonlocal_counter, called),
    "partial": (lambda: functools.partial(nonlocal_counter()), called),
    "what is cached": (lambda: None, lambda module: kept(0)()),
    "default": (lambda: with_default, called),
    "global variable of a helper": (lambda: of_module, called),
    "class attribute": (Counter, called),
    "slot": (Slotted, called),
    "method": (lambda: SimpleNamespace(call=Slotted().__call__), lambda module: module.thing.call()),
    "context variable": (lambda: contextvars.ContextVar("v", default=0), lambda m: m.thing.set(m.thing.get() + 1)),
    "attribute of a thread": (per_thread, lambda module: setattr(module.thing, "count", module.thing.count + 1)),
    "queue": (queued, lambda module: module.thing.get()),
    "random numbers": (lambda: random.Random(0), lambda module: module.thing.random()),
    "array": (lambda: array.array("d", [0.0]), lambda module: module.thing.__setitem__(0, module.thing[0] + 1)),
    "complex number": (lambda: 1j, lambda module: setattr(module, "thing", module.thing + 1)),
    "text": (lambda: "", lambda module: setattr(module, "thing", module.thing + "x")),
    "large number": (lambda: 10**9, lambda module: setattr(module, "thing", module.thing + 1)),
    "tensor in a dict": (lambda: {"t": torch.ones(1)}, lambda m: m.thing.update(t=m.thing["t"] * 0.99999)),
    "stack": (lambda: [1] * 1000, lambda module: module.thing.pop()),
    "queue that turns": (lambda: collections.deque([1, 2, 2]), lambda module: module.thing.rotate()),
    "new attributes": (SimpleNamespace, lambda m: setattr(m.thing, f"a{len(vars(m.thing))}", 1)),
}


@pytest.mark.parametrize("case", CHANGED)
def test_what_changes_in_each_step_is_refused(case: str) -> None:
    make, change = CHANGED[case]
    module = Keeping(make(), change)
    with pytest.raises(ExportFailed, match=r"^Step changes .+, which a model cannot hold: keep it in a tensor"):
        check_repeats(module.step, module, "Step")


def test_what_is_the_same_after_each_step_is_not() -> None:
    def change(module: Any) -> None:
        module.thing["last"] = module.layer.weight.detach().sum()
        module.made = getattr(module, "made", None) or [1.0]
        module.iterator = iter(module.made)
        module.thing["losses"].append(random.random())  # as a time would be
        module.thing["seen"].add(len(module.thing["seen"]))

    module = Keeping({"losses": [], "seen": set()}, change)
    before = module.layer.weight.detach().clone()
    check_repeats(module.step, module, "Step")
    assert module.thing == {"losses": [], "seen": set()}
    assert not hasattr(module, "made")
    assert torch.equal(module.layer.weight, before)


class Named(list):
    """A list of the user's."""

    def extend(self, items: Any) -> None:
        raise AssertionError("no code of the user's runs")


GROWING: list[tuple[Any, Callable[[Any], Any]]] = [
    ([], lambda one: one.append(1)),
    (Named(), lambda one: one.append(1)),
    (collections.deque(maxlen=600), lambda one: one.append(1)),
    ({}, lambda one: one.update({len(one): 1})),
    ({}, lambda one: one.update({f"key{len(one)}": 1})),
    ({}, lambda one: one.update({object(): 1})),
    (collections.OrderedDict(), lambda one: one.update({len(one): 1})),
    (set(), lambda one: one.add(len(one))),
]


@pytest.mark.parametrize(("container", "grow"), GROWING)
def test_what_grows_is_as_long_as_after_many_steps_and_undone(container: Any, grow: Callable[[Any], Any]) -> None:
    module = Keeping(SimpleNamespace(kept=container), lambda module: grow(module.thing.kept))
    check_repeats(module.step, module, "Step")
    with python_kept(module):
        with many_steps(module):
            module.step(0)
        assert len(container) > 500
    assert len(container) == 0
