"""Which engine a captured step goes on with, by scripted times: trials, later checks, engines that fail."""

import dataclasses
from collections.abc import Callable, Collection
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_ort.compiler import malloc
from lightning_ort.compiler.report import CompileReport, StepReport
from lightning_ort.strategies.capture import autotuner
from lightning_ort.strategies.capture.account import StepAccount
from lightning_ort.strategies.capture.autotuner import FIRST_CHECK, StepAutotuner
from lightning_ort.strategies.capture.budget import CompileBudget, Outlook
from lightning_ort.strategies.capture.trials import StepTrials

Seconds = Callable[[str, int], float]


class Bench:
    """A captured step without a module: a script says how long each engine takes in each step."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, engines: Collection[str], seconds: Seconds) -> None:
        self.engines, self.seconds, self.now, self.done = engines, seconds, 0.0, 0
        self.left: list[str] = []
        self.choices: list[str] = []
        self.agree: Any = None
        self.times_steps = True
        self.amortized, self.budget, self.startup_seconds = False, CompileBudget(1.0), dict[tuple[str, str], float]()
        self.report = CompileReport()
        self.backend = SimpleNamespace(report=self.report, agree=None)
        loop = SimpleNamespace(total_batch_idx=0)
        trainer = SimpleNamespace(
            fit_loop=loop, progress_bar_callback=None, is_global_zero=True, state=SimpleNamespace(fn="fit")
        )
        self.module = SimpleNamespace(trainer=trainer)
        monkeypatch.setattr(autotuner.time, "perf_counter", lambda: self.now)
        self.account = StepAccount(self, "training_step")  # type: ignore[arg-type]
        self.trials = StepTrials(self, "training_step", self.account, self.left.append)  # type: ignore[arg-type]
        self.trials.restart("step")

    def new_autotuner(self, name: str, without: Collection[str]) -> StepAutotuner:
        return StepAutotuner([engine for engine in self.engines if engine not in without], lambda: None)  # type: ignore[misc]

    def new_check(self, engine: Any) -> StepAutotuner:
        return StepAutotuner([engine, "torch"], lambda: None)

    def record_choice(self, where: str, kind: Any, text: str, announced: bool = False) -> None:
        self.choices.append(text)

    def outlook(self, name: str, done: int) -> Outlook:
        return Outlook(100, self.module.trainer.fit_loop.total_batch_idx, 100)

    def begin_run(self) -> None:
        pass

    def run(self, steps: int) -> list[str]:
        """Run steps, and return their engines."""
        engines = []
        for _ in range(steps):
            self.account.count_step(self.trials.timer is not None)
            engines.append(self.trials.next_engine())
            if (timer := self.trials.timer) is not None:
                with timer.timed():
                    self.now += self.seconds(engines[-1], self.done)
            self.done += 1
            self.module.trainer.fit_loop.total_batch_idx += 1
        return engines


@pytest.mark.parametrize("work", [(1.0, 9.0), (1.0, 1.0, 9.0, 9.0)])
def test_work_that_alternates_meets_each_engine(work: tuple[float, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """As in GANs: a generator's step and a discriminator's. Captured, each takes 0.8 of its time."""
    share = {"ort": 0.8, "torch": 1.0}
    bench = Bench(monkeypatch, ("ort", "torch"), lambda engine, done: share[engine] * work[done % len(work)])
    bench.run(60)
    (step,) = bench.report.steps
    assert step.engine == "ort"
    assert step.ms["torch"] / step.ms["ort"] == pytest.approx(1.25)


def test_each_verdict_gives_the_memory_of_the_trial_back(monkeypatch: pytest.MonkeyPatch) -> None:
    trimmed: list[int] = []
    monkeypatch.setattr(malloc, "trim", lambda: trimmed.append(bench.done))
    bench = Bench(monkeypatch, ("ort", "torch"), lambda engine, done: {"ort": 1.0, "torch": 2.0}[engine])
    bench.run(FIRST_CHECK)
    (first,) = trimmed
    assert 4 <= first < FIRST_CHECK
    bench.run(FIRST_CHECK)  # with a check
    assert len(trimmed) == 2


def test_equal_engines_are_equal_where_work_alternates(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch, ("ort", "torch"), lambda engine, done: 1.0 + 8.0 * (done % 2))
    bench.run(60)
    (step,) = bench.report.steps
    assert step.ms["ort"] == pytest.approx(step.ms["torch"])


def test_an_engine_that_fails_after_it_won_gives_way_to_a_new_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    ms = {"ort": 3.0, "torch": 2.0, "inductor": 1.0}
    bench = Bench(monkeypatch, tuple(ms), lambda engine, done: ms[engine])
    bench.run(40)
    assert bench.trials.engine == "inductor"
    assert bench.trials.give_up("inductor")
    bench.trials.restart("step")
    engines = bench.run(40)
    assert "inductor" not in engines
    assert bench.left == ["3 s captured, 2 s unchanged"]
    assert bench.report.steps[-1].ms.keys() == {"ort", "torch"}


def test_an_engine_that_fails_within_the_trial_leaves_it(monkeypatch: pytest.MonkeyPatch) -> None:
    ms = {"ort": 1.0, "torch": 2.0, "inductor": 0.5}
    bench = Bench(monkeypatch, tuple(ms), lambda engine, done: ms[engine])
    bench.run(2)
    assert not bench.trials.give_up("inductor")
    bench.run(40)
    assert bench.trials.engine == "ort"
    assert bench.report.steps[0].ms.keys() == {"ort", "torch"}


def test_a_check_that_is_lost_takes_back_what_was_counted_as_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    def seconds(engine: str, done: int) -> float:
        return {"torch": 6.0, "ort": 4.0 if done < 50 else 9.0}[engine]

    bench = Bench(monkeypatch, ("ort", "torch"), seconds)
    bench.report.run.startup_seconds = 10.0
    bench.run(30)
    (first,) = bench.report.steps
    assert first.engine == "ort"
    assert bench.report.run.saved_seconds > 20
    assert bench.report.run.paid_after is not None
    bench.run(FIRST_CHECK + 30)
    (last,) = bench.report.steps
    assert last.engine == "torch"
    assert bench.report.run.saved_seconds == pytest.approx(0, abs=1e-6)
    assert bench.report.run.paid_after is None
    assert len(bench.left) == 1
    assert bench.left[0].startswith(f"timed again after {FIRST_CHECK} steps: 9 s captured, 6 s unchanged")


def test_interruptions_of_the_unchanged_step_are_no_saving(monkeypatch: pytest.MonkeyPatch) -> None:
    turns = iter(range(1000))

    def seconds(engine: str, done: int) -> float:
        if engine == "ort":
            return 1.0
        return 1.5 if next(turns) % 3 == 1 else 9.0  # another program runs beside two steps of three

    bench = Bench(monkeypatch, ("ort", "torch"), seconds)
    engines = bench.run(100)
    (report,) = bench.report.steps
    assert report.ms == {"ort": 1000.0, "torch": 9000.0}
    assert engines.count("torch") == 7
    quartile = 3.375  # of 1.5, 1.5, 9, 9, 9, 9
    assert bench.report.run.saved_seconds == pytest.approx((quartile - 1) * (100 - 14), abs=2 * quartile)


def test_a_check_that_is_won_by_less_corrects_what_was_counted_as_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    def seconds(engine: str, done: int) -> float:
        return {"torch": 9.0 if done < 50 else 3.0, "ort": 1.0}[engine]  # another program ran during the first trial

    bench = Bench(monkeypatch, ("ort", "torch"), seconds)
    bench.run(30)
    counted = bench.report.run.saved_seconds
    assert counted > 8 * 10
    bench.run(FIRST_CHECK)
    steps = (counted / 8 + FIRST_CHECK) - 2 * 3  # outside of the trials
    assert bench.trials.engine == "ort"
    assert bench.report.run.saved_seconds == pytest.approx(2 * steps, rel=0.05)


def test_a_check_that_is_won_costs_the_turns_in_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch, ("ort", "torch"), lambda engine, done: {"ort": 1.0, "torch": 2.0}[engine])
    bench.run(30)
    before = bench.report.run.trial_seconds
    assert before == 0  # on ort nothing was lost
    engines = bench.run(FIRST_CHECK + 30)
    assert bench.report.run.trial_seconds == pytest.approx(engines.count("torch") * 1.0)
    assert bench.trials.engine == "ort"
    saved = (len(engines) + 30) - 2 * 3 * 2  # steps outside of the two trials, of three rounds each
    assert bench.report.run.saved_seconds == pytest.approx(saved, abs=4)


def test_a_process_does_not_go_by_another_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 has kept inductor, where this process has lost it: only PyTorch's time is common to both checks."""
    keys: list[str] = []

    def agree(key: str, times: dict[str, Any]) -> dict[str, Any]:
        keys.append(key)
        return {"torch": 5000.0} if len(keys) > 1 else times

    bench = Bench(monkeypatch, ("ort", "torch"), lambda engine, done: {"ort": 1.0, "torch": 2.0}[engine])
    bench.backend.agree = agree
    bench.run(FIRST_CHECK + 60)
    assert keys == ["training_step/step/1", f"training_step/step/ort/{FIRST_CHECK}/1"]
    assert bench.trials.engine == "ort"
    assert bench.left == []


def test_a_deterministic_run_times_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch, ("ort", "torch"), lambda engine, done: {"ort": 1.0, "torch": 2.0}[engine])
    bench.run(5)
    bench.times_steps = False
    bench.trials.begin_run()
    assert set(bench.run(3 * FIRST_CHECK)) == {"ort"}
    assert bench.report.steps == []


def test_a_step_that_an_earlier_run_captured_has_a_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch, ("ort", "torch"), lambda engine, done: 1.0)
    bench.amortized, bench.budget = True, CompileBudget(0.5, clock=lambda: bench.now)
    history = SimpleNamespace(store=lambda *args: stored.append(args))
    stored: list[Any] = []
    gate: Any = SimpleNamespace(histories={"ort": history}, step_seconds=2.0, done=3)
    bench.account.start(gate, "ort")
    bench.account._spend(7.0)
    bench.account.end_run()
    assert [args[1] for args in stored] == [7.0]
    bench.account.begin_run()  # of a run that begins with a recompilation
    bench.budget = CompileBudget(0.5, clock=lambda: bench.now)
    bench.budget.begin()
    assert bench.account._allowed == pytest.approx(0.5 * 100 * 2.0)
    bench.account._spend(0.001)
    bench.account.end_run()
    assert len(stored) == 1  # not what that run spent, which is no start


def test_what_a_step_was_given_up_for_counts_more_than_its_trial() -> None:
    step = StepReport("training_step", {"ort": 1.0, "torch": 2.0})
    assert str(step).endswith("continues with ort")
    assert str(dataclasses.replace(step, kept="torch")).endswith("continues with torch")


def test_samples_that_differ_by_more_than_the_engines_are_no_verdict() -> None:
    def timed(**seconds: list[float]) -> StepAutotuner:
        timer = StepAutotuner(list(seconds), lambda: None)  # type: ignore[arg-type]
        timer._samples = {engine: [9.0, *samples] for engine, samples in seconds.items()}  # type: ignore[misc]
        return timer

    assert timed(ort=[1.0, 1.1, 0.9, 1.0], torch=[2.0, 2.1, 1.9, 2.0]).is_clear
    assert not timed(ort=[1.0, 1.1, 0.9, 1.0], torch=[1.0, 300.0, 1.1, 300.0]).is_clear
    assert timed(torch=[1.0, 2.0]).is_clear
