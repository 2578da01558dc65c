"""What a step names, and dynamo looks at only when it compiles: :class:`PythonWatch`."""

import abc
import builtins
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from types import CodeType, FunctionType
from typing import Any

from torch import nn

from lightning_ort.compat.cpython import registered_with
from lightning_ort.strategies.audit.snapshot import is_machinery

_MOST = 500  # functions that are looked at


class PythonWatch:
    """Tells when something has changed that dynamo does not guard (torch 2.13), so that it has to compile again.

    That is a global variable that hides a builtin, an imported module that is replaced, a class that is registered with
    an abstract one, and an attribute that is -0.0 instead of 0.0. What changes within a step is left to audits.

    Args:
        module: The module whose step it is.

    Attributes:
        module_replaced: Whether it was an imported module, of which dynamo knows the first one for ever.

    """

    def __init__(self, module: nn.Module) -> None:
        self._module, self.module_replaced = module, False
        self._globals: list[Mapping[str, Any]] = []
        self._builtins: set[str] = set()
        self._imported: list[str] = []
        self._abstract: list[abc.ABCMeta] = []
        self._zeros: list[tuple[Mapping[str, Any], str]] = []
        self._seen: tuple[Any, ...] = ()

    def look(self, step: Any) -> None:
        """Note what a step names, after it was compiled: functions, methods of the modules' classes, and so on."""
        modules = [module for module in self._module.modules() if not is_machinery(type(module))]
        kinds = {base for module in modules for base in type(module).__mro__ if not is_machinery(base)} - {object}
        functions = list(_reachable(step, kinds))
        names = {name for function in functions for name in _names(function.__code__)}
        self._globals = list({id(one.__globals__): one.__globals__ for one in functions}.values())
        self._builtins = names & vars(builtins).keys()
        self._imported = sorted(names & sys.modules.keys())
        known = {id(value): value for variables in self._globals for value in map(variables.get, names)}
        abstract = [value for value in known.values() if isinstance(value, abc.ABCMeta)]
        self._abstract = [
            one for one in abstract if not is_machinery(one) and one.__module__ not in sys.stdlib_module_names
        ]
        attributes = [(vars(module), name) for module in modules for name in vars(module).keys() & names]
        self._zeros = [(place, name) for place, name in attributes if place[name] == 0.0 and type(place[name]) is float]
        self._seen = self._now()

    def changed(self) -> bool:
        """Return whether something is not as it was when this was asked, or looked at, last."""
        if not self._seen or (now := self._now()) == self._seen:
            return False
        changed = (now[0] != self._seen[0] and self._hides()) or now[1:] != self._seen[1:]
        self.module_replaced = self.module_replaced or now[1] != self._seen[1]
        self._seen = now
        return changed

    def _now(self) -> tuple[Any, ...]:
        return (
            [len(variables) for variables in self._globals],
            [id(sys.modules.get(name)) for name in self._imported],
            [registered_with(one) for one in self._abstract],
            [_is_negative_zero(place.get(name)) for place, name in self._zeros],
        )

    def _hides(self) -> bool:
        return any(not self._builtins.isdisjoint(variables) for variables in self._globals)


def _is_negative_zero(value: Any) -> bool:
    return type(value) is float and value == 0 and math.copysign(1.0, value) < 0


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _reachable(step: Callable[..., Any], kinds: set[type]) -> Iterator[FunctionType]:
    """Find the functions that a step may call by name: global ones, and methods of classes."""
    todo = [getattr(step, "__func__", step), *(vars(kind).get("forward") for kind in kinds)]
    seen: set[int] = set()
    while todo and len(seen) < _MOST:
        function = todo.pop()
        function = getattr(function, "fget", None) or getattr(function, "__func__", function)
        if not isinstance(function, FunctionType) or id(function) in seen or is_machinery(function):
            continue
        seen.add(id(function))
        yield function
        for name in set(_names(function.__code__)):
            todo.append(function.__globals__.get(name))
            todo += [vars(kind)[name] for kind in kinds if name in vars(kind)]
