"""What is wanted of a plan, and how that may change while a training runs.

The plans of a frontier are all that is possible; an objective picks one of them for a moment. What does not change with
time is said in the form of `select_plan`: `no_slowdown`, `1.02x`, `350W`, `least_energy`, `least_edp`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.core.frequency_plan import FrequencyPlan
from lightning_pfo.planner.frontier.data import Frontier
from lightning_pfo.planner.frontier.select import check_selection, select_plan

_JOULES_PER_KWH = 3.6e6
_S_PER_HOUR = 3600.0
_SPARE = 0.01
"""Of the time that is left: kept for validation, checkpoints and what else is not an iteration."""


@dataclass(frozen=True)
class Moment:
    """How far a training has come.

    Attributes:
        now_s: Seconds since 1970.
        iterations_left: Iterations still to come; None where that is not known.
    """

    now_s: float
    iterations_left: int | None = None

    @classmethod
    def now(cls, iterations_left: int | None) -> Moment:
        """This moment."""
        return cls(time.time(), iterations_left)


class Objective(Protocol):
    """Picks plans."""

    def plan_of(self, frontier: Frontier, moment: Moment) -> FrequencyPlan:
        """The plan of a frontier that is wanted at a moment.

        Raises:
            PlanError: If there is none.
        """
        ...


@dataclass(frozen=True)
class Selection:
    """The same at any time: an expression as `select_plan` takes it.

    Raises:
        PlanError: If it is none.
    """

    expression: str = "no_slowdown"

    def __post_init__(self) -> None:
        check_selection(self.expression)

    def plan_of(self, frontier: Frontier, moment: Moment) -> FrequencyPlan:
        """See `Objective`."""
        return select_plan(frontier, self.expression)


@dataclass(frozen=True)
class JobDeadline:
    """The least energy with which the whole training is done in time: slack in its schedule is spent on slower plans.

    Where it cannot be, the fastest plan; where nobody knows how many iterations are left, no slowdown.

    Attributes:
        ends_s: When it must be done, seconds since 1970, such as `datetime(2027, 1, 8, 18).timestamp()`.
    """

    ends_s: float

    def plan_of(self, frontier: Frontier, moment: Moment) -> FrequencyPlan:
        """See `Objective`."""
        if not moment.iterations_left:
            return select_plan(frontier, "no_slowdown")
        each_s = (1 - _SPARE) * (self.ends_s - moment.now_s) / moment.iterations_left
        within = [plan for plan in frontier.plans if plan.iteration_time_s <= each_s]
        return within[-1] if within else frontier.fastest


@dataclass(frozen=True)
class EnergyPrice:
    """The least cost, where the price of energy (or its carbon) changes with time and the machine's time has a price.

    Attributes:
        per_kwh: Price of a kilowatt-hour at a moment (seconds since 1970), in any currency, or in grams of carbon.
        per_gpu_hour: What an hour of one GPU is worth, in the same.
    """

    per_kwh: Callable[[float], float]
    per_gpu_hour: float

    def __post_init__(self) -> None:
        if not 0 <= self.per_gpu_hour < math.inf:
            raise ConfigurationError(f"per_gpu_hour is a price, at least 0; got {self.per_gpu_hour}.")

    def plan_of(self, frontier: Frontier, moment: Moment) -> FrequencyPlan:
        """See `Objective`."""
        energy_price = self.per_kwh(moment.now_s) / _JOULES_PER_KWH
        time_price = self.per_gpu_hour * frontier.schedule.num_ranks * frontier.profile.gpus_per_stage / _S_PER_HOUR
        return min(
            frontier.plans, key=lambda plan: energy_price * plan.iteration_energy_j + time_price * plan.iteration_time_s
        )


def objective_of(wanted: str | Objective) -> Objective:
    """An expression, or an objective itself."""
    return Selection(wanted) if isinstance(wanted, str) else wanted
