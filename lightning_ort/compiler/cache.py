"""What was decided and converted, kept between runs.

A folder of JSON and ONNX files, each named by a SHA-256:

- ``graph-<hash>.json``: for each node of a graph, whether ONNX Runtime can run it
- ``region-<hash>.json``: how a region was timed, and the SHA-256 of its model
- ``region-<hash>.onnx``: the model
- ``op-<hash>.json``: how long an op took in each of its forms

What is hashed: the graph (:func:`describe`: ops, arguments, and dtypes, shapes, strides and kinds of device of all
values); the versions of onnxruntime, torch and this package, with the sources of the compiler; the execution providers
and the ``kernels`` of the config; for the nodes of a graph the ``torch_ops``; for a region the processor's name,
torch's thread count, ``intra_op_threads`` and ``cuda_graphs``.

A file that cannot be read, or whose content is not what it says, counts as absent. Files appear whole (written aside,
then renamed), so several processes may share a folder.
"""

import dataclasses
import functools
import hashlib
import json
import logging
import os
import platform
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import platformdirs
import sympy
import torch
from torch import fx

from lightning_ort.compiler.conversion.graph import ANY_BYTE, FORM
from lightning_ort.compiler.report import Reason, ReasonType
from lightning_ort.compiler.support import Support, values_of

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


def files(folder: Path) -> list[Path]:
    """Return the files of a cache folder; others that are there do not count."""
    return [
        path
        for pattern in ("graph-*.json", "region-*.json", "region-*.onnx", "op-*.json")
        for path in folder.glob(pattern)
    ]


class Cache:
    """The cache of one backend.

    Args:
        config: The backend's.

    """

    def __init__(self, config: "ORTConfig") -> None:
        self._folder = None if config.cache_dir is None else Path(config.cache_dir)
        if config.cache_dir == "auto":
            self._folder = default_folder()
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
        if self._folder is None:
            return answer()
        config = self._config
        parts = (describe(gm.graph), *_versions(), *providers, config.kernels, *sorted(config.torch_ops))
        name = f"graph-{digest(*parts)}"
        nodes = [node for node in gm.graph.nodes if node.op == "call_function"]
        kept = self._read(name, lambda items: [_to_support(item) for item in items])
        if kept is not None and len(kept) == len(nodes):
            return dict(zip(nodes, kept, strict=True))
        answers = answer()
        plain = [[a.reason.type.name, a.reason.text] if a.reason else None for a in map(answers.__getitem__, nodes)]
        self._write(f"{name}.json", json.dumps(plain).encode())
        return answers

    def times(
        self, description: str, providers: tuple[str, ...], measure: Callable[[], dict[str, float]]
    ) -> dict[str, float]:
        """Return how long an op takes in each of its forms, in ms: as measured before, or now.

        Args:
            description: :func:`describe` of the op's graph.
            providers: The execution providers of the sessions.
            measure: Measures.

        """
        name = self.name(description, providers, "op")
        if name not in self._times:
            times = self._read(name, lambda kept: {str(form): float(ms) for form, ms in kept.items()})
            if times is None:
                times = measure()
                self._write(f"{name}.json", json.dumps(times).encode())
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
        folder = self._folder
        if folder is None:
            return None

        def to_entry(kept: Any) -> Entry:
            model = (folder / f"{name}.onnx").read_bytes()
            if hashlib.sha256(model).hexdigest() != kept["model"]:
                raise ValueError("the model is not the one that was kept")
            return Entry(model, Timing(**kept["timing"]))

        return self._read(name, to_entry)

    def _read(self, name: str, convert: Callable[[Any], _Kept]) -> _Kept | None:
        """Return what a JSON file says; ``None`` if it is absent, or not what this version writes."""
        if self._folder is None:
            return None
        try:
            return convert(json.loads((self._folder / f"{name}.json").read_text()))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, KeyError) as error:
            log.debug("cache entry %s is unreadable: %s", name, error)
            return None

    def store(self, name: str, entry: Entry) -> None:
        """Keep a region's entry."""
        content = {"model": hashlib.sha256(entry.model).hexdigest(), "timing": dataclasses.asdict(entry.timing)}
        self._write(f"{name}.onnx", entry.model)
        self._write(f"{name}.json", json.dumps(content).encode())

    def _write(self, name: str, content: bytes) -> None:
        if self._folder is None:
            return
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("wb", dir=self._folder, suffix=".tmp", delete=False) as file:
                file.write(content)
            os.replace(file.name, self._folder / name)
        except OSError as error:
            log.warning("Nothing is kept between runs: %s cannot be written (%s)", self._folder, error)
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


def _to_support(item: Sequence[str] | None) -> Support:
    return Support(True) if item is None else Support(False, Reason(ReasonType[item[0]], item[1]))


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
