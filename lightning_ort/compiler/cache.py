"""What was decided and converted, kept between runs.

A folder of JSON and ONNX files, each named by a SHA-256:

- ``graph-<hash>.json``: for each node of a graph, whether ONNX Runtime can run it
- ``region-<hash>.json``: how a region was timed
- ``region-<hash>.onnx``: its model
- ``op-<hash>.json``: how long an op took in each of its forms

What is hashed: the graph (:func:`describe`: ops, arguments, and dtypes, shapes, strides and kinds of device of all
values); the versions of onnxruntime, torch and this package, with the sources of the compiler; the execution providers
and the ``kernels`` of the config; for the nodes of a graph the ``torch_ops``; for a region the processor's name,
torch's thread count, ``intra_op_threads`` and ``cuda_graphs``.

Each file ends with, or holds, a second SHA-256, of its name and its content. A file that cannot be read, that was
damaged, renamed or copied from another, or whose values are not possible ones, counts as absent. Files appear whole
(:mod:`~lightning_ort.compiler.cache_folder`), so several processes may share a folder, and any of them may be killed.
"""

import dataclasses
import functools
import hashlib
import json
import logging
import math
import os
import platform
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import platformdirs
import sympy
import torch
from torch import fx

from lightning_ort.compiler import cache_folder
from lightning_ort.compiler.executors.ort.conversion.graph import ANY_BYTE, FORM
from lightning_ort.compiler.executors.ort.support import Support
from lightning_ort.compiler.nodes import values_of
from lightning_ort.compiler.report import Reason, ReasonType
from lightning_ort.config import MAX_THREADS

if TYPE_CHECKING:
    from lightning_ort.config import ORTConfig

log = logging.getLogger(__name__)

VARIABLE = "LIGHTNING_ORT_CACHE_DIR"
_Kept = TypeVar("_Kept")


@dataclass(frozen=True)
class Timing:
    """What a region took, in ms, and the threads of its fastest session.

    Args:
        ort_ms: Median on ONNX Runtime; ``None`` if not timed.
        torch_ms: Median in torch; ``None`` if not timed.
        threads: Intra-op threads.
        cuda_graph: Whether that session is recorded as a CUDA graph.

    """

    ort_ms: float | None
    torch_ms: float | None
    threads: int
    cuda_graph: bool = False


@dataclass(frozen=True)
class Entry:
    """What is kept of a region.

    Args:
        model: Its serialized ONNX model.
        timing: How it was timed.

    """

    model: bytes
    timing: Timing


def default_folder() -> Path:
    """Return the folder of ``cache_dir="auto"``: ``$LIGHTNING_ORT_CACHE_DIR``, or the user's cache folder."""
    return Path(os.environ.get(VARIABLE) or platformdirs.user_cache_dir("lightning-ort", appauthor=False))


class Cache:
    """The cache of one backend.

    Args:
        config: The backend's.

    """

    def __init__(self, config: "ORTConfig") -> None:
        self._folder = None if config.cache_dir is None else Path(config.cache_dir)
        if config.cache_dir == "auto":
            self._folder = default_folder()
        self._is_open = False  # the folder is looked at when it is first needed
        self._config = config
        self._times: dict[str, dict[str, float]] = {}  # ops come again in other graphs

    def support(
        self, gm: fx.GraphModule, providers: tuple[str, ...], answer: Callable[[], dict[fx.Node, Support]]
    ) -> dict[fx.Node, Support]:
        """Return whether ONNX Runtime can run each node of a graph, from the cache if it is there.

        Args:
            gm: The lowered graph.
            providers: The execution providers of the sessions.
            answer: Finds out.

        """
        if self._open() is None:
            return answer()
        config = self._config
        parts = (describe(gm.graph), *_versions(), *providers, config.kernels, *sorted(config.torch_ops))
        name = f"graph-{digest(*parts)}"
        nodes = [node for node in gm.graph.nodes if node.op == "call_function"]
        kept = self._read(name, lambda items: [_to_support(item) for item in _exactly(list, items)])
        if kept is not None and len(kept) == len(nodes):
            return dict(zip(nodes, kept, strict=True))
        answers = answer()
        plain = [[a.reason.type.name, a.reason.text] if a.reason else None for a in map(answers.__getitem__, nodes)]
        self._write_json(name, plain)
        return answers

    def times(
        self,
        description: str,
        providers: tuple[str, ...],
        names: Collection[str],
        measure: Callable[[], dict[str, float]],
    ) -> dict[str, float]:
        """Return how long an op takes in each of its forms, in ms: as measured before, or now.

        Args:
            description: :func:`describe` of the op's graph.
            providers: The execution providers of the sessions.
            names: Of what may have been timed.
            measure: Measures.

        """
        name = self.name(description, providers, "op")
        if name not in self._times:
            times = self._read(name, lambda kept: {_one_of(names, form): _ms(ms) for form, ms in kept.items()})
            if not times:
                times = measure()
                self._write_json(name, times)
            self._times[name] = times
        return self._times[name]

    def name(self, description: str, providers: tuple[str, ...], kind: str = "region") -> str:
        """Return the name of a region's or an op's entry.

        Args:
            description: :func:`describe` of its graph.
            providers: The execution providers of the sessions.
            kind: ``"region"`` or ``"op"``.

        """
        config = self._config
        machine = (_cpu_name(), str(torch.get_num_threads()))
        asked = (config.kernels, str(config.intra_op_threads), str(config.cuda_graphs))
        return f"{kind}-{digest(description, *_versions(), *providers, *asked, *machine)}"

    def load(self, name: str) -> Entry | None:
        """Return a region's entry, or ``None``."""
        timing = self._read(name, _to_timing)
        if timing is None:
            return None
        content = self._content(f"{name}.onnx")
        seal = _seal(name, content[:-_SEAL_BYTES])
        if not content.endswith(seal):
            return None
        return Entry(content[:-_SEAL_BYTES], timing)

    def store(self, name: str, entry: Entry) -> None:
        """Keep a region's entry."""
        # the one file is right with any version of the other: a process may be killed in between
        self._write(f"{name}.onnx", entry.model + _seal(name, entry.model))
        self._write_json(name, dataclasses.asdict(entry.timing))

    def _open(self) -> Path | None:
        """Return the folder if it is there, or can be made, and nobody else can write to it."""
        if self._folder is not None and not self._is_open:
            self._is_open = True
            if (obstacle := cache_folder.prepare(self._folder)) is not None:
                log.warning("Nothing is kept between runs: %s", obstacle)
                self._folder = None
        return self._folder

    def _content(self, name: str) -> bytes:
        folder = self._open()
        return b"" if folder is None else cache_folder.read(folder / name)

    def _read(self, name: str, convert: Callable[[Any], _Kept]) -> _Kept | None:
        """Return what a JSON file says; ``None`` if it is absent, or not what this version writes."""
        content = self._content(f"{name}.json")
        if not content:
            return None
        try:
            kept = json.loads(content)
            if kept["sha256"] != _checksum(name, kept["content"]):
                raise ValueError("the content is not what was kept under this name")
            return convert(kept["content"])
        except Exception as error:  # whatever it is, it is not what this version writes
            log.debug("cache entry %s is unreadable: %s", name, error)
            return None

    def _write_json(self, name: str, content: Any) -> None:
        self._write(f"{name}.json", json.dumps({"sha256": _checksum(name, content), "content": content}).encode())

    def _write(self, name: str, content: bytes) -> None:
        folder = self._open()
        if folder is None:
            return
        try:
            cache_folder.write(folder / name, content)
        except OSError as error:
            log.warning("Nothing is kept between runs: %s cannot be written (%s)", folder, error)
            self._folder = None


def describe(graph: fx.Graph) -> str:
    """Return a text that is the same for graphs that compute the same from inputs of the same kind.

    Names of nodes and of symbolic sizes do not matter; the sizes that were seen when the graph was traced do, since
    timings depend on them.
    """
    symbols: dict[sympy.Symbol, sympy.Symbol] = {}

    def size(value: Any) -> str:
        if isinstance(value, int):
            return str(value)
        expression = value.node.expr
        for symbol in sorted(expression.free_symbols, key=str):
            symbols.setdefault(symbol, sympy.Symbol(f"n{len(symbols)}"))
        return f"{expression.xreplace(symbols)}={value.node.hint}"

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
        called = target if isinstance(target, torch._ops.OpOverload) else getattr(target, "__qualname__", "")
        arguments = fx.map_arg((node.args, node.kwargs), lambda source: _Named(numbers[source]))
        made = "" if node.op == "output" else ";".join(map(kind, values_of(node)))
        ways = f"{node.meta.get(FORM, '')} {node.meta.get(ANY_BYTE, '')}"
        lines.append(f"{numbers[node]} {node.op} {called} {arguments} {made} {ways}")
    return "\n".join(lines)


class _Named(str):
    """A node's number, which is no string to the eye."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def _to_support(item: Any) -> Support:
    if item is None:
        return Support(True)
    kind, text = _exactly(list, item)
    return Support(False, Reason(ReasonType[kind], _exactly(str, text)))


def _to_timing(kept: Any) -> Timing:
    timing = Timing(**kept)
    for ms in (timing.ort_ms, timing.torch_ms):
        if ms is not None:
            _ms(ms)
    if not 1 <= _exactly(int, timing.threads) <= MAX_THREADS:
        raise ValueError(f"{timing.threads} threads")
    _exactly(bool, timing.cuda_graph)
    return timing


def _ms(value: Any) -> float:
    if not (math.isfinite(_exactly(float, value)) and value > 0):
        raise ValueError(f"{value} ms")
    return value


def _one_of(names: Collection[str], name: str) -> str:
    if name not in names:
        raise ValueError(f"{name!r} is no way to run this op")
    return name


def _exactly(kind: type[_Kept], value: Any) -> _Kept:
    if type(value) is not kind:  # True is an int, too
        raise TypeError(f"{value!r} is no {kind.__name__}")
    return value


def _checksum(name: str, content: Any) -> str:
    return digest(name, json.dumps(content, sort_keys=True))


def _seal(name: str, model: bytes) -> bytes:
    """Return what is put behind a model: its checksum, as an entry of the metadata that ONNX files have.

    Protobuf messages one after the other are one message, so what is written is still a model.
    """
    key, value = b"lightning_ort.sha256", hashlib.sha256(name.encode() + b"\0" + model).hexdigest().encode()
    entry = b"\x0a%c%b\x12%c%b" % (len(key), key, len(value), value)  # StringStringEntryProto
    return b"\x72%c%b" % (len(entry), entry)  # ModelProto.metadata_props


_SEAL_BYTES = len(_seal("", b""))


def digest(*parts: str) -> str:
    """Return the SHA-256 of several texts."""
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


@functools.cache
def _versions() -> tuple[str, ...]:
    import onnxruntime

    from lightning_ort import __version__

    sources = hashlib.sha256()
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        sources.update(path.read_bytes())
    return (onnxruntime.__version__, torch.__version__, __version__, sources.hexdigest())


@functools.cache
def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
