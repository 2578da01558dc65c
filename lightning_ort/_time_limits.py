"""What is decided by time: :class:`TimeLimits`, of which :data:`LIMITS` has those that hold here and now."""

from contextvars import ContextVar
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class TimeLimits:
    """Where times begin to mean something, and how much time may be taken to find out."""

    slowdown: float = 1.25  # from here on a machine is called busy, and two slowdowns are called different
    # seconds of all samples of a duel, or one burst of work elsewhere covers a whole duel of steps of a millisecond
    duel: float = 0.06
    audits: float = 1.0  # seconds that the audits of a run may take, beside shares of its time
    patience: float = 2.0  # seconds before which no copy of the process is ended


LIMITS: ContextVar[TimeLimits] = ContextVar("limits", default=TimeLimits())  # noqa: B039 (it is frozen)
