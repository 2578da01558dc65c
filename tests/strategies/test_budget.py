"""When compiling starts, and when it ends: decisions with a simulated clock."""

import itertools
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_ort.strategies.capture.budget import (
    FIRST,
    CompileBudget,
    Outlook,
    StartDecision,
    expected_cost,
    prior_fraction,
    projected_cost,
    seconds_text,
)
from lightning_ort.strategies.capture.gate import StartGate

STEP = 0.1  # seconds


class Run:
    """A run of steps as they are, of the same length each, until compiling starts."""

    def __init__(self, share: float = 0.05, store: dict[str, Any] | None = None, clock_from: float = 1000.0) -> None:
        self.now = clock_from
        self.budget = CompileBudget(share, lambda: self.now)
        self.decision = StartDecision("training_step", self.budget)
        self.store = store
        self.asked: list[int] = []

    def agree(self, key: str, found: dict[str, float]) -> dict[str, float]:
        assert self.store is not None
        return self.store.setdefault(key, found)

    def outlook(self, total: int | None, seconds: float | None) -> Outlook:
        left = None if total is None else total - self.decision.done
        return Outlook(left, self.decision.done, left, None if seconds is None else seconds - self.budget.elapsed)

    def starts_at(
        self,
        total: int | None,
        cost: float,
        fraction: float = 0.1,
        seconds: float | None = None,
        most: int = 5000,
        step: float = STEP,
        accumulate: int = 1,
    ) -> int | None:
        """The number of steps that run before compiling starts; None if it does not."""
        self.budget.begin()
        for done in range(most if total is None else min(total, most)):
            if self.decision.due and done % accumulate == 0:
                self.asked.append(done)
                view = self.outlook(total, seconds)
                if self.decision.decide(step, fraction, cost, view, None if self.store is None else self.agree):
                    return done
            self.decision.done += 1
            self.now += step
        return None


def test_a_long_run_of_known_length_starts_at_the_first_decision() -> None:
    # 1000 steps of 0.1 s: 5 s may be spent, 10 s are expected to be saved
    assert Run().starts_at(1000, cost=4.0) == FIRST


@pytest.mark.parametrize(
    ("cost", "fraction", "why"),
    [
        (4.0, 0.03, "3.0 s expected to be saved, about 4.0 s to compile"),
        (6.0, 0.1, "10.0 s expected to be saved, about 6.0 s to compile, compile_budget allows 5.0 s"),
    ],
)
def test_a_run_that_does_not_pay_or_has_no_budget_never_starts(cost: float, fraction: float, why: str) -> None:
    run = Run()
    assert run.starts_at(1000 + FIRST, cost, fraction) is None
    assert str(run.decision.estimate) == why  # as it was at first, when there was most to save
    first = Run()
    first.budget.begin()
    first.decision.done, first.now = FIRST, first.now + FIRST * STEP
    assert not first.decision.decide(STEP, fraction, cost, first.outlook(1000 + FIRST, None))
    assert str(first.decision.estimate) == why


def test_a_slow_first_batch_is_no_measure_of_the_others() -> None:
    """2 s, then steps of 0.1 s: 997 of them are to come, not 997 of 0.73 s, which would allow 36 s."""
    run = Run()
    run.budget.begin()
    run.now += 2.0
    run.budget.end_first_batch()
    run.now += 2 * STEP
    run.budget.end_first_batch()  # changes nothing
    assert run.budget.allowed(Outlook(997, 3, 997)) == pytest.approx(0.05 * (2.2 + 997 * STEP))
    run.decision.done = 3
    assert not run.decision.decide(STEP, 0.1, 6.0, Outlook(997, 3, 997))


@pytest.mark.parametrize(("batches_done", "expected"), [(1, 1), (400, 0)])
def test_a_late_validation_ends_no_first_batch(batches_done: int, expected: int) -> None:
    """As in a later fit, whose training step an earlier one has captured: only the validation step waits there."""
    ended: list[bool] = []
    module: Any = SimpleNamespace(
        module=SimpleNamespace(trainer=SimpleNamespace(sanity_checking=False)),
        begin_run=lambda: None,
        budget=SimpleNamespace(end_first_batch=lambda: ended.append(True)),
        outlook=lambda name, done: Outlook(10, batches_done, 10),
    )
    gate = StartGate(module, "validation_step", (), lambda: None)
    for _ in range(2):
        assert gate.opens((), {}, busy=False) is None
    assert len(ended) == expected


def test_a_run_of_unknown_length_doubles() -> None:
    """It starts when twice the time so far allows the cost: 0.05 * 2 * 0.1 s * done >= 4 s."""
    run = Run()
    start = run.starts_at(None, cost=4.0, fraction=0.5)
    assert start is not None
    assert start >= 400
    before = run.asked[run.asked.index(start) - 1]
    assert before < 400


def test_decisions_are_few() -> None:
    run = Run()
    assert run.starts_at(None, cost=1e9) is None
    assert run.asked[:6] == [3, 5, 8, 12, 18, 27]
    assert all(later <= 1.5 * earlier + 1 for earlier, later in itertools.pairwise(run.asked))
    assert len(run.asked) < 20  # of 5000 steps


def test_what_was_spent_counts_for_all_steps() -> None:
    run = Run()
    run.budget.spend(2.0)
    assert run.starts_at(1000, cost=4.0) is None
    other = Run()
    other.budget.spend(-1.0)  # faster than expected earns nothing
    assert other.budget.spent == 0.0
    assert other.starts_at(1000, cost=4.0) == FIRST


def test_time_spent_compiling_is_no_measure_of_the_steps() -> None:
    """Ten steps of 0.1 s and 30 s of compiling: the 90 steps to come take 9 s, not 280."""
    run = Run()
    budget = run.budget
    budget.begin()
    run.now += 10 * STEP + 30.0
    budget.spend(30.0)
    assert budget.allowed(Outlook(90, 10, 90)) == pytest.approx(0.05 * (31 + 9))
    # a limit of time leaves as many steps as the steps alone have needed
    assert budget.steps_left(10, Outlook(None, 10, None, seconds=5.0)) == pytest.approx(50)


def test_a_warm_cache_is_cheap() -> None:
    assert expected_cost(1500) == pytest.approx(23.0)
    assert expected_cost(40) == pytest.approx(1.1)
    assert expected_cost(40, first=True) == pytest.approx(2.1)
    assert expected_cost(1500, cold=12.0) == pytest.approx(8.4)
    assert expected_cost(1500, cold=12.0, warm=1.5) == 1.5
    assert expected_cost(1500, training_seconds=8.0) == pytest.approx(4.0)
    run = 1000 * STEP
    assert 0.05 * run < expected_cost(1500)
    assert Run().starts_at(1000, expected_cost(1500)) is None
    assert Run().starts_at(1000, expected_cost(1500, cold=12.0, warm=1.5)) == FIRST


def test_the_first_graphs_tell_what_the_others_will_take() -> None:
    assert projected_cost(0.4, 2, 100, first=False) == 0.4  # as long as any compilation takes
    assert projected_cost(1.5, 10, 100, first=False) == pytest.approx(0.5 + 10.0)
    assert projected_cost(1.5, 10, 100, first=True) == 1.5
    assert projected_cost(4.0, 100, 100, first=False) == 4.0
    assert projected_cost(4.0, 150, 100, first=False) == 4.0  # a graph may hold more than the unchanged step showed


def test_max_time_ends_a_run_of_unknown_or_longer_length() -> None:
    # 20 s: 1 s may be spent, 2 s are expected to be saved
    for total in (None, 1_000_000):
        assert Run().starts_at(total, cost=0.9, seconds=20.0) == FIRST
        assert Run().starts_at(total, cost=1.1, seconds=20.0, most=190) is None


def test_resumed_steps_count_neither_as_done_nor_as_to_come() -> None:
    """Of 1000 steps 900 are in the checkpoint: 100 steps take 10 s, which allow 0.5 s."""
    resumed = Run(clock_from=5.0)
    assert resumed.starts_at(100, cost=0.6, fraction=0.3) is None
    assert Run().starts_at(1000, cost=0.6, fraction=0.3) == FIRST
    assert Run().starts_at(100, cost=0.4, fraction=0.3) == FIRST


def test_several_processes_decide_alike() -> None:
    store: dict[str, Any] = {}
    # one finds its steps slow enough, the other does not; the first to ask decides for both
    slow, fast = Run(store=store), Run(store=store)
    assert slow.starts_at(1000, cost=4.0, step=STEP) == FIRST
    assert fast.starts_at(1000, cost=4.0, step=STEP / 10) == FIRST
    assert store == {"start/training_step/1": {"starts": 1.0}}
    store.clear()
    slow, fast = Run(store=store), Run(store=store)
    assert fast.starts_at(1000, cost=4.0, step=STEP / 10) is None
    assert slow.starts_at(1000, cost=4.0, step=STEP) is None
    assert slow.asked == fast.asked


def test_no_decision_within_an_accumulation_window() -> None:
    run = Run()
    assert run.starts_at(1000, cost=4.0, accumulate=4) == 4
    waits = Run()
    assert waits.starts_at(1000, cost=1e9, accumulate=4) is None
    assert all(step % 4 == 0 for step in waits.asked)
    assert len(waits.asked) > 5


def test_prior_and_texts() -> None:
    assert prior_fraction(0.001) > prior_fraction(0.1) > 0
    texts = [seconds_text(seconds) for seconds in (0.0, 0.01, 2.34, 123.4)]
    assert texts == ["0 s", "less than 0.1 s", "2.3 s", "123 s"]
