"""What the start of a fit does without, where nothing is compiled."""

import importlib.metadata
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
from small_modules import Small

from lightning_ort.compiler.cache import cache, cache_folder
from lightning_ort.strategies.race import ways


def test_a_fit_that_compiles_nothing_asks_no_file_for_what_is_known(
    make_trainer: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in sweeps and cross-validation: versions are read once a process, the program's files for a cache alone."""
    make_trainer(strategy="ort", max_epochs=1).fit(Small())
    asked: list[str] = []
    for owner, name in ((importlib.metadata, "distribution"), (ways, "program")):
        monkeypatch.setattr(owner, name, lambda *args, name=name, **kwargs: asked.append(name))
    trainer = make_trainer(strategy="ort", max_epochs=1)
    trainer.fit(Small())
    assert trainer.strategy.report.run.waiting, "that its steps are too few is found out"
    assert asked == []


def test_a_short_fit_asks_no_cache(make_trainer: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes longer to look than the fit has left."""
    asked: list[str] = []
    for owner, name in ((cache, "software"), (cache_folder, "folder_of")):
        monkeypatch.setattr(owner, name, lambda *args, name=name: asked.append(name))
    trainer = make_trainer(strategy="ort", max_steps=8)
    trainer.fit(Small())
    assert trainer.strategy.report.run.waiting
    assert asked == []


def calls_of_a_short_fit(make_trainer: Callable[..., Any], strategy: str) -> int:
    found = [0]

    def see(frame: FrameType, event: str, argument: Any) -> None:
        found[0] += event in ("call", "c_call")

    trainer, module = make_trainer(strategy=strategy, max_steps=8, limit_val_batches=0), Small()
    sys.setprofile(see)
    try:
        trainer.fit(module)
    finally:
        sys.setprofile(None)
    return found[0]


def test_a_short_fit_adds_few_calls(make_trainer: Callable[..., Any]) -> None:
    """It has no time to save any; a thousand take about half a millisecond."""
    for strategy in ("auto", "ort"):
        calls_of_a_short_fit(make_trainer, strategy)  # what is done once in a process
    ours, stock = (calls_of_a_short_fit(make_trainer, strategy) for strategy in ("ort", "auto"))
    assert ours - stock < 6000
