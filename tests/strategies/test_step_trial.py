"""Steps are timed captured and as they are, on the run's own batches, and go on in the faster way."""

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from small_modules import Small, loader

from lightning_ort import ORTStrategy
from lightning_ort.compiler import placement
from lightning_ort.compiler.report import ReasonType
from lightning_ort.compiler.runtime import BoundSession
from lightning_ort.strategies import step_trial
from lightning_ort.strategies.step_trial import ROUNDS, StepTrial

SLOW = 0.05  # seconds, many times what a step of the module takes


class Long(Small):
    """Enough batches for a trial and more."""

    def train_dataloader(self) -> Any:
        return loader(8 * 30)


@pytest.fixture
def regions_win(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regions go to ONNX Runtime, however small: it is the steps that are timed here."""
    measure = placement.measure

    def favourably(*args: Any) -> Any:
        timing = measure(*args)
        return type(timing)(0.0, timing.torch_ms, timing.threads)

    monkeypatch.setattr(placement, "measure", favourably)


def fit(module: Small, make_trainer: Callable[..., Any], strategy: Any, **kwargs: Any) -> Any:
    trainer = make_trainer(strategy=strategy, max_epochs=1, limit_val_batches=0, **kwargs)
    trainer.fit(module)
    return trainer


@pytest.mark.usefixtures("regions_win")
def test_a_slower_captured_step_is_left_as_it_is(
    make_trainer: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = BoundSession.__call__

    def slowly(self: Any, *args: Any) -> Any:
        time.sleep(SLOW)
        return run(self, *args)

    monkeypatch.setattr(BoundSession, "__call__", slowly)
    stock, module = Long(), Long()
    fit(stock, make_trainer, "auto")
    report = fit(module, make_trainer, ORTStrategy()).strategy.report
    assert report.ort_runs > 0
    (step,) = report.steps
    assert step.name == "training_step"
    assert step.captured_ms > 1000 * SLOW
    assert not step.stays_captured
    (note,) = [note for note in report.notes if note.where == "training_step"]
    assert note.reason.type is ReasonType.SLOWER
    assert "left as it is" in note.reason.text
    assert str(step) in report.to_text(width=200)
    assert report.to_dict()["steps"][0]["stays_captured"] is False
    # two graphs: compiling, one more, and those of the trial; none after it
    runs = {region.runs for graph in report.graphs for region in graph.regions}
    assert max(runs) < 30 - ROUNDS
    assert module.losses == pytest.approx(stock.losses, rel=1e-4)


@pytest.mark.usefixtures("regions_win")
def test_a_faster_captured_step_stays(make_trainer: Callable[..., Any]) -> None:
    class SlowInPython(Long):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if not torch.compiler.is_compiling():
                time.sleep(SLOW)
            return super().training_step(batch, batch_idx)

    module = SlowInPython()
    report = fit(module, make_trainer, ORTStrategy()).strategy.report
    (step,) = report.steps
    assert step.stays_captured
    assert step.own_ms > 1000 * SLOW
    assert not report.notes
    # all but the steps that ran as they are, and the first, whose regions are timed
    regions = [region for graph in report.graphs for region in graph.regions if region.executor == "ort"]
    assert len(regions) == 2
    assert all(region.runs >= 30 - ROUNDS - 3 for region in regions)


@pytest.mark.parametrize(
    ("config", "deterministic"), [({"placement": "always"}, False), ({"placement": "measured"}, True)]
)
def test_nothing_is_tried_where_timing_does_not_decide(
    config: Any, deterministic: bool, make_trainer: Callable[..., Any]
) -> None:
    report = fit(Long(), make_trainer, ORTStrategy(config=config), deterministic=deterministic).strategy.report
    assert report.ort_runs > 0
    assert report.steps == []


def script(monkeypatch: pytest.MonkeyPatch, captured: float, own: float, spoiled: int) -> StepTrial:
    now = 0.0
    monkeypatch.setattr(step_trial.time, "perf_counter", lambda: now)
    trial = StepTrial(lambda: None)
    for index in range(100):
        way = trial.next()
        if trial.over:
            break
        with trial.clock(), trial.clock():  # a backward pass inside a step, as in manual optimization
            now += captured if way else own
        if index < spoiled:
            assert way  # until nothing is compiled
            trial.spoil()
        with trial.clock():  # the backward pass after it
            now += 1.0
    return trial


def test_medians_are_of_steps_and_backward_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    trial = script(monkeypatch, captured=2.0, own=3.0, spoiled=4)
    assert trial.milliseconds == (3000.0, 4000.0)


def test_a_failing_step_leaves_the_clock_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    trial = StepTrial(lambda: None)
    trial.next()
    with suppress(ValueError), trial.clock():
        raise ValueError
    with trial.clock():
        pass
    assert not trial.over
