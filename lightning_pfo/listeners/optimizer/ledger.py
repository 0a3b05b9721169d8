"""What a run has taken so far, and what it would have taken at the top clocks."""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import asdict, dataclass
from enum import Enum
from itertools import chain
from typing import Any

from lightning_pfo.core.frequency_plan import FrequencyPlan
from lightning_pfo.listeners.meters.iterations import IterationMeasurement

_KEPT = 20_000


class State(Enum):
    """Where the optimizer is."""

    WARM_UP = "WarmUp"
    MEASURE = "Measure"
    PLAN = "Plan"
    VERIFY = "Verify"
    HOLD = "Hold"


@dataclass(frozen=True)
class Step:
    """One iteration of the run.

    Attributes:
        iteration: Its number.
        state: In which state it was.
        is_planned: Whether it ran under the plan.
        clock_mhz: Mean of the clocks that were asked for, over instructions.
        time_s: What it took.
        energy_j: Of all GPUs.
    """

    iteration: int
    state: State
    is_planned: bool
    clock_mhz: float
    time_s: float
    energy_j: float

    def as_dict(self) -> dict[str, Any]:
        """As plain values."""
        return {**asdict(self), "state": self.state.value}


@dataclass(frozen=True)
class Cost:
    """Some iterations, and what they took beyond as many at the top clocks: time in s, energy in J."""

    iterations: int = 0
    time_s: float = 0.0
    energy_j: float = 0.0


@dataclass
class _Sum:
    count: int = 0
    time_s: float = 0.0
    energy_j: float = 0.0

    def add(self, measured: IterationMeasurement) -> None:
        self.count += 1
        self.time_s += measured.time_s
        self.energy_j += measured.energy_j


class Ledger:
    """Keeps what iterations took.

    Attributes:
        steps: The last 20,000 iterations.
        top_s: Time of an iteration at the top clocks, s; nan until it is known.
        top_j: Its energy.
    """

    def __init__(self) -> None:
        self.steps: deque[Step] = deque(maxlen=_KEPT)
        self.top_s = self.top_j = math.nan
        self._saved_j = 0.0  # with pipelines of before
        self._all, self._measuring = _Sum(), _Sum()  # with this one
        self._begun: dict[int, tuple[State, bool, float]] = {}
        self._mean: tuple[FrequencyPlan | None, float] = None, math.nan  # of the clocks of the latest plan

    @property
    def knows_top(self) -> bool:
        """Whether it is known what the top clocks take."""
        return not math.isnan(self.top_s)

    @property
    def saved_j(self) -> float:
        """Energy of all iterations, less than as many at the top clocks; 0 until it is known what these take."""
        return self._saved_j + (self._all.count * self.top_j - self._all.energy_j if self.knows_top else 0.0)

    @property
    def measuring(self) -> Cost:
        """What measuring and planning have taken of this pipeline beyond as many iterations at the top clocks."""
        spent = self._measuring
        if not self.knows_top:
            return Cost()
        return Cost(spent.count, spent.time_s - spent.count * self.top_s, spent.energy_j - spent.count * self.top_j)

    def begin(self, iteration: int, state: State, plan: FrequencyPlan | None, top_mhz: int) -> None:
        """Note what an iteration is for; on CUDA it is measured when the next one is under way.

        Args:
            iteration: Its number.
            state: In which state it is.
            plan: Its clocks; None for the top clock.
            top_mhz: The top clock.
        """
        if plan is not None and plan is not self._mean[0]:
            self._mean = plan, statistics.fmean(chain.from_iterable(plan.clocks_mhz))
        is_planned = plan is not None and state is not State.MEASURE
        self._begun[iteration] = state, is_planned, top_mhz if plan is None else self._mean[1]

    def add(self, measured: IterationMeasurement) -> Step:
        """Note what an iteration took."""
        state, is_planned, clock_mhz = self._begun.pop(measured.iteration)
        for earlier in [number for number in self._begun if number < measured.iteration]:
            del self._begun[earlier]  # was not measured
        step = Step(measured.iteration, state, is_planned, clock_mhz, measured.time_s, measured.energy_j)
        self.steps.append(step)
        self._all.add(measured)
        if state in (State.MEASURE, State.PLAN):
            self._measuring.add(measured)
        return step

    def take_for_top(self, time_s: float, energy_j: float) -> None:
        """Say what an iteration at the top clocks takes; that counts for those of before too."""
        self.top_s, self.top_j = time_s, energy_j

    def forget_top(self) -> None:
        """Another pipeline begins, which takes something else."""
        self._saved_j = self.saved_j
        self._all, self._measuring = _Sum(), _Sum()
        self.top_s = self.top_j = math.nan
