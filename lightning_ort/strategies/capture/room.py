"""Whether there is memory to try another way to run a step: :class:`Room`."""

import math

import torch

from lightning_ort._memory import free_bytes, resident_bytes
from lightning_ort.compiler.engines import ENGINES
from lightning_ort.compiler.machine.out_of_memory import give_back_memory
from lightning_ort.strategies.race.race import UNCHANGED, Way
from lightning_ort.strategies.race.run_facts import RunFacts

# nothing is tried with less free memory than this, in bytes and, on a CPU, as a share of what the process uses
FREE, FREE_SHARE = 256 << 20, 0.25
# so many times what the unchanged step needs, and free memory is given back that malloc keeps in holes of its heap
LARGE = 1.05
FIRST = 4  # steps after ways have changed, before each of which it is: turns of a duel are alike
QUIET = 256  # steps in which nobody asks, at most: the report is that much behind


class Room:
    """The memory that a module's steps have."""

    def __init__(self, run: RunFacts) -> None:
        self._run = run
        self._step = 0  # bytes that an unchanged step takes for itself on a GPU
        self._unchanged = 0.0  # bytes of the process on a CPU, before anything was compiled
        self._next, self._gap = math.inf, 1  # the step before which memory is given back, and steps to the one after it
        self._changed = 0  # the step before which ways have changed

    def see_unchanged(self) -> None:
        """Note between two steps what the unchanged step takes, as long as nothing else has run."""
        device = self._run.device
        if self._next < math.inf:  # a way that has lost leaves holes, and a peak of its own
            return
        if device.type == "cuda":
            self._step = torch.cuda.max_memory_allocated(device) - torch.cuda.memory_allocated(device)
        else:
            self._unchanged = self.used()

    def give_back(self, step: int, has_changed: bool) -> int:
        """Give free memory back before this step, if ways have changed or the process has grown much since.

        Steps that run for the first time, and those that take turns, leave holes in the heap between small blocks: a
        transformer's steps had 127 MB in use and 290 resident; without the holes of the first ones, 185. Each time
        costs about a tenth of such a step, for pages that are touched anew, and more than a whole small one, so it is
        done ever more rarely.

        Returns:
            For how many steps it need not be called.

        """
        if has_changed:
            self._next, self._gap, self._changed = step, 1, step
        if step >= self._next:
            if has_changed or (self._run.device.type == "cpu" and self.used() > LARGE * self._unchanged):
                give_back_memory()
            self._next, self._gap = step + self._gap, 2 * self._gap if step >= self._changed + FIRST else 1
        return QUIET if self._next == math.inf else int(self._next - step) - 1

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
