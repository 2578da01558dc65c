"""Prediction by an ONNX model: :class:`PredictorMixin`, for both namespaces of Lightning."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from lightning_ort._arguments import names_its_arguments
from lightning_ort.compat import lightning_bases


@names_its_arguments
class PredictorMixin(lightning_bases.LightningModule):
    """An ONNX model to call, and for ``trainer.predict``.

    It is called as the exported module was, and returns the same. It has no parameters and cannot be trained.

    Args:
        path: The file, as ``lightning-ort export`` writes it or from elsewhere.
        providers: Execution providers of ONNX Runtime in order of preference.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If the installed onnxruntime has not such a provider, or the file is no model for it.
        RuntimeError: If the provider does not load.

    Example::

        predictor = ORTPredictor("model.onnx")
        logits = predictor(images)
        batches = trainer.predict(predictor, dataloaders=loader)
    """

    def __init__(self, path: str | Path, providers: Sequence[str] = ("CPUExecutionProvider",)) -> None:
        super().__init__()
        from lightning_ort.onnx_export.session import OnnxSession  # loads onnx, which training does not need

        self.session = OnnxSession(path, providers)

    @override
    @torch.compiler.disable  # `strategy="ort"` captures steps: this is on ONNX Runtime already
    def forward(self, *args: Any, **kwargs: Tensor) -> Any:
        """Run the model.

        Args:
            *args: The inputs by position, or one mapping of all of them by name.
            **kwargs: Inputs by name.

        Returns:
            What the exported ``forward`` returns, with tuples for lists and dicts for other mappings.

        Raises:
            TypeError: If an input is missing or unknown, is no tensor or has another dtype.
            ValueError: If an input has another shape.
        """
        if len(args) == 1 and isinstance(args[0], Mapping) and not kwargs:
            return self.session(args[0])
        names = [value.name for value in self.session.inputs]
        if len(args) > len(names) or kwargs.keys() & set(names[: len(args)]):
            given = ", ".join([f"{len(args)} by position", *kwargs])
            raise TypeError(
                f"{self.session.path.name} expects the inputs {self.session.describe_inputs()}; got: {given}. "
                "If a batch contains more, such as labels, override `predict_step` to pass only the model's inputs."
            )
        return self.session({**dict(zip(names, args, strict=False)), **kwargs})

    @override
    def predict_step(self, batch: Any, batch_idx: int = 0, dataloader_idx: int = 0) -> Any:
        """Run the model on a batch: a tensor, the inputs in order in a tuple or list, or by name in a mapping."""
        return self(*batch) if isinstance(batch, (tuple, list)) else self(batch)
