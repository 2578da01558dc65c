"""Probabilistic forecasting models of gluonts, whose estimators build the Trainer from a mapping."""

from typing import Any

import numpy as np
from gluonts.dataset.common import ListDataset
from gluonts.torch.model.deepar import DeepAREstimator
from gluonts.torch.model.estimator import PyTorchLightningEstimator
from gluonts.torch.model.simple_feedforward import SimpleFeedForwardEstimator


def _dataset() -> ListDataset:
    rng = np.random.default_rng(0)
    hours = np.arange(400)
    values = [10 + np.sin(2 * np.pi * hours / 24 + k) + 0.1 * rng.standard_normal(400) for k in range(8)]
    return ListDataset([{"start": "2024-01-01", "target": value} for value in values], freq="h")


def _train(estimator: type[PyTorchLightningEstimator], steps: int, trainer: dict[str, Any], **sizes: Any) -> None:
    del trainer["enable_checkpointing"]  # the estimator adds a checkpoint callback of its own
    trainer |= {"max_epochs": 1}
    sizes |= {"prediction_length": 24, "context_length": 48, "num_batches_per_epoch": steps}
    estimator(trainer_kwargs=trainer, **sizes).train(_dataset())


def deep_ar(steps: int, **trainer: Any) -> None:
    """An LSTM with a Student's t distribution."""
    _train(DeepAREstimator, steps, trainer, freq="h")


def simple_feed_forward(steps: int, **trainer: Any) -> None:
    """A perceptron with a Student's t distribution."""
    _train(SimpleFeedForwardEstimator, steps, trainer)
