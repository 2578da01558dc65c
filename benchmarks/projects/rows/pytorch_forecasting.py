"""Forecasting models of pytorch-forecasting."""

from typing import Any

import lightning.pytorch as pl
import numpy as np
import pandas as pd
from pytorch_forecasting import NBeats, TemporalFusionTransformer, TimeSeriesDataSet
from pytorch_forecasting.metrics import MASE, QuantileLoss

INPUT, HORIZON = 60, 20


def _dataset(**options: Any) -> TimeSeriesDataSet:
    rng = np.random.default_rng(0)
    time = np.arange(300)
    values = [np.sin(2 * np.pi * time / 24 + k) + 0.1 * rng.standard_normal(300) for k in range(8)]
    frames = [pd.DataFrame({"series": str(k), "time": time, "value": value}) for k, value in enumerate(values)]
    return TimeSeriesDataSet(
        pd.concat(frames, ignore_index=True),
        time_idx="time",
        target="value",
        group_ids=["series"],
        max_encoder_length=INPUT,
        max_prediction_length=HORIZON,
        time_varying_unknown_reals=["value"],
        **options,
    )


def _fit(model: pl.LightningModule, dataset: TimeSeriesDataSet, steps: int, trainer: dict[str, Any]) -> None:
    training = dataset.to_dataloader(train=True, batch_size=64)
    validation = dataset.to_dataloader(train=False, batch_size=64)
    pl.Trainer(max_steps=steps, max_epochs=-1, limit_val_batches=2, gradient_clip_val=0.1, **trainer).fit(
        model, training, validation
    )


def tft(steps: int, **trainer: Any) -> None:
    """The temporal fusion transformer."""
    dataset = _dataset(static_categoricals=["series"], time_varying_known_reals=["time"])
    sizes = {"hidden_size": 16, "attention_head_size": 2, "hidden_continuous_size": 8}
    model = TemporalFusionTransformer.from_dataset(dataset, loss=QuantileLoss(), learning_rate=0.01, **sizes)
    _fit(model, dataset, steps, trainer)


def nbeats(steps: int, **trainer: Any) -> None:
    """Stacks of perceptrons with a trend and a seasonal basis."""
    dataset = _dataset()
    _fit(NBeats.from_dataset(dataset, loss=MASE(), learning_rate=1e-3), dataset, steps, trainer)
