"""Whether a candidate learns as float32 under Lightning's own strategy does: :func:`departure`."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

LEAST = 16  # steps of the optimizer, before a curve tells anything
_SMALL = 0.05  # a loss that has fallen to less than this share of the first one is compared with that share
_ERRORS = 2.0  # standard errors that may be chance


@dataclass(frozen=True)
class Departure:
    """How far one loss curve is from another at the end, both relative to the loss."""

    difference: float
    noise: float  # what the difference may be by chance: large where examples come in another order

    def exceeds(self, tolerance: float) -> bool:
        """Return whether more than the tolerance is not by chance."""
        return self.difference - self.noise > tolerance


def departure(curve: Sequence[float], reference: Sequence[float]) -> Departure | None:
    """Return how far two curves are apart at their end, or ``None`` if they are too short or the reference diverges.

    Both start from the same weights and see the same examples. The end is the last quarter of the steps that both have
    done: a mean, since single steps differ by chance.
    """
    length = min(len(curve), len(reference))
    if length < LEAST:
        return None
    part = max(4, length // 4)
    mine, theirs = curve[length - part : length], reference[length - part : length]
    if not all(map(math.isfinite, (reference[0], *theirs))):
        return None
    apart = [one - other for one, other in zip(mine, theirs, strict=True)]
    if not all(map(math.isfinite, mine)):
        return Departure(math.inf, 0.0)
    scale = max(abs(statistics.fmean(theirs)), _SMALL * abs(reference[0]), 1e-12)
    noise = _ERRORS * statistics.stdev(apart) / part**0.5
    return Departure(abs(statistics.fmean(apart)) / scale, noise / scale)


def sketch(curve: Sequence[float], points: int = 6) -> str:
    """Return a curve as a few numbers."""
    length = len(curve)
    at = sorted({round(number * (length - 1) / (points - 1)) for number in range(points)}) if length else []
    return " ".join(f"{curve[index]:.3g}" for index in at)
