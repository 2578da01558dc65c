"""Which engines a step is tried on, in which order, by the clock of a script."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from small_modules import Small

from lightning_ort import ORTConfig, ORTStrategy
from lightning_ort.compiler.executors import inductor
from lightning_ort.compiler.report import ReasonType
from lightning_ort.strategies.capture import autotuner
from lightning_ort.strategies.capture.autotuner import StepAutotuner
from lightning_ort.strategies.capture.engines import engines_for, setting_for
from lightning_ort.strategies.environment import read_environment

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("settings", "device", "expected"),
    [
        ({}, CPU, "ort"),
        ({}, CUDA, "auto"),
        ({"placement": "always"}, CUDA, "ort"),
        ({"engine": "ort"}, CUDA, "ort"),
        ({"engine": "auto"}, CPU, "auto"),
    ],
)
def test_a_gpu_tries_inductor_by_default(settings: Any, device: torch.device, expected: str) -> None:
    assert setting_for(ORTConfig(**settings), device) == expected


def test_on_a_cpu_onnxruntime_comes_first() -> None:
    for step in ("training_step", "predict_step"):
        assert engines_for(ORTConfig(), CPU, step, True).engines == ["ort", "torch"]
        assert engines_for(ORTConfig(engine="auto"), CPU, step, True).engines == ["ort", "torch", "inductor"]


def test_on_a_gpu_it_comes_last() -> None:
    training = engines_for(ORTConfig(), CUDA, "training_step", True)
    assert training.engines == ["torch", "inductor", "inductor-graphs"]
    assert training.last == "ort"
    prediction = engines_for(ORTConfig(), CUDA, "predict_step", True)
    assert prediction.engines == ["torch", "inductor", "inductor-graphs", "ort"]
    assert prediction.last is None


def test_no_recording_of_sizes_that_vary_or_gradients_that_stay() -> None:
    assert engines_for(ORTConfig(dynamic=True), CUDA, "training_step", True).engines == ["torch", "inductor"]
    assert engines_for(ORTConfig(), CUDA, "training_step", False).engines == ["torch", "inductor"]


def trial(monkeypatch: pytest.MonkeyPatch, seconds: dict[str, float], fails: tuple[str, ...] = ()) -> Any:
    """Each engine as it was tried, in order, and the medians."""
    now, order = 0.0, []
    monkeypatch.setattr(autotuner.time, "perf_counter", lambda: now)
    found = engines_for(ORTConfig(), CUDA, "training_step", True)
    tuner = StepAutotuner(found.engines, lambda: None, found.last, found.worth_trying)
    while True:
        engine = tuner.next_engine()
        if tuner.done:
            return list(dict.fromkeys(order)), tuner.milliseconds
        order.append(engine)
        if engine in fails:
            tuner.drop(engine)
            continue
        with tuner.timed():
            now += seconds[engine]


def test_onnxruntime_is_tried_where_its_projected_time_can_win(monkeypatch: pytest.MonkeyPatch) -> None:
    # inductor saves more than capture is expected to: nothing is compiled for ONNX Runtime
    order, ms = trial(monkeypatch, {"torch": 0.100, "inductor": 0.080, "inductor-graphs": 0.070, "ort": 0.001})
    assert order == ["torch", "inductor", "inductor-graphs"]
    assert min(ms, key=ms.__getitem__) == "inductor-graphs"
    # it saves less
    order, ms = trial(monkeypatch, {"torch": 0.100, "inductor": 0.097, "inductor-graphs": 0.120, "ort": 0.050})
    assert order == ["torch", "inductor", "inductor-graphs", "ort"]
    assert min(ms, key=ms.__getitem__) == "ort"
    # it fails
    order, ms = trial(monkeypatch, {"torch": 0.1, "ort": 0.2}, fails=("inductor", "inductor-graphs"))
    assert order == ["torch", "inductor", "inductor-graphs", "ort"]
    assert ms == {"torch": pytest.approx(100), "ort": pytest.approx(200)}


def test_what_inductor_is_told() -> None:
    exact, fast = (inductor.compile_arguments("inductor", masks)["options"] for masks in ("exact", "fast"))
    assert exact == {"fallback_random": True}
    assert fast == {"fallback_random": False}
    recorded = inductor.compile_arguments("inductor-graphs", "exact")
    # these are options of the installed torch, and those of its mode
    mode = torch._inductor.list_mode_options("reduce-overhead")
    assert recorded["options"] == {"fallback_random": True, **mode}
    assert set(recorded["options"]) <= set(torch._inductor.list_options())


def test_results_outlive_the_next_call(monkeypatch: pytest.MonkeyPatch) -> None:
    memory, marks = torch.zeros(2, requires_grad=True), []
    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", lambda: marks.append(len(marks)))

    def recorded(number: float) -> Any:
        with torch.no_grad():
            memory.fill_(number)
        return {"loss": memory.sum(), "memory": memory, "name": "x"}

    run = inductor.with_own_results(recorded)
    first, second = run(1.0), run(2.0)
    assert first["memory"].tolist() == [1, 1]
    assert second["memory"].tolist() == [2, 2]
    assert first["loss"].requires_grad
    assert first["name"] == "x"
    assert marks == [0, 1]
    first["loss"].backward()
    assert memory.grad is not None


@pytest.mark.parametrize("settings", [{"engine": "ort"}, {"placement": "always"}])
def test_fast_masks_need_inductor(settings: Any) -> None:
    with pytest.raises(ValueError, match="dropout_masks='fast'.* engine='auto'"):
        ORTConfig(dropout_masks="fast", **settings)
    assert ORTConfig(dropout_masks="fast", engine="auto").dropout_masks == "fast"


def test_fast_masks_from_yaml(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGHTNING_ORT_CONFIG", "dropout_masks: fast")
    assert read_environment().complete(None).dropout_masks == "fast"
    monkeypatch.setenv("LIGHTNING_ORT_CONFIG", "dropout_masks: quick")
    with pytest.raises(ValueError, match="dropout_masks"):
        read_environment()


def test_the_report_says_where_fast_masks_have_no_effect(make_trainer: Callable[..., Any]) -> None:
    strategy = ORTStrategy(config={"dropout_masks": "fast", "placement": "measured"})
    make_trainer(strategy=strategy, max_steps=2).fit(Small())
    assert any(
        note.where == "dropout_masks" and note.reason.type is ReasonType.NO_EFFECT for note in strategy.report.notes
    )


def test_the_report_has_the_advice(make_trainer: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_ort.strategies.mixin.advice_for", lambda *args: [f"advice of {len(args)} facts"])
    strategy = ORTStrategy(config={"placement": "always"})
    make_trainer(strategy=strategy, max_steps=2).fit(Small())
    (note,) = (note for note in strategy.report.notes if note.where == "advice")
    assert (note.reason.type, note.reason.text) == (ReasonType.ADVICE, "advice of 4 facts")
    assert strategy.report.ort_runs > 0
    assert "advice of 4 facts" in strategy.report.to_text(width=200)
