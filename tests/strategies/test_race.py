"""What decides how a step runs, by plain calls: no clock, no Trainer, nothing patched."""

import itertools
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from lightning_ort.strategies.race.duel import MOST, Duel
from lightning_ort.strategies.race.race import FIRST, GRACE, NO_LIMIT, RARER, RECHECK, SAMPLES, STOP, Race
from lightning_ort.strategies.race.terms import UNCHANGED, Expected, Failure, Now, Took, Waiting, Way
from lightning_ort.strategies.race.turn import Turn

SHARE = 0.05
ORT, CHILDREN, INDUCTOR = Way("ort", graphs=1), Way("ort", "modules"), Way("inductor")
NAMES = {"unchanged": UNCHANGED, "ort": ORT, "children": CHILDREN, "inductor": INDUCTOR, "other": Way("ort")}
NAME = {way: name for name, way in NAMES.items()}


def make(
    *challengers: str, share: float = SHARE, cost: float | Mapping[str, float] = 4.0, saves: Any = 1.0, **kwargs: Any
) -> Race:
    def expect(way: Way) -> Expected:
        found = cost[NAME[way]] if isinstance(cost, Mapping) else cost
        return Expected(found, saves.get(NAME[way], 1.0) if isinstance(saves, Mapping) else saves)

    return Race([NAMES[name] for name in challengers or ("ort",)], share, expect, **kwargs)


def drive(
    race: Race,
    times: Mapping[str, float | Callable[[int], float]],
    steps: int,
    left: float | None = math.nan,
    compiling: Mapping[str, float] = {},
    failures: Mapping[str, Failure] = {},
    recompiles: tuple[str, ...] = (),
    **kwargs: Any,
) -> list[str]:
    """Run steps; each way compiles in its first call of all. Return the ways in order."""
    order: list[str] = []
    for number in range(steps):
        remaining = None if left is None else 10**6 if math.isnan(left) else left - number
        way = NAME[race.next(Now(remaining, **kwargs))]
        time = times[way]
        seconds = time(number) if callable(time) else time
        compiles = way != "unchanged" and (way not in COMPILED[id(race)] or way in recompiles)
        COMPILED[id(race)].add(way)
        order.append(way)
        race.done(Took(seconds + compiles * compiling.get(way, 1.0), compiled=compiles))
        if compiles and way in failures:
            race.fail(NAMES[way], failures[way])
    return order


class _Compiled(dict[int, set[str]]):
    def __missing__(self, key: int) -> set[str]:
        return self.setdefault(key, set())


COMPILED = _Compiled()


@pytest.fixture(autouse=True)
def nothing_is_compiled() -> None:
    COMPILED.clear()


def happened(race: Race, *but: str) -> list[tuple[str, str]]:
    return [
        (NAME[event.way], event.what) for event in race.events if event.what not in ("waits", "compiles", "pays", *but)
    ]


# Starting


def test_a_short_run_compiles_nothing() -> None:
    race = make()
    assert set(drive(race, {"unchanged": 0.05, "ort": 0.04}, 300, 300)) == {"unchanged"}
    assert {event.what for event in race.events} == {"waits"}
    waiting = race.events[-1].why
    assert isinstance(waiting, Waiting)
    assert waiting.cost == 4.0 > waiting.allowed > 0
    assert waiting.by_budget


def test_a_long_run_starts_at_the_first_decision_and_keeps_the_faster() -> None:
    race = make()
    order = drive(race, {"unchanged": 0.1, "ort": 0.08}, 60, 5000)
    assert order[: FIRST + 1] == ["unchanged"] * FIRST + ["ort"]
    assert order[-1] == NAME[race.champion] == "ort"
    assert happened(race) == [("ort", "starts"), ("ort", "wins")]


def test_a_run_of_unknown_length_is_expected_to_take_as_long_again() -> None:
    race = make()
    order = drive(race, {"unchanged": 0.1, "ort": 0.05}, 3000, None)
    started = order.index("ort")
    assert SHARE * 0.1 * started >= 4.0 > SHARE * 0.1 * started / 2


def test_decisions_are_few() -> None:
    race = make(cost=math.inf)
    drive(race, {"unchanged": 0.1}, 10_000, None)
    assert 10 < len(race.events) < 30


def test_what_lost_in_an_earlier_run_does_not_start() -> None:
    race = make(cost=0.0, saves=0.0)
    assert set(drive(race, {"unchanged": 0.1, "ort": 0.01}, 500)) == {"unchanged"}


def test_what_saves_little_may_cost_little() -> None:
    # 1 % of 100 s
    for cost, starts in ((0.9, True), (1.1, False)):
        race = make(cost=cost, saves=0.01)
        assert ("ort" in drive(race, {"unchanged": 0.1, "ort": 0.09}, 20, 1003)) is starts
    assert not any(event.why.by_budget for event in race.events)


def test_no_start_within_a_window_of_accumulated_gradients() -> None:
    race = make(cost=0.0)
    ways = []
    for number in range(40):
        ways.append(NAME[race.next(Now(9000, may_change=number % 4 == 0))])
        race.done(Took(0.1 if ways[-1] == "unchanged" else 0.05))
    assert ways.index("ort") == 4


def test_an_obstacle_is_a_reason_to_wait() -> None:
    race = make(cost=0.0)
    assert set(drive(race, {"unchanged": 0.1}, 50, obstacle=lambda way: "little memory is free")) == {"unchanged"}
    assert {event.why for event in race.events} == {"little memory is free"}


def test_what_takes_memory_of_its_own_waits_alone() -> None:
    race = make("other", "ort", cost=0.0)
    times = {"unchanged": 0.1, "ort": 0.05, "other": 0.01}
    drive(race, times, 50, obstacle=lambda way: "too large" if way == NAMES["other"] else "")
    assert race.champion == ORT
    assert ("other", "waits") in [(NAME[event.way], event.what) for event in race.events]


def test_the_unchanged_step_is_not_met_again_where_it_has_no_room() -> None:
    race = make(cost=0.0)
    times = {"unchanged": 0.1, "ort": 0.05}
    drive(race, times, 50)
    no_room = lambda way: "too large" if way == UNCHANGED else ""  # noqa: E731
    assert set(drive(race, times, 3 * RECHECK, obstacle=no_room)) == {"ort"}
    assert not race.wants_time
    assert "unchanged" in drive(race, times, 2 * RECHECK)


def test_now_starts_at_the_first_step_whatever_it_costs() -> None:
    race = make(share=NO_LIMIT, cost=1e9, first=0)
    assert drive(race, {"unchanged": 0.1, "ort": 0.2}, 40)[0] == "ort"
    assert race.champion == UNCHANGED


def test_without_measuring_the_first_that_runs_stays() -> None:
    race = make("ort", "other", share=NO_LIMIT, measured=False, first=0)
    assert set(drive(race, {"unchanged": 0.1, "ort": 0.2}, 1000)) == {"ort"}
    assert not race.wants_time


def test_a_step_may_run_unchanged_before_all() -> None:
    race = make(share=NO_LIMIT, measured=False, first=1)
    assert drive(race, {"unchanged": 0.1, "ort": 0.1}, 3) == ["unchanged", "ort", "ort"]
    race = make(cost=0.001, first=0)  # nobody knows what a step takes
    assert race.next(Now(math.inf)) == UNCHANGED


# Duels


def test_the_slower_one_is_left() -> None:
    race = make()
    assert drive(race, {"unchanged": 0.08, "ort": 0.1}, 60, 5000)[-1] == "unchanged"
    assert happened(race) == [("ort", "starts"), ("ort", "loses")]
    assert race.events[-1].seconds == {ORT: 0.1, UNCHANGED: 0.08}


def test_inductor_waits_and_meets_the_winner() -> None:
    race = make("ort", "inductor", cost={"ort": 4.0, "inductor": 20.0})
    order = drive(race, {"unchanged": 0.1, "ort": 0.09, "inductor": 0.07}, 2000, 8000)
    assert order.index("inductor") > order.index("ort")
    duel = order[order.index("inductor") : order.index("inductor") + 10]
    assert set(duel) == {"inductor", "ort"}
    assert order[-1] == "inductor"


def test_nothing_is_tried_that_cannot_gain_more_than_the_champion_has() -> None:
    race = make("ort", "inductor", cost=0.1, saves={"inductor": 0.1})
    assert "inductor" not in drive(race, {"unchanged": 0.1, "ort": 0.08, "inductor": 0.01}, 3000)
    race = make("ort", "inductor", cost=0.1, saves={"inductor": 0.3})
    assert "inductor" in drive(race, {"unchanged": 0.1, "ort": 0.08, "inductor": 0.01}, 3000)


@pytest.mark.parametrize(("other", "most"), [(0.5, 10), (0.102, 2 * MOST + 2)])
def test_a_clear_difference_needs_few_steps_and_a_close_one_more(other: float, most: int) -> None:
    order = drive(make(cost=0.0), {"unchanged": 0.1, "ort": other}, 60)
    assert 3 <= order.count("ort") <= most


def test_a_burst_of_other_work_does_not_decide_over_short_steps() -> None:
    race = make(cost=0.0)
    # the first 30 ms of the duel are ten times as slow, whichever way runs
    slow = {"unchanged": lambda n: 0.01 if n < 12 else 0.001, "ort": lambda n: 0.008 if n < 12 else 0.0012}
    assert drive(race, slow, 400)[-1] == "unchanged"


@pytest.mark.parametrize("work", [(0.0, 0.05), (0.0, 0.0, 0.05)])
def test_work_that_alternates_meets_both(work: tuple[float, ...]) -> None:
    extra = itertools.cycle(work)
    duel = Duel(ORT, UNCHANGED, [ORT, UNCHANGED])
    while not duel.is_over:
        duel.add(duel.turn, Took(0.1 + next(extra)))
    sums = [sum(duel.samples(way)) for way in (ORT, UNCHANGED)]
    assert sums[0] == pytest.approx(sums[1], rel=0.1)


def test_a_failing_sample_does_not_count() -> None:
    duel = Duel(ORT, UNCHANGED, [UNCHANGED])
    assert [duel.turn, (duel.add(ORT, Took(9.0)), duel.turn)[1]] == [ORT, ORT]
    assert duel.samples(ORT) == []


def test_interruptions_of_the_unchanged_step_are_no_saving() -> None:
    duel = Duel(ORT, UNCHANGED, [ORT, UNCHANGED])
    for seconds in (0.1, 0.1, 0.1, 0.5, 0.5, 0.5):
        duel.add(ORT, Took(0.1))
        duel.add(UNCHANGED, Took(seconds))
    assert duel.saved_by(ORT) == pytest.approx(0.0)


def test_a_duel_costs_the_turns_of_what_was_not_used_before() -> None:
    duel = Duel(ORT, UNCHANGED, [ORT, UNCHANGED])
    for _ in range(4):
        duel.add(ORT, Took(0.1))
        duel.add(UNCHANGED, Took(0.3))
    assert duel.overhead(UNCHANGED) == 0
    assert duel.overhead(ORT) == pytest.approx(0.8)
    assert duel.is_clear


def test_a_difference_within_the_spread_is_not_clear() -> None:
    duel = Duel(ORT, UNCHANGED, [ORT, UNCHANGED])
    for seconds in (0.1, 0.2, 0.3, 0.4):
        duel.add(ORT, Took(seconds))
        duel.add(UNCHANGED, Took(seconds + 0.01))
    assert not duel.is_clear


def test_more_memory_has_to_be_worth_it() -> None:
    for faster, after, wins in ((0.98, 120.0, False), (0.9, 120.0, True), (0.98, 109.0, True)):
        race = make(cost=0.0)
        for _ in range(100):
            way = race.next(Now(10_000, memory=lambda: 100.0))
            race.done(Took(0.1 * (faster if way == ORT else 1.0), memory=after))
        assert (race.champion == ORT) is wins
        (verdict,) = [event.why for event in race.events if event.what in ("wins", "loses")]
        assert verdict.more_memory == pytest.approx(0.0 if wins else 0.2)


# After a duel


def test_the_winner_meets_the_unchanged_step_again_and_may_lose() -> None:
    race, slow = make(), [0.05]
    times = {"unchanged": 0.1, "ort": lambda _: slow[0]}
    drive(race, times, 150)
    assert race.champion == ORT
    saved = race.saved
    assert saved > 4
    slow[0] = 0.3
    order = drive(race, times, 200)
    assert race.champion == UNCHANGED
    assert happened(race)[-1] == ("ort", "loses")
    assert race.saved <= saved / 10  # nobody knows since when
    assert order.count("ort") < 150


def test_what_a_way_has_beaten_goes_with_it() -> None:
    race = make("ort", "inductor")
    times = {"unchanged": 1.0, "ort": 0.8, "inductor": lambda number: 0.5 if number < RECHECK else 2.0}
    drive(race, times, RECHECK // 2)
    assert race.kept == {INDUCTOR, ORT}
    drive(race, times, 2 * RECHECK)
    drive(race, times | {"inductor": 2.0, "ort": 2.0}, 20 * RECHECK)
    assert race.kept == {UNCHANGED}


def test_checks_become_rare() -> None:
    race = make(cost=0.0)
    order = drive(race, {"unchanged": 0.1, "ort": 0.05}, 3 * RARER * RECHECK)
    starts = [n for n in range(30, len(order)) if order[n] == "unchanged" and order[n - 2 : n] == ["ort"] * 2]
    assert len(happened(race)) == 4  # starts, wins, and twice again
    (won,) = [event.step for event in race.events if event.what == "wins" and not event.why.after]
    assert order.index("unchanged", won) in (won + RECHECK, won + RECHECK + 1)
    assert starts[0] >= RECHECK
    assert starts[-1] >= RARER * RECHECK


def test_it_pays_when_more_is_saved_than_was_spent() -> None:
    race = make(cost=0.0)
    drive(race, {"unchanged": 0.1, "ort": 0.05}, 150, compiling={"ort": 2.0})
    (paid,) = [event for event in race.events if event.what == "pays"]
    assert 2.0 <= 0.05 * paid.step <= 2.0 + 0.05 * 40
    assert race.spent == pytest.approx(2.0, abs=0.1)


def test_quiet_steps_need_no_questions() -> None:
    one, other = make(cost=0.0), make(cost=0.0)
    times = {"unchanged": 0.1, "ort": 0.05}
    drive(one, times, 400)
    calls = 0
    while other.steps < 400:
        if not other.wants_time and (quiet := min(other.quiet_steps, 400 - other.steps)):
            other.pass_by(quiet)
            continue
        drive(other, times, 1)
        calls += 1
    assert calls < 80
    assert (one.champion, one.saved) == (other.champion, pytest.approx(other.saved))
    assert happened(one) == happened(other)


def test_short_steps_take_turns_of_several(limits: Callable[..., None]) -> None:
    """The faster wins by as long a duel as ever, of few questions, and is not rechecked sooner for that."""
    limits(duel=0.06)
    race, times, steps, questions = make(cost=0.0), {UNCHANGED: 5e-4, ORT: 2e-4}, Counter[Way](), 0
    while race.steps < 5000:
        way = race.next(Now(10**6))
        number = race.quiet_steps
        if not race.wants_time:
            race.pass_by(max(1, min(number, 64)))
            continue
        questions += 1
        steps[way] += number
        race.done(Took(times[way], steps=number))
    assert happened(race) == [("ort", "starts"), ("ort", "wins")]
    assert questions < 60
    assert sum(times[way] * steps[way] for way in times) == pytest.approx(0.06, rel=0.25)
    assert race.steps >= 5000 > race.saved / (times[UNCHANGED] - times[ORT]) > 4000


def test_an_unchanged_step_without_challengers_is_quiet() -> None:
    race = make(saves=0.0)
    for number in range(1, 2 * RECHECK):
        race.next(Now(1000))
        race.done(Took(0.1 if number <= SAMPLES else 0.0))
        assert race.wants_time == (number < SAMPLES)
    assert race.usual == 0.1
    assert not race.wants_time
    race.fail(ORT, Failure("of no use"))
    assert race.quiet_steps > 10**6


# Failures


def test_what_fails_names_what_is_tried_instead() -> None:
    failures = {"ort": Failure("untraceable", CHILDREN)}
    times = {"unchanged": 0.1, "ort": 0.05, "children": 0.06}
    race = make()
    assert drive(race, times, 100, failures=failures)[-1] == "children"
    assert happened(race) == [("ort", "starts"), ("ort", "fails"), ("children", "starts"), ("children", "wins")]
    race = make()
    assert drive(race, times, 100, failures=failures | {"children": Failure("no")})[-1] == "unchanged"
    assert [event.why for event in race.events if event.what == "fails"] == ["untraceable", "no"]


def test_what_is_for_eager_alone_ends_the_race() -> None:
    race = make("ort", "inductor")
    times = {"unchanged": 0.1, "ort": 0.05}
    assert (
        drive(race, times, 50, failures={"ort": Failure("it differentiates gradients", final=True)})[-1] == "unchanged"
    )
    assert race.quiet_steps > 10**6
    assert happened(race) == [("ort", "starts"), ("ort", "refused")]


def test_without_measuring_too() -> None:
    race = make(share=NO_LIMIT, measured=False, first=0)
    assert drive(
        race, {"unchanged": 0.1, "ort": 0.1, "children": 0.1}, 10, failures={"ort": Failure("", CHILDREN)}
    ) == ["ort", *["children"] * 9]


def test_a_champion_that_fails_goes_back_to_unchanged() -> None:
    race = make("ort", "inductor", cost={"ort": 0.0, "inductor": math.inf})
    drive(race, {"unchanged": 0.1, "ort": 0.05}, 100)
    race.fail(ORT, Failure("it differs from eager"))
    assert race.next(Now(100)) == UNCHANGED
    before = race.saved
    race.done(Took(0.1))
    assert race.saved == before


def test_a_challenger_that_fails_leaves_the_champion() -> None:
    race = make("ort", "inductor", cost=0.0)
    times = {"unchanged": 0.1, "ort": 0.05, "inductor": 0.01}
    assert drive(race, times, 200, failures={"inductor": Failure("no compiler")})[-1] == "ort"


# Budgets


def test_what_keeps_compiling_ends_with_the_budget_and_returns_in_the_next_run() -> None:
    race, times = make(cost=1.0), {"unchanged": 0.1, "ort": 0.05}
    order = drive(race, times, 100, 400, compiling={"ort": 2.0}, recompiles=("ort",))
    assert order[-1] == "unchanged"
    assert happened(race)[-1] == ("ort", "costs too much")
    race.begin_run()
    assert race.spent == race.saved == 0
    assert drive(race, times, 100, 20_000)[-1] == "ort"


def test_what_was_spent_counts_beside_what_is_expected() -> None:
    race = make()
    drive(race, {"unchanged": 0.1}, FIRST, 1000)
    assert race.may_compile(0.0, 7.0)
    race.spend(2.0, working=2.0)
    assert race.may_compile(0.0, 5.0)
    assert not race.may_compile(0.0, 7.0)


def test_steps_that_run_otherwise_are_timed_anew() -> None:
    race = make(cost=math.inf)
    drive(race, {"unchanged": 0.5}, SAMPLES)
    assert not race.wants_time
    race.time_again()
    assert race.usual == 0
    drive(race, {"unchanged": 0.1}, 1)
    assert race.usual == 0.1


def test_what_was_dear_is_tried_in_the_same_order_in_the_next_run() -> None:
    race, tried = make("ort", "inductor", cost=1.0), []
    for _ in range(2):
        for _ in range(60):
            if is_new := (way := race.next(Now(1000))) != UNCHANGED:
                tried.append(way)
            race.done(Took(0.1, compiled=is_new, projected=1000.0 * is_new))
        race.begin_run()
    assert tried == 2 * [ORT, INDUCTOR]


def test_what_was_dear_but_is_compiled_is_not_thrown_away() -> None:
    race = make(cost=1.0)
    assert drive(race, {"unchanged": 0.1, "ort": 0.05}, 100, 400, compiling={"ort": 30.0})[-1] == "ort"


def test_a_champion_of_an_earlier_run_has_a_budget_too() -> None:
    race, times = make(cost=1.0), {"unchanged": 0.1, "ort": 0.05}
    drive(race, times, 100)
    race.begin_run()
    assert race.next(Now(100)) == ORT
    assert drive(race, times, 30, 100, compiling={"ort": 1.0}, recompiles=("ort",))[-1] == "unchanged"


def test_what_was_left_uncompiled_is_not_tried_on() -> None:
    race = make(cost=1.0)
    drive(race, {"unchanged": 0.1}, FIRST, 1000)
    assert race.next(Now(1000)) is ORT
    race.done(Took(4.0, compiled=True, projected=20.0))
    assert race.next(Now(1000)) is UNCHANGED
    assert happened(race)[-1] == ("ort", "costs too much")


def test_what_audits_take_counts() -> None:
    race = make(cost=4.0)
    race.spend(3.0)
    assert "ort" not in drive(race, {"unchanged": 0.1}, 100, 1300)


def test_a_sample_of_an_audited_step_does_not_count() -> None:
    race = make(cost=0.0)
    drive(race, {"unchanged": 0.1, "ort": 0.05}, 6)
    before = len(happened(race))
    for _ in range(50):
        race.next(Now(1000))
        race.done(Took(0.1, counts=False))
    assert len(happened(race)) == before


@pytest.mark.parametrize("is_timed", [False, True])
def test_what_compiles_counts_whether_its_turn_is_timed_or_not(is_timed: bool) -> None:
    race = make("ort", share=NO_LIMIT, measured=is_timed)
    turn = Turn(race.next(Now(100)), quiet=9, is_timed=is_timed)
    turn.steps, turn.seconds, turn.call_start = 1, 7.0 * is_timed, time.perf_counter() - 50.0
    turn.has_compiled()
    assert turn.quiet == 0
    turn.tell(race, lambda: 0.0)
    assert race.steps == 1
    assert race.spent == 7.0 if is_timed else race.spent >= 50.0


@pytest.mark.parametrize(("quiet", "steps", "usual"), [(0, 0, 0.0), (0, 1, 7.0), (5, 3, 0.0)])
def test_of_the_steps_of_a_turn_one_counts_that_the_race_has_to_know(quiet: int, steps: int, usual: float) -> None:
    race = make()
    turn = Turn(race.next(Now(100)), quiet, is_timed=not quiet)
    turn.steps, turn.seconds = steps, 7.0
    turn.tell(race, lambda: 0.0)
    assert (race.steps, race.usual) == (steps, usual)


def test_the_steps_of_a_timed_turn_count_by_their_mean() -> None:
    race = make()
    turn = Turn(race.next(Now(100)), 5, is_timed=True)
    turn.steps, turn.seconds, turn.waited = 4, 8.0, 2.0
    turn.tell(race, lambda: 0.0)
    assert (race.steps, race.usual) == (4, 1.5)


def test_nothing_more_is_compiled_in_a_call_that_takes_too_long() -> None:
    race = make(cost=1.0)
    drive(race, {"unchanged": 0.1}, FIRST, 1000)
    assert race.next(Now(1000 - FIRST)) == ORT
    allowed = SHARE * 0.1 * 1000
    assert race.may_compile(0.99 * STOP * allowed)
    assert not race.may_compile(1.01 * STOP * allowed)
    assert race.may_compile(1.0, 0.99 * GRACE * allowed)
    assert not race.may_compile(1.0, 1.01 * GRACE * allowed)
    assert make(share=NO_LIMIT).may_compile(1e9)


def simulated(make: Callable[[], Race], known: bool, step: float, length: int, factor: float, ort: float) -> float:
    """How long a run takes, as a multiple of one without compiling, which takes ``factor`` times what is expected."""
    race, total = make(), 0.0
    COMPILED.clear()
    for number in range(length):
        way = NAME[race.next(Now(length - number if known else None))]
        compiles = way != "unchanged" and way not in COMPILED[0]
        COMPILED[0].add(way)
        seconds = step * (ort if way == "ort" else 1.0) + factor * compiles
        total += seconds
        race.done(Took(seconds, compiled=compiles))
    return total / (step * length)


@pytest.mark.parametrize("known", [True, False])
def test_no_run_is_much_slower_than_without_compiling(known: bool) -> None:
    for run in itertools.product((0.002, 0.05), (300, 5000), (0.5, 2.0), (0.7, 1.3)):
        assert simulated(lambda: make(cost=1.0), known, *run) < 1 + 3 * SHARE


@pytest.mark.parametrize("saves", [0.05, 0.3, 0.6])
def test_what_was_measured_may_cost_half_of_what_it_saves(saves: float) -> None:
    def measured() -> Race:
        return Race([ORT], SHARE, lambda way: Expected(1.0, saves, stake=0.5, measured=True))

    lengths = (100, 1000, 2000, 4000, 8000, 16000, 64000)
    for length, factor in itertools.product(lengths, (0.5, 1.0, 1.5)):
        took = simulated(measured, True, 0.001, length, factor, 1 - saves)
        assert took < 1 + SHARE / 10, "no run is slower, if that holds"
        if 0.5 * saves * 0.001 * length > 1.1 and factor == 1:
            assert took < 1 - saves / 3
        # nor much slower, if it does not
        assert simulated(measured, True, 0.001, length, factor, 1.3) < 1 + factor * saves / 2 + SHARE


# Several processes


def test_processes_of_a_run_decide_alike() -> None:
    store: dict[str, Mapping[str, float]] = {}

    def agree(key: str, figures: Mapping[str, float]) -> Mapping[str, float]:
        return store.setdefault(key, dict(figures))

    races = [make(agree=agree), make(agree=agree)]
    orders: list[list[str]] = [[], []]
    for number in range(80):
        for race, order, times in zip(
            races, orders, ({"unchanged": 0.1, "ort": 0.08}, {"unchanged": 0.01, "ort": 0.5}), strict=True
        ):
            way = NAME[race.next(Now(5000 - number))]
            compiles = way == "ort" and "ort" not in order
            order.append(way)
            race.done(Took(times[way] + compiles, compiled=compiles))
    assert orders[0].index("ort") == orders[1].index("ort")
    assert len({order[-1] for order in orders}) == 1


# What strangers to this code found


def test_a_challenger_that_the_run_has_cut_short_meets_the_champion_in_the_next() -> None:
    race = make("ort")
    drive(race, {"unchanged": 0.1, "ort": 0.05}, 6)
    assert race.trying == ORT
    race.begin_run()
    assert drive(race, {"unchanged": 0.1, "ort": 0.05}, 60)[-1] == "ort"


def test_a_champion_that_fails_in_a_duel_leaves_its_challenger_to_be_tried() -> None:
    race = make("ort", "inductor", saves={"ort": 0.06, "inductor": 0.9})
    times = {"unchanged": 0.1, "ort": 0.095, "inductor": 0.05}
    for _ in range(200):
        if race.trying == INDUCTOR:
            break
        drive(race, times, 1)
    race.fail(ORT, Failure("it broke"))
    assert race.champion == UNCHANGED
    assert drive(race, times, 100)[-1] == "inductor"


def test_a_step_for_eager_alone_is_not_tried_in_the_next_run() -> None:
    race = make("ort", "inductor", cost=0.1)
    times = {"unchanged": 0.1, "ort": 0.05, "inductor": 0.2}
    drive(race, times, 40, left=40.0, recompiles=("ort",), compiling={"ort": 50.0})
    assert ("ort", "costs too much") in happened(race)
    race.fail(race.champion, Failure("it differentiates gradients", final=True))
    race.begin_run()
    assert set(drive(race, times, 60)) == {"unchanged"}


def test_what_is_said_to_wait_is_what_comes_first() -> None:
    race = make("ort", "inductor", cost={"ort": 1e3, "inductor": 1e6})
    drive(race, {"unchanged": 0.1}, 40, left=40.0)
    assert race.waiting is not None
    assert race.waiting.way == ORT
    assert isinstance(race.waiting.why, Waiting)
    assert race.waiting.why.allowed < race.waiting.why.cost


# Figures


def test_half_of_what_was_counted_as_saved_goes_where_half_is_left() -> None:
    race, times = make(cost=0.0), {"unchanged": 0.1, "ort": 0.05}
    drive(race, times, RECHECK)
    won = next(event.step for event in race.events if event.what == "wins")
    drive(race, times, won + RECHECK - race.steps)
    saved = race.saved
    assert saved == pytest.approx(0.05 * RECHECK)
    while len(happened(race)) == 2:  # starts, wins
        drive(race, {"unchanged": 0.1, "ort": 0.075}, 1)
    assert race.saved == pytest.approx(saved / 2)
    saved = race.saved
    drive(race, {"unchanged": 0.1, "ort": 0.075}, RARER * RECHECK)
    assert race.saved == pytest.approx(saved + 0.025 * RARER * RECHECK)
    while len(happened(race)) == 3:
        drive(race, {"unchanged": 0.1, "ort": 0.0875}, 1)
    assert race.saved == pytest.approx(saved + 0.0125 * RARER * RECHECK)


def test_it_pays_in_the_step_in_which_as_much_is_saved_as_was_spent() -> None:
    race = make(cost=0.0)
    drive(race, {"unchanged": 0.5, "ort": 0.25}, 40, compiling={"ort": 1.0})  # numbers that floats have
    (won,), (pays,) = ([event for event in race.events if event.what == what] for what in ("wins", "pays"))
    assert race.charged == 0.75
    assert pays.step == won.step + 3
    assert pays.way == ORT


def test_what_an_unchanged_step_takes_is_what_it_took_last() -> None:
    race = make(cost=0.0)
    drive(race, {"unchanged": 0.1}, FIRST)
    assert race.usual == 0.1
    while ("ort", "loses") not in happened(race):
        drive(race, {"unchanged": 0.2, "ort": 0.9}, 1)
    assert race.usual == 0.2
    # a duel has few of them, so more are timed after it
    assert race.champion == UNCHANGED
    timed = 0
    for _ in range(100):
        race.next(Now(1000))
        timed += race.wants_time
        race.done(Took(0.2))
    assert SAMPLES // 2 < timed < SAMPLES
    assert not race.wants_time


def test_a_step_that_an_audit_takes_part_in_says_nothing_of_the_unchanged_step() -> None:
    race = make(cost=math.inf)
    drive(race, {"unchanged": 0.1}, 5)
    for _ in range(20):
        race.next(Now(1000))
        race.done(Took(9.0, counts=False))
    assert race.usual == 0.1


def test_what_may_be_spent_is_a_share_of_the_whole_run_whenever_it_is_asked() -> None:
    race = make(cost=math.inf)
    allowed = SHARE * 0.1 * 1000
    for step in range(40):
        race.next(Now(1000 - step))
        race.done(Took(0.1))
        assert race.may_compile(0.0, 0.9999 * GRACE * allowed)
        assert not race.may_compile(0.0, 1.0001 * GRACE * allowed)
        assert not race.may_compile(1.0001 * STOP * allowed)
    race.next(Now(960))
    race.pass_by(10)
    assert race.may_compile(0.0, 0.9999 * GRACE * allowed)
    assert not race.may_compile(0.0, 1.0001 * GRACE * allowed)


def test_what_is_tried_instead_comes_at_once_and_before_others() -> None:
    race = make("ort", "inductor", cost={"ort": 0.0, "children": 0.0, "inductor": math.inf})
    times = {"unchanged": 0.1, "ort": 0.05, "children": 0.06, "inductor": 0.01}
    drive(race, times, 120)
    assert race.champion == ORT
    race.fail(ORT, Failure("sizes vary", CHILDREN))
    assert race.next(Now(10_000)) == CHILDREN
    race = make("ort", "inductor", cost=0.0)
    drive(race, times, 60, failures={"ort": Failure("untraceable", CHILDREN)})
    assert [name for name, what in happened(race) if what == "starts"] == ["ort", "children", "inductor"]


def test_what_has_lost_fails_no_more() -> None:
    race = make(cost=0.0)
    drive(race, {"unchanged": 0.1, "ort": 0.2}, 40)
    events = len(race.events)
    race.fail(ORT, Failure("too late", CHILDREN))
    assert len(race.events) == events
    assert not race.has_challengers
