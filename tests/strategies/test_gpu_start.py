"""When compiling starts on a GPU: the race on the times that one had."""

import math

import pytest
from gpu_simulation import LENGTHS, MODELS, UNKNOWN, fit, race_before, race_of

from lightning_ort.strategies.race.race import FIRST

GAIN = [name for name in MODELS if name != "ViT"]  # which inductor makes slower


def test_gpt2_is_as_fast_as_compiled_by_hand() -> None:
    model = MODELS["GPT-2"]
    for steps in (5000, 10_000, 50_000):
        assert fit(model, race_of(model), steps) < 1.05 * model.by_hand(steps)


@pytest.mark.parametrize("name", GAIN)
def test_no_length_is_slower_than_stock(name: str) -> None:
    model = MODELS[name]
    lengths = [*LENGTHS, *range(100, 30_000, 700)]
    assert max(fit(model, race_of(model), steps) / (steps * model.stock) for steps in lengths) < 1.02


def test_what_gains_nothing_loses_a_tenth_at_most_and_less_in_longer_runs() -> None:
    model = MODELS["ViT"]
    lost = {steps: fit(model, race_of(model), steps) / (steps * model.stock) for steps in range(1000, 80_000, 1000)}
    assert max(lost.values()) < 1.15
    assert {steps for steps, ratio in lost.items() if ratio > 1.02} <= set(range(6000, 42_000))
    assert all(ratio < model.by_hand(steps) / (steps * model.stock) for steps, ratio in lost.items())


@pytest.mark.parametrize("name", MODELS)
def test_a_run_of_unknown_length_starts_at_once_and_compiles_once(name: str) -> None:
    model = MODELS[name]
    race = race_of(model)
    now = fit(model, race, UNKNOWN, math.inf)
    starts = [event.step for event in race.events if event.what == "starts"]
    assert starts == [FIRST]
    assert (now < 1.05 * model.by_hand(UNKNOWN)) is (name in GAIN) or now < model.by_hand(UNKNOWN)
    assert now < fit(model, race_before(model), UNKNOWN, math.nan)
