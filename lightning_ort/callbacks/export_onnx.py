"""Export the trained module as an ONNX model when a fit ends: :class:`ExportOnnxCallback`."""

import copy
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from typing_extensions import override

from lightning_ort._arguments import check_choice, names_its_arguments
from lightning_ort.compat import lightning_bases
from lightning_ort.onnx_export.signature import Quantize, bind_sample

if TYPE_CHECKING:
    import lightning.pytorch as pl

    from lightning_ort.onnx_export.training.export import ExportedTraining

_log = logging.getLogger(__name__)


@names_its_arguments
class ExportOnnxCallback(lightning_bases.Callback):
    """Exports the module as an ONNX model at the end of a fit, on the first process.

    Everything that can be checked without exporting is checked when the fit starts, and a training step is exported on
    trial before its first batch. An export that fails later is a warning: the fit goes on. ``fast_dev_run`` writes no
    file.

    Args:
        path: The file; with ``training=True`` the folder.
        sample: Inputs of ``forward``: a tensor, a tuple of positional arguments or a dict of arguments by name. None
            takes the module's ``example_input_array``. With ``training=True`` a batch; None takes the first that the
            fit trains on.
        best: Also export each time that a checkpoint is the best so far, to ``<path>-best.onnx``. Needs
            ``ModelCheckpoint(monitor=...)``; the first of several is used.
        dynamic_batch: Let the first size of the first input change, in all inputs that share it.
        tolerance: Largest difference to the module's results.
        quantize: ``"fp16"`` or ``"int8"``: make the weights smaller.
        training: Export the training step instead, with the Trainer's optimizer as it is then, its clipping and its
            accumulation of gradients, see :func:`~lightning_ort.export_training`. ``dynamic_batch`` and ``quantize``
            have no effect on it, and must not be passed.
        float16: With ``training=True``, store frozen parameters in float16.

    Raises:
        ValueError: If a setting is not one of the allowed ones; when the fit starts, if there is no sample.
        ExportFailed: Before the first batch, if the training step, or its optimizer, cannot be exported.
        ModuleNotFoundError: If onnxscript is not installed.

    Example::

        Trainer(callbacks=OnnxExport("model.onnx", sample=torch.zeros(1, 3, 224, 224)))
    """

    def __init__(
        self,
        path: str | Path,
        sample: Any = None,
        best: bool = False,
        dynamic_batch: bool = True,
        tolerance: float = 1e-4,
        quantize: Quantize | None = None,
        training: bool = False,
        float16: bool = False,
    ) -> None:
        check_choice("training", training, (True, False))
        if float16 and not training:
            raise ValueError("OnnxExport(float16=True) needs training=True; quantize='fp16' is for the module alone.")
        if training:
            from lightning_ort.onnx_export.training.export import check_settings as check_training

            if not dynamic_batch or quantize is not None:
                raise ValueError("OnnxExport(training=True) takes neither dynamic_batch nor quantize: leave them out.")
            check_training(path, None, "norm", 1, True, tolerance, float16)
        else:
            from lightning_ort.onnx_export.export import check_settings  # loads onnx, which training does not need

            check_settings(path, dynamic_batch, tolerance, quantize)
        check_choice("best", best, (True, False))
        self.path, self.sample, self.best = Path(path), sample, best
        self.dynamic_batch, self.tolerance, self.quantize = dynamic_batch, tolerance, quantize
        self.training, self.float16, self._batch = training, float16, sample if training else None
        self._tried = False  # whether the training step has been exported on trial
        self._best: tuple[str, Any] | None = None

    @override
    def on_fit_start(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        if self.training:
            self._check_training(trainer, pl_module)
        else:
            bind_sample(pl_module, self.sample)
        strategy = trainer.strategy
        classes = {kind.__name__ for kind in type(strategy).__mro__}
        if classes & {"FSDPStrategy", "ModelParallelStrategy"} or getattr(strategy, "zero_stage_3", False):
            raise ValueError(
                f"OnnxExport under {type(strategy).__name__}: no process has all weights. Remove the callback, "
                "and export a full checkpoint with `lightning-ort export`."
            )
        if self.best and not _is_dev_run(trainer):
            if _monitoring(trainer) is None:
                raise ValueError("OnnxExport(best=True): add a ModelCheckpoint(monitor=...) that decides what is best.")
            self._best = _best(trainer)  # that of the run that this one resumes, if any

    @override
    def on_train_batch_start(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", *args: Any) -> None:
        if self.training and not self._tried:
            self._try(trainer, pl_module, args[0])
        self._export_best(trainer, pl_module)  # the weights have not changed since the checkpoint

    @override
    def on_fit_end(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        self._export_best(trainer, pl_module)
        if _is_dev_run(trainer):
            _log.info("fast_dev_run: %s is not written.", self.path)
        else:
            self._export(trainer, pl_module, self.path)

    def _export_best(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        if not self.best or _is_dev_run(trainer):
            return
        best = _best(trainer)
        # without a counter in it, the file name stays the same while the score improves
        if self._best is None or best[0] != self._best[0] or best[1] is not self._best[1]:
            self._best = best
            with _weights_of(best[0], pl_module):
                self._export(trainer, pl_module, self.path.with_stem(f"{self.path.stem}-best"))

    def _export(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", path: Path) -> None:
        from lightning_ort.onnx_export.export import export_onnx

        if not trainer.is_global_zero:
            return
        if self.training and self._batch is None:
            _log.info("No batch has been trained on: %s is not written.", path)
            return
        settings: dict[str, Any] = {"dynamic_batch": self.dynamic_batch, "tolerance": self.tolerance}
        try:
            if self.training:
                _log.info("%s", self._export_training(trainer, pl_module, path))
            else:
                _log.info("%s", export_onnx(pl_module, path, self.sample, quantize=self.quantize, **settings))
        except Exception as error:  # whatever it is, the fit is worth more
            rank_zero_warn(
                f"OnnxExport has not written {path}, so that what may be there is older: {error}\nThe fit goes on as"
                " without it. `lightning-ort export` exports a checkpoint."
            )

    def _check_training(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        from lightning_ort.onnx_export.training.export import check_halved
        from lightning_ort.onnx_export.training.optimizers import check_kind
        from lightning_ort.onnx_export.training.steps import check_module

        self._tried = False
        check_module(pl_module, trainer.accumulate_grad_batches)
        if len(trainer.optimizers) != 1:
            count = len(trainer.optimizers)
            raise ValueError(f"OnnxExport(training=True): a model has one optimizer; the module configures {count}.")
        check_kind(trainer.optimizers[0])
        if self.float16:
            check_halved(pl_module)

    def _try(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", batch: Any) -> None:
        """Export the training step to nowhere: what it does may not be part of a model."""
        from lightning_ort.onnx_export.failure import ExportFailed
        from lightning_ort.onnx_export.training.steps import TRANSFER_HOOKS, defines

        self._tried = True
        self._batch = batch if self._batch is None else self._batch
        if not trainer.is_global_zero:
            return
        try:
            with TemporaryDirectory() as temporary:
                exported = self._export_training(trainer, pl_module, Path(temporary) / "exported")
            tell = rank_zero_warn if exported.momentum else _log.info
            tell(f"{type(pl_module).__name__}.training_step can be exported{exported.left_out}")
        except ExportFailed as error:
            moved = [name for name in TRANSFER_HOOKS if defines(pl_module, name)]
            if self.sample is not None or not moved:
                raise
            raise ExportFailed(
                f"{error}\nThe batch had been through {moved[-1]}: OnnxExport(sample=...) takes one as the dataloader"
                " gives it."
            ) from error

    def _export_training(
        self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", folder: Path
    ) -> "ExportedTraining":
        from lightning_ort.onnx_export.training.export import export_training

        clipping: dict[str, Any] = {"gradient_clip_val": trainer.gradient_clip_val or None}
        if trainer.gradient_clip_algorithm is not None:
            clipping["gradient_clip_algorithm"] = str(trainer.gradient_clip_algorithm.value)
        accumulate = trainer.accumulate_grad_batches
        return export_training(
            pl_module,
            self._batch,
            folder,
            optimizer=trainer.optimizers[0],
            accumulate_grad_batches=accumulate,
            tolerance=self.tolerance,
            float16=self.float16,
            **clipping,
        )


@contextmanager
def _weights_of(checkpoint: str, module: "pl.LightningModule") -> Iterator[None]:
    """Within the block a module has the weights of a checkpoint, such as averaged ones."""
    if not os.path.isfile(checkpoint):  # a folder of shards, or one that is still to be written
        yield
        return
    saved = torch.load(checkpoint, map_location="cpu", weights_only=False)["state_dict"]
    before = copy.deepcopy(module.state_dict())
    module.load_state_dict(saved, strict=False)
    try:
        yield
    finally:
        module.load_state_dict(before, strict=False)


def _monitoring(trainer: "pl.Trainer") -> Any:
    callbacks: list[Any] = [*trainer.checkpoint_callbacks]
    for callback in callbacks:
        if any(kind.__name__ == "ModelCheckpoint" for kind in type(callback).__mro__) and callback.monitor is not None:
            return callback
    return None


def _best(trainer: "pl.Trainer") -> tuple[str, Any]:
    callback = _monitoring(trainer)
    return callback.best_model_path, callback.best_model_score


def _is_dev_run(trainer: Any) -> bool:
    return bool(trainer.fast_dev_run)
