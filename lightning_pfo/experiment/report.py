"""What an experiment found, as numbers: `report.json` and the table at the end."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from lightning_pfo.core.files import write_text_atomically
from lightning_pfo.core.frequency_plan import FrequencyPlan
from lightning_pfo.experiment.windows import Training
from lightning_pfo.planner.adaptive.windows import (
    FEWEST_PAIRS,
    Windowed,
    change_percent,
    median_interval,
    saving_interval,
    savings_percent,
    slowdowns_percent,
)

Interval = tuple[float, float]

_OF_ONE_RUN = ("profiling_iterations", "profiling_cost_j", "profiling_cost_s", "net_saving_j", "notes", "steps")
"""What `report.json` has of a run that optimised itself."""

_NO_WIDTH = 1e-6
"""Percent: rounding, not noise."""


@dataclass(frozen=True)
class Report:
    """Top clocks against plan.

    Attributes:
        device: Name of the GPU; an emulated one says so.
        is_emulated: Whether times, clocks and energies are modelled.
        training: What was measured.
        predicted_baseline: What the planner says of the top clocks.
        predicted_plan: What the planner says of the plan.
        settings: The configuration.
        profiling_losses: Training losses while clocks were scanned, or without the optimizer; empty where the profile
            is an earlier one.
        one_run: What a run that optimised itself tells; None for one that did not. See `OptimizedRun.summary`.
    """

    device: str
    is_emulated: bool
    training: Training
    predicted_baseline: FrequencyPlan
    predicted_plan: FrequencyPlan
    settings: dict[str, Any]
    profiling_losses: tuple[float, ...] = ()
    one_run: dict[str, Any] | None = None

    @property
    def saving_percent(self) -> float:
        """Measured energy that the plan saves: the median over pairs of windows."""
        return statistics.median(savings_percent(self.training.baseline, self.training.plan))

    @property
    def slowdown_percent(self) -> float:
        """Measured time that the plan costs: the median over pairs of windows."""
        return statistics.median(slowdowns_percent(self.training.baseline, self.training.plan))

    @property
    def saving_interval_percent(self) -> Interval | None:
        """95 % confidence interval of the saving; None for fewer than `FEWEST_PAIRS` pairs of windows."""
        return saving_interval(self.training.baseline, self.training.plan)

    @property
    def slowdown_interval_percent(self) -> Interval | None:
        """That of the slowdown."""
        return median_interval(slowdowns_percent(self.training.baseline, self.training.plan))

    @property
    def lower_bound_saving_percent(self) -> float:
        """No plan of this profile that is as fast saves more."""
        return -change_percent(self.predicted_plan.lower_bound_j, self.predicted_baseline.iteration_energy_j)

    @property
    def num_compared_losses(self) -> int:
        """How many first steps were also trained while clocks were scanned."""
        return min(len(self.training.losses), len(self.profiling_losses))

    @property
    def max_loss_difference(self) -> float | None:
        """Largest difference of the losses of a step of both trainings, whose clocks differ; None if there is one only.

        Clocks do not change arithmetic, so 0 is expected.
        """
        pairs = zip(self.training.losses, self.profiling_losses, strict=False)
        return max((abs(a - b) for a, b in pairs), default=None)

    def as_dict(self) -> dict[str, Any]:
        """The content of `report.json`."""
        pairs = {
            "baseline": (self.training.baseline, self.predicted_baseline),
            "plan": (self.training.plan, self.predicted_plan),
        }
        return {
            "device": self.device,
            "emulated": self.is_emulated,
            "saving_percent": self.saving_percent,
            "saving_interval_percent": self.saving_interval_percent,
            "slowdown_percent": self.slowdown_percent,
            "slowdown_interval_percent": self.slowdown_interval_percent,
            "lower_bound_saving_percent": self.lower_bound_saving_percent,
            **{name: measured.as_dict() for name, (measured, _) in pairs.items()},
            "training": self.training.as_dict(),
            "predicted": {name: _times_and_energy(plan) for name, (_, plan) in pairs.items()},
            "prediction_error_percent": {name: prediction_error_percent(*pair) for name, pair in pairs.items()},
            "losses": {
                "training": self.training.losses,
                "profiling": self.profiling_losses,
                "compared": self.num_compared_losses,
                "identical": None if self.max_loss_difference is None else self.max_loss_difference == 0,
                "max_difference": self.max_loss_difference,
            },
            "clock_failures": self.training.clock_failures,
            "settings": self.settings,
            **({} if self.one_run is None else {name: self.one_run[name] for name in _OF_ONE_RUN}),
        }

    def write(self, path: Path) -> None:
        """Write `report.json`, whole or not at all."""
        write_text_atomically(path, json.dumps(self.as_dict(), indent=2) + "\n")

    def table(self) -> Table:
        """The table at the end of an experiment."""
        title = f"One iteration on {self.device}"
        table = Table(title=title, caption="\n".join(self._notes()) or None, min_width=len(title))  # on one line
        table.add_column("")
        for column in ("top clocks", "plan", "difference", "at best"):
            table.add_column(column, justify="right")
        base, plan = self.training.baseline, self.training.plan
        predicted = (self.predicted_baseline, self.predicted_plan)
        base_error, plan_error = map(prediction_error_percent, (base, plan), predicted)
        saving = self.saving_interval_percent
        for quantity, unit, change, interval, at_best in (
            ("time", "s", self.slowdown_percent, self.slowdown_interval_percent, ""),
            (
                *("energy", "J", -self.saving_percent),
                *(saving and (-saving[1], -saving[0]), _percent(-self.lower_bound_saving_percent)),
            ),
        ):
            key = f"iteration_{quantity}"
            attribute = f"{key}_{unit.lower()}"
            measured = [getattr(result, attribute) for result in (base, plan)]
            expected = [getattr(prediction, attribute) for prediction in predicted]
            table.add_row(f"{quantity} ({unit})", *map(_number, measured), _percent(change), at_best)
            if interval is not None:
                table.add_row("  95 % interval", "", "", _interval(interval))
            _add_row(table, "  predicted", expected)
            table.add_row("  error", _percent(base_error[key]), _percent(plan_error[key]), end_section=True)
        _add_row(table, "power (W)", [result.iteration_energy_j / result.iteration_time_s for result in (base, plan)])
        if base.temperature_c is not None and plan.temperature_c is not None:
            difference_c = plan.temperature_c - base.temperature_c
            table.add_row(
                "hottest (C)", f"{base.temperature_c:.1f}", f"{plan.temperature_c:.1f}", f"{difference_c:+.1f}"
            )
        return table

    def _notes(self) -> list[str]:
        """What the figures are of, and what is to be known of them; each fits a line of a terminal."""
        notes = []
        num_pairs = len(self.training.plan.windows)
        if self.training.clock_failures:
            notes.append(f"NOT THE PLAN: clocks were not set ({', '.join(self.training.clock_failures)}).")
        if self.is_emulated:
            notes.append("EMULATED: times, clocks and energies are modelled.")
        notes.append(f"Difference: median of {num_pairs} pair{'s' * (num_pairs > 1)} of windows.")
        if num_pairs < FEWEST_PAIRS:
            notes.append(f"An interval takes {FEWEST_PAIRS} pairs: more trainer.steps.")
        elif self.is_emulated and _has_no_width(self.saving_interval_percent):
            notes.append("Its interval has no width: without noise the pairs are alike.")
        if self.max_loss_difference is None:
            notes.append(f"Loss of the last step: {self.training.losses[-1]:.4f}.")
        else:
            same = "identical" if self.max_loss_difference == 0 else f"up to {self.max_loss_difference:.1g} apart"
            other = "those while profiling" if self.one_run is None else "those without the optimizer"
            notes.append(f"Losses of {self.num_compared_losses} steps and {other}: {same}.")
        if self.one_run is not None:
            cost_j, cost_s = self.one_run["profiling_cost_j"], self.one_run["profiling_cost_s"]
            steps = self.one_run["profiling_iterations"]
            notes.append(f"Measuring and planning: {steps} steps, {cost_s:+.3g} s and {cost_j:+.4g} J")
            notes.append("compared with the top clocks.")
        return notes


def _has_no_width(interval: Interval | None) -> bool:
    return interval is not None and interval[1] - interval[0] < _NO_WIDTH


def _interval(interval: Interval) -> str:
    return f"{_percent(interval[0]).removesuffix(' %')} to {_percent(interval[1])}"


def _number(value: float) -> str:
    return f"{value:#.5g}"


def _add_row(table: Table, name: str, values: Sequence[float]) -> None:
    table.add_row(name, *map(_number, values), _percent(change_percent(values[1], values[0])))


def _percent(value: float) -> str:
    return f"{round(value, 2) + 0.0:+.2f} %"  # adding 0 makes -0.0 positive


def prediction_error_percent(measured: Windowed, predicted: FrequencyPlan) -> dict[str, float]:
    """How much more was measured than predicted, in percent."""
    return {
        "iteration_time": change_percent(measured.iteration_time_s, predicted.iteration_time_s),
        "iteration_energy": change_percent(measured.iteration_energy_j, predicted.iteration_energy_j),
    }


def _times_and_energy(result: FrequencyPlan) -> dict[str, Any]:
    return {"iteration_time_s": result.iteration_time_s, "iteration_energy_j": result.iteration_energy_j}
