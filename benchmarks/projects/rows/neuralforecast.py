"""Forecasting models of neuralforecast, which builds the Trainer from keyword arguments."""

from typing import Any

import numpy as np
import pandas as pd
from neuralforecast import NeuralForecast
from neuralforecast.models import NBEATS, NHITS, PatchTST, TSMixer

SERIES, LENGTH, INPUT, HORIZON = 8, 400, 96, 24


def _frame() -> pd.DataFrame:
    rng = np.random.default_rng(0)
    hours = np.arange(LENGTH)
    values = [np.sin(2 * np.pi * hours / 24 + k) + 0.1 * rng.standard_normal(LENGTH) for k in range(SERIES)]
    dates = pd.date_range("2024-01-01", periods=LENGTH, freq="h")
    frames = [pd.DataFrame({"unique_id": f"s{k}", "ds": dates, "y": value}) for k, value in enumerate(values)]
    return pd.concat(frames, ignore_index=True)


def _fit(model: type, steps: int, trainer: dict[str, Any], **sizes: Any) -> None:
    made = model(h=HORIZON, input_size=INPUT, max_steps=steps, val_check_steps=max(steps // 2, 1), **sizes, **trainer)
    NeuralForecast(models=[made], freq="h").fit(_frame(), val_size=HORIZON)


def patch_tst(steps: int, **trainer: Any) -> None:
    """A transformer over patches of each series."""
    _fit(PatchTST, steps, trainer, hidden_size=64, n_heads=8, windows_batch_size=128)


def ts_mixer(steps: int, **trainer: Any) -> None:
    """Perceptrons that mix time steps and series."""
    _fit(TSMixer, steps, trainer, n_series=SERIES)


def nbeats(steps: int, **trainer: Any) -> None:
    """Stacks of perceptrons with a trend and a seasonal basis."""
    _fit(NBEATS, steps, trainer, windows_batch_size=128)


def nhits(steps: int, **trainer: Any) -> None:
    """Stacks of perceptrons at several rates."""
    _fit(NHITS, steps, trainer, windows_batch_size=128)
