"""Runs candidates in processes of their own: :class:`Runner`, and :class:`ProcessRunner`, which the search uses."""

import time
from pathlib import Path
from typing import Protocol

import torch

from lightning_ort._memory import free_bytes
from lightning_ort.tuning.candidate import Candidate
from lightning_ort.tuning.project import Project, start
from lightning_ort.tuning.trainer_process import Sample, TrainerProcess, uninterrupted


class Runner(Protocol):
    """What a search needs of the machine."""

    def clock(self) -> float:
        """Return the time in seconds."""
        ...

    def sample(self, candidate: Candidate, steps: int, timeout: float) -> Sample:
        """Let a candidate train for so many batches, from the start if it has not been started."""
        ...

    def stop(self, candidate: Candidate) -> None:
        """End a candidate's training, if it has been started."""
        ...

    def free_memory(self) -> int | None:
        """Return the bytes that further candidates can have, or ``None`` if nobody knows."""
        ...


class ProcessRunner:
    """Trains each candidate in a process of its own, which waits while others have their turn."""

    def __init__(self, project: Project, folder: Path) -> None:
        self._project, self._folder = project, folder
        self._processes: dict[Candidate, TrainerProcess] = {}
        self._started = 0

    def clock(self) -> float:
        """Return the time in seconds."""
        return time.monotonic()

    def sample(self, candidate: Candidate, steps: int, timeout: float) -> Sample:
        """Let a candidate train for so many batches; the errors are those of :class:`TrainerProcess`."""
        if candidate not in self._processes:
            self._started += 1
            folder = self._folder / f"{self._started:02d} {candidate}".replace("/", "_")[:100]
            self._processes[candidate] = start(self._project, candidate, folder)
        return self._processes[candidate].sample(steps, timeout)

    def stop(self, candidate: Candidate) -> None:
        """End a candidate's process."""
        if (process := self._processes.pop(candidate, None)) is not None:
            process.stop()

    def stop_all(self) -> None:
        """End all processes."""
        with uninterrupted():
            for candidate in list(self._processes):
                self.stop(candidate)

    def free_memory(self) -> int | None:
        """Return the free bytes of the GPU, or else of the machine."""
        return free_bytes(torch.device("cuda") if torch.cuda.is_available() else None)
