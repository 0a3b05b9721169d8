"""What an experiment found, as numbers: `report.json` and the table at the end."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.table import Table

from lightning_pfo.core.files import write_text_atomically
from lightning_pfo.core.frequency_plan import FrequencyPlan


@dataclass(frozen=True)
class TrainingResult:
    """One training, as measured by the wall clock and the energy counters of all GPUs.

    Attributes:
        iteration_times_s: Time of each measured iteration.
        iteration_energies_j: Energy of all GPUs during each measured iteration.
        losses: Training loss of every step, warm-up included.
        val_loss: Validation loss after the last step; None without validation.
        clocks: What became of rank 0's clock changes; see `ClockStatistics.as_dict`.
        mean_energy_j: Mean energy of the measured iterations, where counters tick; None where they do not.
        clocks_of_ranks: `clocks` of every rank, by its name.
    """

    iteration_times_s: tuple[float, ...]
    iteration_energies_j: tuple[float, ...]
    losses: tuple[float, ...]
    val_loss: float | None
    clocks: dict[str, Any] = field(default_factory=dict)
    mean_energy_j: float | None = None
    clocks_of_ranks: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def iteration_time_s(self) -> float:
        """Median, which an iteration disturbed by the machine does not move."""
        return statistics.median(self.iteration_times_s)

    @property
    def clock_failures(self) -> dict[str, str]:
        """Why ranks did not set their clocks, by rank; empty if all did."""
        return {rank: clocks["failure"] for rank, clocks in self.clocks_of_ranks.items() if "failure" in clocks}

    @property
    def iteration_energy_j(self) -> float:
        """Median, see `iteration_time_s`; where counters tick, the mean, as single iterations are less exact."""
        return statistics.median(self.iteration_energies_j) if self.mean_energy_j is None else self.mean_energy_j


@dataclass(frozen=True)
class Report:
    """Top clocks against plan.

    Attributes:
        device: Name of the GPU; an emulated one says so.
        is_emulated: Whether times, clocks and energies are modelled.
        baseline: Training at the top clocks.
        plan: Training under the plan.
        predicted_baseline: What the planner says of the top clocks.
        predicted_plan: What the planner says of the plan.
        settings: The configuration.
    """

    device: str
    is_emulated: bool
    baseline: TrainingResult
    plan: TrainingResult
    predicted_baseline: FrequencyPlan
    predicted_plan: FrequencyPlan
    settings: dict[str, Any]

    @property
    def saving_percent(self) -> float:
        """Measured energy that the plan saves."""
        return -change_percent(self.plan.iteration_energy_j, self.baseline.iteration_energy_j)

    @property
    def slowdown_percent(self) -> float:
        """Measured time that the plan costs."""
        return change_percent(self.plan.iteration_time_s, self.baseline.iteration_time_s)

    @property
    def lower_bound_saving_percent(self) -> float:
        """No plan of this profile that is as fast saves more."""
        return -change_percent(self.predicted_plan.lower_bound_j, self.predicted_baseline.iteration_energy_j)

    @property
    def max_loss_difference(self) -> float:
        """Largest difference of the losses of a step; clocks do not change arithmetic, so 0 is expected."""
        return max(abs(a - b) for a, b in zip(self.baseline.losses, self.plan.losses, strict=True))

    @property
    def clock_failures(self) -> dict[str, str]:
        """Why clocks were not set, by training and rank: then the plan was not what was trained under."""
        trainings = {"baseline": self.baseline, "plan": self.plan}
        return {
            f"{name}, {rank}": failure
            for name, training in trainings.items()
            for rank, failure in training.clock_failures.items()
        }

    def as_dict(self) -> dict[str, Any]:
        """The content of `report.json`."""
        pairs = {
            "baseline": (self.baseline, self.predicted_baseline),
            "plan": (self.plan, self.predicted_plan),
        }
        return {
            "device": self.device,
            "emulated": self.is_emulated,
            "saving_percent": self.saving_percent,
            "slowdown_percent": self.slowdown_percent,
            "lower_bound_saving_percent": self.lower_bound_saving_percent,
            **{name: _training_record(measured) for name, (measured, _) in pairs.items()},
            "predicted": {name: _times_and_energy(plan) for name, (_, plan) in pairs.items()},
            "prediction_error_percent": {name: prediction_error_percent(*pair) for name, pair in pairs.items()},
            "losses": {
                "baseline": self.baseline.losses,
                "plan": self.plan.losses,
                "identical": self.max_loss_difference == 0,
                "max_difference": self.max_loss_difference,
            },
            "clock_failures": self.clock_failures,
            "settings": self.settings,
        }

    def write(self, path: Path) -> None:
        """Write `report.json`, whole or not at all."""
        write_text_atomically(path, json.dumps(self.as_dict(), indent=2) + "\n")

    def table(self) -> Table:
        """The table at the end of an experiment."""
        note = "EMULATED: times, clocks and energies are modelled." if self.is_emulated else None
        if self.clock_failures:
            note = f"NOT THE PLAN: clocks were not set ({', '.join(self.clock_failures)})."
        title = f"One iteration on {self.device}"
        table = Table(title=title, caption=note, min_width=len(title))  # on one line
        table.add_column("")
        for column in ("top clocks", "plan", "difference", "at best"):
            table.add_column(column, justify="right")
        base, plan = self.baseline, self.plan
        predicted = (self.predicted_baseline, self.predicted_plan)
        base_error, plan_error = map(prediction_error_percent, (base, plan), predicted)
        for quantity, unit, at_best in (
            ("time", "s", ""),
            ("energy", "J", _percent(-self.lower_bound_saving_percent)),
        ):
            key = f"iteration_{quantity}"
            attribute = f"{key}_{unit.lower()}"
            measured = [getattr(result, attribute) for result in (base, plan)]
            expected = [getattr(prediction, attribute) for prediction in predicted]
            _add_row(table, f"{quantity} ({unit})", measured, at_best)
            _add_row(table, "  predicted", expected)
            table.add_row("  error", _percent(base_error[key]), _percent(plan_error[key]), end_section=True)
        _add_row(table, "power (W)", [result.iteration_energy_j / result.iteration_time_s for result in (base, plan)])
        same = "identical" if self.max_loss_difference == 0 else f"up to {self.max_loss_difference:.1g}"
        table.add_row("last loss", f"{base.losses[-1]:.4f}", f"{plan.losses[-1]:.4f}", same)
        return table


def _add_row(table: Table, name: str, values: Sequence[float], at_best: str = "") -> None:
    table.add_row(name, *(f"{value:#.5g}" for value in values), _percent(change_percent(values[1], values[0])), at_best)


def _percent(value: float) -> str:
    return f"{round(value, 2) + 0.0:+.2f} %"  # adding 0 makes -0.0 positive


def change_percent(value: float, reference: float) -> float:
    """How much larger `value` is than `reference`, in percent."""
    return 100 * (value / reference - 1)


def prediction_error_percent(measured: TrainingResult, predicted: FrequencyPlan) -> dict[str, float]:
    """How much more was measured than predicted, in percent."""
    return {
        "iteration_time": change_percent(measured.iteration_time_s, predicted.iteration_time_s),
        "iteration_energy": change_percent(measured.iteration_energy_j, predicted.iteration_energy_j),
    }


def _times_and_energy(result: TrainingResult | FrequencyPlan) -> dict[str, Any]:
    return {"iteration_time_s": result.iteration_time_s, "iteration_energy_j": result.iteration_energy_j}


def _training_record(result: TrainingResult) -> dict[str, Any]:
    record = asdict(result)
    losses: Sequence[float] = record.pop("losses")
    return {**_times_and_energy(result), **record, "final_loss": losses[-1]}
