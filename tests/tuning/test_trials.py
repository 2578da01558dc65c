"""How trials are compared: speed, break-even, losses."""

import math
import random
from collections.abc import Callable

import pytest

from lightning_ort.tuning.candidate import Candidate
from lightning_ort.tuning.trainer_process import Sample
from lightning_ort.tuning.trials import LEAST, Departure, Trial, break_even, departure, not_measured, speed, while_busy


def trial(rounds: dict[int, float], **more: object) -> Trial:
    made = Trial(Candidate(engine="ort"), "a reason", 4, 2, rounds=rounds)
    for name, value in more.items():
        setattr(made, name, value)
    return made


def test_speed_is_of_common_rounds() -> None:
    own = trial({1: 1.0, 2: 2.0, 3: 1.0, 9: 100.0})
    found = speed(trial({1: 0.5, 2: 1.0, 3: 0.5}), own)
    assert found is not None
    assert (found.median, found.low, found.high) == pytest.approx((2.0, 2.0, 2.0))
    noisy = speed(trial({1: 0.5, 2: 3.0, 3: 0.9}), own)
    assert noisy is not None
    assert noisy.low < 1 < noisy.high
    assert speed(trial({7: 1.0}), own) is None
    assert speed(trial({1: 0.5}), own).low == 0


def test_break_even() -> None:
    own = trial({1: 1.0, 2: 1.0}, startup=1.0)
    assert break_even(trial({1: 0.5, 2: 0.5}, startup=9.0), own, 2.0) == 2  # 8 seconds; a step saves 8 halves
    assert break_even(trial({1: 0.5, 2: 0.5}, startup=1.0), trial({1: 1.0, 2: 1.0}, startup=9.0), 2.0) == 0
    for startup in (9.0, 0.5):
        assert break_even(trial({1: 2.0, 2: 2.0}, startup=startup), own, 0.5) is None
    assert break_even(trial({}), own, None) is None


@pytest.mark.parametrize(("slowed", "notes"), [((1.0, 1.2, 9.0), 0), ((1.0, 2.0, 3.0), 1), ((), 0)])
def test_a_busy_machine_is_named(slowed: tuple[float, ...], notes: int, limits: Callable[..., None]) -> None:
    limits(slowdown=1.25)
    found = while_busy([trial({}, samples=[Sample(1.0, [], None, slowdown=each) for each in slowed])])
    assert len(found) == notes
    assert all("(steps took 2.0 times as long)" in note for note in found)


def test_what_was_not_measured_has_a_line_for_each_reason() -> None:
    found = [("one", "failed", "no compiler"), ("two", "skipped", "no time"), ("three", "failed", "no compiler")]
    assert not_measured(found) == ["one, three: failed: no compiler", "two: skipped: no time"]


def test_curve_of_accumulated_batches() -> None:
    assert trial({}, losses=[1.0, 3.0, 4.0, 6.0, 7.0]).curve == [2.0, 5.0]


def test_departure_at_the_end() -> None:
    falling = [1.0 - 0.01 * number for number in range(40)]
    same = departure(falling, falling)
    assert same == Departure(0.0, 0.0)
    assert not same.exceeds(0.01)
    apart = departure([*falling[:30], *(1.1 * loss for loss in falling[30:])], falling)
    assert apart.difference == pytest.approx(0.1)
    assert apart.exceeds(0.01)
    assert not apart.exceeds(0.1 + 1e-9)
    assert departure(falling[: LEAST - 1], falling) is None
    # both have learned all there is: what is left is noise
    assert not departure([1.0, *[2e-6] * 39], [1.0, *[1e-6] * 39]).exceeds(1e-3)


def test_another_order_of_the_examples_is_no_departure() -> None:
    noise = random.Random(0)
    one, other = ([noise.uniform(0.5, 1.5) for _ in range(40)] for _ in range(2))
    found = departure(one, other)
    assert found.noise > 0.1
    assert not found.exceeds(0.01)
    assert departure([2 * loss for loss in one], other).exceeds(0.01)
    assert departure([*one[:-1], math.nan], other).exceeds(0.01)
    for diverged in (math.nan, math.inf):
        assert departure(one, [*other[:-1], diverged]) is None
        assert departure(one, [diverged, *other[1:]]) is None
