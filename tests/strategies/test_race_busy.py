"""Races on machines that other programs use: by plain calls, as in ``test_race.py``."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from lightning_ort._busy import TimeLimits
from lightning_ort.strategies.race.race import FIRST, RARER, RECHECK, SAMPLES, STOP, Race
from lightning_ort.strategies.race.terms import UNCHANGED, Expected, Failure, Now, Took, Verdict, Waiting, Way

SHARE, SLOWDOWN = 0.05, TimeLimits().slowdown
ORT, INDUCTOR = Way("ort"), Way("inductor")
Slowed = Callable[[int], float]


@pytest.fixture(autouse=True)
def machines_may_be_busy(limits: Callable[..., None]) -> None:
    limits(slowdown=SLOWDOWN)


def make(*ways: Way, cost: float = 4.0, share: float = SHARE, **kwargs: Any) -> Race:
    return Race(ways or [ORT], share, lambda way: Expected(cost), **kwargs)


def drive(
    race: Race,
    times: Mapping[Way, float],
    steps: int,
    left: float | None = 10**6,
    slowed: Slowed = lambda number: 1.0,
    compiling: float = 1.0,
) -> list[Way]:
    """Run steps on a machine on which other programs make each so many times as slow; a way compiles in its first."""
    order, known = [], {event.way for event in race.events if event.what == "compiles"}
    for _ in range(steps):
        slow = slowed(race.steps)
        way = race.next(Now(None if left is None else left - race.steps))
        compiles = way != UNCHANGED and way not in known
        known.add(way)
        order.append(way)
        working = times[way] + compiles * compiling
        race.done(Took(working * slow, working * (slow - 1), compiled=compiles))
    return order


def happened(race: Race) -> list[tuple[str, str]]:
    return [(e.way.engine, e.what) for e in race.events if e.what in ("starts", "wins", "loses", "fails")]


def test_what_other_programs_take_starts_nothing() -> None:
    """A step of 0.1 s in which it waits 0.9 s for a processor is worth no more than one without."""
    for slow, left in ((1.0, 700), (10.0, 700), (1.0, 1000), (10.0, 1000)):
        race = make()
        ran = drive(race, {UNCHANGED: 0.1, ORT: 0.05}, 30, left, lambda number: slow)  # noqa: B023
        assert (ORT in ran) is (left == 1000)
        waits = [event.why for event in race.events if event.what == "waits"]
        assert all(isinstance(why, Waiting) and why.slowdown == pytest.approx(slow) for why in waits)


def test_the_budget_counts_working_seconds_and_the_report_those_of_the_clock() -> None:
    race = make(cost=0.0)
    drive(race, {UNCHANGED: 0.1, ORT: 0.05}, FIRST + 1, 1000, lambda number: 4.0)
    assert race.spent == pytest.approx(4 * 1.05 - 0.1)
    assert race.charged == pytest.approx(1.05 - 0.1)
    (compiles,) = [event for event in race.events if event.what == "compiles"]
    assert compiles.seconds == {ORT: pytest.approx(4 * 1.05 - 0.1)}


def test_compiling_that_is_slower_than_the_steps_costs_more_of_them() -> None:
    """Steps that mostly wait for a disk are as fast as ever where compiling is not."""
    race = make(cost=0.0)
    drive(race, {UNCHANGED: 0.1}, FIRST, 1000)
    assert race.next(Now(1000)) == ORT
    race.done(Took(4.1, waited=3.0, compiled=True))
    assert race.charged == pytest.approx(4.0)
    race.spend(1.0)
    assert race.charged == race.spent == pytest.approx(5.0)


def test_what_audits_take_is_charged_as_steps_are() -> None:
    race = make(cost=1e9)
    drive(race, {UNCHANGED: 0.1}, 10, slowed=lambda number: 2.0)
    race.spend(3.0)
    assert (race.spent, race.charged) == (3.0, 1.5)


def test_compiling_ends_within_the_working_seconds_that_are_allowed() -> None:
    race = make(cost=0.0)
    drive(race, {UNCHANGED: 0.1}, FIRST, 1000, lambda number: 8.0)
    assert race.next(Now(1000 - FIRST)) == ORT
    most = STOP * SHARE * 0.1 * 1000
    assert race.may_compile(0.99 * most)
    assert not race.may_compile(1.01 * most)


def test_duels_compare_working_seconds() -> None:
    race = make(cost=0.0)
    # each second step waits nine times as long as it works: the faster way has all of these
    drive(race, {UNCHANGED: 0.1, ORT: 0.09}, FIRST + 1)
    while not [event for event in race.events if event.what in ("wins", "loses")]:
        way = race.next(Now(1000))
        working = {UNCHANGED: 0.1, ORT: 0.09}[way]
        race.done(Took(working * (10 if way == ORT else 1), working * (9 if way == ORT else 0)))
    (verdict,) = [event for event in race.events if event.what in ("wins", "loses")]
    assert verdict.what == "wins"
    assert verdict.seconds == {ORT: pytest.approx(0.09), UNCHANGED: pytest.approx(0.1)}
    assert isinstance(verdict.why, Verdict)
    assert verdict.why.is_busy
    assert verdict.why.slowdown == {ORT: pytest.approx(10.0), UNCHANGED: 1.0}


@pytest.mark.parametrize(("slow", "busy"), [(1.01, False), (0.99 * SLOWDOWN, False), (1.01 * SLOWDOWN, True)])
def test_a_verdict_says_whether_the_machine_was_busy(slow: float, busy: bool) -> None:
    race = make(cost=0.0)
    drive(race, {UNCHANGED: 0.1, ORT: 0.05}, 30, slowed=lambda number: slow)
    (verdict,) = [event.why for event in race.events if event.what == "wins"]
    assert verdict.is_busy is busy


def test_what_has_lost_on_a_busy_machine_is_tried_again_when_it_is_not() -> None:
    race, times = make(cost=0.0), {UNCHANGED: 0.1, ORT: 0.2}
    drive(race, times, RECHECK + SAMPLES + 60, slowed=lambda number: 3.0)
    assert happened(race) == [("ort", "starts"), ("ort", "loses")]  # it is still busy when it is asked again
    lost = next(event.step for event in race.events if event.what == "loses")
    again = lost + (1 + RARER) * RECHECK  # the second time
    drive(race, times | {ORT: 0.05}, again + 60 - race.steps)
    assert happened(race)[2:] == [("ort", "starts"), ("ort", "wins")]
    starts = [event.step for event in race.events if event.what == "starts"]
    assert starts[1] == again + SAMPLES, starts[1] - again
    assert race.champion == ORT


def test_steps_that_need_no_question_are_as_many_as_those_to_the_next_answer() -> None:
    def slowed(number: int) -> float:
        return 3.0 if number < 60 else 1.0

    one, other, times, steps = make(cost=0.0), make(cost=0.0), {UNCHANGED: 0.1, ORT: 0.2}, RECHECK + SAMPLES + 60
    drive(one, times, steps, slowed=slowed)
    while other.steps < steps:
        if not other.wants_time and (quiet := min(other.quiet_steps, steps - other.steps)):
            other.pass_by(quiet)
        else:
            drive(other, times, 1, slowed=slowed)
    assert happened(one) == happened(other) == [("ort", "starts"), ("ort", "loses")] * 2


def test_what_has_lost_on_an_idle_machine_is_not() -> None:
    race = make(cost=0.0)
    drive(race, {UNCHANGED: 0.1, ORT: 0.2}, 3 * RARER * RECHECK)
    assert happened(race) == [("ort", "starts"), ("ort", "loses")]
    assert race.quiet_steps > 10**6


def test_a_loser_in_doubt_may_challenge_another_champion() -> None:
    race = make(ORT, INDUCTOR, cost=0.0)
    times = {UNCHANGED: 0.1, ORT: 0.2, INDUCTOR: 0.05}
    drive(race, times, 100, slowed=lambda number: 3.0 if number < 10 else 1.0)
    assert race.champion == INDUCTOR
    assert happened(race)[-2:] == [("ort", "starts"), ("ort", "loses")]


def test_a_winner_in_doubt_is_checked_as_soon_again() -> None:
    race = make(cost=0.0)
    drive(race, {UNCHANGED: 0.1, ORT: 0.05}, 5 * RECHECK, slowed=lambda number: 3.0)
    checks = [event.why.after for event in race.events if event.what == "wins"]
    assert checks[0] == 0
    assert set(checks[1:]) == {RECHECK}
    assert len(checks) >= 4
    # and a champion that a check on a busy machine has taken down may come back
    drive(race, {UNCHANGED: 0.1, ORT: 0.2}, RECHECK + 40, slowed=lambda number: 3.0)
    assert race.champion == UNCHANGED
    drive(race, {UNCHANGED: 0.1, ORT: 0.05}, RARER * RECHECK + RECHECK + 100)
    assert race.champion == ORT


def test_a_run_takes_up_what_the_last_one_has_left_in_doubt() -> None:
    race, times = make(cost=0.0), {UNCHANGED: 0.1, ORT: 0.2}
    drive(race, times, 60, slowed=lambda number: 3.0)
    race.begin_run()
    drive(race, times, 60)
    assert happened(race) == [("ort", "starts"), ("ort", "loses")] * 2


def test_a_step_for_eager_alone_leaves_no_doubt() -> None:
    race, times = make(ORT, INDUCTOR, cost=0.0), {UNCHANGED: 0.1, ORT: 0.2, INDUCTOR: 0.05}
    drive(race, times, 12, slowed=lambda number: 3.0)
    race.fail(INDUCTOR, Failure("it differentiates gradients", final=True))
    assert set(drive(race, times, 3 * RECHECK)) == {UNCHANGED}


def test_processes_agree_on_whether_the_machine_is_busy() -> None:
    store: dict[str, Mapping[str, float]] = {}

    def agree(key: str, figures: Mapping[str, float]) -> Mapping[str, float]:
        return store.setdefault(key, dict(figures))

    races = [make(cost=0.0, agree=agree), make(cost=0.0, agree=agree)]
    times = {UNCHANGED: 0.1, ORT: 0.2}
    for number in range(2 * RECHECK):
        for race, slow in zip(races, (3.0 if number < RECHECK else 1.0, 1.0), strict=True):
            drive(race, times, 1, slowed=lambda step: slow)  # noqa: B023
    assert happened(races[0]) == happened(races[1]) == [("ort", "starts"), ("ort", "loses")] * 2


# A champion that fails


def test_a_champion_that_fails_gives_way_to_the_one_that_it_has_beaten() -> None:
    race, times = make(ORT, INDUCTOR, cost=0.0), {UNCHANGED: 0.1, ORT: 0.08, INDUCTOR: 0.05}
    drive(race, times, 100)
    assert race.champion == INDUCTOR
    assert race.saving == pytest.approx(0.05)  # of the unchanged step
    race.fail(INDUCTOR, Failure("gradients are accumulated now"))
    assert race.champion == ORT
    assert race.saving == pytest.approx(0.02)
    order = drive(race, times, RECHECK + 40)
    assert order[:RECHECK] == [ORT] * RECHECK
    assert UNCHANGED in order  # which it meets again
    race.fail(ORT, Failure("it differs"))
    assert (race.champion, race.saving) == (UNCHANGED, 0.0)


def test_where_nothing_is_left_to_spend_the_step_runs_unchanged() -> None:
    race, times = make(ORT, INDUCTOR, cost=0.0), {UNCHANGED: 0.1, ORT: 0.08, INDUCTOR: 0.05}
    drive(race, times, 100, 3000)
    assert race.champion == INDUCTOR
    race.next(Now(0))
    race.done(Took(100.0, compiled=True))
    assert (race.champion, race.saving) == (UNCHANGED, 0.0)


def test_what_the_unchanged_step_has_beaten_comes_back_for_nobody() -> None:
    race, times = make(ORT, INDUCTOR, cost=0.0), {UNCHANGED: 0.1, ORT: 0.08, INDUCTOR: 0.05}
    drive(race, times, 100)
    drive(race, {way: 0.2 for way in times} | {UNCHANGED: 0.1}, RECHECK + 40)
    assert race.champion == UNCHANGED
    race.fail(UNCHANGED, Failure("no matter"))
    assert race.champion == UNCHANGED


def test_what_is_tried_instead_meets_the_runner_up() -> None:
    race, times = make(ORT, INDUCTOR, cost=0.0), {UNCHANGED: 0.1, ORT: 0.08, INDUCTOR: 0.05, Way("plain"): 0.06}
    drive(race, times, 100)
    race.fail(INDUCTOR, Failure("sizes vary", Way("plain")))
    order = drive(race, times, 30)
    assert {ORT, Way("plain")} == set(order[:10])
    assert race.champion == Way("plain")


# The stake


def test_a_way_may_cost_a_share_of_what_it_is_expected_to_save() -> None:
    for cost, starts in ((9.0, True), (11.0, False)):
        race = Race([ORT], 1.0, lambda way: Expected(cost, 0.4, stake=0.25))  # noqa: B023
        assert (ORT in drive(race, {UNCHANGED: 0.1, ORT: 0.05}, 20, 1003)) is starts
        if starts:  # and what has started stops by the same share of the whole run
            assert race.may_compile(0.99 * STOP * 0.1 * 100 - race.charged)
            assert not race.may_compile(1.01 * STOP * 0.1 * 100)


def test_a_run_that_is_taken_to_be_long_starts_at_once() -> None:
    race = Race([ORT], 1.0, lambda way: Expected(1e6, 0.4, stake=0.25))
    order = []
    for _ in range(FIRST + 1):
        order.append(race.next(Now(float("inf"))))
        race.done(Took(0.1, compiled=order[-1] == ORT))
    assert order == [UNCHANGED] * FIRST + [ORT]
    assert race.may_compile(1e9)


# What duels cost


def test_what_duels_take_longer_is_spent_too() -> None:
    race, times = make(cost=0.0), {UNCHANGED: 0.1, ORT: 0.2}
    order = drive(race, times, 60, compiling=1.0)
    longer = 0.1 * (order.count(ORT) - 2)  # the first compiles, the second allocates
    assert longer > 0
    assert race.tried == pytest.approx(longer)
    assert race.spent == race.charged == pytest.approx(longer + 1.1)


@pytest.mark.parametrize(("cost", "starts"), [(2.0, True), (2.9, False)])
def test_what_duels_have_taken_is_missing_for_the_next_challenger(cost: float, starts: bool) -> None:
    costs = {ORT: 0.0, INDUCTOR: cost}
    race = Race([ORT, INDUCTOR], SHARE, lambda way: Expected(costs[way]))
    # 5 s in all, of which compiling takes 1.1 s and the duel 1 s and more; 4 % of the steps are over then
    assert (INDUCTOR in drive(race, {UNCHANGED: 0.1, ORT: 0.6, INDUCTOR: 0.05}, 60, 1000)) is starts
