"""Fifty steps under ``ort`` lose what fifty steps under the stock strategy lose, with the same seed."""

from collections.abc import Callable
from typing import Any

import pytest
from parity_models import MODELS, STEPS, Base

from lightning_ort import ORTStrategy


def losses(model: type[Base], strategy: Any, make_trainer: Callable[..., Any]) -> tuple[list[float], Any]:
    module = model()
    trainer = make_trainer(strategy=strategy, max_steps=STEPS)
    trainer.fit(module)
    return module.losses, trainer


CASES = [
    pytest.param(model, id=model.__name__, marks=[pytest.mark.slow] if model.__name__ in ("BERT", "GAN") else [])
    for model in MODELS
]


@pytest.mark.parametrize("model", CASES)
def test_losses_agree(model: type[Base], make_trainer: Callable[..., Any]) -> None:
    if model.__name__ == "BERT":
        pytest.importorskip("transformers")
    stock, _ = losses(model, "auto", make_trainer)
    ours, trainer = losses(model, ORTStrategy(config={"placement": "always"}), make_trainer)

    assert len(stock) >= STEPS
    assert ours == pytest.approx(stock, rel=1e-3)
    assert max(stock) - min(stock) > 0.02 * abs(stock[0])  # there was something to compare
    report = trainer.strategy.report
    assert report.ort_runs > 0
    assert report.ort_node_fraction > 0.3
