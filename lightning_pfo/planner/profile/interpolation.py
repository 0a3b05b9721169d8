"""Between two measured clocks: on the straight line. The one interpolation of the planner."""

from __future__ import annotations

import operator
from bisect import bisect_left
from collections.abc import Sequence


def at_clock(clock_mhz: int, clocks_mhz: Sequence[int], *curves: Sequence[float]) -> tuple[float, ...]:
    """Each curve at a clock: on the line between its measured neighbours, or at the nearest one beyond the ends.

    Args:
        clock_mhz: Any clock.
        clocks_mhz: Measured clocks, the highest first.
        curves: Values at each of them.
    """
    row = bisect_left(clocks_mhz, -clock_mhz, key=operator.neg)
    if row == len(clocks_mhz):
        return tuple(values[-1] for values in curves)
    if row == 0 or clocks_mhz[row] == clock_mhz:
        return tuple(values[row] for values in curves)
    share = (clock_mhz - clocks_mhz[row]) / (clocks_mhz[row - 1] - clocks_mhz[row])
    return tuple(share * values[row - 1] + (1 - share) * values[row] for values in curves)
