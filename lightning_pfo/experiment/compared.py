"""Plans of several policies in one training: what each took beside the top clocks, and beside the plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from lightning_pfo.core.frequency_plan import FrequencyPlan, saving_percent
from lightning_pfo.planner.adaptive.verification import Interval, Verified
from lightning_pfo.planner.adaptive.windows import Windowed, change_percent

_NO_DIFFERENCE = 1e-6
"""Percent: rounding, not another plan."""


@dataclass(frozen=True)
class ComparedPlan:
    """A plan that had windows of the training.

    Attributes:
        measured: Its windows, and those at the top clocks.
        predicted: What the planner says of it.
        predicted_baseline: What it says of the top clocks.
        beside_plan: Its windows, and those of the plan that the training is about; None for that one itself.
    """

    measured: Verified
    predicted: FrequencyPlan
    predicted_baseline: FrequencyPlan
    beside_plan: Verified | None = None

    @property
    def bound_saving_percent(self) -> float:
        """No plan of its order and profile that is as fast saves more."""
        return saving_percent(self.predicted.lower_bound_j, self.predicted_baseline.iteration_energy_j)

    @property
    def beats_plan(self) -> bool:
        """Whether it needed less energy than the plan and was not slower, beyond doubt where there is an interval."""
        beside = self.beside_plan
        if beside is None:
            return False
        saving, slowdown = beside.saving_interval_percent, beside.slowdown_interval_percent
        least_saved = beside.saving_percent if saving is None else saving[0]
        most_lost = beside.slowdown_percent if slowdown is None else slowdown[1]
        return least_saved > _NO_DIFFERENCE and most_lost <= _NO_DIFFERENCE

    def as_dict(self) -> dict[str, Any]:
        """An entry of `policies` in `report.json`."""
        one = self.measured
        record = {
            "iteration_time_s": one.plan.iteration_time_s,
            "iteration_energy_j": one.plan.iteration_energy_j,
            "saving_percent": one.saving_percent,
            "saving_interval_percent": one.saving_interval_percent,
            "slowdown_percent": one.slowdown_percent,
            "slowdown_interval_percent": one.slowdown_interval_percent,
            "lower_bound_saving_percent": self.bound_saving_percent,
            "predicted": {
                "iteration_time_s": self.predicted.iteration_time_s,
                "iteration_energy_j": self.predicted.iteration_energy_j,
            },
            "prediction_error_percent": prediction_error_percent(one.plan, self.predicted),
            "beats_plan": self.beats_plan,
            "windows": one.plan.as_dict(),
        }
        if self.beside_plan is not None:
            record["saving_beside_plan_percent"] = self.beside_plan.saving_percent
            record["saving_beside_plan_interval_percent"] = self.beside_plan.saving_interval_percent
        return record


def compared_plans(
    own: tuple[str, Verified, FrequencyPlan],
    others: Mapping[str, tuple[Verified, FrequencyPlan]],
    baseline: FrequencyPlan,
) -> dict[str, ComparedPlan]:
    """All plans of a training by who planned, that of the training first; none if there are no others.

    Args:
        own: Who planned, what was measured, what is predicted.
        others: The same of further plans, by who planned.
        baseline: What is predicted of the top clocks.
    """
    if not others:
        return {}
    name, measured, predicted = own
    plans = {name: ComparedPlan(measured, predicted, baseline)}
    for other, (windows, plan) in others.items():
        plans[other] = ComparedPlan(windows, plan, baseline, _beside(measured.plan, windows.plan))
    return plans


def _beside(plan: Windowed, other: Windowed) -> Verified:
    """Windows of the same rounds; a training that was ended early has one more of either."""
    count = min(len(plan.windows), len(other.windows))
    return Verified(*(Windowed(one.windows[:count]) for one in (plan, other)))


def comparison_table(plans: Mapping[str, ComparedPlan], title: str) -> Table:
    """The plans in rows, with 95 % intervals below the values that have one."""
    table = Table(title=title, caption="\n".join(_notes(plans)))
    table.add_column("policy")
    for heading in ("time (s)", "slowdown", "energy (J)", "saving", "predicted", "at most"):
        table.add_column(heading, justify="right", no_wrap=True)
    for name, one in plans.items():
        found, baseline_j = one.measured, one.predicted_baseline.iteration_energy_j
        table.add_row(
            f"{name} *" if one.beats_plan else name,
            f"{found.plan.iteration_time_s:#.5g}",
            _with_interval(f"{signed(found.slowdown_percent)} %", found.slowdown_interval_percent),
            f"{found.plan.iteration_energy_j:#.5g}",
            _with_interval(f"{found.saving_percent:.2f} %", found.saving_interval_percent),
            f"{saving_percent(one.predicted.iteration_energy_j, baseline_j):.2f} %",
            f"{one.bound_saving_percent:.2f} %",
        )
    return table


def _notes(plans: Mapping[str, ComparedPlan]) -> list[str]:
    first = next(iter(plans))
    notes = [
        f"Each in windows of one training, against the top clocks; median of {len(plans[first].measured.plan.windows)}."
    ]
    if any(one.measured.saving_interval_percent for one in plans.values()):
        notes.append("Below a value its 95 % interval.")
    notes += [
        f"* {name} needs {one.beside_plan.saving_percent:.2f} % less energy than {first} and is not slower."
        for name, one in plans.items()
        if one.beats_plan and one.beside_plan is not None
    ]
    return notes


def _with_interval(value: str, interval: Interval | None) -> str:
    return value if interval is None else f"{value}\n{interval[0] + 0.0:.2f} to {interval[1] + 0.0:.2f}"


def signed(value: float) -> str:
    """With two digits and a sign; never minus zero."""
    return f"{round(value, 2) + 0.0:+.2f}"


def prediction_error_percent(measured: Windowed, predicted: FrequencyPlan) -> dict[str, float]:
    """How much more was measured than predicted, in percent."""
    return {
        "iteration_time": change_percent(measured.iteration_time_s, predicted.iteration_time_s),
        "iteration_energy": change_percent(measured.iteration_energy_j, predicted.iteration_energy_j),
    }
