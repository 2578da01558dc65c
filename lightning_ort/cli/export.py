"""``lightning-ort export``: the module in a checkpoint as an ONNX model, or the training of a module."""

import inspect
import sys
from argparse import ArgumentParser
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch

from lightning_ort._arguments import check_keywords
from lightning_ort._text import say
from lightning_ort.cli.arguments import MODULE, TRUST, Extend, add_mapping, add_switch, elements
from lightning_ort.cli.export_training import TrainingTask, export_training_command
from lightning_ort.cli.load import described, load
from lightning_ort.onnx_export.export import check_settings, export_onnx
from lightning_ort.onnx_export.failure import ExportFailed
from lightning_ort.onnx_export.quantize import Quantize
from lightning_ort.optim.shard_files import NotTrusted
from lightning_ort.optim.shard_files import load as load_file

Clip = Literal["norm", "value"]


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
        "--input-shape",
        nargs="+",
        type=elements(int),
        action=Extend,
        help="shape of the single float32 input, batch first, such as 1 3 224 224",
    )
    add_switch(parser, "--dynamic-batch", "whether the batch size may change (default: true)", default=True)
    add("--tolerance", type=float, default=1e-4, help="largest difference from the module (default: %(default)s)")
    add("--quantize", choices=get_args(Quantize), help="reduce the weights to int8 or fp16")
    add("--trust", action="store_true", help=TRUST)
    training = parser.add_argument_group("arguments for the training of a module")
    training.add_argument("--training", help=f"export the training of this {MODULE}")
    training.add_argument("--data", help="a LightningDataModule, or a function that returns a DataLoader")
    add_mapping(training, "--data-args", "keyword arguments for the data")
    training.add_argument("--gradient-clip-val", type=float, help="clip gradients")
    training.add_argument(
        "--gradient-clip-algorithm", choices=get_args(Clip), default="norm", help="how to clip (default: %(default)s)"
    )
    training.add_argument(
        "--accumulate-grad-batches", type=int, default=1, help="batches whose gradients are added before an update"
    )
    add_switch(training, "--dropout", "whether dropout is part of the model (default: true)", default=True)
    training.add_argument("--gradients-only", action="store_true", help="return gradients, and leave the optimizer out")
    training.add_argument("--float16", action="store_true", help="store frozen parameters in float16")


def export(
    checkpoint: Path | None = None,
    *,
    module: str | None = None,
    output: Path,
    args: dict[str, Any] | None = None,
    sample: Path | None = None,
    input_shape: list[int] | None = None,
    dynamic_batch: bool = True,
    tolerance: float = 1e-4,
    quantize: Quantize | None = None,
    trust: bool = False,
    training: str | None = None,
    data: str | None = None,
    data_args: dict[str, Any] | None = None,
    gradient_clip_val: float | None = None,
    gradient_clip_algorithm: Clip = "norm",
    accumulate_grad_batches: int = 1,
    dropout: bool = True,
    gradients_only: bool = False,
    float16: bool = False,
) -> None:
    """Export the module of a checkpoint as an ONNX model and compare the model with the module.

    The module is created with the hyperparameters in the checkpoint. The sample inputs are its own example_input_array,
    unless --sample or --input-shape is passed. With --training, export the training step and the optimizer as a folder
    that trains with onnxruntime alone; a checkpoint is then optional.
    """
    if training is not None:
        if module is not None or quantize is not None or input_shape is not None or not dynamic_batch:
            sys.exit("--training takes no --module, --quantize, --input-shape or --dynamic-batch.")
        export_training_command(
            TrainingTask(training, args or {}, data, data_args or {}, checkpoint, sample, trust),
            output,
            optimizer=None if gradients_only else "configured",
            gradient_clip_val=gradient_clip_val,
            gradient_clip_algorithm=gradient_clip_algorithm,
            accumulate_grad_batches=accumulate_grad_batches,
            dropout=dropout,
            tolerance=tolerance,
            float16=float16,
        )
        return
    for_training = {"--data": data, "--data-args": data_args, "--gradient-clip-val": gradient_clip_val}
    for_training |= {"--gradient-clip-algorithm": gradient_clip_algorithm != "norm", "--dropout": not dropout}
    for_training |= {"--accumulate-grad-batches": accumulate_grad_batches != 1, "--gradients-only": gradients_only}
    for_training |= {"--float16": float16}
    if given := [name for name, value in for_training.items() if value not in (None, False)]:
        sys.exit(f"{', '.join(given)}: pass --training too, or leave this out.")
    if checkpoint is None or module is None:
        sys.exit(_what_is_missing(checkpoint))
    inputs = (sample, input_shape)
    settings: dict[str, Any] = {"dynamic_batch": dynamic_batch, "tolerance": tolerance, "quantize": quantize}
    _export_checkpoint(checkpoint, module, output, args or {}, inputs, trust, settings)


def _what_is_missing(checkpoint: Path | None) -> str:
    if checkpoint is not None and ":" in checkpoint.name and not checkpoint.exists():
        return (
            f"{checkpoint} names a module: pass a checkpoint and --module {checkpoint}, or --training {checkpoint} to"
            " export its training step."
        )
    return "Pass a checkpoint and --module, or --training to export a module's training step."


def _export_checkpoint(
    checkpoint: Path,
    module: str,
    output: Path,
    args: dict[str, Any],
    samples: tuple[Path | None, list[int] | None],
    trust: bool,
    settings: dict[str, Any],
) -> None:
    if output.exists():
        sys.exit(f"{output} already exists. Choose another output file.")
    if checkpoint.is_dir():
        sys.exit(f"{checkpoint} is a directory. If DeepSpeed wrote it, `lightning-ort convert` converts it to a file.")
    if not checkpoint.is_file():
        sys.exit(f"{checkpoint}: there is no such file.")
    kind = load(module, "module")
    if not hasattr(kind, "load_from_checkpoint"):
        sys.exit(f"module={module!r} is not a LightningModule class, which is needed to load a checkpoint.")
    try:
        check_settings(output, **settings)
        inputs = _inputs(*samples)
        load_file(checkpoint, trust, device="meta")  # Lightning before 2.6 calls whatever it names
        parameters = inspect.signature(kind).parameters
        if all(parameter.kind is not parameter.VAR_KEYWORD for parameter in parameters.values()):
            check_keywords(kind.__name__, args, parameters)  # Lightning drops others
        if "weights_only" in inspect.signature(kind.load_from_checkpoint).parameters:
            args = {**args, "weights_only": not trust}
        loaded = _load(kind, checkpoint, args)
        if inputs is None and loaded.example_input_array is None:
            sys.exit(
                f"{module} has no sample inputs: set `self.example_input_array` in it, or pass --sample FILE.pt, "
                "--sample FILE.npz or --input-shape 1 3 224 224."
            )
        exported = export_onnx(loaded, output, inputs, **settings)
    except NotTrusted as error:
        sys.exit(f"{error} If you trust it, pass --trust.")
    except (ExportFailed, ModuleNotFoundError, OSError, RuntimeError, TypeError, ValueError) as error:
        sys.exit(str(error))
    say(exported)


def _load(kind: Any, checkpoint: Path, args: dict[str, Any]) -> Any:
    try:
        return kind.load_from_checkpoint(checkpoint, map_location="cpu", **args)
    except Exception as error:  # the user's code is run, and Lightning's on what may be no checkpoint of its
        raise ValueError(f"{checkpoint} cannot be loaded as a {kind.__name__}: {described(error)}") from error


def _inputs(sample: Path | None, input_shape: list[int] | None) -> Any:
    if sample is not None and input_shape is not None:
        raise ValueError("Pass --sample or --input-shape, not both.")
    if input_shape is not None:
        if not all(size > 0 for size in input_shape):
            raise ValueError(f"--input-shape {input_shape}: each size must be at least 1.")
        return torch.randn(input_shape, generator=torch.Generator().manual_seed(0))
    if sample is None:
        return None
    if not sample.is_file():
        raise ValueError(f"--sample {sample}: there is no such file.")
    if sample.suffix == ".npz":
        try:
            with np.load(sample) as arrays:
                return {name: torch.from_numpy(array) for name, array in arrays.items()}
        except Exception as error:  # zipfile's, zlib's and numpy's own
            raise ValueError(f"--sample {sample} is not a valid .npz file: {error}") from None
    if sample.suffix == ".pt":
        return load_file(sample)
    raise ValueError(f"--sample {sample}: pass a .pt or .npz file.")
