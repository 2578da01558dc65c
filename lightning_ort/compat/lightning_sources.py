"""What the functions of Lightning look like that :mod:`lightning_ort.strategies.lean` does without (2.5, 2.6).

A function is known by its source without comments and empty lines. ``lightning_sources.txt`` has the digests of each in
all releases that were read; :mod:`tests.compat.lightning_releases` makes them from wheels. One more function is a line.
"""

import functools
import hashlib
import inspect
import tokenize
from collections.abc import Callable, Iterator
from importlib.resources import files
from types import CodeType
from typing import Any

from lightning_ort._imports import LightningNamespace

_FILE = files("lightning_ort.compat").joinpath("lightning_sources.txt")
KNOWN = {name: frozenset(found) for name, *found in map(str.split, _FILE.read_text(encoding="utf-8").splitlines())}

_DECORATED = (  # by Lightning with decorators of torch's
    "loops.optimization.automatic.Closure.closure",
    "trainer.connectors.logger_connector.result._ResultCollection.log",
    "trainer.connectors.logger_connector.result._ResultCollection.update_metrics",
)


def place_of(name: str) -> tuple[str, str, str]:
    """Return the module of a function, its class ("" for the module itself) and its own name."""
    *module, owner, function = name.split(".")
    return (
        (".".join(module), owner, function)
        if owner.lstrip("_")[0].isupper()
        else (f"{'.'.join(module)}.{owner}", "", function)
    )


def functions(namespace: LightningNamespace) -> Iterator[tuple[str, Any]]:
    """Find them in what is imported; ``None`` for one that does not exist."""
    for each in KNOWN:
        module, owner, name = place_of(each)
        found = namespace.submodule(module)
        value = vars(getattr(found, owner, None) or found).get(name)
        yield each, value.fget if isinstance(value, property) else getattr(value, "__func__", value)


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
    """Return the lines of a file, which stay in memory if ``linecache`` reads them."""
    try:
        with tokenize.open(file) as source:
            return source.readlines()
    except (OSError, SyntaxError):
        return []


def digest_of(code: CodeType, package: str, read: Callable[[str], list[str]] = source_lines) -> str:
    """Return the digest of a function's code, or nothing without its source."""
    lines = read(code.co_filename)
    return digest(lines, code.co_firstlineno, package) if len(lines) >= code.co_firstlineno else ""


def if_known(function: Callable[..., Any], known: str) -> Callable[..., Any] | None:
    """Return a function of torch's if its digest is the known one."""
    return function if digest_of(inspect.unwrap(function).__code__, "torch") == known else None


def unknown_function(namespace: LightningNamespace) -> str:
    """Return the name of the first function that is not as in a known release, or nothing."""
    return _unknown(namespace, tuple(functions(namespace)))


@functools.lru_cache(4)
def _unknown(namespace: LightningNamespace, found: tuple[tuple[str, Callable[..., Any]], ...]) -> str:
    read = functools.cache(source_lines)
    for name, function in found:
        code = getattr(inspect.unwrap(function) if name in _DECORATED else function, "__code__", None)
        if code is None or digest_of(code, namespace.package, read) not in KNOWN[name]:
            return name
    return ""
