"""Steps are timed on each engine, on the run's own batches, and go on with the fastest."""

import gc
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
import torch._inductor.compile_fx
from small_modules import Small, loader

from lightning_ort import ORTStrategy
from lightning_ort.compiler import timing
from lightning_ort.compiler.backend import ORTBackend
from lightning_ort.compiler.executors.ort.binding import BoundSession
from lightning_ort.compiler.report import ReasonType
from lightning_ort.strategies.capture import autotuner
from lightning_ort.strategies.capture.autotuner import MAX_ROUNDS, ROUNDS, StepAutotuner
from lightning_ort.strategies.capture.module import CapturedModule

SLOW = 0.05  # seconds, many times what a step of the module takes


STEPS = 60  # more than a trial takes where two engines are close


class Long(Small):
    """Enough batches to time each engine and more."""

    def train_dataloader(self) -> Any:
        return loader(8 * STEPS)


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
        sessions.add(self)
        time.sleep(SLOW)
        return run(self, *args)

    sessions: weakref.WeakSet[BoundSession] = weakref.WeakSet()
    monkeypatch.setattr(BoundSession, "__call__", slowly)
    stock, module = Long(), Long()
    fit(stock, make_trainer, "auto")
    report = fit(module, make_trainer, ORTStrategy()).strategy.report
    assert report.ort_runs > 0
    (step,) = report.steps
    assert step.name == "training_step"
    assert step.ms["ort"] > 1000 * SLOW
    assert step.engine == "torch"
    (note,) = [note for note in report.notes if note.where == "training_step"]
    assert note.reason.type is ReasonType.SLOWER
    assert "stays in PyTorch" in note.reason.text
    assert str(step) in report.to_text(width=200)
    assert report.to_dict()["steps"][0]["engine"] == "torch"
    # two graphs: compiling, one more, and those of the timing; none after it
    runs = {region.runs for graph in report.graphs for region in graph.regions}
    assert max(runs) < STEPS - ROUNDS
    assert module.losses == pytest.approx(stock.losses, rel=1e-4)
    gc.collect()
    assert not sessions  # nor does their memory stay


@pytest.mark.usefixtures("regions_win")
def test_a_faster_captured_step_stays(make_trainer: Callable[..., Any]) -> None:
    module = SlowInPython()
    report = fit(module, make_trainer, ORTStrategy()).strategy.report
    (step,) = report.steps
    assert step.engine == "ort"
    assert step.ms["torch"] > 1000 * SLOW
    assert not report.notes
    # all but the steps that ran as they are, and the first, whose regions are timed
    regions = [region for graph in report.graphs for region in graph.regions if region.executor == "ort"]
    assert len(regions) == 1
    assert all(region.runs >= STEPS - ROUNDS - 3 for region in regions)


@pytest.mark.usefixtures("regions_win")
def test_a_captured_step_that_becomes_slower_is_taken_back(
    make_trainer: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, calls = BoundSession.__call__, 0

    def slowly(self: Any, *args: Any) -> Any:
        nonlocal calls
        calls += 1
        time.sleep(SLOW if strategy.report.steps else 0)  # after the first trial
        return run(self, *args)

    monkeypatch.setattr(autotuner, "FIRST_CHECK", 15)
    monkeypatch.setattr(BoundSession, "__call__", slowly)
    stock, module = SlowInPython(), SlowInPython()
    fit(stock, make_trainer, "auto")
    module.pause = stock.pause / 10  # between the fast and the slow session's time
    strategy = ORTStrategy()
    report = fit(module, make_trainer, strategy).strategy.report
    (step,) = report.steps  # the later times alone
    assert step.engine == "torch"
    assert step.ms["ort"] > 1000 * SLOW
    (note,) = [note for note in report.notes if note.where == "training_step"]
    assert note.reason.type is ReasonType.SLOWER
    assert "timed again after 15 steps" in note.reason.text
    assert 15 < calls < STEPS
    assert module.losses == pytest.approx(stock.losses, rel=1e-4)


@pytest.mark.usefixtures("regions_win")
def test_a_captured_step_that_stays_faster_is_kept(
    make_trainer: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    checks: list[int] = []
    again = CapturedModule.new_check

    def new_check(self: CapturedModule, engine: Any) -> Any:
        checks.append(self.module.trainer.fit_loop.total_batch_idx)
        return again(self, engine)

    monkeypatch.setattr(autotuner, "FIRST_CHECK", 5)
    monkeypatch.setattr(CapturedModule, "new_check", new_check)
    module = SlowInPython()
    report = fit(module, make_trainer, ORTStrategy()).strategy.report
    assert len(checks) == 2  # after 5 steps and after 25
    assert checks[1] - checks[0] >= 20
    (step,) = report.steps
    assert step.engine == "ort"
    assert not report.notes


@pytest.mark.parametrize(
    ("config", "deterministic"), [({"placement": "always"}, False), ({"placement": "measured"}, True)]
)
def test_nothing_is_tried_where_timing_does_not_decide(
    config: Any, deterministic: bool, make_trainer: Callable[..., Any]
) -> None:
    report = fit(Long(), make_trainer, ORTStrategy(config=config), deterministic=deterministic).strategy.report
    assert report.ort_runs > 0
    assert report.steps == []


def script(monkeypatch: pytest.MonkeyPatch, captured: float, own: float, spoiled: int) -> StepAutotuner:
    now = 0.0
    monkeypatch.setattr(autotuner.time, "perf_counter", lambda: now)
    tuner = StepAutotuner(("ort", "torch"), lambda: None)
    for index in range(100):
        engine = tuner.next_engine()
        if tuner.done:
            break
        with tuner.timed(), tuner.timed():  # a backward pass inside a step, as in manual optimization
            now += captured if engine == "ort" else own
        if index < spoiled:
            assert engine == "ort"  # until nothing is compiled
            tuner.discard_sample()
        with tuner.timed():  # the backward pass after it
            now += 1.0
    return tuner


def test_medians_are_of_steps_and_backward_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    tuner = script(monkeypatch, captured=2.0, own=3.0, spoiled=4)
    assert tuner.milliseconds == {"ort": 3000.0, "torch": 4000.0}


def test_close_engines_are_timed_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    clear, close = (script(monkeypatch, captured=2.0, own=own, spoiled=0) for own in (3.0, 2.1))
    # the first of each does not count
    assert {len(samples) - 1 for samples in clear._samples.values()} == {ROUNDS}
    assert {len(samples) - 1 for samples in close._samples.values()} == {MAX_ROUNDS}


def test_one_that_is_far_ahead_needs_few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    for captured, own in ((1.0, 3.0), (3.0, 1.0)):
        tuner = script(monkeypatch, captured, own, spoiled=0)
        assert {len(samples) - 1 for samples in tuner._samples.values()} == {timing.CLEAR_ROUNDS}
        assert tuner.milliseconds == {"ort": 1000 * (captured + 1), "torch": 1000 * (own + 1)}


SECONDS = autotuner.MIN_SECONDS  # before a fixture changes it


@pytest.mark.parametrize("disturbed", ["ort", "torch"])
def test_a_burst_of_other_work_does_not_decide_over_short_steps(
    disturbed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For twenty milliseconds one engine's steps take twice as long, such as right after it was compiled."""
    monkeypatch.setattr(autotuner, "MIN_SECONDS", SECONDS)
    now = 0.0
    monkeypatch.setattr(autotuner.time, "perf_counter", lambda: now)
    tuner = StepAutotuner(("ort", "torch"), lambda: None)
    usual = {"ort": 0.0009, "torch": 0.001} if disturbed == "ort" else {"ort": 0.001, "torch": 0.0009}
    while True:
        engine = tuner.next_engine()
        if tuner.done:
            break
        with tuner.timed():
            now += usual[engine] * (2 if engine == disturbed and now < 0.02 else 1)
    assert min(tuner.milliseconds, key=tuner.milliseconds.__getitem__) == disturbed
    assert now < 2 * SECONDS


def test_an_interrupted_step_does_not_end_the_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(autotuner.time, "perf_counter", lambda: now)
    tuner = StepAutotuner(("ort", "torch"), lambda: None)
    seconds = {"ort": iter([1.0, 1.0, 9.0, *[1.0] * 20]), "torch": iter([1.4] * 23)}
    while True:
        engine = tuner.next_engine()
        if tuner.done:
            break
        with tuner.timed():
            now += next(seconds[engine])
    assert tuner.rounds == ROUNDS
    assert tuner.milliseconds == {"ort": pytest.approx(1000), "torch": pytest.approx(1400)}


def test_a_failing_step_leaves_the_clock_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    tuner = StepAutotuner(("ort", "torch"), lambda: None)
    tuner.next_engine()
    with suppress(ValueError), tuner.timed():
        raise ValueError
    with tuner.timed():
        pass
    assert not tuner.done


def test_an_engine_that_is_dropped_does_not_count() -> None:
    tuner = StepAutotuner(("ort", "torch", "inductor"), lambda: None)
    assert [tuner.next_engine() for _ in range(4)] == ["ort", "torch", "inductor", "inductor"]
    assert [tuner.next_engine() for _ in range(2)] == ["torch", "ort"]
    tuner.drop("inductor")
    assert [tuner.next_engine() for _ in range(4)] == ["ort", "ort", "torch", "torch"]
    while not tuner.done:
        tuner.next_engine()
    assert tuner.milliseconds.keys() == {"ort", "torch"}


class SlowInPython(Long):
    """A step that is slow unless it is compiled."""

    pause = SLOW

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if not torch.compiler.is_compiling():
            time.sleep(self.pause)
        return super().training_step(batch, batch_idx)


@pytest.mark.usefixtures("regions_win")
@pytest.mark.parametrize(("capture", "masks"), [("step", "exact"), ("modules", "fast")])
def test_engine_auto_keeps_inductor_where_it_wins(
    make_trainer: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, capture: str, masks: str
) -> None:
    """What stands for inductor here compiles nothing: its C++ compiler would take a minute."""
    run, calls = BoundSession.__call__, 0

    def slowly(self: Any, *args: Any) -> Any:
        time.sleep(SLOW)
        return run(self, *args)

    def compile_fx(gm: Any, inputs: Any, **kwargs: Any) -> Any:
        def forward(*args: Any) -> Any:
            nonlocal calls
            calls += 1
            return gm.forward(*args)

        assert kwargs["config_patches"]["fallback_random"] is (masks == "exact")
        return forward

    monkeypatch.setattr(BoundSession, "__call__", slowly)
    monkeypatch.setattr(torch._inductor.compile_fx, "compile_fx", compile_fx)
    stock, module = Long(), (SlowInPython if capture == "step" else SlowModule)()
    fit(stock, make_trainer, "auto")
    strategy = ORTStrategy(config={"engine": "auto", "capture": capture, "dropout_masks": masks})
    report = fit(module, make_trainer, strategy).strategy.report
    (step,) = report.steps
    assert step.ms.keys() == {"ort", "torch", "inductor"}
    assert step.engine == "inductor"
    assert "continues with inductor" in report.to_text(width=200)
    assert report.ort_runs > 0
    assert calls > STEPS - 3 * (ROUNDS + 2)
    (note,) = [note for note in report.notes if note.reason.type is not ReasonType.NOT_AUDITED]
    assert note.reason.type is ReasonType.INDUCTOR_WON
    assert module.losses == pytest.approx(stock.losses, rel=1e-4)


class SlowModule(Long):
    """The same with the slow part in a child."""

    def __init__(self) -> None:
        super().__init__()
        self.net.append(Sleeper())


class Sleeper(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not torch.compiler.is_compiling():
            time.sleep(SLOW)
        return x


def test_engine_auto_goes_on_without_inductor(
    make_trainer: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def compile_fx(gm: Any, inputs: Any, **kwargs: Any) -> Any:
        raise RuntimeError("no C++ compiler")

    monkeypatch.setattr(torch._inductor.compile_fx, "compile_fx", compile_fx)
    stock, module = Long(), Long()
    fit(stock, make_trainer, "auto")
    report = fit(module, make_trainer, ORTStrategy(config={"engine": "auto"})).strategy.report
    (step,) = report.steps
    assert step.ms.keys() == {"ort", "torch"}
    (note,) = [note for note in report.notes if note.reason.type is ReasonType.INDUCTOR_FAILED]
    assert "no C++ compiler" in note.reason.text
    assert not report.fallbacks
    assert module.losses == pytest.approx(stock.losses, rel=1e-4)


def test_engine_auto_tries_nothing_in_deterministic_mode(make_trainer: Callable[..., Any]) -> None:
    strategy = ORTStrategy(config={"engine": "auto"})
    report = fit(Long(), make_trainer, strategy, deterministic=True).strategy.report
    assert report.ort_runs > 0
    assert report.steps == []
    (note,) = report.notes
    assert note.reason.type is ReasonType.STATIC_RULE


def test_engine_auto_needs_a_strategy_and_timing() -> None:
    with pytest.raises(ValueError, match="engine='auto' times whole training steps"):
        ORTBackend({"engine": "auto"})
    with pytest.raises(ValueError, match="engine='auto' needs placement='measured'"):
        ORTStrategy(config={"engine": "auto", "placement": "always"})


@pytest.mark.slow
def test_engine_auto_with_the_real_inductor(make_trainer: Callable[..., Any]) -> None:
    stock, module = Long(), Long()
    fit(stock, make_trainer, "auto")
    report = fit(module, make_trainer, ORTStrategy(config={"engine": "auto"})).strategy.report
    (step,) = report.steps
    assert step.ms.keys() == {"ort", "torch", "inductor"}
    assert module.losses == pytest.approx(stock.losses, rel=1e-4)
