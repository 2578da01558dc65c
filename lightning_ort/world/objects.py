"""What can be reached from a step, and which parts of it hold values."""

import collections
import enum
import functools
import gc
import types
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lightning_ort.world.flat import PLAIN
from lightning_ort.world.places import LIGHTNING, Place, Places, root_of

_CACHED = type(functools.cache(len))
MAX_ITEMS = 4096
# objects that never change, or that C alone changes
_FIXED: tuple[Any, ...] = (
    *PLAIN,
    torch.dtype,
    torch.device,
    torch.Size,
    torch.layout,
    torch.memory_format,
    torch.finfo,
    torch.iinfo,
)
_FIXED += (slice, range, type(...), type(NotImplemented), types.BuiltinFunctionType, types.MethodDescriptorType)
_FIXED += (types.WrapperDescriptorType, types.MethodWrapperType, types.GetSetDescriptorType, types.CodeType)
_FIXED += (types.MemberDescriptorType, types.ClassMethodDescriptorType, types.GenericAlias, types.UnionType)
_NAMES_OF_FIXED = {"re.Pattern", "datetime.date", "datetime.datetime", "datetime.timedelta", "datetime.timezone"}
_NAMES_OF_FIXED |= {"decimal.Decimal", "fractions.Fraction", "uuid.UUID", "pathlib.PosixPath", "pathlib.WindowsPath"}
_NAMES_OF_FIXED |= {"numpy.ufunc", "numpy.dtype", "numpy._ArrayFunctionDispatcher", "typing.TypeVar"}
_NAMES_OF_FIXED |= {"pathlib._local.PosixPath", "pathlib._local.WindowsPath", "_thread.lock", "_thread.RLock"}
_NAMES_OF_FIXED |= {"_abc._abc_data", "builtins.method", "_collections._tuplegetter", "operator.itemgetter"}
BOXES = (list, dict, tuple, set, frozenset, collections.deque, types.MappingProxyType)
_PLAIN_BOXES = {*BOXES, collections.OrderedDict, collections.defaultdict, collections.Counter}
TENSORS = (torch.Tensor, nn.Parameter, nn.Buffer)
# what each module has, and what of it counts without being named
MACHINERY = frozenset(vars(nn.Module()))
ALWAYS = {"training", "_parameters", "_buffers", "_modules", "_forward_hooks", "_forward_pre_hooks"}
ALWAYS |= {"_backward_hooks", "_backward_pre_hooks"}
_ODD = {
    "__getattr__",
    "__getattribute__",
    "__setattr__",
    "__delattr__",
    "__del__",
    "__eq__",
    "__hash__",
    "__instancecheck__",
}
_SEEN_BY_LISTS = {"__getattribute__", "__del__"}  # the comparison itself may call them
WRAPPERS = {
    staticmethod: ("__func__",),
    classmethod: ("__func__",),
    property: ("fget", "fset"),
    types.MethodType: ("__self__", "__func__"),
}
WRAPPERS |= {
    functools.cached_property: ("func",),
    functools.partial: ("func", "args", "keywords"),
    functools.partialmethod: ("func", "args", "keywords"),
}


def own_attribute(owner: Any, name: str) -> Any:
    """Return an attribute, or ``None``, without any code of others, as a ``__getattr__`` is."""
    try:
        return object.__getattribute__(owner, name)
    except AttributeError:
        return None


@dataclass
class Part:
    """A place that holds values: a dictionary, a list, the attributes of an object.

    Attributes:
        owner: The dictionary, list, set, class dictionary, cell, function, or object with slots.
        names: The attributes to read of an object that is no container; empty for containers.
        what: What people call it.
        of: The object whose attributes the dictionary holds, if it is one.
    """

    owner: Any
    what: str
    of: Any = None
    names: tuple[str, ...] = ()

    @property
    def is_items(self) -> bool:
        """Whether it has keys."""
        return isinstance(self.owner, (dict, types.MappingProxyType))

    @property
    def key(self) -> int:
        """The identity of what it is a part of: each look at a class's dictionary makes another view of it."""
        return id(self.of if isinstance(self.of, type) else self.owner)

    @property
    def size(self) -> int:
        """How many values it holds."""
        return int(self.owner.size) if is_array(self.owner) else len(self.owner)

    def content(self) -> tuple[Any, ...]:
        """Keys and values of now, or items."""
        if is_array(self.owner):
            return (self.owner.tobytes(),)
        if self.names:
            return tuple(own_attribute(self.owner, name) for name in self.names)
        if self.is_items:
            return (*self.owner, *self.owner.values())
        return tuple(self.owner)

    def pairs(self) -> Iterator[tuple[Any, Any]]:
        """The values, each with its key."""
        if is_array(self.owner):
            return
        if self.names:
            yield from ((name, own_attribute(self.owner, name)) for name in self.names)
        elif self.is_items:
            yield from self.owner.items()
        else:
            yield from enumerate(self.owner)


class Surroundings:
    """What values are made of, for somebody with this idea of whose code is which.

    Args:
        places: Whose code is which.
    """

    def __init__(self, places: Places) -> None:
        self.places = places
        self.ran: Container[int] | None = None  # the identities of the code that ran, once that is known

    def parts(self, value: Any, what: str) -> list[Part]:
        """The places in an object that hold values; empty for what never changes."""
        kind = type(value)
        if is_metric(value) or self.places.of_class(kind) is Place.OURS:  # the recording calls it
            return []
        if kind in _FIXED or isinstance(value, (torch.Size, BaseException)):
            return []
        if isinstance(value, enum.Enum) and self.places.of_class(kind) not in (Place.USER, Place.PACKAGE):
            return []
        if isinstance(value, torch.Tensor):
            own = getattr(value, "__dict__", None)
            return [Part(own, what, value)] if own else []
        if isinstance(value, types.FunctionType):
            return self._of_function(value, what)
        for wrapper, names in WRAPPERS.items():
            if isinstance(value, wrapper):
                own = tuple(name for name in names if getattr(kind, name, None) is getattr(wrapper, name, None))
                inner = self._of_object(value, what) if kind is not wrapper else []  # the rest is a subclass's code
                return [Part(value, what, None, own), *inner] if own else inner
        if isinstance(value, types.ModuleType):
            user = self.places.of_module(value.__name__, getattr(value, "__file__", None) or "") is Place.USER
            return [Part(vars(value), value.__name__, value)] if user else []
        if isinstance(value, type):
            return [Part(vars(value), value.__name__, value)] if self.is_read(value) else []
        return self._of_object(value, what)

    def is_read(self, kind: type) -> bool:
        """Whether the attributes of a class are listed."""
        return self.places.of_class(kind) in (Place.USER, Place.PACKAGE) and bool(kind.__flags__ & 512)

    def _of_function(self, value: types.FunctionType, what: str) -> list[Part]:
        parts = [Part(value, what, None, ("__code__", "__defaults__", "__kwdefaults__"))]
        name = value.__qualname__
        for variable, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=False):
            parts.append(Part(cell, f"{variable} of {name}", variable, ("cell_contents",)))
        if value.__dict__:
            parts.append(Part(value.__dict__, name, value))
        return parts

    def _of_object(self, value: Any, what: str) -> list[Part]:
        kind = type(value)
        parts = []
        if isinstance(value, BOXES):
            parts.append(Part(value, what))
        if is_array(value):
            return [Part(value, what)]
        if kind in _PLAIN_BOXES or f"{kind.__module__}.{kind.__name__}" in _NAMES_OF_FIXED:
            return parts
        if isinstance(own := own_attribute(value, "__dict__"), dict):
            parts.append(Part(own, what, value))
        if slots := tuple(_slots(kind)):
            parts.append(Part(value, what, value, slots))
        return parts

    def unknown(self, value: Any) -> str:
        """Why what an object holds cannot be listed; empty if it can."""
        kind = type(value)
        name = f"{kind.__module__}.{kind.__name__}"
        if kind in _FIXED or isinstance(value, (enum.Enum, BaseException)) or name in _NAMES_OF_FIXED:
            return ""
        if isinstance(value, torch.Tensor):
            return "" if kind in TENSORS else f"a tensor of the class {kind.__name__}"
        if isinstance(value, type):
            return self._unknown_class(value)
        if isinstance(value, (types.FunctionType, types.ModuleType, *WRAPPERS, *BOXES)):
            if kind is types.MappingProxyType and type(gc.get_referents(value)[0]) not in _PLAIN_BOXES:
                return "a view of a mapping of an unknown class"
            if isinstance(value, BOXES) and len(value) > MAX_ITEMS:
                return f"a {kind.__name__} of {len(value)} items"
            if isinstance(value, functools.partial) and value.func in (getattr, setattr, hasattr, delattr):
                return "a partial of getattr"
            return self._unknown_class(kind) if kind.__flags__ & 512 else ""
        if isinstance(value, _CACHED):
            return "a function with a cache"
        if isinstance(value, (torch.jit.ScriptModule, torch.jit.ScriptFunction)):
            return "a scripted function"
        if root_of(kind.__module__) == "numpy":
            known = ("generic", "dtype", "ndarray") if kind.__name__ == "ndarray" else ("generic", "dtype")
            if any(base.__module__ == "numpy" and base.__name__ in known for base in kind_bases(kind)):
                unlike = kind.__name__ == "ndarray" and (value.dtype.hasobject or value.size > MAX_ITEMS)
                return "a large array, or one of objects" if unlike else ""
            return f"an object of {name}"
        if kind is types.SimpleNamespace:
            return ""
        if not is_python(kind):
            return f"an object of {name}"
        if isinstance(value, torch.optim.Optimizer) or self.places.of_class(kind) is not Place.STANDARD:
            return self._unknown_class(kind)
        return (
            ""
            if name in ("logging.Logger", "logging.RootLogger", "argparse.Namespace")
            or hasattr(value, "__dict__")
            and name.startswith("types.")
            else f"an object of {name}"
        )

    def _unknown_class(self, kind: type) -> str:
        """A class of the user's whose objects do other things than Python's."""
        if self.places.of_class(kind) is Place.STANDARD and kind.__module__ != "_thread" and not is_python(kind):
            return "" if issubclass(kind, BaseException) else f"{kind.__module__}.{kind.__name__}"  # a class of C
        for base in kind_bases(kind):
            if self.places.of_class(base) is not Place.USER:
                continue
            meta = type(base)
            if meta is not type and not issubclass(meta, enum.EnumType) and self.places.of_class(meta) is Place.USER:
                return f"{base.__name__} has the metaclass {meta.__name__}"
            odd = {name for name in _ODD & vars(base).keys() if self._may_run(name, vars(base)[name])}
            if "__dataclass_params__" in vars(base):
                odd -= {"__eq__", "__hash__", "__setattr__", "__delattr__"}
            if odd and not (odd == {"__hash__"} and vars(base)["__hash__"] is None):
                return f"{base.__name__} has {min(odd)}"
        return ""

    def _may_run(self, name: str, function: Any) -> bool:
        """Whether a method that Python calls unasked has a part in the step: not if the step has not called it."""
        if self.ran is None or name in _SEEN_BY_LISTS or type(function) is not types.FunctionType:
            return True
        return id(function.__code__) in self.ran

    def is_known_to_user(self, part: Part) -> bool:
        """Whether only the user's names count: an object of Lightning that is not a module."""
        of = part.of
        if of is None or isinstance(of, (nn.Module, type, types.ModuleType, torch.Tensor, dict)):
            return False
        return root_of(type(of).__module__) in LIGHTNING


def is_python(kind: type) -> bool:
    """Whether Python code made a class."""
    heap = [base for base in kind_bases(kind) if base.__flags__ & 512]
    return any("__dict__" in vars(base) or "__slots__" in vars(base) for base in heap)


def is_array(value: Any) -> bool:
    """Whether it is an array of NumPy, whose values count."""
    return type(value).__name__ == "ndarray" and type(value).__module__ == "numpy" and not value.dtype.hasobject


def is_metric(value: Any) -> bool:
    """Whether it is a metric of torchmetrics."""
    return isinstance(value, nn.Module) and any(
        base.__module__ in ("torchmetrics.metric", "torchmetrics.collections") for base in kind_bases(type(value))
    )


def kind_bases(kind: type) -> tuple[type, ...]:
    """A class and its bases."""
    return type.__dict__["__mro__"].__get__(kind)


def _slots(kind: type) -> Iterable[str]:
    for base in kind_bases(kind):
        if base.__flags__ & 512:
            for name, member in vars(base).items():
                if isinstance(member, types.MemberDescriptorType):
                    yield name
