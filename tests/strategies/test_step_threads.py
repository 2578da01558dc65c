"""How many threads a step that nothing compiles runs on: by plain calls, and by scripted times in a fit."""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from small_modules import Small, loader
from torch import Tensor, nn, optim

from lightning_ort import ORTStrategy
from lightning_ort.compiler.machine.openmp import OneThread, OneThreadInAll
from lightning_ort.optim import fused_update
from lightning_ort.strategies.race.duel import LEAST, MOST
from lightning_ort.strategies.race.race import Race
from lightning_ort.strategies.race.terms import ON_ONE_THREAD, UNCHANGED, Expected, Now, Took
from lightning_ort.strategies.race.threads import AGAIN, LOOK, PATIENCE, SLOW, WATCHED, Threads
from lightning_ort.strategies.race.turn import Turn


@pytest.fixture(autouse=True)
def one_thread_is_tried(limits: Callable[..., None]) -> None:
    limits(one_thread=5.0, slowdown=1.25)


Times = tuple[float, float]  # seconds on all threads and on one


def drive(threads: Threads, times: Callable[[int], Times] | Times, steps: int, left: float | None = 1e6) -> str:
    """Run steps; return their ways in order, an A for all threads and a 1 for one."""
    order = ""
    for _ in range(steps):
        way = threads.next(left, True)
        on_all, on_one = times(threads.steps) if callable(times) else times
        assert way in (UNCHANGED, ON_ONE_THREAD)
        order += "A" if way == UNCHANGED else "1"
        if threads.wants_time:
            threads.done(Took(on_all if way == UNCHANGED else on_one))
        else:
            threads.pass_by(1)
    return order


def test_the_faster_goes_on() -> None:
    assert drive(Threads(2, 2), (0.1, 0.03), 19) == "AAAAA11A" + 11 * "1"
    order = drive(Threads(2, 2), (0.1, 0.099), 2 * AGAIN)
    first, second = order[:AGAIN], order[AGAIN:]
    assert first.count("1") == LEAST, "the race waits for it"
    assert first[4 + 2 * LEAST :] == (AGAIN - 4 - 2 * LEAST) * "A"
    assert second.count("1") == MOST


def test_it_begins_when_steps_have_settled() -> None:
    """All threads are faster, but not in the first steps beside other programs."""
    slow = [2.5, 0.9, 0.4, 1.1, 0.5, 0.9]
    threads = Threads(2, 2)
    order = drive(threads, lambda step: (slow[step] if step < len(slow) else 0.12, 0.2), 60)
    assert order.count("1") == 3, "one of them to see whether it is far faster"
    assert order.index("11") > len(slow)
    assert threads.kept == UNCHANGED
    uneven = Threads(2, 2)  # as long as the fit goes on
    assert drive(uneven, lambda step: (0.1 + 0.4 * (step % 2), 0.01), 60).index("1") <= PATIENCE + 2
    assert uneven.kept == ON_ONE_THREAD


@pytest.mark.parametrize("waited", [0.0, 0.5])
@pytest.mark.parametrize("length", [15, 20, 30])
@pytest.mark.parametrize("begins", [0, 3, 6, 210])
def test_what_the_next_steps_contradict_is_taken_back(begins: int, length: int, waited: float) -> None:
    """Other work slows steps on all threads more than those on one, as long as the duel lasts and somewhat longer."""
    threads, order, total = Threads(2, 2), "", 50 if begins < 50 else 300
    for step in range(total):
        is_busy = begins <= step < begins + length
        way = threads.next(total - step, True)
        order += "A" if way == UNCHANGED else "1"
        on_all, on_one = (0.44, 0.32) if is_busy else (0.11, 0.2)
        seconds = on_all if way == UNCHANGED else on_one
        threads.done(Took(seconds, waited * seconds * is_busy))
    assert "1" in order[begins : begins + length], "in it, one thread is faster"
    assert order[begins + length :].count("1") <= 4
    assert threads.kept == UNCHANGED


def test_on_one_thread_a_step_on_all_is_run_now_and_then() -> None:
    """The machine was busy when the steps settled, and a step on one thread does not tell that it is no longer."""
    order = drive(Threads(2, 2), lambda step: (0.5 if step < 12 else 0.11, 0.2), 40, left=40)
    assert "1" in order[:12]
    assert order[-15:] == 15 * "A"
    order = drive(Threads(2, 2), (0.1, 0.01), AGAIN)
    assert order[8:].count("A") == order[8:].count("1A1") <= 3, "what has lost by much is run less often"


def test_where_ways_are_far_apart_one_step_is_enough() -> None:
    assert drive(Threads(2, 2), lambda step: (0.5 + 0.5 * (step % 2), 0.09), 10) == "AAAA111A11"


def test_what_a_trial_may_cost() -> None:
    threads = Threads(64, 64)
    assert drive(threads, (0.01, 0.5), 20) == "AAAAA1" + 14 * "A"  # the first one was enough
    assert "1" not in drive(threads, (0.01, 0.5), AGAIN)  # what has cost 50 steps waits
    assert not threads.wants_time
    assert "1" in drive(threads, (0.01, 0.5), 1500)
    threads = Threads(64, 64)
    assert "1" not in drive(threads, (0.01, 0.005), 1000, left=1000)  # too few to pay for it
    assert not threads.wants_time
    assert "1" in drive(Threads(64, 2), (0.01, 0.005), 100, left=1000)  # of which two cores could run no more
    assert "1" not in drive(Threads(64, 64), (0.1, 0.05), AGAIN)  # a step may take six seconds more
    assert "1" in drive(Threads(2, 2), (4.0, 2.0), AGAIN)  # four
    assert "1" not in drive(Threads(1, 64), (0.1, 0.05), 2 * AGAIN)


def test_a_turn_that_has_lost_ends_as_the_other_goes_on() -> None:
    threads = Threads(4, 4)
    drive(threads, (0.1, 0.1), 5)
    assert threads.next(1e6, True) == ON_ONE_THREAD
    assert threads.longest == pytest.approx(0.2)
    drive(threads, lambda step: (0.14 if step == 7 else 0.1, 0.1), 5)
    assert threads.next(1e6, True) == ON_ONE_THREAD
    assert threads.longest == pytest.approx(0.28), "than each of the other"
    drive(threads, (0.1, 0.1), 1)
    assert threads.next(1e6, True) == UNCHANGED
    assert threads.longest == math.inf, "what is kept goes on to its end"


def test_it_is_asked_again() -> None:
    threads = Threads(2, 2)
    machine: dict[str, Times] = {"busy": (0.5, 0.1), "quiet": (0.06, 0.1)}
    assert drive(threads, machine["busy"], AGAIN)[-1] == "1"
    assert drive(threads, machine["quiet"], AGAIN)[-1] == "A"
    assert threads.found == {UNCHANGED: 0.06, ON_ONE_THREAD: 0.1}
    assert drive(threads, machine["quiet"], 20 * AGAIN).count("11") < 6  # ever more rarely
    order = drive(threads, machine["busy"], LOOK + SLOW + 20)
    assert order[-1] == "1", "it is asked sooner, as steps are much slower"
    assert "11" in order


@pytest.mark.parametrize(("number", "on_one", "then", "most"), [(2, 0.005, 0.005, WATCHED), (64, 0.5, 0.03, 5 * SLOW)])
def test_few_steps_are_timed_between_duels(number: int, on_one: float, then: float, most: int) -> None:
    """Also where steps are slower and a duel has to wait, since the last one has cost much."""
    threads, timed = Threads(number, number), 0
    drive(threads, (0.01, on_one), 20)
    for _ in range(5 * LOOK if number > 2 else AGAIN - 40):
        threads.next(1e6, True)
        if threads.wants_time:
            timed += 1
            threads.done(Took(then))
        else:
            threads.pass_by(1)
    assert 0 < timed <= most


def drive_turns(threads: Threads, times: Callable[[int], Times], steps: int) -> tuple[int, int]:
    """Run turns, each of as many steps as may be; return how often somebody asked, and the steps on one thread."""
    questions = on_one = 0
    while threads.steps < steps:
        way = threads.next(1e6, True)
        number, seconds = max(1, threads.quiet_steps), times(threads.steps)[way == ON_ONE_THREAD]
        questions += 1
        on_one += number * (way == ON_ONE_THREAD)
        if threads.wants_time:
            threads.done(Took(seconds, steps=number))
        else:
            threads.pass_by(number)
    return questions, on_one


def test_short_steps_are_timed_together() -> None:
    threads = Threads(2, 2)
    questions, on_one = drive_turns(threads, lambda step: (3e-4, 2e-4), 10_000)
    assert threads.kept == ON_ONE_THREAD
    assert on_one > 9_800
    assert questions < 200


def test_what_the_next_short_steps_contradict_is_taken_back() -> None:
    """Other work slows steps on all threads for 30 ms."""
    for begins in (0, 20, 2_200):
        threads = Threads(2, 2)
        busy = range(begins, begins + 100)
        drive_turns(threads, lambda step, busy=busy: (4e-4, 3e-4) if step in busy else (1e-4, 2e-4), begins + 300)
        assert threads.kept == UNCHANGED


def test_where_nobody_knows_how_long_a_run_is() -> None:
    """As many steps are expected as were done, of which a trial on one thread may take a share."""
    order = drive(Threads(2, 2), (0.1, 0.01), 60, left=None)
    assert 20 <= order.index("1") < 40


def test_no_duel_waits_that_pays_no_longer() -> None:
    threads = Threads(2, 2)
    for step in range(10):
        threads.next(26 - step, True)
        assert threads.is_trying == (0 < step <= 6), "of fewer steps it would take too large a share"
        threads.done(Took(0.1 + 0.4 * (step % 2)))


def test_a_step_that_has_changed_its_way_tells_the_race_nothing() -> None:
    race, turn = Race([], 0.05, lambda way: Expected(0.0)), Turn(ON_ONE_THREAD, is_timed=True)
    race.next(Now())
    turn.longest, turn.otherwise, turn.steps = 0.0, UNCHANGED, 1
    with turn.timed():
        assert torch.get_num_threads() == 1
    assert turn.way == UNCHANGED
    turn.tell(race, lambda: 0.0)
    assert (race.steps, race.usual) == (1, 0.0)


def test_seconds_without_a_processor_count() -> None:
    threads = Threads(2, 2)
    for _ in range(9):
        on_all = threads.next(1e6, True) == UNCHANGED
        threads.done(Took(0.2, 0.19) if on_all else Took(0.1))
    assert threads.kept == ON_ONE_THREAD


def test_a_turn_lasts_until_the_optimizers_step() -> None:
    threads, order = Threads(2, 2), ""
    for step in range(36):
        way = threads.next(1e6, True)
        order += "A" if way == UNCHANGED else "1"
        # only the last step of a window takes longer on all threads
        threads.done(Took(0.3 if way == UNCHANGED and step % 4 == 3 else 0.02), ends=step % 4 == 3)
    assert order == 16 * "A" + "11111111AAAA11111111"


# Fits


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def paces(monkeypatch: pytest.MonkeyPatch) -> Mapping[Any, float]:
    """Return the seconds that each timed step takes by script."""
    seconds = {UNCHANGED: 0.3, ON_ONE_THREAD: 0.1}
    tell = Turn.tell_threads

    def scripted(self: Turn, *args: Any) -> None:
        if self.is_timed:
            self.seconds, self.waited, self.update = seconds[self.way], 0.0, Took()
        tell(self, *args)

    monkeypatch.setattr(Turn, "tell_threads", scripted)
    return seconds


class Noting(Small):
    """Notes the number of threads in each part of a step."""

    def __init__(self, sets: Mapping[int, int] | None = None, by_hand: bool = False) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 182), nn.Dropout(), nn.Linear(182, 182), nn.Linear(182, 3))
        self.sets = sets or {}  # numbers that are set in steps
        self.threads: dict[str, list[int]] = {}
        self.automatic_optimization = not by_hand

    def note(self, part: str) -> None:
        self.threads.setdefault(part, []).append(torch.get_num_threads())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.note("forward")
        if batch_idx in self.sets:
            torch.set_num_threads(self.sets[batch_idx])
        loss = self.loss(batch)
        if loss.requires_grad:
            loss.register_hook(lambda gradient: self.note("backward"))
        if not self.automatic_optimization:
            optimizer: Any = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return loss

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.note("test")

    def configure_optimizers(self) -> Any:
        return optim.AdamW(self.parameters())

    def train_dataloader(self) -> Any:
        return loader(2 * 30, 2)


class Hooks(Callback):
    """Notes the number of threads outside of steps."""

    def __init__(self) -> None:
        self.threads: set[int] = set()

    def note(self, *args: Any) -> None:
        self.threads.add(torch.get_num_threads())

    on_train_batch_start = on_train_batch_end = on_before_zero_grad = on_before_optimizer_step = note


def fit(make_trainer: Callable[..., Any], module: Small, strategy: Any = None, **kwargs: Any) -> Any:
    ours = ORTStrategy(config={"cache_dir": None, "audit": "off"}) if strategy is None else strategy
    trainer = make_trainer(strategy=ours, **{"max_epochs": 1, "limit_val_batches": 0, **kwargs})
    trainer.fit(module)
    return trainer


@pytest.mark.parametrize("by_hand", [False, True])
def test_forward_backward_and_update_are_on_one_thread(
    by_hand: bool, make_trainer: Callable[..., Any], two_threads: None, paces: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    updates: list[int] = []
    kernel = fused_update.FUSED_KERNELS[optim.AdamW]

    def noting(params: Any, *args: Any, **kwargs: Any) -> None:
        if params[0].numel() > fused_update.SMALL:
            updates.append(torch.get_num_threads())
        kernel(params, *args, **kwargs)

    monkeypatch.setitem(fused_update.FUSED_KERNELS, optim.AdamW, noting)
    module, hooks = Noting(by_hand=by_hand), Hooks()
    report = fit(make_trainer, module, callbacks=[hooks]).strategy.report
    assert module.threads["forward"] == module.threads["backward"] == 5 * [2] + [1, 1, 2] + 11 * [1] + [2] + 10 * [1]
    assert updates == 4 * [2] + [1, 1, 2] + 11 * [1] + [2] + 10 * [1]  # torch makes the first one
    assert by_hand or hooks.threads == {2}  # by hand, optimizers' hooks are within the step
    assert torch.get_num_threads() == 2
    assert report.run.threads["training_step"].startswith("one thread, 100 ms a step (with 2 threads: 300 ms)")
    assert "threads: training_step on one thread" in str(report)
    stock = Noting(by_hand=by_hand)
    fit(make_trainer, stock, "auto")
    assert module.losses == pytest.approx(stock.losses, rel=1e-5), "random numbers do not depend on threads"


def test_each_kind_of_step_has_its_own(make_trainer: Callable[..., Any], two_threads: None, paces: Any) -> None:
    module = Noting()
    trainer = fit(make_trainer, module, limit_train_batches=2)
    trainer.test(module, loader(8 * 25), verbose=False)
    assert module.threads["test"][-1] == 1
    assert list(trainer.strategy.report.run.threads) == ["test_step"], "two steps are not worth a trial"


def test_all_batches_of_an_accumulation_are_of_one_turn(
    make_trainer: Callable[..., Any], two_threads: None, paces: Any, limits: Callable[..., None]
) -> None:
    limits(one_thread=math.inf)
    paces |= {UNCHANGED: 500.0, ON_ONE_THREAD: 100.0}  # none of which a real step takes, and so ends its turn
    windows: dict[tuple[int, int], set[int]] = {}

    class Windows(Noting):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            windows.setdefault((self.current_epoch, batch_idx // 3), set()).add(torch.get_num_threads())
            return super().training_step(batch, batch_idx)

    strategy = ORTStrategy(config={"cache_dir": None, "audit": "off", "compile_budget": 1e-9})
    fit(make_trainer, Windows(), strategy, accumulate_grad_batches=3, max_epochs=4)
    assert {1} in windows.values()
    assert all(len(threads) == 1 for threads in windows.values())


@pytest.mark.parametrize("number", [1, 3])
def test_a_number_that_a_step_sets_holds(
    number: int, make_trainer: Callable[..., Any], two_threads: None, paces: Any
) -> None:
    module = Noting({25: number})
    fit(make_trainer, module)
    assert module.threads["forward"][24] == 1
    assert torch.get_num_threads() == number


@pytest.mark.parametrize(
    ("config", "trainer", "number"),
    [({}, {"deterministic": True}, 2), ({}, {}, 1), ({"engine": "torch"}, {}, 2), ({"placement": "always"}, {}, 2)],
    ids=["deterministic", "one thread", "torch alone", "captured"],
)
def test_where_nothing_is_tried(
    config: Any, trainer: Any, number: int, make_trainer: Callable[..., Any], two_threads: None, paces: Any
) -> None:
    torch.set_num_threads(number)
    module = Noting()
    strategy = ORTStrategy(config={"cache_dir": None, "audit": "off", **config})
    report = fit(make_trainer, module, strategy, **trainer).strategy.report
    assert set(module.threads["forward"]) == {number}
    assert report.ort_runs > 0 or config.get("placement") != "always"
    assert report.run.threads == {}


@pytest.mark.parametrize("told", [None, 2, 4])
def test_a_number_that_is_set_within_the_block_holds(told: int | None, two_threads: None) -> None:
    if told is not None:
        torch.set_num_threads(told)
    before = torch.get_num_threads()
    for kind in (OneThread, OneThreadInAll):
        with kind():
            assert torch.get_num_threads() == 1
            with kind():
                assert torch.get_num_threads() == 1
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == before
    for number in (1, 3):
        with OneThreadInAll():
            torch.set_num_threads(number)
        assert torch.get_num_threads() == number
        torch.set_num_threads(before)
