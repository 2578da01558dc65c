"""Steps run unchanged until compiling pays, and then go on captured; what the report says of it."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from lightning.pytorch.callbacks import Callback, Timer
from ort_settings import config_of
from small_modules import Appends, Small, loader
from torch import Tensor, nn

from lightning_ort import CompileReport, ORTStrategy
from lightning_ort._imports import LIGHTNING
from lightning_ort.compiler import engines
from lightning_ort.compiler.backend import ORTBackend
from lightning_ort.compiler.executors.ort import kernels
from lightning_ort.compiler.reason import Reason, ReasonType
from lightning_ort.compiler.running.fallbacks import ORTFallbackError
from lightning_ort.config import DEFAULT_START, ORTConfig, Start
from lightning_ort.strategies.race import run_facts
from lightning_ort.strategies.race.race import FIRST
from lightning_ort.strategies.race.run_facts import Outlook, at_window_start, outlook_of

STEPS = 40


def amortized(**config: Any) -> ORTStrategy:
    return ORTStrategy(config=config_of(**{"start": "amortized", "engine": "ort", **config}))


class Dropped(Small):
    """Enough batches, dropout, a hook and a scheduler."""

    def __init__(self) -> None:
        super().__init__()
        self.net.insert(2, nn.Dropout(0.5))
        self.calls = 0
        self.rates: list[float] = []
        self.net.register_forward_hook(self.count)

    def count(self, *args: Any) -> None:
        self.note(torch.compiler.is_compiling())

    @torch.compiler.disable
    def note(self, compiling: bool) -> None:
        self.calls += 1

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(outputs, batch, batch_idx)
        self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 5), "interval": "step"}]

    def train_dataloader(self) -> Any:
        return loader(8 * STEPS)


def fit(module: Small, strategy: Any, make_trainer: Callable[..., Any], **kwargs: Any) -> Any:
    trainer = make_trainer(strategy=strategy, **{"max_epochs": 1, "limit_val_batches": 0, **kwargs})
    torch.manual_seed(0)  # for dropout's masks
    trainer.fit(module)
    return trainer


def test_a_short_fit_compiles_nothing(make_trainer: Callable[..., Any]) -> None:
    stock, module = Dropped(), Dropped()
    fit(stock, "auto", make_trainer)
    strategy = ORTStrategy(config={"start": "amortized"}, optim="keep")
    report = fit(module, strategy, make_trainer).strategy.report
    assert report.graphs == []
    assert report.run.startup_seconds == report.compile_seconds == 0
    assert module.losses == stock.losses  # bit for bit
    assert module.calls == stock.calls
    (note,) = report.notes
    assert note.where == "training_step"
    assert note.reason.type is ReasonType.NOT_COMPILED
    assert "to record; it is worth at most" in note.reason.text
    first = report.to_text().splitlines()[0]
    assert first.startswith("not compiled yet: training_step: ")
    assert report.to_dict()["verdict"].startswith("not compiled yet: ")


def test_the_verdict_of_a_fit_is_that_of_its_training_step(make_trainer: Callable[..., Any]) -> None:
    report = fit(Dropped(), amortized(), make_trainer, limit_val_batches=2, max_epochs=3).strategy.report
    assert report.graphs == []
    assert {"training_step", "validation_step"} <= {note.where for note in report.notes}  # validation decides last
    assert report.run.verdict.startswith("not compiled yet: training_step: ")


def test_a_run_of_two_steps_has_nothing_to_go_by(make_trainer: Callable[..., Any]) -> None:
    report = fit(Small(), amortized(), make_trainer, max_steps=2).strategy.report
    assert report.graphs == []
    assert "too few steps to decide (2)" in report.run.verdict


def test_a_long_fit_goes_over_in_the_middle(make_trainer: Callable[..., Any], paces: Callable[..., None]) -> None:
    paces(torch=2.0, ort=1.0, compiling=3.0)
    stock, module = Dropped(), Dropped()
    fit(stock, "auto", make_trainer)
    report = fit(module, amortized(audit="off"), make_trainer).strategy.report
    assert report.ort_runs > STEPS // 2
    assert report.run.startup_seconds == 1.0  # what compiling took longer than the step that it replaced
    # dropout's masks, the hook and the scheduler are the same before and after
    assert module.losses == pytest.approx(stock.losses, rel=1e-4)
    assert module.losses[:FIRST] == stock.losses[:FIRST]
    assert module.calls == stock.calls
    assert module.rates == stock.rates
    for mine, theirs in zip(module.parameters(), stock.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
    (step,) = report.steps
    assert step.ms == {"ort": 1000.0, "torch": 2000.0}
    assert report.run.verdict.startswith("paid for itself after step ")
    assert report.run.paid_after is not None
    assert FIRST < report.run.paid_after < STEPS


def test_accumulation_windows_stay_whole(
    make_trainer: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, paces: Callable[..., None]
) -> None:
    paces(torch=2.0, ort=1.0)
    seen = []
    call = ORTBackend.__call__

    def at(self: ORTBackend, *args: Any, **kwargs: Any) -> Any:
        seen.append(module.trainer.fit_loop.batch_idx)
        return call(self, *args, **kwargs)

    monkeypatch.setattr(ORTBackend, "__call__", at)
    stock, module = Dropped(), Dropped()
    fit(stock, "auto", make_trainer, accumulate_grad_batches=4)
    report = fit(module, amortized(), make_trainer, accumulate_grad_batches=4).strategy.report
    assert report.ort_runs > 0
    assert seen[0] == 4  # not 3, where it is asked first
    assert module.losses == pytest.approx(stock.losses, rel=1e-4)
    assert module.rates == stock.rates


def test_nothing_is_compiled_in_the_sanity_check(make_trainer: Callable[..., Any], paces: Callable[..., None]) -> None:
    paces(torch=2.0, ort=1.0)
    sanity: list[int] = []

    class Watch(Callback):
        def on_sanity_check_end(self, trainer: Any, pl_module: Any) -> None:
            sanity.append(len(trainer.strategy.report.graphs))

    class Validated(Dropped):
        def val_dataloader(self) -> Any:
            return loader(8 * 10)

    settings = {"limit_val_batches": 10, "num_sanity_val_steps": 8, "callbacks": [Watch()]}
    trainer = fit(Validated(), amortized(), make_trainer, **settings)
    assert sanity == [0]
    assert any(graph.name.startswith("validation_step") for graph in trainer.strategy.report.graphs)
    assert trainer.strategy.report.ort_runs > 0


def test_prediction_of_ten_batches_compiles_nothing(make_trainer: Callable[..., Any]) -> None:
    trainer = make_trainer(strategy=amortized())
    found = trainer.predict(Small(), loader(80))
    assert len(found) == 10
    report = trainer.strategy.report
    assert report.graphs == []
    assert [note.where for note in report.notes] == ["predict_step"]


def test_deterministic_mode_lets_no_clock_decide(make_trainer: Callable[..., Any]) -> None:
    module = Small()
    trainer = fit(module, amortized(), make_trainer)
    assert trainer.strategy.report.graphs == []
    torch.use_deterministic_algorithms(True)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module)
    waits, starts = (
        fit(Small(), ORTStrategy(config={"start": start}), make_trainer, deterministic=True).strategy.report
        for start in ("amortized", "now")
    )
    for one in (trainer.strategy.report, waits):
        assert one.graphs == []  # but it may be recorded, which changes no bit
    assert [graph.name for graph in starts.graphs] == ["training_step/step_0"]


def test_who_wants_no_fallback_learns_at_once_that_onnxruntime_does_not_load(
    make_trainer: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    reason = Reason(ReasonType.RUNTIME_UNAVAILABLE, "it does not import")
    monkeypatch.setattr(kernels, "unavailable", lambda loads=True: reason if loads else None)
    module = Small()
    with pytest.raises(ORTFallbackError, match="it does not import"):
        fit(module, ORTStrategy(config={"fallback": "raise"}), make_trainer)
    assert module.losses == []
    assert fit(Small(), amortized(), make_trainer).strategy.report.fallbacks == []


def test_always_is_now_and_amortized_is_honoured(make_trainer: Callable[..., Any]) -> None:
    report = fit(Small(), ORTStrategy(config={"placement": "always"}), make_trainer).strategy.report
    assert report.ort_runs > 0
    assert report.run.verdict.startswith("not known whether it is worth it")
    report = fit(Small(), amortized(placement="always"), make_trainer).strategy.report
    assert report.graphs == []


@pytest.mark.parametrize("default", get_args(Start))
def test_the_default_holds_where_regions_are_timed(
    default: str, make_trainer: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(run_facts, "DEFAULT_START", default)
    report = fit(Small(), ORTStrategy(), make_trainer).strategy.report
    assert (report.graphs == []) == (default == "amortized")
    # what needs graphs gets them at once
    for config in (
        {"placement": "always"},
        {"debug": {"check_against_eager": True}},
        {"debug": {"save_onnx_dir": str(tmp_path / "onnx")}},
    ):
        report = fit(Small(), ORTStrategy(config=config), make_trainer).strategy.report
        assert report.graphs


def test_the_default_is_as_documented() -> None:
    assert ORTConfig().start is None
    page = (Path(__file__).parents[2] / "docs" / "configuration.md").read_text(encoding="utf-8")
    (row,) = [line for line in page.splitlines() if line.startswith("| `start` | `None` |")]
    assert f'`None`: `"{DEFAULT_START}"`' in row
    assert f'``"{DEFAULT_START}"``, but' in str(ORTConfig.__doc__)


def test_torch_compile_has_no_run_to_wait_for() -> None:
    assert ORTBackend({"start": "now"}).report.run.verdict == ""
    with pytest.raises(ValueError, match="start='amortized' waits until a run of the Trainer is long enough"):
        ORTBackend({"start": "amortized"})


def test_a_budget_that_is_used_up_ends_capture_for_this_run(
    make_trainer: Callable[..., Any], paces: Callable[..., None]
) -> None:
    """Dynamo compiles this step again each time; the budget allows 4 s, and each compilation takes 1.5 s."""
    paces(torch=2.0, ort=1.0, compiling=3.5)

    class Long(Appends):
        def train_dataloader(self) -> Any:
            return loader(8 * STEPS)

    stock, module = Long(), Long()
    fit(stock, "auto", make_trainer)
    strategy = amortized(audit="off", cache_dir=None)
    report = fit(module, strategy, make_trainer).strategy.report
    assert report.ort_runs > 0
    (note,) = [note for note in report.notes if note.reason.type is ReasonType.BUDGET]
    assert note.reason.text.startswith(
        "compiling takes 4.5 s, more than the 4 s allowed; raise ORTConfig(compile_budget=...)"
    )
    assert note.reason.text.endswith("the step stays uncompiled")
    assert report.run.verdict.startswith("not worth it: ")
    assert report.run.verdict.endswith("training_step used up its compile budget")
    assert len({graph.name for graph in report.graphs if "forward" in graph.name}) == 3
    assert module.losses == pytest.approx(stock.losses, rel=1e-4)
    # the next run has a budget of its own
    paces(torch=2.0, ort=1.0)
    before = len(report.graphs)
    fit(Small(), strategy, make_trainer, max_epochs=10)
    assert len(strategy.report.graphs) > before


class Loops(Small):
    """Few layers, many operations."""

    def add(self, loss: Tensor) -> Tensor:
        for _ in range(20):
            loss = loss + self.net[0].weight.exp().tanh().mean() * 0.001
        return loss

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.add(self.add(self.add(self.loss(batch))))

    def train_dataloader(self) -> Any:
        return loader(8 * STEPS)


class Parts(Loops):
    """The same in three graphs."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        torch._dynamo.graph_break()
        loss = self.add(loss)
        torch._dynamo.graph_break()
        return self.add(self.add(loss))


def test_the_rest_of_a_call_is_left_to_torch(make_trainer: Callable[..., Any], paces: Callable[..., None]) -> None:
    """The first graph has few operations of many, so the others are expected to take more than the budget allows."""
    paces(torch=1.0, ort=0.5, compiling=2.0)
    stock, module = Parts(), Parts()
    fit(stock, "auto", make_trainer)
    report = fit(module, amortized(capture="step"), make_trainer).strategy.report
    (note,) = [note for note in report.notes if note.reason.type is ReasonType.BUDGET]
    assert "more than the 2 s allowed" in note.reason.text
    assert len(report.graphs) == 2  # the first forward and its backward
    assert module.losses == pytest.approx(stock.losses, rel=1e-4)


@pytest.mark.usefixtures("captured_at_once")
def test_later_runs_know_what_earlier_ones_found(
    make_trainer: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, paces: Callable[..., None]
) -> None:
    names = lambda: [path for path in (tmp_path / "cache").iterdir() if path.name.startswith("start-")]  # noqa: E731
    paces(torch=2.0, ort=3.0, compiling=2.5)
    first = fit(Dropped(), amortized(), make_trainer).strategy.report
    assert first.ort_runs > 0
    assert [step.engine for step in first.steps] == ["torch"]
    assert first.run.verdict.startswith("not worth it: ")
    (file,) = names()
    monkeypatch.setattr(engines, "COST", 1e6)
    second = fit(Dropped(), amortized(report=str(tmp_path / "elsewhere.json")), make_trainer).strategy.report
    assert second.graphs == []  # nothing is tried that was slower
    assert "in an earlier run the unchanged step was the fastest" in second.run.verdict
    # another structure is another matter, and so is a damaged file
    wider = Dropped()
    wider.net.append(nn.Linear(3, 3))
    assert fit(wider, amortized(), make_trainer).strategy.report.graphs == []
    file.write_text(file.read_text().replace("cold", "hot"))
    third = fit(Dropped(), amortized(), make_trainer).strategy.report
    assert third.graphs == []
    assert "an earlier run" not in third.run.verdict


@pytest.mark.parametrize("first", [{"start": "amortized", "engine": "ort"}, {"start": "now"}])
def test_a_faster_step_is_known_to_later_runs(
    first: Any, make_trainer: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, paces: Callable[..., None]
) -> None:
    paces(torch=2.0, ort=1.0, compiling=2.5)
    assert fit(Dropped(), ORTStrategy(config=config_of(**first)), make_trainer).strategy.report.ort_runs > 0
    # without a file of an earlier run this would not start; whether other engines may run says nothing about this one
    for name in ("COST", "INDUCTOR_COST"):
        monkeypatch.setattr(engines, name, 1e9)
    assert fit(Dropped(), amortized(engine="auto"), make_trainer).strategy.report.ort_runs > 0
    assert fit(Dropped(), amortized(cache_dir=None), make_trainer).strategy.report.graphs == []


@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        ({"max_epochs": 3}, 12 - 2),
        ({"max_epochs": -1, "max_steps": 6}, 6 - 2),
        ({"max_epochs": 3, "max_steps": 3, "accumulate_grad_batches": 2}, 6 - 2),
        ({"max_epochs": -1, "max_time": "00:00:10:00"}, None),
    ],
)
def test_outlook_of_a_fit(settings: Any, steps: Any, make_trainer: Callable[..., Any]) -> None:
    found: list[Any] = []

    class Asks(Small):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> Any:
            trainer = self.trainer
            if trainer.fit_loop.total_batch_idx == 2:
                found.append(outlook_of(trainer, LIGHTNING, "training_step", 2, 0))
                found.append(at_window_start(trainer))
                trainer.should_stop = True

    trainer = make_trainer(limit_val_batches=0, **settings)
    trainer.fit(Asks())
    view, start = found[:2]
    assert view.steps == steps
    assert start == (2 % settings.get("accumulate_grad_batches", 1) == 0)
    timers = [callback for callback in trainer.callbacks if isinstance(callback, Timer)]
    assert (view.seconds is not None) == bool(timers)
    assert view.seconds is None or 500 < view.seconds <= 600


def test_a_limit_of_time_ends_a_run_of_unknown_or_longer_length() -> None:
    assert Outlook(None).steps_left(10, 5.0) is None
    assert Outlook(None, 20.0).steps_left(10, 5.0) == 40
    assert Outlook(30, 20.0).steps_left(10, 5.0) == 30
    assert Outlook(100, 20.0).steps_left(10, 5.0) == 40
    assert Outlook(-3).steps_left(10, 5.0) == 0


def test_outlook_of_validation_within_a_fit(make_trainer: Callable[..., Any]) -> None:
    found: list[Outlook] = []

    class Asks(Small):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            if not self.trainer.sanity_checking:
                found.append(outlook_of(self.trainer, LIGHTNING, "validation_step", len(found), 0))

    make_trainer(max_epochs=3).fit(Asks())
    # two batches after each of three epochs; in the first of the second epoch's there are 4 to come
    assert [view.steps for view in found][2] == pytest.approx(4, abs=2)
    assert all(view.steps is not None and math.isfinite(view.steps) for view in found)


def test_the_account_survives_json() -> None:
    report = CompileReport()
    report.run.startup_seconds, report.run.saved_seconds, report.run.paid_after = 2.0, 3.0, 120
    assert report.run.verdict == "paid for itself after step 120: 2.0 s to start up, 3.0 s saved so far"
    assert report.to_text().splitlines()[0] == report.run.verdict
    again = CompileReport.from_dict(report.to_dict())
    assert again == report
    assert again.run.verdict == report.run.verdict


def test_the_estimate_counts_what_unchanged_steps_do(make_trainer: Callable[..., Any]) -> None:
    texts = []
    for module in (Small(), Loops()):
        report = fit(module, amortized(cache_dir=None), make_trainer, max_steps=10, max_epochs=-1).strategy.report
        texts += [note.reason.text for note in report.notes if note.where == "training_step"]
    found = [text.partition("about ")[2].split() for text in texts]  # a number and its unit
    few, many = (float(number) / {"s": 1, "ms": 1000}[unit] for number, unit, *_ in found)
    assert many - few > 60 * 4 * 0.014  # seconds
