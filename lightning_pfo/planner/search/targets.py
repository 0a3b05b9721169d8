"""The times for which assignments are wanted, and which of them are still open."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lightning_pfo.planner.network.arrays import Floats


@dataclass(frozen=True, eq=False)
class Targets:
    """The times for which assignments are wanted.

    Attributes:
        times: In seconds, slow to fast, shape (targets,).
        is_kept: Whether a time must be kept to.
        reach: By how many seconds the others may be missed: half the distance to the next one.
    """

    times: Floats
    is_kept: npt.NDArray[np.bool_]
    reach: Floats

    def __len__(self) -> int:
        return len(self.times)


def make_targets(slowest: float, fastest: float, num_free: int, kept: Set[float]) -> Targets:
    """Spread targets equally between the slowest and the fastest time, and add those that must be kept to.

    Args:
        slowest: In seconds.
        fastest: In seconds.
        num_free: Number of targets in between that need not be kept to.
        kept: Times in seconds that must be.
    """
    free = np.linspace(slowest, fastest, num_free + 2)[1:-1]
    times = np.array(sorted([*free, *kept], reverse=True))
    is_kept = np.isin(times, list(kept))
    return Targets(times, is_kept, np.where(is_kept, 0.0, (slowest - fastest) / (num_free + 1) / 2))
