"""Steps run unchanged until compiling pays, and then go on captured; what the report says of it."""

import math
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch
from lightning.pytorch.callbacks import Callback, Timer
from small_modules import Appends, Small, loader
from torch import Tensor, nn

from lightning_ort import CompileReport, ORTStrategy
from lightning_ort._imports import LIGHTNING
from lightning_ort.compiler.backend import ORTBackend
from lightning_ort.compiler.report import ReasonType
from lightning_ort.config import DEFAULT_START, ORTConfig, Start
from lightning_ort.strategies.capture import budget, gate
from lightning_ort.strategies.capture.autotuner import StepAutotuner
from lightning_ort.strategies.capture.budget import FIRST, CompileBudget, Outlook
from lightning_ort.strategies.capture.outlook import at_window_start, outlook_of

STEPS = 40


def amortized(**config: Any) -> ORTStrategy:
    return ORTStrategy(config={"start": "amortized", "engine": "ort", **config})


class Dropped(Small):
    """Enough batches, dropout, a hook and a scheduler; notes which steps were captured."""

    def __init__(self) -> None:
        super().__init__()
        self.net.insert(2, nn.Dropout(0.5))
        self.captured: list[bool] = []
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


@pytest.fixture
def compiling_is_free(monkeypatch: pytest.MonkeyPatch, regions_win: None) -> None:
    """It is expected to pay for the shortest run, and may take as long as it does."""
    monkeypatch.setattr(budget, "_COST", 0.0)
    monkeypatch.setattr(budget, "_COST_PER_OPERATION", 0.0)
    monkeypatch.setattr(budget, "_FIRST_COMPILATION", 0.0)
    monkeypatch.setattr(budget, "EVALUATION", 0.0)
    monkeypatch.setattr(CompileBudget, "allowed", lambda self, outlook: 1e6)


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
    assert "expected to be saved" in note.reason.text
    assert "ORTConfig(start='now') compiles at once" in note.reason.text
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


@pytest.mark.usefixtures("compiling_is_free")
def test_a_long_fit_goes_over_in_the_middle(make_trainer: Callable[..., Any]) -> None:
    stock, module = Dropped(), Dropped()
    fit(stock, "auto", make_trainer)
    report = fit(module, amortized(), make_trainer).strategy.report
    assert report.ort_runs > 0
    assert report.run.startup_seconds > 0
    # dropout's masks, the hook and the scheduler are the same before and after
    assert module.losses == pytest.approx(stock.losses, rel=1e-4)
    assert module.losses[:FIRST] == stock.losses[:FIRST]
    assert module.calls == stock.calls
    assert module.rates == stock.rates
    for mine, theirs in zip(module.parameters(), stock.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
    (step,) = report.steps
    assert report.run.verdict.startswith("not worth it" if step.engine == "torch" else ("paid", "not paid"))


@pytest.mark.usefixtures("compiling_is_free")
def test_accumulation_windows_stay_whole(make_trainer: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert seen[0] == 4  # not 3, the first decision
    assert module.losses == pytest.approx(stock.losses, rel=1e-4)
    assert module.rates == stock.rates


@pytest.mark.usefixtures("compiling_is_free")
def test_nothing_is_compiled_in_the_sanity_check(make_trainer: Callable[..., Any]) -> None:
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
    report = fit(Small(), amortized(), make_trainer, deterministic=True).strategy.report
    assert [graph.name for graph in report.graphs] == ["training_step/step_0"]


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
    monkeypatch.setattr(gate, "DEFAULT_START", default)
    report = fit(Small(), ORTStrategy(), make_trainer).strategy.report
    assert (report.graphs == []) == (default == "amortized")
    # what needs graphs gets them at once
    for config in ({"placement": "always"}, {"check_against_eager": True}, {"save_onnx_dir": str(tmp_path / "onnx")}):
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


@pytest.mark.usefixtures("compiling_is_free")
def test_a_budget_that_is_used_up_ends_capture(
    make_trainer: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dynamo compiles this step again each time; the budget allows 10 s, and each start-up of it counts as 4 s."""
    spend = CompileBudget.spend
    monkeypatch.setattr(CompileBudget, "allowed", lambda self, outlook: 10.0)
    monkeypatch.setattr(CompileBudget, "spend", lambda self, seconds: spend(self, 4.0))

    class Long(Appends):
        def train_dataloader(self) -> Any:
            return loader(8 * STEPS)

    stock, module = Long(), Long()
    fit(stock, "auto", make_trainer)
    report = fit(module, amortized(audit="off"), make_trainer).strategy.report
    assert report.ort_runs > 0
    (note,) = [note for note in report.notes if note.reason.type is ReasonType.BUDGET]
    assert note.reason.text.startswith("12.0 s of 10.0 s allowed; raise ORTConfig(compile_budget=...)")
    assert note.reason.text.endswith("the step stays in PyTorch")
    assert report.run.verdict.startswith("not worth it: ")
    assert report.run.verdict.endswith("training_step used up its compile budget")
    assert len({graph.name for graph in report.graphs if "forward" in graph.name}) == 3
    assert module.losses == pytest.approx(stock.losses, rel=1e-4)


@pytest.mark.usefixtures("compiling_is_free")
def test_the_rest_of_a_call_is_left_to_torch(make_trainer: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Three graphs in one step; after the first the budget is far exceeded."""
    compiled = 0
    call = ORTBackend._compile

    def counting(self: ORTBackend, *args: Any) -> Any:
        nonlocal compiled
        compiled += 1
        monkeypatch.setattr(CompileBudget, "allowed", lambda self, outlook: 0.0)
        return call(self, *args)

    monkeypatch.setattr(ORTBackend, "_compile", counting)

    class Broken(Dropped):
        def loss(self, batch: Any) -> Tensor:
            x, y = batch
            first = self.net[:2](x)
            torch._dynamo.graph_break()
            second = self.net[2](first)
            torch._dynamo.graph_break()
            return self.net[3](second).square().mean()

    stock, module = Broken(), Broken()
    fit(stock, "auto", make_trainer)
    report = fit(module, amortized(), make_trainer).strategy.report
    assert compiled == len(report.graphs) == 2  # the first forward and its backward
    assert report.ort_runs > 0
    assert [note.reason.type for note in report.notes] == [ReasonType.BUDGET]
    assert module.losses == pytest.approx(stock.losses, rel=1e-4)


@pytest.mark.usefixtures("compiling_is_free")
def test_later_runs_know_what_earlier_ones_found(
    make_trainer: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    names = lambda: [path for path in (tmp_path / "cache").iterdir() if path.name.startswith("start-")]  # noqa: E731
    ms = {"ort": 3.0, "torch": 2.0}
    monkeypatch.setattr(
        StepAutotuner, "milliseconds", property(lambda self: {each: ms[each] for each in self._samples})
    )
    first = fit(Dropped(), amortized(), make_trainer).strategy.report
    assert first.ort_runs > 0
    assert [step.engine for step in first.steps] == ["torch"]
    assert first.run.verdict.startswith("not worth it: ")
    (file,) = names()
    monkeypatch.setattr(budget, "_COST", 1e6)
    second = fit(Dropped(), amortized(), make_trainer).strategy.report
    assert second.graphs == []  # nothing is tried that was slower
    assert "in an earlier run the unchanged step was the fastest (3 ms ort, 2 ms torch)" in second.run.verdict
    # another structure is another matter, and so is a damaged file
    wider = Dropped()
    wider.net.append(nn.Linear(3, 3))
    assert fit(wider, amortized(), make_trainer).strategy.report.graphs == []
    file.write_text(file.read_text().replace("cold", "hot"))
    third = fit(Dropped(), amortized(), make_trainer).strategy.report
    assert third.graphs == []
    assert "an earlier run" not in third.run.verdict


@pytest.mark.parametrize(
    ("settings", "steps", "batches"),
    [
        ({"max_epochs": 3}, 12 - 2, 12 - 2),
        ({"max_epochs": -1, "max_steps": 6}, 6 - 2, 6 - 2),
        ({"max_epochs": 3, "max_steps": 3, "accumulate_grad_batches": 2}, 6 - 2, 6 - 2),
        ({"max_epochs": -1, "max_time": "00:00:10:00"}, None, None),
    ],
)
def test_outlook_of_a_fit(settings: Any, steps: Any, batches: Any, make_trainer: Callable[..., Any]) -> None:
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
    assert isinstance(view, Outlook)
    assert (view.steps, view.batches_done, view.batches) == (steps, 2, batches)
    assert start == (2 % settings.get("accumulate_grad_batches", 1) == 0)
    timers = [callback for callback in trainer.callbacks if isinstance(callback, Timer)]
    assert (view.seconds is not None) == bool(timers)
    assert view.seconds is None or 500 < view.seconds <= 600


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


@pytest.mark.usefixtures("compiling_is_free")
def test_a_faster_step_pays_and_is_known_to_later_runs(
    make_trainer: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each step saves a thousand seconds, and a start-up counts as five thousand."""
    ms = {"ort": 1e6, "torch": 2e6}  # longer than any compilation, however busy the machine is
    monkeypatch.setattr(
        StepAutotuner, "milliseconds", property(lambda self: {each: ms[each] for each in self._samples})
    )
    monkeypatch.setattr(StepAutotuner, "saved_by", lambda self, engine: (ms["torch"] - ms[engine]) / 1000)
    monkeypatch.setattr(StepAutotuner, "overhead", lambda self, engine: 5000.0)
    report = fit(Dropped(), amortized(), make_trainer).strategy.report
    run = report.run
    assert report.ort_runs > 0
    assert run.startup_seconds == 5000.0  # the call that compiled took less than the step that it replaced
    assert run.saved_seconds == pytest.approx(round(run.saved_seconds, -3))  # whole steps
    assert run.paid_after is not None
    assert run.paid_after > FIRST + 5
    assert report.to_text().splitlines()[0].startswith(f"paid for itself after step {run.paid_after}: ")
    # without a file of an earlier run this would not start
    monkeypatch.setattr(budget, "_COST", 1e9)
    assert fit(Dropped(), amortized(), make_trainer).strategy.report.ort_runs > 0
    assert fit(Dropped(), amortized(cache_dir=None), make_trainer).strategy.report.graphs == []


def test_the_account_survives_json() -> None:
    report = CompileReport()
    report.run.startup_seconds, report.run.saved_seconds, report.run.paid_after = 2.0, 3.0, 120
    assert report.run.verdict == "paid for itself after step 120: 2.0 s to start up, 3.0 s saved so far"
    assert report.to_text().splitlines()[0] == report.run.verdict
    again = CompileReport.from_dict(report.to_dict())
    assert again == report
    assert again.run.verdict == report.run.verdict


class Loops(Small):
    """Three layers, many operations."""

    def add(self, loss: Tensor) -> Tensor:
        for _ in range(15):
            loss = loss + self.net[0].weight.exp().tanh().mean() * 0.001
        return loss

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.add(self.add(self.add(self.add(self.loss(batch)))))

    def train_dataloader(self) -> Any:
        return loader(8 * STEPS)


class Parts(Loops):
    """The same in several graphs."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        torch._dynamo.graph_break()
        loss = self.add(loss)
        torch._dynamo.graph_break()
        loss = self.add(loss)
        torch._dynamo.graph_break()
        loss = self.add(loss)
        torch._dynamo.graph_break()
        return self.add(loss)


def test_the_estimate_counts_what_unchanged_steps_do(make_trainer: Callable[..., Any]) -> None:
    texts = []
    for module in (Small(), Loops()):
        report = fit(module, amortized(cache_dir=None), make_trainer, max_steps=10, max_epochs=-1).strategy.report
        texts += [note.reason.text for note in report.notes if note.where == "training_step"]
    few, many = (float(text.partition("about ")[2].partition(" s ")[0]) for text in texts)
    assert many - few > 60 * 4 * 0.014  # seconds


def test_a_bad_estimate_stops_early(make_trainer: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The first graphs take longer than expected, so the others are left out, before the budget is used up."""
    monkeypatch.setattr(budget, "_COST", 0.0)
    monkeypatch.setattr(budget, "_FIRST_COMPILATION", 0.0)
    monkeypatch.setattr(budget, "_COST_PER_OPERATION", 0.0)
    monkeypatch.setattr(budget, "_SAVED_DISPATCH", 0.9)
    monkeypatch.setattr(CompileBudget, "steps_left", lambda self, done, outlook: 1e6)
    monkeypatch.setattr(CompileBudget, "allowed", lambda self, outlook: 3.0)
    call = ORTBackend.__call__

    def slowly(self: ORTBackend, *args: Any, **kwargs: Any) -> Any:
        now[0] += 1.0
        return call(self, *args, **kwargs)

    now = [0.0]
    clock = SimpleNamespace(perf_counter=lambda: time.perf_counter() / 1000 + now[0])
    monkeypatch.setattr("lightning_ort.strategies.capture.account.time", clock)
    monkeypatch.setattr(ORTBackend, "__call__", slowly)
    module, stock = Parts(), Parts()
    fit(stock, "auto", make_trainer)
    strategy = amortized(cache_dir=None, capture="step")
    report = fit(module, strategy, make_trainer).strategy.report
    (note,) = [note for note in report.notes if note.reason.type is ReasonType.BUDGET]
    assert "of 3.0 s allowed, " in note.reason.text
    assert "expected; raise ORTConfig(compile_budget=...)" in note.reason.text
    assert 0 < sum(graph.name.startswith("training_step/forward") for graph in report.graphs) < 5
    assert module.losses == pytest.approx(stock.losses, rel=1e-4)
