"""Models for tables, with pytorch-tabular, which builds the Trainer from a configuration."""

from typing import Any

import numpy as np
import pandas as pd
from pytorch_tabular import TabularModel
from pytorch_tabular.config import DataConfig, OptimizerConfig, TrainerConfig
from pytorch_tabular.models import CategoryEmbeddingModelConfig, DANetConfig

BATCH, ROWS = 128, 1280


def _frame(rows: int, rng: np.random.Generator) -> pd.DataFrame:
    frame = pd.DataFrame({f"number_{k}": rng.standard_normal(rows) for k in range(8)})
    frame["kind"] = rng.choice(list("abcd"), rows)
    frame["target"] = (frame["number_0"] + (frame["kind"] == "a") > 0).astype(int)
    return frame


def _fit(config: Any, steps: int, trainer: dict[str, Any]) -> None:
    rng = np.random.default_rng(0)
    for name in ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"):
        del trainer[name]  # set by the package
    settings = TrainerConfig(
        batch_size=BATCH,
        max_epochs=-(-steps * BATCH // ROWS),
        accelerator=trainer.pop("accelerator"),
        devices=trainer.pop("devices"),
        early_stopping=None,
        checkpoints=None,
        load_best=False,
        progress_bar="none",
        trainer_kwargs=trainer | {"enable_model_summary": False},
    )
    columns = DataConfig(
        target=["target"], continuous_cols=[f"number_{k}" for k in range(8)], categorical_cols=["kind"]
    )
    model = TabularModel(
        data_config=columns,
        model_config=config,
        optimizer_config=OptimizerConfig(),
        trainer_config=settings,
        verbose=False,
    )
    model.fit(train=_frame(ROWS, rng), validation=_frame(256, rng), seed=0)


def category_embedding(steps: int, **trainer: Any) -> None:
    """Embeddings and a perceptron."""
    _fit(CategoryEmbeddingModelConfig(task="classification"), steps, trainer)


def danet(steps: int, **trainer: Any) -> None:
    """Deep abstract networks."""
    _fit(DANetConfig(task="classification"), steps, trainer)
