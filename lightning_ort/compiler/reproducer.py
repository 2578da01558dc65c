"""Write a script that runs one region alone: what is behind ``RegionReport.save_reproducer``."""

import re
import weakref
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from lightning_ort.compat.torch import hint_of
from lightning_ort.compiler import reproduce
from lightning_ort.compiler.layouts import int_hint
from lightning_ort.compiler.region_module import RegionModule


def reproducer(module: RegionModule) -> Callable[[Path], Path]:
    """Return a function that writes the script of a region to a folder; it does not keep the region alive."""
    reference = weakref.ref(module)

    def write(folder: Path) -> Path:
        region = reference()
        if region is None:
            raise RuntimeError("This graph no longer exists. Call save_reproducer while the compiled module is in use.")
        return _write(region, folder)

    return write


def _write(region: RegionModule, folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    code = region.graph.python_code("self")
    used = [(name, value) for name, value in code.globals.items() if re.search(rf"\b{name}\b", code.src)]
    imports = [_import(name, value) for name, value in used]
    if "torch.ops.lightning_ort" in code.src:
        imports.append("import lightning_ort.compiler.layouts  # defines torch.ops.lightning_ort")
    specs = [f"    {_spec(node.meta['val'])},  # {node.name}" for node in region.graph.find_nodes(op="placeholder")]
    model = None
    if region.model is not None:
        (folder / "region.onnx").write_bytes(region.model)
        model = 'Path(__file__).with_name("region.onnx")'
    parts = [
        Path(reproduce.__file__).read_text(encoding="utf-8"),
        *imports,
        code.src.strip(),
        "\n",
        "# sizes, strides, dtype, device; or a number",
        "\n".join(["INPUTS = [", *specs, "]"]),
        f"reproduce(forward, INPUTS, {model})\n",
    ]
    script = folder / "reproduce.py"
    script.write_text("\n".join(parts), encoding="utf-8")
    return script


def _import(name: str, value: Any) -> str:
    if isinstance(value, ModuleType):
        return f"import {value.__name__} as {name}"
    if isinstance(value, float):  # inf and nan
        return f'{name} = float("{value}")'
    return f"from {value.__module__} import {value.__qualname__} as {name}"


def _spec(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return repr(hint_of(value) if isinstance(value, (torch.SymInt, torch.SymFloat)) else value)
    sizes, strides = tuple(map(int_hint, value.shape)), tuple(map(int_hint, value.stride()))
    return f"({sizes}, {strides}, {value.dtype}, {str(value.device)!r})"
