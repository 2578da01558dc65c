"""When the strategy gives memory back that malloc keeps in holes of its heap."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_ort import ORTConfig
from lightning_ort.strategies.capture import room
from lightning_ort.strategies.capture.room import FREE, QUIET, Room
from lightning_ort.strategies.race.terms import UNCHANGED, Way


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> list[int | None]:
    """What was given back: the bytes that the process had."""
    sizes: list[int | None] = []
    monkeypatch.setattr(room, "give_back_memory", lambda: sizes.append(room.resident_bytes()))
    return sizes


def room_of(monkeypatch: pytest.MonkeyPatch, device: str = "cpu") -> tuple[Room, list[int]]:
    """Return the room of a process, and how large that is."""
    size = [1000]
    monkeypatch.setattr(room, "resident_bytes", lambda device=None: size[0])
    run: Any = SimpleNamespace(device=torch.device(device), config=ORTConfig())
    return Room(run), size


def steps_of(one: Room, steps: int, changes: set[int]) -> list[int]:
    """Run steps; return those before which memory may be given back."""
    asked, quiet = [], 0
    for step in range(steps):
        if quiet and step not in changes:
            quiet -= 1
            continue
        asked.append(step)
        quiet = one.give_back(step, step in changes)
    return asked


def test_nothing_is_given_back_where_nothing_was_compiled(
    monkeypatch: pytest.MonkeyPatch, given: list[int | None]
) -> None:
    one, size = room_of(monkeypatch)
    one.see_unchanged()
    size[0] = 5000
    assert steps_of(one, 3 * QUIET, set()) == [0, QUIET + 1, 2 * QUIET + 2]
    assert given == []


def test_a_process_that_has_grown_gives_back_ever_more_rarely(
    monkeypatch: pytest.MonkeyPatch, given: list[int | None]
) -> None:
    one, size = room_of(monkeypatch)
    one.see_unchanged()
    size[0] = 1100
    assert steps_of(one, 40, {5}) == [0, 5, 6, 7, 8, 9, 10, 12, 16, 24]
    assert len(given) == 9
    one.see_unchanged()  # after a way that has lost
    one.give_back(100, True)  # such as another way
    one.give_back(101, False)
    assert len(given) == 11


def test_a_process_that_has_not_grown_gives_back_once(monkeypatch: pytest.MonkeyPatch, given: list[int | None]) -> None:
    one, size = room_of(monkeypatch)
    one.see_unchanged()
    size[0] = 1040
    steps_of(one, 40, {5})
    assert given == [1040]


def test_what_another_way_took_on_a_gpu_is_not_what_the_unchanged_step_takes(
    monkeypatch: pytest.MonkeyPatch, given: list[int | None]
) -> None:
    one, peak = room_of(monkeypatch, "cuda")[0], [2 * FREE]
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: peak[0])
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 0)
    monkeypatch.setattr(room, "free_bytes", lambda device: 3 * FREE)
    for step, has_changed in enumerate((False, True, False)):
        one.see_unchanged()
        one.give_back(step, has_changed)
        peak[0] = 2 * FREE if step == 0 else 4 * FREE
    assert not one.obstacle(UNCHANGED)
    assert not one.obstacle(Way("ort", "step", 1))
    monkeypatch.setattr(room, "free_bytes", lambda device: FREE)
    assert one.obstacle(UNCHANGED)
