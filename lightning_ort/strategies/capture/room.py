"""Whether there is memory to try another way to run a step: :class:`Room`."""

import torch

from lightning_ort._memory import free_bytes, resident_bytes
from lightning_ort.compiler.engines import ENGINES
from lightning_ort.strategies.race.race import UNCHANGED, Way
from lightning_ort.strategies.race.run_facts import RunFacts

# nothing is tried with less free memory than this, in bytes and, on a CPU, as a share of what the process uses
FREE, FREE_SHARE = 256 << 20, 0.25


class Room:
    """The memory that a module's steps have."""

    def __init__(self, run: RunFacts) -> None:
        self._run = run
        self._step = 0  # bytes that an unchanged step takes for itself on a GPU

    def see_unchanged(self) -> None:
        """Note between two steps what the unchanged step takes, as long as nothing else has run."""
        device = self._run.device
        if device.type == "cuda":
            self._step = torch.cuda.max_memory_allocated(device) - torch.cuda.memory_allocated(device)

    def used(self) -> float:
        """Return the bytes that the process uses; 0 if nobody knows."""
        return resident_bytes(self._run.device) or 0.0

    def obstacle(self, way: Way) -> str:
        """Return why a way may not run beside the champion now; nothing if it may.

        What is compiled takes memory, and so do two ways in turns. On a GPU both take it from torch's cache, one after
        the other, but for a recording, which keeps its own.
        """
        device = self._run.device
        free, used = free_bytes(device), resident_bytes(device)
        if free is None or used is None:
            return ""
        if device.type == "cuda":
            wanted = self._step if way == UNCHANGED else max(FREE, self._step * (1 + ENGINES[way.engine].records))
        else:
            wanted = 0 if way == UNCHANGED else max(FREE, int(FREE_SHARE * used))
        return "" if free >= wanted else f"only {free >> 20} MB of memory are free"
