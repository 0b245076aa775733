"""Measured points -> values between them, on logarithmic scales. No torch."""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence


def at(points: Sequence[tuple[int, float]], x: float) -> float:
    """Value at `x` of a curve through some points: straight between two in log-log space.

    Below the first point the value stays; above the last one it grows in proportion, as the time
    of a transfer does.

    Args:
        points: at least one (x, value) with both above 0, in the order of x.
    """
    first, last = points[0], points[-1]
    if x <= first[0]:
        return first[1]
    if x >= last[0]:
        return last[1] * x / last[0]
    i = bisect.bisect_right(points, (x, math.inf))
    (x0, y0), (x1, y1) = points[i - 1], points[i]
    share = math.log(x / x0) / math.log(x1 / x0)
    return math.exp(math.log(y0) + share * math.log(y1 / y0))


def level(points: Sequence[tuple[int, float]], x: float) -> float:
    """As `at`, but the value stays above the last point too, as a rate does."""
    return at(points, min(x, points[-1][0]))
