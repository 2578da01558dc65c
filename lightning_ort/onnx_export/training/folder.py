"""The files of an exported folder, written beside it until all of them are right."""

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

import onnx_ir as ir
import torch
from torch import Tensor

from lightning_ort.onnx_export.export import versions
from lightning_ort.onnx_export.training import runner
from lightning_ort.onnx_export.training.models import SUM, Model, Port, Settings

NEEDS = "1.17 or later"  # of onnxruntime: opset 18, IR version 9
ABOUT = "training.json"
STATE = "state.safetensors"  # with metadata `step` and `pending`: updates so far, and batches since the last one
FROZEN = "frozen.data"  # constants of some size of all models, if there are any
RUNNERS = {"runner.py": "training.py", "runner.mjs": "training.mjs"}  # source -> name in the folder
INLINE = 1 << 16  # bytes of a frozen tensor up to which it is in the model itself
# products of this many weights and more are worth a second thread
SEVERAL_THREADS = 1 << 17


def state_of(
    parameters: Mapping[str, Tensor], buffers: Mapping[str, Tensor], settings: Settings
) -> dict[str, tuple[str, Tensor]]:
    """Return the state of a training: role and value by name."""
    state = {name: ("parameter", value) for name, value in parameters.items()}
    state |= {name: ("buffer", value) for name, value in buffers.items()}
    optimizer = settings.optimizer
    if optimizer is not None:
        for key, values in optimizer.states.items():
            state |= {f"{key}/{name}": ("state", value) for name, value in values.items()}
        if settings.accumulate > 1:
            for group in optimizer.groups:
                for name in group.parameters:
                    state[f"{SUM}/{name}"] = ("state", torch.zeros_like(parameters[name]))
    return state


def write_models(folder: Path, models: Mapping[str, Model]) -> None:
    """Write the models; frozen tensors of some size are in one file for all of them."""
    places: dict[str, tuple[int, int]] = {}
    with (folder / FROZEN).open("wb") as data:
        for model in models.values():
            for value in list(model.model.graph.initializers.values()):
                tensor, shape = value.const_value, value.shape
                assert tensor is not None
                assert shape is not None
                if tensor.nbytes <= INLINE:
                    continue
                content = tensor.tobytes()
                key = hashlib.sha256(content).hexdigest()
                if key not in places:
                    data.write(b"\0" * (-data.tell() % 64))
                    places[key] = (data.tell(), len(content))
                    data.write(content)
                offset, length = places[key]
                value.const_value = ir.ExternalTensor(
                    FROZEN, offset, length, tensor.dtype, shape=shape, name=str(value.name), base_dir=folder
                )
    for name, model in models.items():
        proto = ir.to_proto(model.model)
        (folder / f"{name}.onnx").write_bytes(proto.SerializeToString())
    if not places:
        (folder / FROZEN).unlink()


def write_rest(
    folder: Path,
    models: Mapping[str, Model],
    state: Mapping[str, tuple[str, Tensor]],
    settings: Settings,
    more: Mapping[str, Any],
) -> None:
    """Write the state, the runners and what is known about it all."""
    arrays = {name: value.detach().cpu().contiguous().numpy() for name, (_, value) in state.items()}
    step = 0 if settings.optimizer is None else settings.optimizer.step
    runner.write_state(folder / STATE, arrays, {"step": str(step), "pending": "0"})
    package = files("lightning_ort.onnx_export.training")
    for source, name in RUNNERS.items():
        (folder / name).write_text(package.joinpath(source).read_text(encoding="utf-8"), encoding="utf-8")
    written = [f"{name}.onnx" for name in models] + [FROZEN] * (folder / FROZEN).exists()
    constants = [value.const_value for value in models["training"].model.graph.initializers.values()]
    weights = sum(array.size for array in arrays.values()) + sum(each.size for each in constants if each is not None)
    about = {
        "format": runner.FORMAT,
        "needs": NEEDS,
        **more,
        "fields": _fields(models["training"]),
        "state": [{"name": n, "role": role, **_type_of(value)} for n, (role, value) in state.items()],
        "optimizer": _optimizer(settings),
        "clip": None if settings.clip_value is None else [settings.clip_algorithm, settings.clip_value],
        "accumulate": settings.accumulate,
        "threads": 1 if weights < SEVERAL_THREADS else 64,
        "models": {
            name: {
                "file": f"{name}.onnx",
                "fields": _fields(model),
                "inputs": [_described(port) for port in model.inputs],
                "outputs": [_described(port) for port in model.outputs],
                "sizes": model.limits.sizes,
                "conditions": model.limits.conditions,
            }
            for name, model in models.items()
        },
        "files": {name: _fingerprint(folder / name) for name in written},
        "versions": versions(),
    }
    (folder / ABOUT).write_text(json.dumps(about, indent=1, default=str), encoding="utf-8")


def _type_of(value: Any) -> dict[str, Any]:
    return {"dtype": str(value.dtype).removeprefix("torch."), "shape": list(value.shape)}


def _described(port: Port) -> dict[str, Any]:
    return {"name": port.name, "role": port.role, "key": port.key, **_type_of(port)}


def _fields(model: Model) -> list[dict[str, Any]]:
    return [{"name": port.key, **_type_of(port)} for port in model.fields]


def _optimizer(settings: Settings) -> dict[str, Any] | None:
    optimizer = settings.optimizer
    if optimizer is None:
        return None
    groups = [
        {"learning_rate": group.learning_rate, "parameters": list(group.parameters), **group.settings}
        for group in optimizer.groups
    ]
    return {"name": optimizer.name, "groups": groups}


def _fingerprint(path: Path) -> dict[str, Any]:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while part := file.read(1 << 20):
            digest.update(part)
    return {"bytes": path.stat().st_size, "sha256": digest.hexdigest()}


def put_in_place(written: Path, folder: Path) -> None:
    """Give a complete folder its name; an older export of that name goes only then."""
    if not folder.exists():
        written.rename(folder)
        return
    old = written.with_name(f"{written.name}-old")
    folder.rename(old)
    try:
        written.rename(folder)
    except OSError:
        old.rename(folder)
        raise
    shutil.rmtree(old)


def refuse_foreign(folder: Path) -> None:
    """Raise ``ValueError`` if a folder has something else in it than an export."""
    if folder.is_dir() and not (folder / ABOUT).is_file() and any(os.scandir(folder)):
        raise ValueError(f"{folder} is not empty, and no export: choose another folder.")
