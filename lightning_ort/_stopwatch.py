"""Seconds, and how many of them this thread waited for a processor: :class:`Stopwatch`."""

import os
import time

from lightning_ort._busy import slowdown

_FILE = "/proc/thread-self/schedstat"  # nanoseconds on a processor, those of waiting for one, time slices


class Stopwatch:
    """Runs from when it is made; read it in the same thread.

    Linux counts how long a thread was ready to run and had no processor. Where nobody does, the system's load says how
    many programs share a processor.
    """

    def __init__(self) -> None:
        self._waited, self._start = _seconds_waited(), time.perf_counter()

    def read(self) -> tuple[float, float]:
        """Return the seconds since the start, and those of them in which the thread waited for a processor."""
        seconds, waited = time.perf_counter() - self._start, _seconds_waited()
        if waited is not None and self._waited is not None:
            return seconds, min(waited - self._waited, seconds)
        return seconds, seconds * max(0.0, 1 - 1 / _load())

    @property
    def slowdown(self) -> float:
        """How many times as long it has taken so far as on an idle machine."""
        return slowdown(*self.read())


def _seconds_waited() -> float | None:
    try:
        with open(_FILE, "rb") as file:
            return int(file.read().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return None


def _load() -> float:
    """Programs that want to run, for each processor; at least 1."""
    try:
        return max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
    except (AttributeError, OSError):  # Windows
        return 1.0
