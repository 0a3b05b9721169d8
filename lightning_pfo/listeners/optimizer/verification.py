"""Whether a plan keeps what it promises: windows under it and at the top clocks in turn, compared in pairs."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_pfo.core.frequency_plan import FrequencyPlan
from lightning_pfo.listeners.meters.iterations import IterationMeasurement
from lightning_pfo.listeners.windows import Group, Window, Windowed, Windows, change_percent, median_interval
from lightning_pfo.planner.frontier.data import Frontier

Interval = tuple[float, float]


@dataclass(frozen=True)
class Verified:
    """What pairs of windows say of a plan.

    Attributes:
        baseline: Windows at the top clocks.
        plan: As many under the plan: those of equal place make a pair.
    """

    baseline: Windowed
    plan: Windowed

    @property
    def savings_percent(self) -> list[float]:
        """Energy saved, by pair."""
        return [-change for change in self._changes_percent("energy_j")]

    @property
    def slowdowns_percent(self) -> list[float]:
        """Time lost, by pair."""
        return self._changes_percent("time_s")

    def _changes_percent(self, name: str) -> list[float]:
        pairs = zip(self.plan.windows, self.baseline.windows, strict=True)
        return [change_percent(getattr(plan, name), getattr(top, name)) for plan, top in pairs]

    @property
    def saving_percent(self) -> float:
        """The median over pairs."""
        return statistics.median(self.savings_percent)

    @property
    def slowdown_percent(self) -> float:
        """The median over pairs."""
        return statistics.median(self.slowdowns_percent)

    @property
    def saving_interval_percent(self) -> Interval | None:
        """95 % confidence interval; None for too few pairs."""
        return median_interval(self.savings_percent)

    @property
    def slowdown_interval_percent(self) -> Interval | None:
        """That of the slowdown."""
        return median_interval(self.slowdowns_percent)

    def and_more(self, more: Verified) -> Verified:
        """With further pairs."""
        return Verified(
            Windowed(self.baseline.windows + more.baseline.windows), Windowed(self.plan.windows + more.plan.windows)
        )

    def as_dict(self) -> dict[str, Any]:
        """For `report.json`."""
        return {
            "pairs": len(self.plan.windows),
            "saving_percent": self.saving_percent,
            "saving_interval_percent": self.saving_interval_percent,
            "slowdown_percent": self.slowdown_percent,
            "slowdown_interval_percent": self.slowdown_interval_percent,
            "baseline": self.baseline.as_dict(),
            "plan": self.plan.as_dict(),
        }


def verified(
    windows: Windows,
    first: int,
    measurements: Sequence[IterationMeasurement],
    means_j: Mapping[Group, float],
    number: int = 1,
) -> Verified | None:
    """What was measured in the pairs of which both windows were; None if there is none.

    Args:
        windows: How iterations were divided.
        first: Number of the first iteration.
        measurements: What iterations took.
        means_j: Mean energies of groups, where counters tick; see `PlannedRun.mean_energies_j`.
        number: Of the plan, where there are several.
    """
    by_group: dict[Group, list[IterationMeasurement]] = {}
    for one in measurements:
        if first <= one.iteration < first + windows.num_steps:
            by_group.setdefault(windows.group_of(one.iteration - first), []).append(one)
    pairs = [n for n in range(windows.num_pairs) if {(n, 0, True), (n, number, True)} <= by_group.keys()]
    if not pairs:
        return None

    def windowed(number: int) -> Windowed:
        groups = [(pair, number, True) for pair in pairs]
        return Windowed(tuple(Window.of(by_group[group], means_j.get(group)) for group in groups))

    return Verified(windowed(0), windowed(number))


def faster_plan(frontier: Frontier, plan: FrequencyPlan, found: Verified, tolerance: float) -> FrequencyPlan | None:
    """What to fall back to where a plan is slower than it promises; None where it is not, beyond the tolerance.

    The next one would be late by as much, so that one is taken that much faster; the top clocks where there is none.

    Args:
        frontier: The plans.
        plan: The one that was measured.
        found: What was measured.
        tolerance: How much later than promised it may be, as a share of the top clocks' time.
    """
    top_s = frontier.baseline.iteration_time_s
    promised = plan.iteration_time_s / top_s - 1
    late = found.slowdown_percent / 100 - promised
    if late <= tolerance:
        return None
    within_s = plan.iteration_time_s - late * top_s
    fitting = [one for one in frontier.plans if one.iteration_time_s <= within_s]
    return fitting[-1] if fitting else frontier.baseline
