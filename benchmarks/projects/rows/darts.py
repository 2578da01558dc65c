"""Forecasting models of darts, which builds the Trainer from a mapping."""

from typing import Any

import numpy as np
from darts import TimeSeries
from darts.models import TCNModel, TFTModel


def _series() -> TimeSeries:
    rng = np.random.default_rng(0)
    hours = np.arange(1000)
    values = np.sin(2 * np.pi * hours / 24) + 0.1 * rng.standard_normal(1000)
    return TimeSeries.from_values(values.astype(np.float32))


def _trainer(steps: int, trainer: dict[str, Any]) -> dict[str, Any]:
    del trainer["logger"], trainer["enable_checkpointing"], trainer["enable_model_summary"]
    return {"max_steps": steps, **trainer}


def tft(steps: int, **trainer: Any) -> None:
    """The temporal fusion transformer."""
    TFTModel(
        input_chunk_length=48,
        output_chunk_length=12,
        add_relative_index=True,
        n_epochs=steps,
        random_state=0,
        pl_trainer_kwargs=_trainer(steps, trainer),
    ).fit(_series())


def tcn(steps: int, **trainer: Any) -> None:
    """Dilated convolutions."""
    TCNModel(
        input_chunk_length=48,
        output_chunk_length=12,
        num_filters=32,
        dropout=0.1,
        n_epochs=steps,
        random_state=0,
        pl_trainer_kwargs=_trainer(steps, trainer),
    ).fit(_series())
