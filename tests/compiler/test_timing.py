"""How often candidates are timed, with a simulated clock."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from lightning_ort import _busy
from lightning_ort.compiler.placement import timing
from lightning_ort.compiler.regions.region import Timing


class Clock:
    """Candidates that take so many seconds at each of their calls; the last number goes on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.calls: dict[str, int] = {}
        for each in (timing, _busy):
            monkeypatch.setattr(each, "perf_counter", lambda: self.now)

    def candidate(self, name: str, seconds: Sequence[float]) -> Callable[..., None]:
        def call(*args: Any) -> None:
            index = self.calls.get(name, 0)
            self.calls[name] = index + 1
            self.now += seconds[min(index, len(seconds) - 1)]

        return call

    def race(self, **seconds: Sequence[float]) -> dict[str, float]:
        return timing.race({name: self.candidate(name, each) for name, each in seconds.items()}, [])


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def test_two_rounds_are_enough_where_one_is_far_ahead(clock: Clock) -> None:
    assert clock.race(ort=[0.001], torch=[0.002]) == {"ort": pytest.approx(1), "torch": pytest.approx(2)}
    assert clock.calls == {"ort": 2, "torch": 2}


def test_candidates_that_are_close_are_timed_for_longer(clock: Clock) -> None:
    clock.race(ort=[0.001], torch=[0.0014])
    assert clock.calls == {"ort": 15, "torch": 15}


def test_an_interruption_decides_nothing(clock: Clock) -> None:
    times = clock.race(ort=[0.010, 0.001], torch=[0.0014])
    assert times["ort"] < times["torch"]
    assert clock.calls == {"ort": 15, "torch": 15}
    clock.race(uneven=[0.001, 0.0016], even=[0.0022])
    assert clock.calls["even"] == 15


def test_the_fastest_number_of_threads_is_taken(clock: Clock) -> None:
    calls = {threads: clock.candidate(str(threads), [0.003 / threads]) for threads in (1, 3, 2)}
    found = timing.measure("ort", calls, clock.candidate("torch", [0.002]), [], pytest.fail)
    assert found == Timing({"ort": pytest.approx(1), "torch": pytest.approx(2)}, 3)


def test_only_those_that_are_far_behind_drop_out(clock: Clock) -> None:
    times = clock.race(one_thread=[0.001], two_threads=[0.0012], torch=[0.003])
    assert list(times) == ["one_thread", "two_threads", "torch"]
    assert clock.calls == {"one_thread": 15, "two_threads": 15, "torch": 2}


def test_slow_candidates_that_are_close_are_timed_three_times(clock: Clock) -> None:
    clock.race(ort=[0.2], torch=[0.25])
    assert clock.calls == {"ort": 3, "torch": 3}
