"""Whether other programs take the processors, from how long a thread waits for one.

A *slowdown* is how many times as long something took as it would have with a processor of its own: its seconds,
divided by those in which the thread did not wait for one. It is 1 on an idle machine.
"""

import os
from collections.abc import Iterable
from contextvars import ContextVar
from dataclasses import dataclass
from time import perf_counter


@dataclass(frozen=True, kw_only=True)
class TimeLimits:
    """Where times begin to mean something, and how much time may be taken to find out."""

    slowdown: float = 1.25  # from here on a machine is called busy, and two slowdowns are called different
    # seconds of all samples of a duel, or one burst of work elsewhere covers a whole duel of steps of a millisecond
    duel: float = 0.06
    one_thread: float = 5.0  # that a step may take longer where it is tried on one thread; 0 if that is not tried


WHILE_BUSY = "; timed while other programs used the machine"  # behind times, in what people read

LIMITS: ContextVar[TimeLimits] = ContextVar("limits", default=TimeLimits())  # noqa: B039 (it is frozen)


def slowdown(seconds: float, waited: float) -> float:
    """Return the slowdown of something that took seconds, in some of which the thread waited for a processor."""
    return max(1.0, seconds / (seconds - waited)) if seconds > waited else 1.0


def is_busy(slowed: float) -> bool:
    """Return whether a machine with this slowdown is busy: what is timed on it may be different when it is not."""
    return slowed > LIMITS.get().slowdown


def differ(slowed: Iterable[float]) -> bool:
    """Return whether times under these slowdowns have no ratio that means anything."""
    slowed = list(slowed)
    return bool(slowed) and max(slowed) > LIMITS.get().slowdown * min(slowed)


_FILE = "/proc/thread-self/schedstat"  # nanoseconds on a processor, those of waiting for one, time slices


class Stopwatch:
    """Runs from when it is made; read it in the same thread.

    Linux counts how long a thread was ready to run and had no processor. Where nobody does, the system's load says how
    many programs share a processor.
    """

    def __init__(self) -> None:
        self._waited, self._start = _seconds_waited(), perf_counter()

    def read(self) -> tuple[float, float]:
        """Return the seconds since the start, and those of them in which the thread waited for a processor."""
        seconds, waited = perf_counter() - self._start, _seconds_waited()
        if waited is not None and self._waited is not None:
            return seconds, min(waited - self._waited, seconds)
        return seconds, seconds * max(0.0, 1 - 1 / _load())

    @property
    def slowdown(self) -> float:
        """How many times as long it has taken so far as on an idle machine."""
        return slowdown(*self.read())


def _seconds_waited() -> float | None:
    try:
        file = os.open(_FILE, os.O_RDONLY)  # in half the time of Python's open
        try:
            return int(os.read(file, 100).split()[1]) / 1e9
        finally:
            os.close(file)
    except (OSError, ValueError, IndexError):
        return None


def _load() -> float:
    """Programs that want to run, for each processor; at least 1."""
    try:
        return max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
    except (AttributeError, OSError):  # Windows
        return 1.0
