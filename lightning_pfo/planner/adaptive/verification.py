"""Whether a plan keeps what it promises: windows under it and at the top clocks in turn, compared in pairs."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_pfo.core.frequency_plan import FrequencyPlan
from lightning_pfo.core.wording import counted
from lightning_pfo.planner.adaptive.windows import (
    MeanEnergy,
    MeasuredIteration,
    Window,
    Windowed,
    Windows,
    median_interval,
    saving_interval,
    savings_percent,
    slowdowns_percent,
)
from lightning_pfo.planner.frontier.data import Frontier

Interval = tuple[float, float]
_EQUAL_TIMES = 1e-9


@dataclass(frozen=True)
class Verified:
    """What pairs of windows say of a plan.

    Attributes:
        baseline: Windows at the top clocks.
        plan: As many under the plan: those of equal place make a pair.
    """

    baseline: Windowed
    plan: Windowed

    def __str__(self) -> str:
        interval = self.saving_interval_percent
        between = "" if interval is None else f" ({interval[0]:.2f} to {interval[1]:.2f} %)"
        return (
            f"{counted(len(self.plan.windows), 'pair')} of windows: {self.saving_percent:.2f} %{between} less energy, "
            f"{self.slowdown_percent:+.2f} % time"
        )

    @property
    def savings_percent(self) -> list[float]:
        """Energy saved, by pair."""
        return savings_percent(self.baseline, self.plan)

    @property
    def saving_percent(self) -> float:
        """The median over pairs."""
        return statistics.median(self.savings_percent)

    @property
    def slowdown_percent(self) -> float:
        """The median over pairs."""
        return statistics.median(slowdowns_percent(self.baseline, self.plan))

    @property
    def saving_interval_percent(self) -> Interval | None:
        """95 % confidence interval; None for too few pairs."""
        return saving_interval(self.baseline, self.plan)

    @property
    def slowdown_interval_percent(self) -> Interval | None:
        """That of the slowdown."""
        return median_interval(slowdowns_percent(self.baseline, self.plan))

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
    measurements: Sequence[MeasuredIteration],
    means: Mapping[tuple[int, bool, bool], MeanEnergy],
) -> Verified | None:
    """What was measured in the pairs of which both windows were; None if there is none.

    Args:
        windows: How iterations were divided.
        first: Number of the first iteration.
        measurements: What iterations took.
        means: Mean energies of groups, where counters tick; see `PlannedRun.mean_energies`.
    """
    by_group: dict[tuple[int, bool, bool], list[MeasuredIteration]] = {}
    for one in measurements:
        if first <= one.iteration < first + windows.num_steps:
            by_group.setdefault(windows.group_of(one.iteration - first), []).append(one)
    pairs = [n for n in range(windows.num_pairs) if {(n, False, True), (n, True, True)} <= by_group.keys()]
    if not pairs:
        return None

    def windowed(is_plan: bool) -> Windowed:
        groups = [(pair, is_plan, True) for pair in pairs]
        return Windowed(tuple(Window.of(by_group[group], means.get(group)) for group in groups))

    return Verified(windowed(False), windowed(True))


def lateness_s(frontier: Frontier, wanted_s: float, found: Verified, tolerance: float) -> float:
    """How much longer than wanted a plan takes, s; 0 where that is within the tolerance.

    Args:
        frontier: Where it is from.
        wanted_s: What it may take, s: the time of the plan that was asked for.
        found: What was measured.
        tolerance: How much later it may be, as a share of the top clocks' time.
    """
    top_s = frontier.baseline.iteration_time_s
    late_s = (1 + found.slowdown_percent / 100) * top_s - wanted_s
    return late_s if late_s > tolerance * top_s else 0.0


def faster_by(frontier: Frontier, plan: FrequencyPlan, by_s: float) -> FrequencyPlan:
    """The plan of least energy that is faster than another by so much; the top clocks where there is none.

    The next one would be late by about as much as the one that was measured, so that is how much faster it must be.
    """
    if not by_s:
        return plan
    within_s = (plan.iteration_time_s - by_s) * (1 + _EQUAL_TIMES)
    fitting = [one for one in frontier.plans if one.iteration_time_s <= within_s]
    return fitting[-1] if fitting else frontier.baseline
