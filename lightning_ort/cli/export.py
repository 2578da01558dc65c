"""``lightning-ort export``: the module in a checkpoint as an ONNX model, or the training of a module."""

import inspect
import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch

from lightning_ort._arguments import check_keywords
from lightning_ort._text import say
from lightning_ort.cli.arguments import DATA, MODULE, TRUST, add_mapping, add_switch
from lightning_ort.cli.load import call, described, load
from lightning_ort.onnx_export.export import check_settings, export_onnx
from lightning_ort.onnx_export.failure import ExportFailed
from lightning_ort.onnx_export.signature import Quantize
from lightning_ort.onnx_export.training.export import CONFIGURED, export_training
from lightning_ort.onnx_export.training.optimizers import configured
from lightning_ort.optim.shard_files import NotTrusted
from lightning_ort.optim.shard_files import load as load_file
from lightning_ort.tuning.project import Project

# what only one of the two kinds of export takes, with the defaults
_OF_CHECKPOINTS = {"module": None, "quantize": None, "input_shape": None, "dynamic_batch": True}
_OF_TRAINING = {
    **{"data": None, "data_args": None, "gradient_clip_val": None, "gradient_clip_algorithm": "norm"},
    **{"accumulate_grad_batches": 1, "dropout": True, "gradients_only": False, "float16": False},
}


def add_arguments(parser: ArgumentParser) -> None:
    """Add what :func:`export` takes."""
    add = parser.add_argument
    add("checkpoint", nargs="?", type=Path, help="a Lightning checkpoint; with --training, optional")
    add("--module", help="the LightningModule's class, as package.module:name or path/to/file.py:name")
    add("-o", "--output", type=Path, required=True, help="the output file; with --training, a folder (required)")
    add_mapping(parser, "--args", "keyword arguments for the class, which override hyperparameters")
    add(
        "--sample",
        type=Path,
        help="inputs of forward: a .pt file with a tensor, tuple or dict, or a .npz file with an array for each name",
    )
    add(
        "--input-shape", type=int, nargs="+", help="shape of the single float32 input, batch first, such as 1 3 224 224"
    )
    add_switch(parser, "--dynamic-batch", "whether the batch size may change (default: true)", default=True)
    add("--tolerance", type=float, default=1e-4, help="largest difference from the module (default: %(default)s)")
    add("--quantize", choices=get_args(Quantize), help="reduce the weights to int8 or fp16")
    add("--trust", action="store_true", help=TRUST)
    training = parser.add_argument_group("arguments for the training of a module")
    training.add_argument("--training", help=f"export the training of this {MODULE}")
    training.add_argument("--data", help=DATA)
    add_mapping(training, "--data-args", "keyword arguments for the data")
    training.add_argument("--gradient-clip-val", type=float, help="clip gradients")
    training.add_argument(
        "--gradient-clip-algorithm",
        choices=("norm", "value"),
        default="norm",
        help="how to clip (default: %(default)s)",
    )
    training.add_argument(
        "--accumulate-grad-batches", type=int, default=1, help="batches whose gradients are added before an update"
    )
    add_switch(training, "--dropout", "whether dropout is part of the model (default: true)", default=True)
    training.add_argument("--gradients-only", action="store_true", help="return gradients, and leave the optimizer out")
    training.add_argument("--float16", action="store_true", help="store frozen parameters in float16")


def export(given: Namespace) -> None:
    """Export the module of a checkpoint as an ONNX model and compare the model with the module.

    The module is created with the hyperparameters in the checkpoint. The sample inputs are its own example_input_array,
    unless --sample or --input-shape is passed. With --training, export the training step and the optimizer as a folder
    that trains with onnxruntime alone; a checkpoint is then optional.
    """
    try:
        say(_exported_module(given) if given.training is None else _exported_training(given))
    except NotTrusted as error:
        sys.exit(f"{error} If you trust it, pass --trust.")
    except (ExportFailed, ModuleNotFoundError, OSError, RuntimeError, TypeError, ValueError) as error:
        sys.exit(str(error))


def _passed(given: Namespace, defaults: dict[str, Any]) -> str:
    """Return the options that were passed, of those with these defaults."""
    return ", ".join(f"--{name.replace('_', '-')}" for name, one in defaults.items() if getattr(given, name) != one)


def _check_paths(given: Namespace) -> None:
    if given.output.exists():
        raise ValueError(f"{given.output} already exists. Choose another output.")
    for path in (given.checkpoint, given.sample):
        if path is not None and path.is_dir():
            raise ValueError(
                f"{path} is a directory. If DeepSpeed wrote it, `lightning-ort convert` converts it to a file."
            )
        if path is not None and not path.is_file():
            raise ValueError(f"{path}: there is no such file.")


def _exported_module(given: Namespace) -> Any:
    checkpoint, module, args = given.checkpoint, given.module, given.args or {}
    if passed := _passed(given, _OF_TRAINING):
        raise ValueError(f"{passed}: pass --training too, or leave this out.")
    if checkpoint is not None and ":" in checkpoint.name and not checkpoint.exists():
        raise ValueError(
            f"{checkpoint} names a module: pass a checkpoint and --module {checkpoint}, or --training {checkpoint} to"
            " export its training step."
        )
    if checkpoint is None or module is None:
        raise ValueError("Pass a checkpoint and --module, or --training to export a module's training step.")
    if given.sample is not None and given.input_shape is not None:
        raise ValueError("Pass --sample or --input-shape, not both.")
    _check_paths(given)
    kind = load(module, "module")
    if not hasattr(kind, "load_from_checkpoint"):
        raise ValueError(f"module={module!r} is not a LightningModule class, which is needed to load a checkpoint.")
    settings = {name: getattr(given, name) for name in ("dynamic_batch", "tolerance", "quantize")}
    check_settings(given.output, **settings)
    inputs = _inputs(given.sample, given.input_shape)
    load_file(checkpoint, given.trust, device="meta")  # Lightning before 2.6 calls whatever it names
    parameters = inspect.signature(kind).parameters
    if all(parameter.kind is not parameter.VAR_KEYWORD for parameter in parameters.values()):
        check_keywords(kind.__name__, args, parameters)  # Lightning drops others
    if "weights_only" in inspect.signature(kind.load_from_checkpoint).parameters:
        args = {**args, "weights_only": not given.trust}
    try:
        loaded = kind.load_from_checkpoint(checkpoint, map_location="cpu", **args)
    except Exception as error:  # the user's code is run, and Lightning's on what may be no checkpoint of its
        raise ValueError(f"{checkpoint} cannot be loaded as a {kind.__name__}: {described(error)}") from error
    if inputs is None and loaded.example_input_array is None:
        raise ValueError(
            f"{module} has no sample inputs: set `self.example_input_array` in it, or pass --sample FILE.pt, "
            "--sample FILE.npz or --input-shape 1 3 224 224."
        )
    return export_onnx(loaded, given.output, inputs, **settings)


def _inputs(sample: Path | None, input_shape: list[int] | None) -> Any:
    if input_shape is not None:
        if not all(size > 0 for size in input_shape):
            raise ValueError(f"--input-shape {input_shape}: each size must be at least 1.")
        return torch.randn(input_shape, generator=torch.Generator().manual_seed(0))
    if sample is None:
        return None
    if sample.suffix == ".npz":
        try:
            with np.load(sample) as arrays:
                return {name: torch.from_numpy(array) for name, array in arrays.items()}
        except Exception as error:  # zipfile's, zlib's and numpy's own
            raise ValueError(f"--sample {sample} is not a valid .npz file: {error}") from None
    if sample.suffix == ".pt":
        return load_file(sample)
    raise ValueError(f"--sample {sample}: pass a .pt or .npz file.")


def _exported_training(given: Namespace) -> Any:
    if _passed(given, _OF_CHECKPOINTS):
        raise ValueError("--training takes no --module, --quantize, --input-shape or --dynamic-batch.")
    if given.data is not None and given.sample is not None:
        raise ValueError("Pass --data or --sample, not both.")
    _check_paths(given)
    make = load(given.training, "training")
    content: dict[str, Any] = {}
    if given.checkpoint is not None:
        content = load_file(given.checkpoint, given.trust)
        if not isinstance(content, dict) or "state_dict" not in content:
            raise ValueError(f"{given.checkpoint} is no Lightning checkpoint: it has no state_dict.")
    kept = content.get("hyper_parameters", {}) if isinstance(make, type) else {}
    module = call(make, given.training, {**kept, **(given.args or {})})
    if given.sample is not None:
        data = load_file(given.sample)
    elif given.data is not None:
        data = call(load(given.data, "data"), given.data, given.data_args or {})
    elif Project(module=module).lacks_data:
        raise ValueError(
            "Pass --data with a LightningDataModule, or --sample with a batch in a .pt file: the module has no"
            " train_dataloader."
        )
    else:
        data = module
    optimizer: Any = None if given.gradients_only else CONFIGURED
    if content:
        module.load_state_dict(content["state_dict"])
        if optimizer is not None:
            optimizer, _ = configured(module)
            if content.get("optimizer_states"):
                optimizer.load_state_dict(content["optimizer_states"][0])
    names = (
        "gradient_clip_val",
        "gradient_clip_algorithm",
        "accumulate_grad_batches",
        "dropout",
        "tolerance",
        "float16",
    )
    settings = {name: getattr(given, name) for name in names}
    return export_training(module, data, given.output, optimizer=optimizer, **settings)
