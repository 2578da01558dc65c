"""What the console says while a step compiles."""

import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from lightning.pytorch.callbacks import RichProgressBar, TQDMProgressBar
from small_modules import Small

from lightning_ort import ORTStrategy
from lightning_ort.strategies.capture import announcements
from lightning_ort.strategies.capture.announcements import Announcement

ALWAYS = {"placement": "always"}


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
        assert re.fullmatch(rf"lightning-ort: {step} compiled in .* s: the settings exclude timing.*", end)


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


def trainer_with(bar: Bar | None, first: bool = True) -> Any:
    return SimpleNamespace(progress_bar_callback=bar, is_global_zero=first)


@pytest.mark.parametrize(
    ("ms", "verdict"),
    [
        ({"ort": 10.0, "torch": 20.0}, "ONNX Runtime wins, 10 ms a step (20 ms in PyTorch), 2.00x as fast as before"),
        ({"ort": 20.0, "torch": 10.0}, "PyTorch wins, 10 ms a step (20 ms in ONNX Runtime); the step stays in PyTorch"),
        (
            {"ort": 1500.0, "torch": 2000.0, "inductor": 1000.0},
            "inductor wins, 1 s a step (1.5 s in ONNX Runtime, 2 s in PyTorch), 2.00x as fast as before",
        ),
    ],
)
def test_win_or_lose(ms: dict[str, float], verdict: str) -> None:
    bar = Bar()
    announcement = Announcement("training_step")
    announcement.end(trainer_with(bar), "never started")
    announcement.start(trainer_with(bar), "ort")
    announcement.add(1.25)
    announcement.add(0.25)
    announcement.verdict(trainer_with(bar), ms)
    announcement.end(trainer_with(bar), "a second end")
    assert bar.lines[1:] == [f"lightning-ort: training_step compiled in 1.5 s: {verdict}"]


@pytest.mark.parametrize("trainer", [trainer_with(None), trainer_with(Bar(), first=False)])
def test_other_processes_and_quiet_runs_say_nothing(trainer: Any) -> None:
    announcement = Announcement("training_step")
    announcement.start(trainer, "ort")
    announcement.end(trainer, "why")
    assert trainer.progress_bar_callback is None or trainer.progress_bar_callback.lines == []


def test_colour_is_for_terminals(monkeypatch: pytest.MonkeyPatch) -> None:
    bar = Bar()
    monkeypatch.setattr(announcements.sys, "stdout", SimpleNamespace(isatty=lambda: True, encoding="utf-8"))
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    Announcement("training_step").start(trainer_with(bar), "ort")
    monkeypatch.setenv("NO_COLOR", "1")
    Announcement("training_step").start(trainer_with(bar), "ort")
    assert [line.startswith("\x1b[") for line in bar.lines] == [True, False]


def test_no_clear_difference() -> None:
    bar = Bar()
    announcement = Announcement("training_step")
    announcement.start(trainer_with(bar), "ort")
    announcement.verdict(trainer_with(bar), {"ort": 1.0, "torch": 185.0}, is_clear=False)
    text = "ONNX Runtime goes on, without a clear difference, 1 ms a step (185 ms in PyTorch); the machine may be busy"
    assert bar.lines[1].endswith(text)
