"""A script that runs one region alone: what is behind ``RegionReport.save_reproducer``."""

import re
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import fx

from lightning_ort.compat.torch import hint_of
from lightning_ort.compiler import reproduce

_DATA_DEPENDENT = 4  # for a number that depends on data, whose value no trace knows


@dataclass(frozen=True)
class Reproducer:
    """What a script needs of a region: text, so that it keeps neither the graph nor its tensors alive.

    Args:
        code: The region's torch code and the shapes of its inputs.
        model: Its ONNX model, if it has one.

    """

    code: str
    model: bytes | None

    @classmethod
    def of(cls, graph: fx.Graph, model: bytes | None = None) -> "Reproducer":
        """Return the reproducer of a region's graph."""
        code = graph.python_code("self")
        used = [(name, value) for name, value in code.globals.items() if re.search(rf"\b{name}\b", code.src)]
        imports = [_import(name, value) for name, value in used]
        if "torch.ops.lightning_ort" in code.src:
            imports.append("import lightning_ort.compiler.layouts  # defines torch.ops.lightning_ort")
        specs = [f"    {_spec(node.meta['val'])},  # {node.name}" for node in graph.find_nodes(op="placeholder")]
        inputs = ["# sizes, strides, dtype, device; or a number", "INPUTS = [", *specs, "]\n"]
        return cls("\n".join([*imports, "\n", code.src.strip(), "\n", *inputs]), model)

    def save(self, folder: Path) -> Path:
        """Write the script and the model to a folder; return the script's path."""
        folder.mkdir(parents=True, exist_ok=True)
        model = "None"
        if self.model is not None:
            (folder / "region.onnx").write_bytes(self.model)
            model = 'Path(__file__).with_name("region.onnx")'
        runner = Path(reproduce.__file__).read_text(encoding="utf-8")
        script = folder / "reproduce.py"
        script.write_text(f"{runner}\n{self.code}\nreproduce(forward, INPUTS, {model})\n", encoding="utf-8")
        return script


def _import(name: str, value: Any) -> str:
    if isinstance(value, ModuleType):
        return f"import {value.__name__} as {name}"
    if isinstance(value, float):  # inf and nan
        return f'{name} = float("{value}")'
    return f"from {value.__module__} import {value.__qualname__} as {name}"


def _spec(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        sizes, strides = tuple(map(_number, value.shape)), tuple(map(_number, value.stride()))
        return f"({sizes}, {strides}, {value.dtype}, {str(value.device)!r})"
    return repr(_number(value))


def _number(value: Any) -> Any:
    if not isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return value
    hint = hint_of(value)
    return _DATA_DEPENDENT if hint is None else hint
