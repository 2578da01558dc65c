"""``lightning-ort export``: the module in a checkpoint as an ONNX model, or the training of a module."""

import inspect
import sys
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from lightning_ort._arguments import check_keywords
from lightning_ort._text import say
from lightning_ort.cli.export_training import TrainingTask, export_training_command
from lightning_ort.cli.load import described, load
from lightning_ort.onnx_export.export import check_settings, export_onnx
from lightning_ort.onnx_export.failure import ExportFailed
from lightning_ort.onnx_export.quantize import Quantize
from lightning_ort.optim.shard_files import NotTrusted
from lightning_ort.optim.shard_files import load as load_file


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
    gradient_clip_algorithm: Literal["norm", "value"] = "norm",
    accumulate_grad_batches: int = 1,
    dropout: bool = True,
    gradients_only: bool = False,
    float16: bool = False,
) -> None:
    """Export the module of a checkpoint as an ONNX model and compare the model with the module.

    The module is created with the hyperparameters in the checkpoint. The sample inputs are its own example_input_array,
    unless --sample or --input-shape is passed. With --training, export the training step and the optimizer as a folder
    that trains with onnxruntime alone; a checkpoint is then optional.

    Args:
        checkpoint: A Lightning checkpoint.
        module: The LightningModule's class, as "package.module:name" or "path/to/file.py:name".
        output: The output file.
        args: Keyword arguments for the class, which override hyperparameters.
        sample: Inputs of forward: a .pt file with a tensor, tuple or dict, or a .npz file with an array for each name.
        input_shape: Shape of the single float32 input, batch first, such as 1 3 224 224.
        dynamic_batch: Whether the batch size may change.
        tolerance: Largest difference from the module's results.
        quantize: Reduce the weights to int8 or fp16.
        training: Export the training of this LightningModule class, or function that returns one.
        data: With --training, the LightningDataModule or function that returns a DataLoader; or pass --sample with a
            batch.
        data_args: Keyword arguments for it.
        gradient_clip_val: With --training, clip gradients.
        gradient_clip_algorithm: How to clip.
        accumulate_grad_batches: With --training, batches whose gradients are added up before an update.
        dropout: With --training, whether dropout is part of the model.
        gradients_only: With --training, return gradients and leave the optimizer out.
        float16: With --training, store frozen parameters in float16.
        trust: Also load a checkpoint that names functions and classes to call, for example because hyperparameters are
            objects. Such a file may do anything on this machine, so only use this for a checkpoint that you trust.

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
        sys.exit("Pass a checkpoint and --module, or --training to export a module's training step.")
    inputs = (sample, input_shape)
    settings: dict[str, Any] = {"dynamic_batch": dynamic_batch, "tolerance": tolerance, "quantize": quantize}
    _export_checkpoint(checkpoint, module, output, args or {}, inputs, trust, settings)


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
