"""What functions, iterators and other objects of Python's own keep beside attributes; no code of the user's runs."""

import contextvars
import functools
import gc
import sys
import types
import warnings
from collections.abc import Iterator
from typing import Any

_GENERATORS = (types.GeneratorType, types.CoroutineType)
# whose objects say what they hold in the form in which they are copied
_COPIED = ("builtins", "itertools", "array", "datetime", "decimal")
_OTHERS = (int, float, str, bytes, bool, type(None), list, dict, tuple, set, frozenset, type)
_INSTALLED = ("site-packages", "dist-packages")


def parts_of_code(value: Any) -> list[tuple[str, Any]] | None:
    """Return what a value keeps if it is one of these, and what its names begin with."""
    kind = type(value)
    if kind is types.CellType:
        return [("", item) for item in gc.get_referents(value)]
    if kind is types.FunctionType:
        return list(_of_function(value)) if is_users(value) else []
    if kind in _GENERATORS:
        frame = value.gi_frame if kind is types.GeneratorType else value.cr_frame
        # a ``None`` is what it was sent: it stays, or not, with how Python went on in it
        no_values = (types.CodeType, types.FrameType, type(None))
        kept = [one for one in gc.get_referents(value) if type(one) not in no_values]
        position = [] if frame is None else [("'s position", frame.f_lasti)]
        return position + [(f"'s {index}", one) for index, one in enumerate(kept)]
    if kind is contextvars.ContextVar:
        return [("", value.get(None))]
    if kind is types.MethodType:
        return [("", value.__self__), ("", value.__func__)]
    if kind is functools.partial or (kind.__module__ in _COPIED and kind not in _OTHERS):
        with warnings.catch_warnings():  # Python 3.12 warns of what itertools will not have in 3.14
            warnings.simplefilter("ignore", DeprecationWarning)
            try:
                return [("'s state", value.__reduce_ex__(2))]
            except TypeError:  # it cannot be copied
                return None
    if kind.__module__ == "functools" and hasattr(kind, "cache_info"):
        kept = [item for one in gc.get_referents(value) for item in (one.values() if type(one) is dict else [one])]
        return [(f"'s {index}", one) for index, one in enumerate(kept)]
    return None


def is_users(value: Any) -> bool:
    """Whether a function or class is of no package that is installed."""
    name = getattr(value, "__module__", None) or ""
    if isinstance(value, types.FunctionType):
        file = value.__code__.co_filename
    else:
        file = getattr(sys.modules.get(name), "__file__", None) or ""
    return _is_own(name, file)


def _is_own(module: str, file: str) -> bool:
    known = {*sys.stdlib_module_names, "lightning_ort"} - {"__main__"}
    return module.partition(".")[0] not in known and not any(part in file for part in _INSTALLED)


def globals_of(function: types.FunctionType) -> dict[str, Any]:
    """Return the global variables that a function names, also those of modules that it names, by name."""
    names, found = names_in(function.__code__), dict[str, Any]()
    for name in sorted(names & function.__globals__.keys()):
        value = function.__globals__[name]
        if not isinstance(value, types.ModuleType):
            found[name] = value
        elif _is_own(value.__name__, str(vars(value).get("__file__"))):
            found |= {f"{name}.{own}": vars(value)[own] for own in sorted(names & vars(value).keys())}
    return found


def names_in(code: types.CodeType) -> set[str]:
    """Return the names of global variables and attributes in a function's code, and in what is defined within."""
    return set(code.co_names).union(*(names_in(one) for one in code.co_consts if isinstance(one, types.CodeType)))


def _of_function(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        yield f".{name}", cell
    for values in (function.__defaults__, function.__kwdefaults__):
        if values:
            yield "'s defaults", values
    if vars(function):
        yield "", vars(function)
    for name, value in globals_of(function).items():
        if not isinstance(value, types.ModuleType):
            yield f".{name}", value
