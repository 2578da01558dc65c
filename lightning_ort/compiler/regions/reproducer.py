"""A script that runs one region alone: what is behind ``RegionReport.save_reproducer``."""

import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import fx

from lightning_ort.compat.torch_graphs import hint_of
from lightning_ort.compiler.regions import reproducer_script

_DATA_DEPENDENT = 4  # for a number that depends on data, whose value no trace knows


@dataclass(frozen=True, eq=False)
class Reproducer:
    """What a script needs of a region; few are asked for, so the text is made late."""

    graph: fx.Graph | None  # the region's graph, without its tensors; gone once the text is made
    inputs: Mapping[str, Any]  # its inputs: (sizes, strides, dtype, device), or a number
    model: bytes | None  # its ONNX model, if it has one
    providers: Sequence[Any]  # what runs the model, as a session takes it

    @classmethod
    def of(cls, graph: fx.Graph, model: bytes | None = None, providers: Sequence[Any] = ()) -> "Reproducer":
        """Return the reproducer of a region's graph."""
        copy, copied = fx.Graph(), dict[fx.Node, fx.Node]()
        copy.output(copy.graph_copy(graph, copied))
        for node in copied.values():
            node.meta.clear()
        inputs = {node.name: spec_of(node.meta["val"]) for node in graph.find_nodes(op="placeholder")}
        return cls(copy, inputs, model, providers)

    @functools.cached_property
    def code(self) -> str:
        """The region's torch code and the shapes of its inputs."""
        assert self.graph is not None
        code = self.graph.python_code("self")
        used = [(name, value) for name, value in code.globals.items() if re.search(rf"\b{name}\b", code.src)]
        imports = [_import(name, value) for name, value in used]
        if "torch.ops.lightning_ort" in code.src:
            imports.append("import lightning_ort.compiler.graphs.nodes  # defines torch.ops.lightning_ort")
        specs = [f"    {_text(spec)},  # {name}" for name, spec in self.inputs.items()]
        inputs = ["# sizes, strides, dtype, device; or a number", "INPUTS = [", *specs, "]\n"]
        return "\n".join([*imports, "\n", code.src.strip(), "\n", *inputs])

    def __getstate__(self) -> dict[str, Any]:
        """Return the text in place of the graph: torch's ops cannot be pickled."""
        return {**vars(self), "graph": None, "inputs": {}, "code": self.code}

    def save(self, folder: Path) -> Path:
        """Write the script and the model to a folder; return the script's path."""
        folder.mkdir(parents=True, exist_ok=True)
        model = "None"
        if self.model is not None:
            (folder / "region.onnx").write_bytes(self.model)
            model = 'Path(__file__).with_name("region.onnx")'
        runner = Path(reproducer_script.__file__).read_text(encoding="utf-8")
        script = folder / "reproduce.py"
        call = f"reproduce(forward, INPUTS, {model}, {self.providers!r})"
        script.write_text(f"{runner}\n{self.code}\n{call}\n", encoding="utf-8")
        return script


def _import(name: str, value: Any) -> str:
    if isinstance(value, ModuleType):
        return f"import {value.__name__} as {name}"
    if isinstance(value, float):  # inf and nan
        return f'{name} = float("{value}")'
    return f"from {value.__module__} import {value.__qualname__} as {name}"


def spec_of(value: Any) -> Any:
    """Return sizes, strides, dtype and device of a traced tensor, or a number as it was when it was traced."""
    if isinstance(value, torch.Tensor):
        return tuple(map(_number, value.shape)), tuple(map(_number, value.stride())), value.dtype, str(value.device)
    return _number(value)


def _text(spec: Any) -> str:
    if isinstance(spec, tuple):
        sizes, strides, dtype, device = spec
        return f"({sizes}, {strides}, {dtype}, {device!r})"
    return repr(spec)


def _number(value: Any) -> Any:
    if not isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return value
    hint = hint_of(value)
    return _DATA_DEPENDENT if hint is None else hint
