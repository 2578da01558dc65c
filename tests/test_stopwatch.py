"""What other programs take, as the system counts it; no test that times anything."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from lightning_ort import _busy
from lightning_ort._busy import Stopwatch, differ, is_busy, slowdown


def test_the_system_counts_how_long_a_thread_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "schedstat"
    monkeypatch.setattr(_busy, "_FILE", str(file))
    times = iter([10.0, 14.0, 14.5])
    monkeypatch.setattr(_busy, "perf_counter", lambda: next(times))
    file.write_text("5000000000 2000000000 7\n")
    watch = Stopwatch()
    file.write_text("6000000000 5000000000 9\n")
    assert watch.read() == (4.0, 3.0)
    file.write_text("6000000000 50000000000 9\n")
    assert watch.read() == (4.5, 4.5)  # never more than there was


@pytest.mark.parametrize(("load", "waited"), [(0.1, 0.0), (1.0, 0.0), (4.0, 3.0)])
def test_elsewhere_the_load_tells(load: float, waited: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_busy, "_FILE", str(tmp_path / "absent"))
    times = iter([0.0, 4.0])
    monkeypatch.setattr(_busy, "perf_counter", lambda: next(times))
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    monkeypatch.setattr(os, "getloadavg", lambda: (2 * load, 0.0, 0.0))
    assert Stopwatch().read() == (4.0, pytest.approx(waited))


def test_this_system_counts_it_where_it_is_linux() -> None:
    if Path(_busy._FILE).exists():
        seconds, waited = Stopwatch().read()
        assert 0 <= waited <= seconds


def test_slowdowns(limits: Callable[..., None]) -> None:
    assert slowdown(4.0, 3.0) == 4.0
    assert slowdown(1.0, 0.0) == slowdown(0.0, 0.0) == slowdown(1.0, 1.0) == 1.0
    limits(slowdown=1.25)
    assert not differ([])
    assert not differ([3.0, 3.7])
    assert differ([3.0, 4.0])
    assert differ(iter([4.0, 3.0]))
    assert [is_busy(slowed) for slowed in (1.0, 1.25, 1.26)] == [False, False, True]
