"""Whether other programs take the processors, from how long a thread waits for one.

A *slowdown* is how many times as long something took as it would have with a processor of its own: its seconds,
divided by those in which the thread did not wait for one. It is 1 on an idle machine.
"""

from collections.abc import Iterable

from lightning_ort._time_limits import LIMITS


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
