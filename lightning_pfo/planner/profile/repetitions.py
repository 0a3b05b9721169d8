"""Repeated measurements of one point, of which chance would decide which looks fastest, and which cheapest."""

from __future__ import annotations

import math
from collections.abc import Sequence


def mean_of(values: Sequence[float], stderrs: Sequence[float | None]) -> tuple[float, float | None]:
    """The mean of repetitions and its standard error, None unless those of all are known.

    Values that are all alike stand for one measurement: they have been given their mean before.
    """
    if len(set(values)) == 1:
        return values[0], stderrs[0]
    known = [stderr for stderr in stderrs if stderr is not None]
    stderr = math.hypot(*known) / len(known) if len(known) == len(stderrs) else None
    return math.fsum(values) / len(values), stderr
