"""What people read of a race: lines of the console, notes and figures of the report."""

import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import RichProgressBar, TQDMProgressBar
from small_modules import Small

from lightning_ort import CompileReport, ORTStrategy
from lightning_ort.compiler.reason import ReasonType
from lightning_ort.compiler.report.view import speedup
from lightning_ort.compiler.run_part import OptimizerReport, RunReport
from lightning_ort.strategies.race import view as race_view
from lightning_ort.strategies.race.race import Race
from lightning_ort.strategies.race.terms import UNCHANGED, Event, Verdict, Waiting, Way
from lightning_ort.strategies.race.view import WHILE_BUSY, RaceView

ALWAYS = {"placement": "always"}
ORT, INDUCTOR = Way("ort"), Way("inductor")
EQUAL, UNEQUAL = {ORT: 3.0, UNCHANGED: 3.2}, {ORT: 1.0, UNCHANGED: 3.0}


def lines(text: str) -> list[str]:
    """The lines of ours, without colours and the rest of a progress bar."""
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text).replace("\r", "\n")
    return [line for line in plain.splitlines() if line.startswith("lightning-ort: ") and "_step" in line]


@pytest.mark.parametrize("bar", [TQDMProgressBar, RichProgressBar])
def test_two_lines_for_each_step(
    bar: type, make_trainer: Callable[..., Any], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    trainer = make_trainer(
        strategy=ORTStrategy(config=ALWAYS), max_epochs=1, callbacks=[bar()], enable_progress_bar=True
    )
    trainer.fit(Small())
    assert trainer.strategy.report.ort_runs > 0
    found = lines(capfd.readouterr().out)
    for step in ("training_step", "validation_step"):
        start, end = [line for line in found if step in line]
        assert start.startswith(f"lightning-ort: compiling {step} for ONNX Runtime")
        assert re.fullmatch(rf"lightning-ort: {step} compiled in .* m?s: the settings exclude timing.*", end)


def test_nothing_without_a_progress_bar(
    make_trainer: Callable[..., Any], capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    trainer = make_trainer(strategy=ORTStrategy(config=ALWAYS), max_epochs=1)
    trainer.fit(Small())
    assert trainer.strategy.report.ort_runs > 0
    captured = capfd.readouterr()
    assert lines(captured.out + captured.err) == []


class Bar:
    """A progress bar that keeps what it is given."""

    is_enabled = True

    def __init__(self) -> None:
        self.lines: list[str] = []

    def print(self, text: str) -> None:
        self.lines.append(text)


def module_with(bar: Bar | None, first: bool = True) -> Any:
    trainer = SimpleNamespace(progress_bar_callback=bar, is_global_zero=first)
    report = CompileReport()
    return SimpleNamespace(
        module=SimpleNamespace(trainer=trainer),
        device=torch.device("cpu"),
        backend=SimpleNamespace(report=report),
        record_choice=lambda where, kind, text, announced=False: None,
        batches_done=lambda name, done: done,
    )


def show(module: Any, *events: Event, measured: bool = True) -> CompileReport:
    race = Race([ORT], 0.05, lambda way: None, measured)  # type: ignore[arg-type,return-value]
    race.events += [Event(ORT, "starts", 3), Event(ORT, "compiles", 4, seconds={ORT: 1.5}), *events]
    RaceView(module, "training_step").update(race)
    return module.backend.report  # type: ignore[no-any-return]


@pytest.fixture
def machines_may_be_busy(limits: Callable[..., None]) -> None:
    limits(slowdown=1.25)


@pytest.mark.usefixtures("machines_may_be_busy")
@pytest.mark.parametrize(
    ("event", "verdict"),
    [
        (
            Event(ORT, "wins", 20, Verdict(), {ORT: 0.01, UNCHANGED: 0.02}),
            "ONNX Runtime wins, 10 ms a step (20 ms in uncompiled PyTorch), 2.00x as fast",
        ),
        (
            Event(ORT, "loses", 20, Verdict(), {ORT: 0.02, UNCHANGED: 0.01}),
            "uncompiled PyTorch wins, 10 ms a step (20 ms in ONNX Runtime); the step stays uncompiled",
        ),
        (
            Event(Way("ort", "modules"), "loses", 20, Verdict(), {Way("ort", "modules"): 0.02, UNCHANGED: 0.01}),
            "uncompiled PyTorch wins, 10 ms a step (20 ms in ONNX Runtime); the step stays uncompiled",
        ),
        (
            Event(ORT, "wins", 20, Verdict(is_clear=False), {ORT: 0.001, UNCHANGED: 0.009}),
            "ONNX Runtime goes on, without a clear difference, 1 ms a step (9 ms in uncompiled PyTorch)",
        ),
        (
            Event(ORT, "wins", 20, Verdict(slowdown=UNEQUAL, is_busy=True), {ORT: 0.001, UNCHANGED: 0.009}),
            f"ONNX Runtime wins, 1 ms a step (9 ms in uncompiled PyTorch){WHILE_BUSY}",
        ),
        (
            Event(ORT, "wins", 20, Verdict(slowdown=EQUAL, is_busy=True), {ORT: 0.01, UNCHANGED: 0.02}),
            f"ONNX Runtime wins, 10 ms a step (20 ms in uncompiled PyTorch), 2.00x as fast{WHILE_BUSY}",
        ),
    ],
)
def test_win_or_lose(event: Event, verdict: str) -> None:
    bar = Bar()
    report = show(module_with(bar), event)
    assert bar.lines[1:] == [f"lightning-ort: training_step compiled in 1.5 s: {verdict}"]
    (step,) = report.steps
    assert step.engine == ("ort" if event.what == "wins" else "torch")
    # no ratio of times of which one was taken on a busier machine
    unequal = isinstance(event.why, Verdict) and event.why.slowdown == UNEQUAL
    assert (speedup(report) is None) == unequal
    assert speedup(CompileReport.from_dict(report.to_dict())) == speedup(report)


def test_the_report_says_what_runs_whatever_was_faster_before() -> None:
    bar = Bar()
    events = [
        Event(ORT, "wins", 20, Verdict(), {ORT: 0.01, UNCHANGED: 0.02}),
        Event(ORT, "loses", 300, Verdict(after=200), {ORT: 0.03, UNCHANGED: 0.025}),
        Event(INDUCTOR, "loses", 500, Verdict(), {INDUCTOR: 0.04, UNCHANGED: 0.025}),
    ]
    (step,) = show(module_with(bar), *events).steps
    assert step.engine == "torch"
    assert step.ms == {"ort": 30.0, "torch": 25.0, "inductor": 40.0}
    assert "timed again after 200 steps" in bar.lines[2]


@pytest.mark.usefixtures("machines_may_be_busy")
def test_a_note_of_what_was_not_tried_says_how_busy_the_machine_is() -> None:
    module, notes = module_with(None), []
    module.record_choice = lambda where, kind, text, announced=False: notes.append((kind, text))
    race = Race([INDUCTOR], 0.05, lambda way: None)  # type: ignore[arg-type,return-value]
    waiting = Waiting(15.1, 0.0, 2.8, earlier=True, by_budget=False)
    race.events += [Event(ORT, "starts", 3), Event(INDUCTOR, "waits", 4, waiting)]
    RaceView(module, "training_step").end_run(race)
    ((kind, text),) = notes
    assert kind is ReasonType.NOT_TRIED
    assert text.count("(") == text.count(")") == 1
    assert "15.1 s to compile, by an earlier run" in text
    assert "compile_budget" not in text
    assert "2.8 times as slow" in text


@pytest.mark.parametrize("module", [module_with(None), module_with(Bar(), first=False)])
def test_other_processes_and_quiet_runs_say_nothing(module: Any) -> None:
    show(module)
    bar = module.module.trainer.progress_bar_callback
    assert bar is None or bar.lines == []


def test_colour_is_for_terminals(monkeypatch: pytest.MonkeyPatch) -> None:
    bar = Bar()
    monkeypatch.setattr(race_view.sys, "stdout", SimpleNamespace(isatty=lambda: True, encoding="utf-8"))
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    show(module_with(bar))
    monkeypatch.setenv("NO_COLOR", "1")
    show(module_with(bar))
    assert [line.startswith("\x1b[") for line in bar.lines] == [True, False]


def test_the_report_has_the_peak_of_memory_with_and_without(make_trainer: Callable[..., Any]) -> None:
    for config, compiles in ((ALWAYS, True), ({"start": "amortized"}, False)):
        trainer = make_trainer(strategy=ORTStrategy(config=config), max_epochs=1)
        trainer.fit(Small())
        run = trainer.strategy.report.run
        assert (0 < run.peak_bytes_before <= run.peak_bytes) == compiles
        text = trainer.strategy.report.to_text(width=200)
        added = round(run.peak_bytes / 1e6) != round(run.peak_bytes_before / 1e6)  # in MB, as it is shown
        assert ("before anything was compiled" in text) == (compiles and added)
        assert "without compiling: torch.SGD (fused), retained memory" in text


def test_what_is_in_use_without_compiling() -> None:
    fused = OptimizerReport("torch.AdamW", "torch.AdamW (fused)")
    masks = "drawn by a compiled function"
    all_of_it = RunReport([fused], host_memory="retained", dropout_masks=masks).uncompiled_text
    assert all_of_it == "torch.AdamW (fused), retained memory, faster dropout masks"
    assert RunReport([fused], host_memory="default").uncompiled_text == "torch.AdamW (fused)"
