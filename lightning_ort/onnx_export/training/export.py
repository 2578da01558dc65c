"""From a LightningModule and a batch to a folder that trains: :func:`export_training`."""

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import torch
from rich.filesize import decimal
from torch import Tensor, nn

from lightning_ort._arguments import check_choice, check_integer, check_number, check_path, check_type, check_writable
from lightning_ort.compat.torch import tree_map
from lightning_ort.onnx_export.export import left_alone
from lightning_ort.onnx_export.failure import ExportFailed
from lightning_ort.onnx_export.training import folder as files
from lightning_ort.onnx_export.training import optimizers
from lightning_ort.onnx_export.training.batch import Limits, batch_size, chosen_sizes, fields_of, of_distinct_sizes
from lightning_ort.onnx_export.training.models import Model, Settings, convert
from lightning_ort.onnx_export.training.steps import check_module, traces_of
from lightning_ort.onnx_export.training.tracing import Trace
from lightning_ort.onnx_export.training.verify import Difference, Task, batches_within, limits_of, rounding, verify

log = logging.getLogger(__name__)

_DROPPING = re.compile("drop|StochasticDepth", re.IGNORECASE)
CONFIGURED: Literal["configured"] = "configured"


@dataclass(frozen=True)
class ExportedTraining:
    """What was written; as a string, one line about it."""

    path: Path
    models: tuple[str, ...]
    trained: int  # parameters
    frozen: int
    nodes: int  # of training.onnx
    bytes: int  # of all files
    difference: Difference  # from the module, after some steps; from one that has its frozen parameters in float16 too
    schedule: str | None = None  # of the learning rate, which the model does not have
    rounding: Difference | None = None  # that of float16 from float32, if frozen parameters are stored in it
    rows: str | None = None  # the number of rows, if it cannot change, and the line that it is asked for in
    momentum: bool = False  # whether the schedule also sets the momentum, or betas, which the model has as it is

    @property
    def left_out(self) -> str:
        """What the optimizer has and the model has not, or an empty text."""
        text = ""
        if self.schedule is not None:
            text += f"; {self.schedule} is not part of it: pass the learning rate to each step"
        if self.momentum:
            text += "; the momentum, which a schedule sets too, stays as it is"
        return text

    def __str__(self) -> str:
        text = f"{self.path}: {', '.join(f'{name}.onnx' for name in self.models)}, {decimal(self.bytes)}"
        text += f"; trains {self.trained:,} parameters, {self.frozen:,} are frozen; {self.nodes} nodes"
        if self.rows is not None:
            text += f"; takes batches of {self.rows} alone"
        text += f"; differs from torch by {max(self.difference.loss, self.difference.state):.2g}{self.left_out}"
        if self.rounding is None:
            return text
        saved, loss, state = decimal(2 * self.frozen), self.rounding.loss, self.rounding.state
        return f"{text}; float16 saves {saved}, and changes the loss by {loss:.2g} and the state by {state:.2g}"


def check_settings(
    folder: str | Path,
    clip_value: float | None,
    clip_algorithm: str,
    accumulate: int,
    dropout: bool,
    tolerance: float,
    float16: bool,
) -> None:
    """Raise what :func:`export_training` would raise for its settings, before anything has been trained."""
    check_number("tolerance", tolerance)
    check_choice("dropout", dropout, (True, False))
    check_choice("float16", float16, (True, False))
    check_choice("gradient_clip_algorithm", clip_algorithm, ("norm", "value"))
    check_integer("accumulate_grad_batches", accumulate, 1)
    if clip_value is not None:
        check_number("gradient_clip_val", clip_value)
    path = check_path("folder", folder, allowed="a folder")
    if Path(path).is_file():
        raise ValueError(f"folder={path!r}: this is a file; pass a folder, which may not exist yet.")
    check_writable("folder", path, is_folder=True)
    files.refuse_foreign(Path(path))


def export_training(
    module: nn.Module,
    data: Any,
    folder: str | Path,
    *,
    optimizer: torch.optim.Optimizer | Literal["configured"] | None = CONFIGURED,
    gradient_clip_val: float | None = None,
    gradient_clip_algorithm: Literal["norm", "value"] = "norm",
    accumulate_grad_batches: int = 1,
    dropout: bool = True,
    sizes: Mapping[str, Any] | None = None,
    tolerance: float = 1e-4,
    float16: bool = False,
) -> ExportedTraining:
    """Write a module's training step, with its optimizer, as an ONNX model of standard operators that trains elsewhere.

    The folder has ``training.onnx``, ``prediction.onnx`` (what ``forward`` returns, if the module has one),
    ``evaluation.onnx`` (what ``validation_step`` logs, if it has one), ``state.safetensors``, ``training.json``, and
    ``training.py`` and ``training.mjs``, which run them with onnxruntime alone. Parameters that need no gradient, and
    buffers that no step writes to, are constants of the models. The models are run by onnxruntime for some steps and
    compared with the module; the folder gets its name when all is well. The module is left as it was found.

    Args:
        module: The LightningModule, in float32, with automatic optimization.
        data: A batch as ``training_step`` takes it, a DataLoader, or a LightningDataModule.
        folder: Where to write; an earlier export there is replaced.
        optimizer: What updates the parameters: ``"configured"`` for what ``configure_optimizers`` returns, an optimizer
            of the module's, whose states are taken over, or ``None`` for a model that returns the gradients.
        gradient_clip_val: Clip gradients, as the Trainer's argument.
        gradient_clip_algorithm: ``"norm"`` or ``"value"``.
        accumulate_grad_batches: Add up the gradients of so many batches before an update.
        dropout: Whether dropout draws numbers, in the model. Otherwise what is drawn, also by ``torch.bernoulli``, has
            its mean, so that nothing is dropped, and modules that drop whole paths are in evaluation mode.
        sizes: Which dimensions of which field may change, such as ``{"tokens": [0, 1]}``. By default the batch, and
            the second dimension of integers, where the step allows it.
        tolerance: Largest difference of losses, parameters and states from the module's.
        float16: Store frozen parameters in float16, which makes the folder smaller; the models convert them to float32
            and compute with that. What it changes in some steps is part of the result, and no reason to fail.

    Returns:
        What was written.

    Raises:
        ExportFailed: If something in a step cannot be part of a model, which names the operation, the module and the
            line; or if the results differ.
        TypeError: If the module is no LightningModule, or the batch has something else than tensors.
        ValueError: If a setting is not one of the allowed ones; or if float16 has nothing to store, or holds it not.
    """
    check_type("module", module, nn.Module, "a LightningModule")
    settings = (gradient_clip_val, gradient_clip_algorithm, accumulate_grad_batches, dropout, tolerance, float16)
    check_settings(folder, *settings)
    check_module(module, accumulate_grad_batches)
    folder = Path(folder).absolute()
    folder.parent.mkdir(parents=True, exist_ok=True)
    task = _task(module, optimizer, settings)
    device = next(module.parameters()).device
    batch = tree_map(lambda leaf: leaf.detach().to(device) if isinstance(leaf, Tensor) else leaf, _first_batch(data))
    fields = of_distinct_sizes(fields_of(batch))
    chosen = chosen_sizes(fields, sizes)
    quiet = ("onnx_ir", "torch.export", "torch.fx")
    with left_alone(module, quiet), TemporaryDirectory(dir=folder.parent, prefix=".export-") as temporary:
        if not module.training:  # parts that the user keeps in evaluation mode stay so
            module.train()
        if not dropout:
            _stop_dropping(module)
        accumulate, means = task.settings.accumulate, task.means
        traces = traces_of(module, batch, fields, chosen, task.optimizer, accumulate, means=means)
        return _write(task, traces, Path(temporary), folder)


def _task(module: nn.Module, optimizer: Any, settings: Any) -> Task:
    clip_value, clip_algorithm, accumulate, dropout, tolerance, float16 = settings
    _check_dtypes(module)
    halved = check_halved(module) if float16 else ()
    trained = {name for name, value in module.named_parameters() if value.requires_grad}
    if not trained:
        raise ExportFailed(f"{type(module).__name__} has no parameter that needs a gradient.")
    scheduler = None
    if isinstance(optimizer, str):
        check_choice("optimizer", optimizer, (CONFIGURED, None))
        optimizer, scheduler = optimizers.configured(module)
    read = None if optimizer is None else optimizers.read(optimizer, module, trained, scheduler)
    if read is not None and any(optimizer.state.values()):  # SGD counts no steps, its Trainer does
        read = replace(read, step=max(read.step, int(getattr(module, "global_step", 0)), 1))
    if read is None and accumulate > 1:
        raise ValueError(
            "accumulate_grad_batches needs an optimizer; with optimizer=None add up the gradients yourself."
        )
    export = Settings(read, clip_value, clip_algorithm, accumulate)
    return Task(module, optimizer, export, tolerance, halved, means=not dropout)


def _check_dtypes(module: nn.Module) -> None:
    for name, parameter in module.named_parameters():
        if parameter.dtype is not torch.float32:
            raise ExportFailed(f"The parameter {name} is of {parameter.dtype}; models train in float32: call .float().")


def _stop_dropping(module: nn.Module) -> None:
    """Put into evaluation mode what drops values or, as `DropPath` and `StochasticDepth`, whole paths."""
    for child in module.modules():
        is_plain = not any(True for _ in (*child.parameters(), *child.buffers()))
        if is_plain and _DROPPING.search(type(child).__name__):
            child.eval()


def check_halved(module: nn.Module) -> tuple[str, ...]:
    """Return the names of the frozen parameters, which float16 can store, or raise ``ValueError``."""
    frozen = {name: value for name, value in module.named_parameters() if not value.requires_grad}
    if not frozen:
        raise ValueError(
            f"float16=True: {type(module).__name__} has no frozen parameters (requires_grad=False), which alone are"
            " stored in float16. Leave it out."
        )
    for name, value in frozen.items():
        if not torch.equal(value.half().isfinite(), value.isfinite()):
            raise ValueError(
                f"float16=True: {name} has values up to {value.abs().max().item():.3g}, float16 up to"
                f" {torch.finfo(torch.float16).max:.0f}. Leave it out."
            )
    return tuple(frozen)


def _first_batch(data: Any) -> Any:
    if hasattr(data, "train_dataloader") and hasattr(data, "setup"):
        data.prepare_data()
        data.setup("fit")
        data = data.train_dataloader()
    if isinstance(data, torch.utils.data.DataLoader):
        try:
            return next(iter(data))
        except StopIteration:
            raise ValueError("The dataloader has no batch: pass one that has.") from None
    return data


def _write(task: Task, traces: Mapping[str, Trace], temporary: Path, folder: Path) -> ExportedTraining:
    trained = traces["training"]
    task = replace(task, halved=tuple(name for name in task.halved if name not in trained.written))
    parameters = {name: value for name, value in task.module.named_parameters() if value.requires_grad}
    known = {**dict(task.module.named_parameters()), **dict(task.module.named_buffers())}
    written_to = {name: known[name] for name in trained.written if not known[name].requires_grad}
    state = files.state_of(parameters, written_to, task.settings)
    name = f"{type(task.module).__module__}.{type(task.module).__qualname__}"
    frozen = [key for key, value in task.module.named_parameters() if key not in state]
    more: dict[str, Any] = {"module": name, "frozen": frozen, "float16": None}
    limits = {kind: Limits({name: [1, None] for name in traced.symbols.values()}) for kind, traced in traces.items()}
    # what is compared also returns the gradients
    compared = temporary / "compared"
    _write_folder(task, traces, limits, compared, state, more, returns_gradients=True)
    for kind, traced in traces.items():
        limits[kind] = limits_of(compared, task, kind, traced)
    difference, *_ = (
        verify(compared, task, kind, traced, batches_within(limits[kind], task, kind, traced))
        for kind, traced in traces.items()
    )
    rounded = (
        rounding(task, trained, batches_within(limits["training"], task, "training", trained)) if task.halved else None
    )
    more["float16"] = None if rounded is None else {"loss": rounded.loss, "state": rounded.state}
    written = temporary / "written"
    models = _write_folder(task, traces, limits, written, state, more)
    exported = ExportedTraining(
        folder,
        tuple(models),
        sum(value.numel() for value in parameters.values()),
        sum(value.numel() for value in task.module.parameters() if not value.requires_grad),
        len(list(models["training"].model.graph)),
        sum(file.stat().st_size for file in written.iterdir()),
        difference,
        None if task.settings.optimizer is None else task.settings.optimizer.scheduler,
        rounded,
        _rows(trained),
        task.settings.optimizer is not None and task.settings.optimizer.scheduled_momentum,
    )
    files.put_in_place(written, folder)
    return exported


def _rows(trace: Trace) -> str | None:
    if trace.rows is None:
        return None
    return f"{batch_size(trace.samples)} rows{trace.rows and f' ({trace.rows})'}"


def _write_folder(
    task: Task,
    traces: Mapping[str, Trace],
    limits: Mapping[str, Limits],
    folder: Path,
    state: Mapping[str, Any],
    more: Mapping[str, Any],
    returns_gradients: bool = False,
) -> dict[str, Model]:
    tensors = {**dict(task.module.named_parameters()), **dict(task.module.named_buffers())}
    models = {
        kind: convert(
            found,
            state,
            tensors,
            task.settings if kind == "training" else None,
            returns_gradients=returns_gradients,
            halved=task.halved,
            limits=limits[kind],
        )
        for kind, found in traces.items()
    }
    folder.mkdir()
    files.write_models(folder, models)
    files.write_rest(folder, models, state, task.settings, more)
    return models
