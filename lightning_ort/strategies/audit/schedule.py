"""When captured steps are audited, and what that may take: :class:`Schedule` and :func:`expected_seconds`.

Nothing here knows of torch, clocks or files.
"""

import random

from lightning_ort._busy import LIMITS

LONGEST_GAP = 1000  # steps
SHARE, SHARE_OF_COMPILING = 0.003, 0.03  # of a run's time, and of that of compiling, that its audits may take
COPYING = 0.1  # seconds that copying a process is expected to take, before one was copied
PATIENCE = 4.0  # the copy ends after so many times what was expected
ENOUGH = 2  # audits, for a step to be called audited


class Schedule:
    """Draws which captured steps are audited: the first ones, then ever fewer, in no pattern; the same for a seed."""

    def __init__(self, seed: str) -> None:
        self._random = random.Random(seed)
        self._due = 0
        self._epoch = -1

    def restart(self) -> None:
        """Begin anew with step 0: something was compiled."""
        self._due = 0

    def is_due(self, step: int, epoch: int) -> bool:
        """Return whether a step is to be audited, by its number since something was compiled; each epoch's first is."""
        return step >= self._due or epoch != self._epoch

    def passed(self, step: int, epoch: int, again: bool = False) -> None:
        """Draw the next one; ``again``: whether the next step is to confirm what was found."""
        self._epoch = epoch
        longest = 1 if again else min(max(1, step // 2), LONGEST_GAP)
        self._due = step + 1 + self._random.randrange(longest)


def expected_seconds(usual: float, threads: int, processor: float, slowdown: float) -> float:
    """Return how long an audit is expected to take on the machine as it is now.

    ``usual`` are the seconds of the unchanged step with its ``threads``, of which a copy has one; ``processor`` the
    processor's seconds of the last copy, 0 if there was none.
    """
    return slowdown * max(processor, COPYING + usual * threads)


def allowed_seconds(elapsed: float, compiling: float) -> float:
    """Return what the audits of a run may take in all, after so many seconds of the run, and of compiling in it."""
    return LIMITS.get().audits + SHARE * elapsed + SHARE_OF_COMPILING * compiling


def limit_seconds(expected: float) -> float:
    """Return after how many seconds a copy ends itself."""
    return max(LIMITS.get().patience, PATIENCE * expected)
