"""Texts and hashes by which the cache recognizes a graph, the installed software and the processor."""

import functools
import hashlib
import os
import platform
import re
import sysconfig
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import sympy
import torch
from torch import fx

from lightning_ort.compat.aot_autograd import tracing_modes
from lightning_ort.compat.torch_graphs import OpOverload, expression_of, hint_of
from lightning_ort.compiler.engines import ENGINES
from lightning_ort.compiler.graphs.nodes import ANY_BYTE, MIXED, is_view, values_of

_PACKAGES = re.compile(r"[\\/](site|dist)-packages[\\/]")


def fingerprint(graph: fx.Graph) -> str:
    """Return a text that is equal for graphs that compute the same from inputs of the same kind.

    The names of nodes and of symbolic sizes do not matter. The sizes that were seen when the graph was traced do, since
    timings depend on them.
    """
    lines = _Lines()
    for node in graph.nodes:
        lines.add(node, node.op)
    return str(lines)


def node_fingerprint(node: fx.Node) -> str:
    """Return a text that is equal for nodes that do the same with inputs of the same kind, views of them included."""
    lines = _Lines()
    for source in node.all_input_nodes:
        if is_view(source):
            for base in source.all_input_nodes:
                lines.add(base)
        lines.add(source, "view" if is_view(source) else "")
    lines.add(node, node.op)
    return str(lines)


def captured_fingerprint(graph: fx.Graph, inputs: Sequence[Any]) -> str | None:
    """Return the same for a graph that dynamo has captured, its inputs, and the modes of torch in which it is compiled.

    ``None`` for a graph that holds more than calls of functions and methods.
    """
    autocast = [(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")]
    modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), *tracing_modes()
    remaining, lines = iter(inputs), _Lines()
    for node in graph.nodes:
        if node.op in ("get_attr", "call_module"):
            return None
        lines.add(node, node.op, [next(remaining)] if node.op == "placeholder" else [])
    text = f"{autocast} {modes} {[*map(_state_of, inputs)]}\n{lines}"
    return None if " at 0x" in text else text  # the address of an object, which says nothing


def _state_of(value: Any) -> Any:
    """What the trace of a graph may depend on beside the sizes of an input."""
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    offset = value.storage_offset() if value.layout is torch.strided else 0
    bits = value.requires_grad, value.is_leaf, value.is_conj(), value.is_neg(), value.is_inference()
    return type(value).__name__, str(value.device), offset, *bits


class _Lines:
    """Lines about nodes, in which the names of nodes and of symbolic sizes do not matter."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._numbers: dict[fx.Node, str] = {}
        self._symbols: dict[sympy.Symbol, sympy.Symbol] = {}

    def __str__(self) -> str:
        return "\n".join(self._lines)

    def add(self, node: fx.Node, op: str = "", values: Sequence[Any] | None = None) -> None:
        """Add a node, without ``op`` only what it returns: ``values``, by default those in its metadata."""
        number = self._numbers.setdefault(node, f"%{len(self._numbers)}")
        called = ""
        arguments: Any = ""
        if op:
            arguments = fx.map_arg((node.args, node.kwargs), lambda source: _Unquoted(self._numbers[source]))
            called = "" if node.op in ("placeholder", "output", "get_attr") else _name_of(node.target)
        if values is None:
            values = [] if node.op == "output" else values_of(node)
        conversion = f"{node.meta.get(ANY_BYTE, '')} {node.meta.get(MIXED, '')}"
        self._lines.append(f"{number} {op} {called} {arguments} {';'.join(map(self._kind, values))} {conversion}")

    def _kind(self, value: Any) -> str:
        if isinstance(value, torch.Tensor):
            steps = value.stride() if value.layout is torch.strided else ()
            sizes, strides = (",".join(map(self._size, numbers)) for numbers in (value.shape, steps))
            return f"{value.dtype}[{sizes}][{strides}]{value.layout}{value.device.type}"
        if isinstance(value, torch.SymFloat):
            return f"SymFloat={hint_of(value)}"
        return self._size(value) if isinstance(value, (int, torch.SymInt)) else type(value).__name__

    def _size(self, value: Any) -> str:
        if isinstance(value, int):
            return str(value)
        expression = expression_of(value)
        for symbol in sorted(expression.free_symbols, key=str):
            self._symbols.setdefault(symbol, sympy.Symbol(f"n{len(self._symbols)}"))
        return f"{expression.xreplace(self._symbols)}={hint_of(value)}"


def graphics() -> tuple[str, ...]:
    """Return what times on a GPU depend on: names, driver, TF32, cuDNN's search; nothing without one."""
    if not torch.cuda.is_initialized():
        return ()
    conv: Any = torch.backends.cudnn.conv  # type: ignore[attr-defined]
    cudnn = (conv.fp32_precision, str(torch.backends.cudnn.benchmark))
    return (*_gpus(), torch.backends.cuda.matmul.fp32_precision, *cudnn)


@functools.cache
def _gpus() -> tuple[str, ...]:
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    try:
        driver = Path("/proc/driver/nvidia/version").read_text().partition("\n")[0]
    except OSError:  # not on Linux
        driver = ""
    return (*names, driver, str(torch.version.cuda))


def _name_of(target: Any) -> str:
    if isinstance(target, (str, OpOverload)):
        return str(target)
    name = getattr(target, "__qualname__", None)
    return f"{getattr(target, '__module__', None)}.{name}" if name else repr(target)


class _Unquoted(str):
    """A string without quotes in the ``repr`` of a container."""

    __repr__ = str.__str__


def digest(*parts: str) -> str:
    """Return the SHA-256 of several texts."""
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


@functools.cache
def software() -> tuple[str, ...]:
    """Return the builds of onnxruntime, torch and engines, and a hash of this package's sources that matter."""
    # not at the top: it imports more than a hash needs
    from lightning_ort.compiler.executors.ort.kernels import builds, installed

    sources = hashlib.sha256()
    own = Path(__file__).parents[2]
    for path in sorted([*own.glob("compat/*.py"), *own.glob("compiler/**/*.py")]):
        sources.update(path.read_bytes())
    packages = filter(None, (engine.package for engine in ENGINES.values()))
    return (str(builds()), *(str(installed(package)) for package in packages), torch.__version__, sources.hexdigest())


def program(modules: Iterable[object]) -> str:
    """Return a hash of the files of a program, whose modules these are: of those that are not installed."""
    files = {getattr(module, "__file__", None) for module in modules}
    states = []
    for file in sorted(file for file in files if isinstance(file, str) and not _is_installed(file)):
        with suppress(OSError):  # such as of a cell of a notebook
            state = os.stat(file)
            states.append(f"{file} {state.st_mtime_ns} {state.st_size}")
    return digest(*states)


@functools.cache
def _is_installed(file: str) -> bool:
    # packages may be of another environment than this one: a system's, or one that a .pth file names
    return file.startswith(_library()) or _PACKAGES.search(file) is not None


@functools.cache
def _library() -> tuple[str, ...]:
    return tuple({sysconfig.get_path(kind) for kind in ("stdlib", "platstdlib")})


@functools.cache
def processor() -> str:
    """Return the name of the processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
