"""What the functions of Lightning look like that :mod:`lightning_ort.strategies.lean` does without (2.5, 2.6).

A function is known by its source without comments and empty lines. ``lightning_sources.txt`` has the digests of each in
all releases that were read; :mod:`tests.compat.lightning_releases` makes them from wheels. One more function is a line.
"""

import contextlib
import functools
import hashlib
import inspect
import os
import sys
from collections.abc import Callable, Iterator
from importlib.resources import files
from types import CodeType
from typing import Any

import torch

from lightning_ort._imports import LightningNamespace

_FILE = files("lightning_ort.compat").joinpath("lightning_sources.txt")
KNOWN = {name: frozenset(found) for name, *found in map(str.split, _FILE.read_text(encoding="utf-8").splitlines())}

# of what Lightning decorates functions with; what others put around one is theirs
_DECORATORS = (os.path.join(os.path.dirname(torch.__file__), ""), contextlib.__file__)


_OF_FABRIC = (
    "plugins.precision.precision.Precision.convert_input",
    "plugins.precision.precision.Precision.forward_context",
    "strategies.strategy.move_data_to_device",
)


@functools.cache
def place_of(name: str) -> tuple[str, str, str]:
    """Return the module of a function, its class ("" for the module itself) and its own name."""
    *module, owner, function = name.split(".")
    return (
        (".".join(module), owner, function)
        if owner.lstrip("_")[0].isupper()
        else (f"{'.'.join(module)}.{owner}", "", function)
    )


def owner_of(namespace: LightningNamespace, name: str) -> tuple[Any, str]:
    """Return the class or module that has a function, and its own name."""
    module, owner, function = place_of(name)
    found = namespace.submodule(module)
    return getattr(found, owner, None) or found, function


def functions(namespace: LightningNamespace) -> Iterator[tuple[str, Any]]:
    """Find them in what is imported; ``None`` for one that does not exist."""
    for each in KNOWN:
        try:
            owner, name = owner_of(namespace, each)
        except ImportError:
            yield each, None
            continue
        value = vars(owner).get(name)
        yield each, value.fget if isinstance(value, property) else getattr(value, "__func__", value)


def of_fabric(namespace: LightningNamespace) -> Iterator[tuple[str, Any]]:
    """Find what comes from Fabric; ``None`` for one that somebody has replaced."""
    fabric = namespace.submodule("plugins.precision.precision").FabricPrecision.__module__.partition(".")[0]
    folder = os.path.join(os.path.dirname(str(sys.modules[fabric].__file__)), "")
    for each in _OF_FABRIC:
        owner, name = owner_of(namespace, each)
        value = getattr(owner, name)
        code = getattr(inspect.unwrap(value, stop=_is_lightnings), "__code__", None)
        yield each, value if code is not None and code.co_filename.startswith(folder) else None


def digest(lines: list[str], first: int, package: str) -> str:
    """Return a digest of the function that begins in line ``first``, whatever its comments are.

    ``first`` is counted from 1: the first decorator, or the ``def``. With the ``package`` that the file is in, it is
    the same in both namespaces.
    """
    depth, kept, in_body = len(lines[first - 1]) - len(lines[first - 1].lstrip()), [], False
    for line in lines[first - 1 :]:
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        deeper = len(line) - len(line.lstrip()) > depth
        if in_body and not deeper and not text.startswith(")"):
            break
        in_body = in_body or (not deeper and text.startswith("def "))
        kept.append(text)
    return hashlib.sha256("\n".join(kept).replace(package, "lightning.pytorch").encode()).hexdigest()[:12]


def source_lines(file: str) -> list[str]:
    """Return the lines of a file in UTF-8, which stay in memory if ``linecache`` reads them."""
    try:
        with open(file, "rb") as source:  # decoded at once, in half the time
            return source.read().decode().split("\n")
    except (OSError, UnicodeDecodeError):
        return []


def digest_of(code: CodeType, package: str, read: Callable[[str], list[str]] = source_lines) -> str:
    """Return the digest of a function's code, or nothing without its source."""
    lines = read(code.co_filename)
    return digest(lines, code.co_firstlineno, package) if len(lines) >= code.co_firstlineno else ""


def if_known(function: Callable[..., Any], known: str) -> Callable[..., Any] | None:
    """Return a function of torch's if its digest is the known one."""
    return function if digest_of(inspect.unwrap(function).__code__, "torch") == known else None


def unknown_functions(namespace: LightningNamespace) -> tuple[str, ...]:
    """Return the names of the functions that are not as in a known release."""
    return _unknown(namespace, tuple(functions(namespace)))


def _is_lightnings(function: Any) -> bool:
    code = getattr(function, "__code__", None)
    return code is None or not code.co_filename.startswith(_DECORATORS)


@functools.lru_cache(4)
def _unknown(namespace: LightningNamespace, found: tuple[tuple[str, Callable[..., Any]], ...]) -> tuple[str, ...]:
    read = functools.cache(source_lines)

    def is_known(name: str, function: Callable[..., Any]) -> bool:
        code = getattr(inspect.unwrap(function, stop=_is_lightnings), "__code__", None)
        return code is not None and digest_of(code, namespace.package, read) in KNOWN[name]

    return tuple(name for name, function in found if function is None or not is_known(name, function))
