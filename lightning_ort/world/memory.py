"""What was there before a step, and what the step has written to it."""

import sys
import types
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from lightning_ort.world.code import imported_module, reads_of
from lightning_ort.world.flat import PLAIN, is_same
from lightning_ort.world.objects import BOXES, MAX_ITEMS, TENSORS, Part, Surroundings
from lightning_ort.world.places import Place
from lightning_ort.world.watch import Opening

_MISSING = object()
# of a LightningModule, for what runs in it and what it logs
OF_LIGHTNING = {"_current_fx_name", "_metric_attributes", "log"}
# what Python itself writes
_NOT_WRITTEN_BY_STEP = {"__warningregistry__", "_cache"}


@dataclass(frozen=True)
class Effect:
    """What a step wrote to something that was there before; a call repeats it.

    Attributes:
        owner: The dictionary or list: an attribute is an item of its object's ``__dict__``.
        key: The key or index, or None for what was appended.
        value: A tensor, or tuples, lists, dictionaries that hold nothing but tensors.
        kind: Whether the value was set or appended.
    """

    owner: dict[Any, Any] | list[Any]
    key: Any
    value: Any
    kind: Literal["item", "append"]


def structure_of(value: Any) -> Any:
    """How tensors are put together; None if there is something else among them."""
    if type(value) in TENSORS:
        return type(value)
    if type(value) in (tuple, list):
        inner = tuple(map(structure_of, value))
        return (type(value), inner) if inner and None not in inner else None
    if type(value) is dict:
        inner = tuple(map(structure_of, value.values()))
        return (dict, tuple(value), inner) if inner and None not in inner else None
    return None


class Memory:
    """All that can be reached from a step before it runs, as identities."""

    def __init__(self, surroundings: Surroundings) -> None:
        self._surroundings = surroundings
        self._seen: dict[int, Any] = {}
        self.finalizer = ""  # a class of the user's whose objects do something when nothing refers to them any more
        self.parts: dict[int, list[tuple[Part, tuple[Any, ...]]]] = {}  # by their keys
        self._waiting: deque[tuple[Any, str]] = deque()

    def __contains__(self, value: Any) -> bool:
        return id(value) in self._seen

    def remember(self, value: Any, what: str) -> None:
        """Remember an object and all that can be reached from it."""
        self._waiting.append((value, what))
        while self._waiting:
            self._visit(*self._waiting.popleft())

    def forget(self) -> None:
        """Refer to nothing any more."""
        self._seen.clear()
        self.parts.clear()

    def remember_globals(self, namespace: dict[str, Any], code: types.CodeType) -> None:
        """Remember the global variables that a function names, and what it imports: it cannot reach the others."""
        if id(namespace) not in self.parts:
            self._take(Part(namespace, str(namespace.get("__name__"))), deep=False)
        for name in code.co_names:
            if name in namespace:
                self.remember(namespace[name], name)
        for module, level, taken in reads_of(code).imports:
            known = vars(sys.modules.get(imported_module(namespace, module, level), types))
            for name in taken:
                self.remember(known.get(name), name)

    def _visit(self, value: Any, what: str) -> None:
        if id(value) in self._seen:
            return
        self._seen[id(value)] = value
        if hasattr(type(value), "__del__") and self._surroundings.places.of_class(type(value)) is Place.USER:
            self.finalizer = type(value).__name__
        if isinstance(value, types.FunctionType) and not (value.__closure__ or value.__dict__ or value.__defaults__):
            return
        if id(type(value)) not in self._seen and not isinstance(value, type):
            self._waiting.append((type(value), type(value).__name__))
        if isinstance(value, type):
            self._waiting += ((base, base.__name__) for base in value.__bases__)
        for part in self._surroundings.parts(value, what):
            self._take(part, deep=not self._is_known(value))

    def _is_known(self, value: Any) -> bool:
        """Whether it is an object of a known package, of which only its own attributes are remembered."""
        if isinstance(value, (nn.Module, torch.Tensor, types.FunctionType, *BOXES)):
            return False
        return self._surroundings.places.of_class(type(value)) in (Place.KNOWN, Place.OURS, Place.STANDARD)

    def _take(self, part: Part, deep: bool) -> None:
        if part.key in self.parts and not part.names:
            return
        if not part.names and part.size > MAX_ITEMS:
            return
        self.parts.setdefault(part.key, []).append((part, part.content()))
        if deep:
            name = "" if part.of is None or isinstance(part.of, str) else "."
            for key, value in part.pairs():
                if id(value) not in self._seen:
                    self._waiting.append((value, f"{name}{key}" if name else part.what))

    def tensors(self) -> list[torch.Tensor]:
        """All tensors that were there."""
        return [value for value in self._seen.values() if isinstance(value, torch.Tensor)]

    def written(self) -> Iterator[Effect | Opening]:
        """What the step has written since."""
        for parts in self.parts.values():
            for part, before in parts:
                now = part.content()
                if len(now) != len(before) or any(map(lambda a, b: a is not b, before, now)):
                    yield from self._differences(part, before, now)

    def _differences(self, part: Part, before: tuple[Any, ...], now: tuple[Any, ...]) -> Iterator[Effect | Opening]:
        if type(part.owner) is list:
            yield from self._of_list(part, before, now)
        elif part.is_items:
            yield from self._of_items(part, before, now)
        elif not all(map(is_same, before, now)) or len(before) != len(now):
            yield Opening(f"it changes {_a(part.owner)}", part.what)

    def _is_result(self, value: Any) -> bool:
        """Whether it is made of tensors and of what a closed step makes again: numbers, strings, new containers."""
        if type(value) in (list, dict) and value in self:
            return False
        if type(value) in (tuple, list, dict):
            return all(map(self._is_result, value.values() if type(value) is dict else value))
        return type(value) in (*TENSORS, *PLAIN)

    def _of_list(self, part: Part, before: tuple[Any, ...], now: tuple[Any, ...]) -> Iterator[Effect | Opening]:
        if len(now) < len(before):
            yield Opening("it takes items out of a list", part.what)
            return
        for at, value in enumerate(now):
            old = before[at] if at < len(before) else _MISSING
            if is_same(old, value):
                continue
            if not (self._is_result(value) if old is _MISSING else structure_of(value)):
                yield Opening(f"it puts {_a(value)} into a list that was there before", part.what)
            elif old is _MISSING:
                yield Effect(part.owner, None, value, "append")
            else:
                yield Effect(part.owner, at, value, "item")

    def _of_items(self, part: Part, before: tuple[Any, ...], now: tuple[Any, ...]) -> Iterator[Effect | Opening]:
        keys = before[: len(before) // 2]
        old = dict(zip(keys, before[len(before) // 2 :], strict=True))
        if [key for key in part.owner if key in old] != [key for key in keys if key in part.owner]:
            yield Opening("it changes the order of items", part.what)
        for key, value in part.owner.items():
            was = old.pop(key, _MISSING)
            if is_same(was, value) or (key in OF_LIGHTNING or (key in _NOT_WRITTEN_BY_STEP and self._is_own(part))):
                continue
            name = f"{part.what}.{key}"
            if structure_of(value) is None or isinstance(value, nn.Parameter) or not isinstance(part.owner, dict):
                yield Opening(f"it writes {_a(value)} to what was there before", name)
            else:
                yield Effect(part.owner, key, value, "item")
        for key in old:
            yield Opening("it deletes an item of what was there before", f"{part.what}.{key}")

    def _is_own(self, part: Part) -> bool:
        """Whether it is a module's namespace or belongs to an object of the standard library."""
        return part.of is None or self._is_known(part.of)

    def item_before(self, owner: Any, key: Any) -> Any:
        """What a dictionary held under a key."""
        content = self.before(Part(owner, "")) or ()
        half = len(content) // 2
        return dict(zip(content[:half], content[half:], strict=True)).get(key) if isinstance(owner, dict) else None

    def pairs_before(self, part: Part) -> Iterable[tuple[Any, Any]]:
        """Values of a container before the step, each with its key; those of now if it was not seen."""
        if (content := self.before(part)) is None or part.names:
            return part.pairs()
        half = len(content) // 2
        return zip(content[:half], content[half:], strict=True) if part.is_items else enumerate(content)

    def before(self, part: Part) -> tuple[Any, ...] | None:
        """What a container held; None if it was not seen."""
        found = self.parts.get(part.key)
        return found[0][1] if found else None


def _a(value: Any) -> str:
    return f"a {type(value).__name__}"
