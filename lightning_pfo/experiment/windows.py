"""Which steps of the training run at the top clocks, and which under the plan: windows in turn, compared in pairs.

::

    pair            0          1          2
    clocks      top  plan   plan  top  top  plan ...

What changes slowly (temperature, other users of the machine, the data) meets both windows of a pair, and as every other
pair begins with the plan, a steady drift favours neither. The first steps of each window, in which clocks, power and
counters settle, are not measured.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

_CONFIDENCE = 0.95
FEWEST_PAIRS = 6
"""Fewer have no interval: the true median is above or below all of five values in 6 % of cases."""


@dataclass(frozen=True)
class Windows:
    """The division of a training.

    Attributes:
        num_pairs: Windows at the top clocks, and as many under the plan.
        steps: Steps of a window.
        warmup_steps: The first of them, which are not measured.
    """

    num_pairs: int
    steps: int
    warmup_steps: int

    @property
    def num_steps(self) -> int:
        """Steps of the whole training."""
        return 2 * self.num_pairs * self.steps

    def place_of(self, step: int) -> tuple[int, bool]:
        """Pair of a step, and whether it runs under the plan."""
        pair, is_second = divmod(step // self.steps, 2)
        return pair, is_second == 1 - pair % 2

    def is_measured(self, step: int) -> bool:
        """Whether a step is not one of a window's first."""
        return step % self.steps >= self.warmup_steps

    def group_of(self, step: int) -> tuple[int, bool, bool]:
        """Steps of equal groups are alike: those of a window that are measured, and those that are not."""
        return (*self.place_of(step), self.is_measured(step))


def median_interval(differences: Sequence[float]) -> tuple[float, float] | None:
    """The 95 % confidence interval of the median, whatever the distribution; None for fewer than `FEWEST_PAIRS`.

    Each difference is above the true median with probability 1/2, so the number of those that are is binomial (the
    interval of the sign test). Between two order statistics, its coverage is 95 % or more.
    """
    values, count = sorted(differences), len(differences)
    outside, tail = -1, 0.0  # how many values may lie outside at either end
    while (tail := tail + math.comb(count, outside + 1) / 2**count) <= (1 - _CONFIDENCE) / 2:
        outside += 1
    return (values[outside], values[count - 1 - outside]) if outside >= 0 else None


def change_percent(value: float, reference: float) -> float:
    """How much larger `value` is than `reference`, in percent."""
    return 100 * (value / reference - 1)
