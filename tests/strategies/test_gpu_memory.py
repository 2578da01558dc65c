"""What is free of a GPU's memory, and for which way it suffices, with figures as torch gives them."""

from typing import Any

import pytest
import torch

from lightning_ort._memory import free_bytes, peak_bytes
from lightning_ort.strategies.capture.room import FREE, Room
from lightning_ort.strategies.race.race import UNCHANGED, Way

CUDA, GB = torch.device("cuda", 0), 1 << 30
RECORDED, INDUCTOR = Way("inductor-graphs"), Way("inductor")


class Gpu:
    """One of 80 GB: what torch has reserved, and what of it is in use or belongs to recordings."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reserved, self.active, self.recorded, self.peak = 0, 0, 0, 0
        free = lambda device: (80 * GB - self.reserved - self.recorded, 80 * GB)  # noqa: E731
        monkeypatch.setattr(torch.cuda, "mem_get_info", free)
        monkeypatch.setattr(torch.cuda, "memory_snapshot", self.snapshot)
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: self.active)
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: self.peak)
        monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: self.reserved + self.recorded)

    def snapshot(self) -> list[dict[str, Any]]:
        shared = {"device": 0, "total_size": self.reserved, "active_size": self.active, "segment_pool_id": (0, 0)}
        own = {"device": 0, "total_size": self.recorded, "active_size": 0, "segment_pool_id": (1, 0)}
        return [shared, own, {**shared, "device": 1, "total_size": 70 * GB}]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    return Gpu(monkeypatch)


class Module:
    device = CUDA


def test_what_torch_keeps_for_the_next_tensors_is_free(gpu: Gpu) -> None:
    gpu.reserved, gpu.active = 70 * GB, 20 * GB
    assert free_bytes(CUDA) == 60 * GB
    gpu.recorded = 5 * GB
    assert free_bytes(CUDA) == 55 * GB
    assert peak_bytes(CUDA) == 75 * GB


def test_a_way_is_tried_where_the_memory_suffices_for_both(gpu: Gpu) -> None:
    room = Room(Module())  # type: ignore[arg-type]
    gpu.reserved, gpu.active, gpu.peak = 70 * GB, 20 * GB, 65 * GB
    room.see_unchanged()  # 45 GB for itself
    assert room.obstacle(INDUCTOR) == ""  # they run one after the other
    assert room.obstacle(RECORDED) == "only 61440 MB of memory are free"
    gpu.active = 20 * GB
    gpu.peak = 45 * GB
    room.see_unchanged()
    assert room.obstacle(RECORDED) == ""
    assert room.obstacle(UNCHANGED) == ""
    gpu.reserved, gpu.recorded = 40 * GB, 36 * GB  # of a recording that has won
    assert room.obstacle(UNCHANGED) == "only 24576 MB of memory are free"
    gpu.reserved = gpu.active = 80 * GB - FREE // 2
    gpu.recorded = 0
    assert room.obstacle(INDUCTOR)
