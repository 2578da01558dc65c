"""When a duel is over, and what it has found: by plain calls."""

from collections.abc import Callable

import pytest

from lightning_ort.strategies.race.duel import LEAST, MANY, MOST, TOGETHER, Duel
from lightning_ort.strategies.race.terms import UNCHANGED, Took, Way

ORT = Way("ort")


def duel(*pairs: tuple[float, float]) -> Duel:
    """Return a duel of two ways that have run, with steps of the challenger and of the unchanged step."""
    made = Duel(ORT, UNCHANGED, [ORT, UNCHANGED])
    for challenger, champion in pairs:
        made.add(ORT, Took(challenger))
        made.add(UNCHANGED, Took(champion))
    return made


def length(challenger: float, champion: float) -> int:
    """Return how many steps of each way a duel takes."""
    made, steps = duel(), 0
    while not made.is_over:
        steps += 1
        made.add(made.turn, Took({ORT: challenger, UNCHANGED: champion}[made.turn]))
    return steps // 2


def test_how_many_steps_a_duel_takes() -> None:
    assert length(0.1, 0.3) == length(0.3, 0.1) == 2
    assert length(0.1, 0.12) == length(0.12, 0.1) == LEAST
    assert length(0.1, 0.105) == length(0.1, 0.1) == MOST


def test_each_step_has_to_be_far_from_each_of_the_other_way() -> None:
    assert not duel((0.1, 0.12), (0.1, 0.9)).is_over
    assert not duel((0.1, 0.9), (0.7, 0.9)).is_over
    assert duel((0.1, 0.9), (0.1, 0.9)).is_over


def test_a_pair_of_pairs_is_finished() -> None:
    pairs = [(0.1, 0.1)] * 3 + [(0.1, 0.12)] * 3
    assert not duel(*pairs).is_over  # medians 0.1 and 0.11
    assert not duel(*pairs, (0.1, 0.12)).is_over  # medians 0.1 and 0.12, of seven steps
    assert duel(*pairs, (0.1, 0.12), (0.1, 0.12)).is_over


@pytest.mark.parametrize("fresh", [ORT, UNCHANGED])
def test_what_has_not_run_yet_runs_once_more(fresh: Way) -> None:
    made = Duel(ORT, UNCHANGED, {ORT, UNCHANGED} - {fresh})
    assert made.turn == fresh
    made.add(fresh, Took(9.0))
    assert made.samples(fresh) == []
    order = []
    for _ in range(4):
        order.append(made.turn)
        made.add(made.turn, Took(0.1))
    assert order == [ORT, UNCHANGED, UNCHANGED, ORT]


def test_a_spread_of_either_way_makes_a_difference_unclear() -> None:
    wide = (0.1, 0.15, 0.3, 0.35)
    assert not duel(*((0.1, other) for other in wide)).is_clear
    assert not duel(*((one, 0.1) for one in wide)).is_clear
    assert duel(*((0.1, 0.3 + other / 10) for other in wide)).is_clear


def test_interruptions_of_what_was_used_before_are_not_what_a_duel_costs() -> None:
    made = duel((0.2, 0.1), (0.1, 0.1), (0.05, 0.5), (0.1, 0.1))
    assert made.overhead(UNCHANGED) == pytest.approx(0.1)
    assert made.overhead(ORT) == pytest.approx(0.4)


def test_what_is_saved_is_what_lower_quartiles_and_medians_say() -> None:
    assert duel(*[(0.1, 0.3)] * 4).saved_by(ORT) == pytest.approx(0.2)
    assert duel(*[(0.1, 0.3)] * 4).saved_by(UNCHANGED) == 0.0
    assert duel((0.1, 0.1), (0.1, 0.1), (0.1, 0.9), (0.1, 0.9)).saved_by(ORT) == pytest.approx(0.0)
    assert duel(*((0.05, other) for other in (0.1, 0.2, 0.3, 0.4))).saved_by(ORT) == pytest.approx(0.125)
    # the upper half is what other work makes of it
    assert duel((0.1, 0.2), (0.1, 0.2), (0.1, 0.2), (0.9, 0.2)).saved_by(ORT) == pytest.approx(0.1)


def test_working_seconds_count() -> None:
    made = Duel(ORT, UNCHANGED, [ORT, UNCHANGED])
    for _ in range(2):
        made.add(ORT, Took(0.5, waited=0.4))
        made.add(UNCHANGED, Took(0.3, waited=0.1))
    assert made.medians == {ORT: pytest.approx(0.1), UNCHANGED: pytest.approx(0.2)}
    assert made.slowdown == {ORT: pytest.approx(5.0), UNCHANGED: pytest.approx(1.5)}
    assert Took(0.1, waited=0.2).working == 0.0


def test_nothing_is_over_while_one_way_has_run_more_often() -> None:
    one, other = Way("recorded"), Way("torch")
    duel = Duel(one, other, (one, other))
    for _ in range(40):
        duel.add(one, Took(1.0))
    assert not duel.is_over
    for _ in range(40):
        duel.add(other, Took(2.0))
    assert duel.is_over


@pytest.mark.parametrize("seconds", [1e-6, 1e-4, 4e-4, 1e-3, 3e-3, 0.1])
def test_short_steps_are_timed_together(seconds: float) -> None:
    made = Duel(ORT, UNCHANGED, [ORT, UNCHANGED])
    assert made.length == 1, "nobody knows how long one takes"
    made.add(ORT, Took(seconds))
    made.add(UNCHANGED, Took(2.0))
    made.add(UNCHANGED, Took(2.0))
    assert made.turn == ORT
    assert made.length == MANY or TOGETHER / 2 < made.length * seconds <= max(TOGETHER, seconds)
    made.add(ORT, Took(seconds))
    made.add(ORT, Took(seconds))
    assert made.turn == UNCHANGED
    assert made.length == 1


def test_all_steps_of_a_turn_count_where_their_seconds_do(limits: Callable[..., None]) -> None:
    made = Duel(ORT, UNCHANGED, [ORT, UNCHANGED])
    for _ in range(LEAST):
        made.add(ORT, Took(0.3, steps=5))
        made.add(UNCHANGED, Took(0.1, steps=2))
    assert made.overhead(UNCHANGED) == pytest.approx(LEAST * 5 * 0.2)
    assert made.medians == {ORT: 0.3, UNCHANGED: 0.1}
    limits(duel=1.01 * LEAST * 1.7)
    assert not made.is_over
    limits(duel=0.99 * LEAST * 1.7)
    assert made.is_over
