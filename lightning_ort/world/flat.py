"""The flat list: what a step reads, compared by identity in C."""

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from operator import is_
from types import MappingProxyType
from typing import Any

from torch import Tensor

from lightning_ort.compat.torch import layout_check

_MRO: Any = vars(type)["__mro__"].__get__  # a metaclass may have another
_dict = operator.attrgetter("__dict__")
_call: Callable[..., Any] = getattr(operator, "call", lambda function, *args: function(*args))  # Python 3.11
# one getter of both takes longer than two
_hooks = operator.attrgetter("_backward_hooks"), operator.attrgetter("_post_accumulate_grad_hooks")
# values that are as good as others that are equal
PLAIN = (type(None), bool, int, float, complex, str, bytes)


def _layout(tensor: Tensor) -> tuple[Any, ...]:
    lazy = tensor.is_conj(), tensor.is_neg(), tensor.is_inference()
    return (tensor.requires_grad, tensor.shape, tensor.stride(), tensor.dtype, tensor.device, *lazy)


def storage_of(tensor: Tensor) -> int:
    """Where the memory is that a tensor has a part of."""
    return tensor.untyped_storage().data_ptr()


def hooks_of_gradient(tensor: Tensor) -> tuple[dict[int, Any] | None, ...]:
    """Hooks that run when a gradient arrives."""
    before, after = _hooks
    return before(tensor), after(tensor)


def is_same(old: Any, new: Any) -> bool:
    """Whether a value is as good as another: the same object, or a plain one of the same type and bits."""
    return old is new or (type(old) is type(new) and type(old) in PLAIN and repr(old) == repr(new))


class Entry:
    """Some values of one object.

    Attributes:
        owner: A dictionary, a list, an object.
        read: Returns its values that count, in a fixed order.
        names: What these are called.
        what: What the owner is called.
        saved: The values that were there.
    """

    __slots__ = ("names", "owner", "read", "saved", "what")

    def __init__(self, owner: Any, read: Callable[[Any], Iterable[Any]], names: Sequence[Any], what: str) -> None:
        self.owner, self.read, self.names, self.what = owner, read, names, what
        self.saved = list(read(owner))

    def changed(self) -> str:
        """What is another value now; a plain one that is as good is taken over."""
        try:
            now = list(self.read(self.owner))
        except (KeyError, AttributeError, ValueError) as error:
            return f"{self.what}: {error} is gone"
        if len(now) != len(self.saved):
            return f"{self.what} has {len(now)} items instead of {len(self.saved)}"
        for at, (old, new) in enumerate(zip(self.saved, now, strict=True)):
            if not is_same(old, new):
                name = f".{self.names[at]}" if at < len(self.names) else ""
                return f"{self.what}{name}" + (f" = {new!r}" if type(new) in PLAIN else " is another object")
        self.saved = now
        return ""


class Flat:
    """All entries, and what else is compared without Python code for each."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self._sized: list[Any] = []
        self._absent: list[tuple[Any, frozenset[Any], str]] = []
        self._objects: list[Any] = []
        self._classes: list[type] = []
        self._tensors: list[Tensor] = []
        self._fixed: list[tuple[str, Callable[[], Any], Any]] = []

    def add_items(self, owner: Any, keys: Sequence[Any], what: str) -> None:
        """Values of a dictionary (of a class, a module, an object) under some keys."""
        if keys:
            keys = [*keys, keys[0]][: max(len(keys), 2)]  # a getter of one key returns no tuple
            self.entries.append(Entry(owner, operator.itemgetter(*keys), keys, what))

    def add_attributes(self, owner: Any, names: Sequence[str], what: str) -> None:
        """Attributes that C keeps: those of functions, cells, slots."""
        names = [*names, names[0]][: max(len(names), 2)]
        self.entries.append(Entry(owner, operator.attrgetter(*names), names, what))

    def add_container(self, owner: Any, what: str) -> None:
        """All items of a list, dictionary, set, their number, and their order."""
        self._sized.append(owner)
        if len(owner):
            self.entries.append(Entry(owner, iter, (), what))
            if isinstance(owner, (dict, MappingProxyType)):
                values = dict.values if isinstance(owner, dict) else MappingProxyType.values
                self.entries.append(Entry(owner, values, tuple(owner), what))

    def add_size(self, owner: Any) -> None:
        """How many items something has."""
        self._sized.append(owner)

    def add_keys(self, owner: Mapping[Any, Any], what: str) -> None:
        """Which names a class has."""
        self._sized.append(owner)
        self.entries.append(Entry(owner, iter, (), f"the names of {what}"))

    def add_absent(self, owner: Any, names: frozenset[Any], what: str) -> None:
        """Names that a dictionary does not have."""
        if names:
            self._absent.append((owner.keys().isdisjoint, names, what))

    def add_object(self, value: Any) -> None:
        """An object whose class counts, and which dictionary its attributes are in."""
        self._objects.append(value)

    def add_class(self, kind: type) -> None:
        """A class whose bases count."""
        self._classes.append(kind)

    def add_tensor(self, tensor: Tensor) -> None:
        """A tensor whose memory, flags and hooks count."""
        self._tensors.append(tensor)

    def add_value(self, what: str, read: Callable[[], Any], *value: Any) -> None:
        """What a function of Python tells, by default now; there should be few."""
        self._fixed.append((what, read, *(value or (read(),))))

    def seal(self) -> None:
        """Prepare the comparison."""
        self._owners = [entry.owner for entry in self.entries]
        self._reads = [entry.read for entry in self.entries]
        self._saved = [value for entry in self.entries for value in entry.saved]
        self._lengths = [len(owner) for owner in self._sized]
        self._disjoint = [method for method, _, _ in self._absent]
        self._names = [names for _, names, _ in self._absent]
        self._types = [*map(type, self._objects)]
        self._dicts = [*map(_dict, self._objects)]
        self._mros = [*map(_MRO, self._classes)]
        self._addresses = [*map(Tensor.data_ptr, self._tensors)]
        self._layouts = [*map(_layout, self._tensors)]
        self._has_layouts: Callable[..., bool] | None = None  # made in the modes in which it is called
        self._hooks = [[*map(hooks, self._tensors)] for hooks in _hooks]
        self._readers = [read for _, read, _ in self._fixed]
        self._results = [value for _, _, value in self._fixed]

    def holds(self) -> bool:
        """Whether all is as it was."""
        try:
            return self._is_same() or not self.changed()
        except Exception:  # a container that is changed meanwhile, a tensor without memory
            return False

    def _is_same(self) -> bool:
        try:
            return (
                all(map(is_, chain.from_iterable(map(_call, self._reads, self._owners)), self._saved))
                and [*map(len, self._sized)] == self._lengths
                and all(map(_call, self._disjoint, self._names))
                and all(map(is_, map(type, self._objects), self._types))
                and all(map(is_, map(_dict, self._objects), self._dicts))
                and all(map(is_, map(_MRO, self._classes), self._mros))
                and [*map(Tensor.data_ptr, self._tensors)] == self._addresses
                and self._has_flags()
                and [*map(_call, self._readers)] == self._results
            )
        except (KeyError, AttributeError, ValueError):
            return False

    def _has_flags(self) -> bool:
        before, after = _hooks
        return (
            self._has_layouts is not None
            and self._has_layouts(*self._tensors)
            and all(map(is_, map(before, self._tensors), self._hooks[0]))
            and all(map(is_, map(after, self._tensors), self._hooks[1]))
        )

    def changed(self) -> str:
        """What is not as it was, for people; what is as good is taken over."""
        for entry in self.entries:
            if what := entry.changed():
                return what
        for owner, length in zip(self._sized, self._lengths, strict=True):
            if len(owner) != length:
                return f"a {type(owner).__name__} has {len(owner)} items instead of {length}"
        for method, names, what in self._absent:
            if not method(names):
                return f"{what} has an attribute that was not there"
        for value, kind in zip(self._objects, self._types, strict=True):
            if type(value) is not kind:
                return f"a {kind.__name__} is a {type(value).__name__}"
        if not all(map(is_, map(_dict, self._objects), self._dicts)):
            return "the attributes of an object, all of them"
        if [*map(_MRO, self._classes)] != self._mros:
            return "the bases of a class"
        if [*map(Tensor.data_ptr, self._tensors)] != self._addresses:
            return "the memory of a tensor"
        if [*map(_layout, self._tensors)] != self._layouts:
            return "the shape, layout, or requires_grad of a tensor"
        self._has_layouts = layout_check(self._tensors)
        if not self._has_flags():
            return "the hooks of a tensor"
        for what, read, value in self._fixed:
            if (now := read()) != value:
                return f"{what} is {now}, was {value}"
        self._saved = [value for entry in self.entries for value in entry.saved]
        return ""
