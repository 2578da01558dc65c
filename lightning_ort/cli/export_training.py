"""``lightning-ort export --training``: a module's training step as a folder that trains with onnxruntime alone."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lightning_ort._text import say
from lightning_ort.cli.load import call, load
from lightning_ort.onnx_export.failure import ExportFailed
from lightning_ort.onnx_export.training.export import export_training
from lightning_ort.onnx_export.training.optimizers import configured
from lightning_ort.optim.shard_files import NotTrusted
from lightning_ort.optim.shard_files import load as load_file


@dataclass(frozen=True)
class TrainingTask:
    """What the command line names: the module, its data or a batch in a file, and a checkpoint to start from."""

    module: str
    args: dict[str, Any]
    data: str | None
    data_args: dict[str, Any]
    checkpoint: Path | None
    sample: Path | None
    trust: bool


def export_training_command(task: TrainingTask, output: Path, optimizer: Any, **settings: Any) -> None:
    """Export what a command line names; exit with a message if that fails."""
    if output.exists():
        sys.exit(f"{output} already exists. Choose another folder.")
    if (task.data is None) == (task.sample is None):
        sys.exit("Pass --data with a LightningDataModule, or --sample with a batch in a .pt file.")
    for path in (task.checkpoint, task.sample):
        if path is not None and not path.is_file():
            sys.exit(f"{path}: there is no such file.")
    try:
        make = load(task.module, "training")
        content = None if task.checkpoint is None else _content(task.checkpoint, task.trust)
        kept = content.get("hyper_parameters", {}) if content is not None and isinstance(make, type) else {}
        module = call(make, task.module, {**kept, **task.args})
        if task.sample is not None:
            data = load_file(task.sample)
        else:
            data = call(load(str(task.data), "data"), str(task.data), task.data_args)
        if content is not None:
            optimizer = _resumed(module, content, optimizer)
        exported = export_training(module, data, output, optimizer=optimizer, **settings)
    except NotTrusted as error:
        sys.exit(f"{error} If you trust it, pass --trust.")
    except (ExportFailed, ModuleNotFoundError, OSError, RuntimeError, TypeError, ValueError) as error:
        sys.exit(str(error))
    say(exported)


def _content(checkpoint: Path, trust: bool) -> dict[str, Any]:
    content = load_file(checkpoint, trust)
    if not isinstance(content, dict) or "state_dict" not in content:
        raise ValueError(f"{checkpoint} is no Lightning checkpoint: it has no state_dict.")
    return content


def _resumed(module: torch.nn.Module, content: dict[str, Any], optimizer: Any) -> Any:
    """Load the weights of a checkpoint, and the states of its optimizer."""
    module.load_state_dict(content["state_dict"])
    if optimizer is None:
        return None
    made, _ = configured(module)
    if content.get("optimizer_states"):
        made.load_state_dict(content["optimizer_states"][0])
    return made
