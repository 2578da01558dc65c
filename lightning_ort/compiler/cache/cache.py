"""Keeps decisions, timings, models and a function between runs, in a folder of files named by a SHA-256.

- ``graph-<hash>.json``: for each node of a graph, whether an executor can run it
- ``region-<hash>.json`` and ``region-<hash>.onnx``: the timing and the model of a region
- ``graphs-<hash>.json``: the report of a graph, and of its gradient, of which torch runs everything
- ``step-<hash>.json``: a captured step as one graph with its gradients, lowered (:mod:`.kept_step`)
- ``start-<hash>.json``: how long it took to start a module's step, and what that was worth
- ``masks-<hash>.so``: the function that draws dropout masks (:mod:`lightning_ort.compiler.executors.mask_kernel`)

The hash covers the graph (:mod:`.fingerprint`), or the module and its first batch; the versions
of onnxruntime and torch, and the sources of the compiler; the executor and its providers; the settings on which it
depends (:meth:`~lightning_ort.config.ORTConfig.key`); for all but the nodes of a graph the processor, the GPUs with
their driver and TF32, and torch's thread count.

Each file contains a second SHA-256, of its name and its content: what is read is what the same sources have written. A
file that cannot be read, is damaged, renamed or copied from another counts as absent. Files appear only when they are
complete (:mod:`.cache_folder`), so several processes may share a folder, and any of them may be killed.
"""

import dataclasses
import functools
import hashlib
import json
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import fx

from lightning_ort.compat.torch import float32_matmul_precision
from lightning_ort.compiler.cache import cache_folder
from lightning_ort.compiler.cache.fingerprint import (
    captured_fingerprint,
    digest,
    fingerprint,
    graphics,
    processor,
    software,
)
from lightning_ort.compiler.reason import Reason
from lightning_ort.compiler.regions.region import Timing
from lightning_ort.compiler.report.plain_types import from_plain, to_plain
from lightning_ort.config import ORTConfig

log = logging.getLogger(__name__)

_Content = TypeVar("_Content")


class Entry(NamedTuple):
    """What is kept of a region: its serialized ONNX model and its timing."""

    model: bytes
    timing: Timing


@dataclasses.dataclass(frozen=True)
class Startup:
    """What starting a step took in earlier runs."""

    cold: float  # seconds with an empty cache
    warm: float | None = None  # seconds with what that run kept; ``None`` if there was no such run
    ms: dict[str, float] = dataclasses.field(default_factory=dict)  # time of the step on each engine, if it was tried
    finished: bool = True  # whether the step was compiled, and not given up before
    refused: str = ""  # why the step was found to be for eager alone; "" if it was not
    program: str = ""  # of which program and settings that is true


class Cache:
    """The cache of one backend."""

    def __init__(self, config: ORTConfig) -> None:
        self._config = config

    @functools.cached_property
    def _folder(self) -> Path | None:
        """The folder if it exists or can be created, and no other user can write to it; checked when first used."""
        return cache_folder.folder_of(self._config.cache_dir)

    def refusals(
        self, gm: fx.GraphModule, executor_key: tuple[str, ...], check: Callable[[], dict[fx.Node, Reason | None]]
    ) -> dict[fx.Node, Reason | None]:
        """Return why an executor cannot run each node of a lowered graph, if so: from the cache, or from ``check``."""
        if self._folder is None:
            return check()
        options = self._config.key("graphs")
        name = f"graph-{digest(fingerprint(gm.graph), *software(), *executor_key, *options)}"
        nodes = [node for node in gm.graph.nodes if node.op == "call_function"]
        kept = self.read(name, list[Reason | None])
        if kept is not None:
            return dict(zip(nodes, kept, strict=True))
        answers = check()
        reasons = [answers[node] for node in nodes]
        if not any(reason is not None and reason.type.is_failure for reason in reasons):  # it may work the next time
            self.write(name, reasons)
        return answers

    def name(self, fingerprint: str, executor_key: tuple[str, ...], kind: str = "region") -> str:
        """Return the name of the entry of a graph's region or op."""
        machine = (processor(), str(torch.get_num_threads()), float32_matmul_precision(), *graphics())
        options = self._config.key("regions")
        return f"{kind}-{digest(fingerprint, *software(), *executor_key, *options, *machine)}"

    def load(self, name: str) -> Entry | None:
        """Return a region's entry, or ``None``."""
        timing = self.read(name, Timing)
        if timing is None:
            return None
        content = self._read_bytes(f"{name}.onnx")
        model = content[:-_SEAL_BYTES]
        return Entry(model, timing) if content.endswith(_seal(name, model)) else None

    def store(self, name: str, entry: Entry) -> None:
        """Write a region's entry."""
        # each file is valid with any version of the other: the process may be killed in between
        self._write(f"{name}.onnx", entry.model + _seal(name, entry.model))
        self.write(name, entry.timing)

    def graphs_name(self, gm: fx.GraphModule, inputs: Sequence[Any], *facts: bool) -> str | None:
        """Return the name of a captured graph's entry, or ``None`` if nothing is kept of it.

        ``facts`` are what else decides how it is traced.
        """
        config = self._config
        wanted = config.cache_dir is not None and config.debug.save_onnx_dir is None
        text = captured_fingerprint(gm.graph, inputs) if wanted else None
        if text is None:
            return None
        return self.name(text, (*config.key("graphs"), str(facts)), "graphs")

    def load_step(self, name: str, restore: Callable[[Any], None]) -> bool:
        """Have what is kept of a captured graph that is a step restored; return whether there was anything.

        ``name`` is that of :meth:`graphs_name`; ``restore`` may raise anything for what it does not know.
        """

        def convert(kept: Any) -> bool:
            restore(kept)
            return True

        return self._read(_of_step(name), convert) is not None

    def store_step(self, name: str, plain: Any) -> None:
        """Write what is kept of a step."""
        self.write(_of_step(name), plain)

    def read(self, name: str, kind: Any) -> Any:
        """Return the value of a type that was written under a name, or ``None``."""
        return self._read(name, functools.partial(from_plain, kind))

    def write(self, name: str, value: Any) -> None:
        """Write a value, such as a dataclass or a list of them; :meth:`name` and others make names."""
        content = to_plain(value)
        self._write(f"{name}.json", json.dumps({"sha256": _checksum(name, content), "content": content}).encode())

    def _read_bytes(self, name: str) -> bytes:
        return b"" if self._folder is None else cache_folder.read(self._folder / name)

    def _read(self, name: str, convert: Callable[[Any], _Content]) -> _Content | None:
        """Return the converted content of a JSON file, or ``None`` if it is absent or not what this version writes."""
        file = self._read_bytes(f"{name}.json")
        if not file:
            return None
        try:
            kept = json.loads(file)
            if kept["sha256"] != _checksum(name, kept["content"]):
                raise ValueError("the checksum does not match")
            return convert(kept["content"])
        except Exception as error:  # a damaged file can raise anything
            log.debug("cache entry %s is unreadable: %s", name, error)
            return None

    def _write(self, name: str, content: bytes) -> None:
        if self._folder is None:
            return
        try:
            cache_folder.write(self._folder / name, content)
        except OSError as error:
            log.warning("Nothing is kept between runs: %s cannot be written (%s)", self._folder, error)
            self._folder = None


def _of_step(name: str) -> str:
    return f"step-{name.partition('-')[2]}"


def _checksum(name: str, content: Any) -> str:
    return digest(name, json.dumps(content, sort_keys=True))


def _seal(name: str, model: bytes) -> bytes:
    """Return a checksum to append to a model, as an entry of ONNX metadata: the file is still a model."""
    key, value = b"lightning_ort.sha256", hashlib.sha256(name.encode() + b"\0" + model).hexdigest().encode()
    entry = b"\x0a%c%b\x12%c%b" % (len(key), key, len(value), value)  # StringStringEntryProto
    return b"\x72%c%b" % (len(entry), entry)  # ModelProto.metadata_props


_SEAL_BYTES = len(_seal("", b""))
