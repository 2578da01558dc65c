"""Texts and hashes by which the cache recognizes a graph, the installed software and the processor."""

import functools
import hashlib
import platform
from pathlib import Path
from typing import Any

import sympy
import torch
from torch import fx

from lightning_ort.compat.torch import OpOverload, expression_of, hint_of
from lightning_ort.compiler.nodes import ANY_BYTE, VARIANT, values_of


def fingerprint(graph: fx.Graph) -> str:
    """Return a text that is equal for graphs that compute the same from inputs of the same kind.

    The names of nodes and of symbolic sizes do not matter. The sizes that were seen when the graph was traced do, since
    timings depend on them.
    """
    symbols: dict[sympy.Symbol, sympy.Symbol] = {}

    def size(value: Any) -> str:
        if isinstance(value, int):
            return str(value)
        expression = expression_of(value)
        for symbol in sorted(expression.free_symbols, key=str):
            symbols.setdefault(symbol, sympy.Symbol(f"n{len(symbols)}"))
        return f"{expression.xreplace(symbols)}={hint_of(value)}"

    def kind(value: Any) -> str:
        if isinstance(value, torch.Tensor):
            sizes, strides = map(size, value.shape), map(size, value.stride())
            return f"{value.dtype}[{','.join(sizes)}][{','.join(strides)}]{value.device.type}"
        return size(value) if isinstance(value, (int, torch.SymInt)) else type(value).__name__

    numbers: dict[fx.Node, str] = {}
    lines = []
    for node in graph.nodes:
        numbers[node] = f"%{len(numbers)}"
        target = node.target if node.op == "call_function" else ""
        called = target if isinstance(target, OpOverload) else getattr(target, "__qualname__", "")
        arguments = fx.map_arg((node.args, node.kwargs), lambda source: _Unquoted(numbers[source]))
        values = "" if node.op == "output" else ";".join(map(kind, values_of(node)))
        conversion = f"{node.meta.get(VARIANT, '')} {node.meta.get(ANY_BYTE, '')}"
        lines.append(f"{numbers[node]} {node.op} {called} {arguments} {values} {conversion}")
    return "\n".join(lines)


class _Unquoted(str):
    """A string without quotes in the ``repr`` of a container."""

    __repr__ = str.__str__


def digest(*parts: str) -> str:
    """Return the SHA-256 of several texts."""
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


@functools.cache
def software() -> tuple[str, ...]:
    """Return the versions of onnxruntime and torch, and a hash of this package's sources that matter."""
    import onnxruntime

    sources = hashlib.sha256()
    package = Path(__file__).parents[1]
    for path in sorted([*package.glob("compat/*.py"), *package.glob("compiler/**/*.py")]):
        sources.update(path.read_bytes())
    return (onnxruntime.__version__, torch.__version__, sources.hexdigest())


@functools.cache
def processor() -> str:
    """Return the name of the processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
