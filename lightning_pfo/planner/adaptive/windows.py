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
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

_CONFIDENCE = 0.95
FEWEST_PAIRS = 6
"""Fewer have no interval: the true median is above or below all of five values in 6 % of cases."""


class MeasuredIteration(Protocol):
    """What one iteration took, all ranks together."""

    @property
    def iteration(self) -> int:
        """Its number."""

    @property
    def time_s(self) -> float:
        """Its time."""

    @property
    def energy_j(self) -> float:
        """Energy of all GPUs in that time."""

    @property
    def temperature_c(self) -> float | None:
        """The hottest GPU's at the end, degrees Celsius; None where not known."""


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


@dataclass(frozen=True)
class MeanEnergy:
    """Mean energy of some iterations, J, and its standard error."""

    energy_j: float
    stderr_j: float


@dataclass(frozen=True)
class Window:
    """The measured steps of one window, as the wall clock and the energy counters of all GPUs tell them.

    Attributes:
        times_s: Time of each iteration.
        energies_j: Energy of all GPUs during each iteration.
        mean_energy: Mean of the energies, where counters tick: single ones are less exact there. None elsewhere.
        temperature_c: The hottest GPU's at the end, degrees Celsius; None where not known.
    """

    times_s: tuple[float, ...]
    energies_j: tuple[float, ...]
    mean_energy: MeanEnergy | None = None
    temperature_c: float | None = None

    @classmethod
    def of(cls, measured: Sequence[MeasuredIteration], mean_energy: MeanEnergy | None = None) -> Window:
        """The window of these iterations."""
        times_s, energies_j = (tuple(getattr(one, name) for one in measured) for name in ("time_s", "energy_j"))
        return cls(times_s, energies_j, mean_energy, measured[-1].temperature_c)

    @property
    def time_s(self) -> float:
        """Median, which an iteration disturbed by the machine does not move."""
        return statistics.median(self.times_s)

    @property
    def energy_j(self) -> float:
        """Median; where counters tick, the mean."""
        return statistics.median(self.energies_j) if self.mean_energy is None else self.mean_energy.energy_j

    @property
    def energy_error(self) -> float:
        """Relative standard error of reading the counters; 0 where they do not tick."""
        return 0.0 if self.mean_energy is None else self.mean_energy.stderr_j / self.mean_energy.energy_j


@dataclass(frozen=True)
class Windowed:
    """All windows at the top clocks, or all under the plan."""

    windows: tuple[Window, ...]

    @property
    def iteration_time_s(self) -> float:
        """Median over all measured iterations."""
        return statistics.median(time_s for window in self.windows for time_s in window.times_s)

    @property
    def iteration_energy_j(self) -> float:
        """Median over all measured iterations; where counters tick, the mean over windows."""
        if any(window.mean_energy is not None for window in self.windows):
            return statistics.fmean(window.energy_j for window in self.windows)
        return statistics.median(energy_j for window in self.windows for energy_j in window.energies_j)

    @property
    def temperature_c(self) -> float | None:
        """Mean over windows, degrees Celsius; None where not known."""
        known = [window.temperature_c for window in self.windows if window.temperature_c is not None]
        return statistics.fmean(known) if len(known) == len(self.windows) else None

    def as_dict(self) -> dict[str, Any]:
        """The content of `baseline` and `plan` in `report.json`; lists have one entry per window, or per iteration."""
        return {
            "iteration_time_s": self.iteration_time_s,
            "iteration_energy_j": self.iteration_energy_j,
            "iteration_times_s": [time_s for window in self.windows for time_s in window.times_s],
            "iteration_energies_j": [energy_j for window in self.windows for energy_j in window.energies_j],
            "window_times_s": [window.time_s for window in self.windows],
            "window_energies_j": [window.energy_j for window in self.windows],
            "window_temperatures_c": [window.temperature_c for window in self.windows],
        }


def savings_percent(baseline: Windowed, plan: Windowed) -> list[float]:
    """Energy saved, by pair."""
    pairs = zip(plan.windows, baseline.windows, strict=True)
    return [-change_percent(under.energy_j, top.energy_j) for under, top in pairs]


def slowdowns_percent(baseline: Windowed, plan: Windowed) -> list[float]:
    """Time lost, by pair."""
    pairs = zip(plan.windows, baseline.windows, strict=True)
    return [change_percent(under.time_s, top.time_s) for under, top in pairs]


def saving_interval(baseline: Windowed, plan: Windowed) -> tuple[float, float] | None:
    """The 95 % confidence interval of the saving, percent; None for too few pairs.

    Where counters tick, it is wider by what reading them misses in a pair. More pairs do not help against that:
    iterations that take about a multiple of a tick begin and end at the same place of a tick each time.
    """
    interval = median_interval(savings_percent(baseline, plan))
    if interval is None:
        return None
    pairs = zip(plan.windows, baseline.windows, strict=True)
    errors = [math.hypot(under.energy_error, top.energy_error) * under.energy_j / top.energy_j for under, top in pairs]
    missed = 100 * statistics.median(errors)
    return interval[0] - missed, interval[1] + missed


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
