"""What a step computed and left behind, as plain values that can be compared: :func:`snapshot`.

A tensor is its dtype, its shape, the sum of its elements and the sum of their magnitudes; a container its type and its
items; an object its type and its attributes. Something that was met before is the place where that was, so that an
attribute which refers to another object than it did is another value.

Only what is stored is looked at, and no code of the user's runs for it: a mapping that loads what is asked for, a
property or a ``__repr__`` may do anything.
"""

import enum
import hashlib
import itertools
import math
import random
import types
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from lightning_ort.compat.torch import sizes_of_tensor
from lightning_ort.world.code_parts import globals_of, is_users, parts_of_code

MAX_VALUES = 20_000  # of a snapshot: what comes after them is not compared
_MAX_DEPTH = 12
GRADIENT = "gradient of "
_SMALL_GRADIENT = 1e-3  # of the largest mean magnitude: gradients that are roundings alone
_ROUNDINGS = 4 * torch.finfo(torch.float32).eps  # of the loss
# their objects are machinery, such as the Trainer, locks and files
_MACHINERY = {
    *("torch", "lightning", "pytorch_lightning", "lightning_ort", "lightning_fabric", "logging", "threading", "tqdm"),
    *("multiprocessing", "concurrent", "asyncio", "io", "_io", "weakref", "socket", "rich"),
}
_OF_MODULES = vars(nn.Module()).keys() - {"training"}  # hooks, and what is looked at apart
_PARTS_OF_MODULES = ("_parameters", "_buffers", "_modules")
_PLAIN = (int, float, str, list, dict, set, deque, torch.Tensor, type(None))
_CONTAINERS = (dict, list, tuple, deque, set, frozenset)
_CODE = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, type, types.ModuleType)


@dataclass(frozen=True)
class Numbers:
    """A tensor, an array or a number; what is compared up to rounding."""

    kind: str  # its dtype and shape, or the type of the number
    total: float  # the sum of its elements
    magnitude: float  # the sum of their absolute values
    count: int = 1  # how many elements there are

    def __str__(self) -> str:
        return f"{self.total:.6g}" if self.count == 1 else f"sum {self.total:.6g} of {self.count} elements"


Value = Numbers | str


@dataclass
class Findings:
    """What is different between two snapshots, by where it is."""

    relative: dict[str, float] = field(default_factory=dict)  # how far numbers are apart, relative to their magnitude
    # what is no number, or numbers of other dtypes and shapes, with a description
    other: dict[str, str] = field(default_factory=dict)

    @property
    def names(self) -> set[str]:
        """Where they are."""
        return {*self.relative, *self.other}


def differences(own: Mapping[str, Value], eager: Mapping[str, Value], tolerance: float) -> Findings:
    """Compare two snapshots; a relative difference up to the tolerance is none."""
    found = Findings()
    small = _SMALL_GRADIENT * max(
        (_mean(value) for name, value in eager.items() if name.startswith(GRADIENT)), default=0.0
    )
    # a gradient that is zero but for the roundings of what it is the difference of
    loss = max((_mean(value) for name, value in eager.items() if name.startswith("output")), default=0.0)
    roundings = _ROUNDINGS * loss
    for name in dict.fromkeys((*eager, *own)):
        if name not in own or name not in eager:
            found.other[name] = "is missing" if name not in own else "is there only in one of them"
            continue
        one, two = own[name], eager[name]
        if isinstance(one, Numbers) and isinstance(two, Numbers) and one.kind == two.kind:
            if name.startswith(GRADIENT) and one.magnitude + two.magnitude <= roundings * one.count:
                continue
            scale = max(one.magnitude, two.magnitude, small * one.count if name.startswith(GRADIENT) else 0.0)
            if (relative := _relative(one, two, scale)) > tolerance:
                found.relative[name] = relative
        elif one != two:
            found.other[name] = f"is {_text(one)} instead of {_text(two)}"
    return found


def _mean(value: Value) -> float:
    return value.magnitude / max(value.count, 1) if isinstance(value, Numbers) else 0.0


def _relative(one: Numbers, two: Numbers, scale: float) -> float:
    pairs = [(one.total, two.total), (one.magnitude, two.magnitude)]
    if all(a == b or (a != a and b != b) for a, b in pairs):
        return 0.0
    # an infinity or a NaN on one side alone is the largest difference; a NaN comes first, so that it is the maximum
    worst = max(abs(a - b) for a, b in pairs)
    return worst / scale if 0 < scale < math.inf and worst < math.inf else math.inf


def _text(value: Value) -> str:
    return f"{value.kind} {value}" if isinstance(value, Numbers) else str(value)


def snapshot(roots: Mapping[str, Any], met: Mapping[str, Any] = {}) -> dict[str, Value]:
    """Return the values below named objects, by where they are, such as ``self.net.weight``.

    What is ``met`` already, by its names, is not looked into where something below refers to it.
    """
    found = itertools.islice(_stored(roots, met), MAX_VALUES)
    return {path: _value_of(value) if before == path else f"the same as {before}" for path, value, before in found}


def stored_in(roots: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Return what is below named objects, by where it is, each once."""
    found = itertools.islice(_stored(roots), MAX_VALUES)
    return [(path, value) for path, value, before in found if before == path]


def tensors_in(value: Any) -> list[tuple[str, torch.Tensor]]:
    """Return the tensors of a batch, with the places where they are."""
    return [(path, one) for path, one in stored_in({"": value}) if is_one(one, torch.Tensor)]


def _stored(roots: Mapping[str, Any], met: Mapping[str, Any] = {}) -> Iterator[tuple[str, Any, str]]:
    """Find what is below named objects: where, what, and where it was met first."""
    seen = {id(value): name for name, value in met.items()}  # objects that may be met twice
    keep: list[Any] = []  # a new object would get the id of one that is gone
    todo = deque((name, value, 0) for name, value in roots.items())
    while todo:
        path, value, depth = todo.popleft()
        before = path
        if _may_be_met_again(value):
            before = seen.setdefault(id(value), path)
            keep.append(value)
        yield path, value, before
        if before == path and depth < _MAX_DEPTH:
            todo += [(f"{path}{name}", item, depth + 1) for name, item in _parts(value)]


def items_of(value: Any) -> list[Any]:
    """Return the items of a container of Python's, or of a class derived from one."""
    if is_one(value, dict):
        return [*dict.values(value)]
    container = next((one for one in _CONTAINERS if is_one(value, one)), None)
    return [] if container is None else [*container.__iter__(value)]


def gradients(module: nn.Module) -> dict[str, Value]:
    """Return the gradients of a module's parameters."""
    return {f"{GRADIENT}{name}": _value_of(parameter.grad) for name, parameter in module.named_parameters()}


def left_behind(module: nn.Module, step: Any) -> dict[str, Any]:
    """Return what a step may change outside of itself: its module, attributes of classes, and global variables.

    Global variables are those that the step and the methods of its module's classes name.
    """
    kinds = {base for one in module.modules() for base in type(one).__mro__ if not _is_machinery(base)} - {object}
    variables = dict[str, Any]()
    functions = (getattr(step, "__func__", step), *functions_of(type(module)))
    for function in (one for one in functions if isinstance(one, types.FunctionType)):
        for name, value in globals_of(function).items():
            if isinstance(value, type):
                kinds |= set() if _is_machinery(value) else {value}
            elif not is_one(value, *_CODE, nn.Module):
                variables[f"{function.__globals__.get('__name__')}.{name}"] = value
    return {"self": module, "globals": dict(sorted(variables.items())), "class": attributes_of(kinds)}


def functions_of(kind: type) -> list[types.FunctionType]:
    """Return the methods of a class, and of those that it derives from, which are the user's."""
    found = [value for kind in kind.__mro__ if not _is_machinery(kind) for value in vars(kind).values()]
    found = [one.fget if type(one) is property else one for one in found]
    found = [one.__func__ if type(one) in (staticmethod, classmethod) else one for one in found]
    return [one for one in found if isinstance(one, types.FunctionType)]


def attributes_of(kinds: Iterable[type]) -> dict[str, Any]:
    """Return the plain attributes of classes themselves, by name."""
    return {
        f"{kind.__qualname__}.{name}": value
        for kind in sorted(kinds, key=lambda kind: (kind.__module__, kind.__qualname__))
        for name, value in vars(kind).items()
        if not name.startswith("__") and is_one(value, *_PLAIN)
    }


def _may_be_met_again(value: Any) -> bool:
    return not is_one(value, int, float, complex, str, bytes, enum.Enum, types.ModuleType, type(None))


def _value_of(value: Any) -> Value:
    """Return an object itself as a plain value, without its parts."""
    name = type(value).__qualname__
    if is_one(value, torch.Tensor):
        return _of_tensor(value)
    if is_one(value, enum.Enum):
        return f"{name}.{value._name_}"
    if is_one(value, str, bytes):
        return f"{name} {(str if is_one(value, str) else bytes).__repr__(value)}"[:200]
    if is_one(value, bool, np.bool_, type(None)):
        return f"{name} {value}"
    if is_one(value, int, float, np.number):
        return Numbers(name, *_finite(value))
    if is_one(value, np.ndarray) and value.dtype.kind in "biuf":
        wide = np.ndarray.view(value, np.ndarray).astype(np.float64)
        return Numbers(f"{value.dtype} {value.shape}", float(wide.sum()), float(np.abs(wide).sum()), value.size)
    if is_one(value, np.random.Generator, np.random.RandomState, torch.Generator) or type(value) is random.Random:
        return f"{name} {_digest(value)}"
    if is_one(value, *_CODE):
        return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', getattr(value, '__name__', ''))}"
    if (container := next((one for one in _CONTAINERS if is_one(value, one)), None)) is None:
        return name
    items = list(container.__iter__(value))
    if container in (set, frozenset):
        return f"{name} of {len(items)} items, {_digest(sorted(repr(item) for item in items if _is_plain(item)))}"
    if container is dict:
        names = [key if _is_plain(key) else type(key).__name__ for key in items]
        return f"{name} of {len(items)} items, keys {_digest(names)}"
    return f"{name} of {len(items)} items"


def is_one(value: Any, *kinds: type) -> bool:
    """As ``isinstance``, which asks objects for their ``__class__``; for kinds that are not abstract."""
    return issubclass(type(value), kinds)


def _is_plain(value: Any) -> bool:
    return type(value) in (int, float, bool, str, bytes, type(None)) or (
        type(value) is tuple and all(_is_plain(item) for item in value)
    )


def _of_tensor(tensor: torch.Tensor) -> Value:
    kind = f"{tensor.dtype} {sizes_of_tensor(tensor)}"
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta or tensor.is_nested:
        return f"{kind} {tensor.layout}"
    with torch.no_grad():
        plain = tensor.detach().as_subclass(torch.Tensor)
        if plain.is_complex():
            plain = torch.view_as_real(plain.resolve_conj())
        # sums in float64 of other dtypes take ten times as long, and norms in float32 are off by a thousandth
        wide = torch.float32 if plain.dtype in (torch.float32, torch.float16, torch.bfloat16) else torch.float64
        total = plain.sum(dtype=wide).item()
        magnitude = plain.abs().sum(dtype=wide).item() if plain.dtype.is_signed else total
    return Numbers(kind, total, magnitude, tensor.numel())


def _finite(value: Any) -> tuple[float, float]:
    try:
        # a class derived from these may convert itself in its own way
        number = (int if is_one(value, int) else float if is_one(value, float) else type(value)).__float__(value)
    except OverflowError:
        number = math.copysign(math.inf, value)
    return number, abs(number)


def _parts(value: Any) -> list[tuple[str, Any]]:
    """Return the parts of an object that are to be looked at, and what their names begin with."""
    if is_one(value, type) and is_users(value):
        attributes = [(f".{name.rpartition('.')[2]}", item) for name, item in attributes_of([value]).items()]
        return attributes + [(f".{one.__name__}", one) for one in functions_of(value)]
    if (found := parts_of_code(value)) is not None:
        return found
    if is_one(value, torch.Tensor, str, bytes, np.ndarray, enum.Enum, *_CODE):
        return []
    if is_one(value, nn.Module):
        attributes = [(name, item) for name, item in _attributes(value).items() if name not in _OF_MODULES]
        parts = [_attributes(value).get(name) or {} for name in _PARTS_OF_MODULES]
        registered = [pair for items in parts for pair in items.items()]
        return [(f".{name}", item) for name, item in registered + attributes]
    found = []
    if is_one(value, dict):
        for index, (key, item) in enumerate(dict.items(value)):
            found.append((f"[{key!r}]"[:80] if _is_plain(key) else f"[item {index}]", item))
    elif (container := next((one for one in (list, tuple, deque) if is_one(value, one)), None)) is not None:
        found = [(f"[{index}]", item) for index, item in enumerate(container.__iter__(value))]
    if not _is_machinery(type(value)):
        found += [(f".{name}", item) for name, item in (*_attributes(value).items(), *slots_of(value))]
    return found


def _attributes(value: Any) -> dict[str, Any]:
    methods = (vars(kind).get("__getattribute__") for kind in type(value).__mro__)
    try:  # by Python's own, which for a threading.local is not that of object
        found = next(one for one in methods if type(one) is types.WrapperDescriptorType)(value, "__dict__")
    except AttributeError:
        return {}
    return found if type(found) is dict else {}


def slots_of(value: Any) -> list[tuple[str, Any]]:
    """Return what an object has in slots, ``None`` in empty ones."""
    found: list[tuple[str, Any]] = []
    for base in type(value).__mro__:
        for name, slot in vars(base).items() if "__slots__" in vars(base) else ():
            if isinstance(slot, types.MemberDescriptorType):
                try:
                    item = slot.__get__(value)
                except AttributeError:
                    item = None
                found.append((name, item))
    return [(name, item) for name, item in found if not is_one(item, types.MethodType)]


def _is_machinery(kind: Any) -> bool:
    return kind.__module__.partition(".")[0] in _MACHINERY


def _digest(value: Any) -> str:
    if isinstance(value, np.random.Generator):
        value = value.bit_generator.state
    elif isinstance(value, np.random.RandomState):
        value = value.get_state()
    elif isinstance(value, torch.Generator):
        value = value.get_state().numpy().tobytes()
    elif isinstance(value, random.Random):
        value = value.getstate()
    data = value if isinstance(value, bytes) else repr(value).encode()
    return hashlib.sha256(data).hexdigest()[:12]
