"""Whether a candidate learns as float32 under Lightning's own strategy does: :func:`difference`."""

import statistics
from collections.abc import Sequence

LEAST = 8  # steps of the optimizer, before a curve tells anything
_SMALL = 0.05  # a loss that has fallen to less than this share of the first one is compared with that share


def difference(curve: Sequence[float], reference: Sequence[float]) -> float | None:
    """Return the relative difference of two loss curves at their end, or ``None`` if they are too short.

    Both start from the same weights and see the same examples. The end is the last quarter of the steps that both have
    done: a mean, since single steps differ by chance.
    """
    length = min(len(curve), len(reference))
    if length < LEAST:
        return None
    part = max(2, length // 4)
    mine, theirs = (statistics.fmean(one[length - part : length]) for one in (curve, reference))
    return abs(mine - theirs) / max(abs(theirs), _SMALL * abs(reference[0]), 1e-12)


def sketch(curve: Sequence[float], points: int = 6) -> str:
    """Return a curve as a few numbers."""
    length = len(curve)
    at = sorted({round(number * (length - 1) / (points - 1)) for number in range(points)}) if length else []
    return " ".join(f"{curve[index]:.3g}" for index in at)
