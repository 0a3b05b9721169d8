"""What a run has taken so far, and what it would have taken at the top clocks."""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import asdict, dataclass, replace
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


_MEASURING = (State.MEASURE, State.PLAN)


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
    """Keeps what iterations took, and compares those that had other clocks with the mean of those at the top clocks.

    Iterations at the top clocks cost nothing, whatever each of them took: times and energies scatter. In those that
    follow another one (and in the first of all) clocks settle, so that they do not say what the top clocks take.

    Attributes:
        steps: The last 20,000 iterations.
    """

    def __init__(self) -> None:
        self.steps: deque[Step] = deque(maxlen=_KEPT)
        self._saved_j = 0.0  # with pipelines of before
        self._num_measuring = 0  # with this one
        self._top, self._others, self._measuring = _Sum(), _Sum(), _Sum()
        self._was_top = False  # whether the iteration before is at the top clocks
        self._begun: dict[int, tuple[State, bool, float, list[_Sum]]] = {}
        self._mean: tuple[FrequencyPlan | None, float] = None, math.nan  # of the clocks of the latest plan

    @property
    def knows_top(self) -> bool:
        """Whether it is known what the top clocks take."""
        return self._top.count > 0

    @property
    def saved_j(self) -> float:
        """Energy of all iterations, less than as many at the top clocks; 0 until it is known what these take."""
        return self._saved_j - self._beyond_top(self._others).energy_j

    @property
    def measuring(self) -> Cost:
        """What measuring and planning have taken of this pipeline beyond as many iterations at the top clocks."""
        return replace(self._beyond_top(self._measuring), iterations=self._num_measuring)

    @property
    def measuring_slowdown(self) -> float:
        """By what share of their time iterations of measuring and planning were slower than at the top clocks."""
        cost = self.measuring
        return cost.time_s / (cost.iterations * self._top.time_s / self._top.count) if cost.time_s else 0.0

    def _beyond_top(self, spent: _Sum) -> Cost:
        if not self.knows_top:
            return Cost()
        share = spent.count / self._top.count
        return Cost(spent.count, spent.time_s - share * self._top.time_s, spent.energy_j - share * self._top.energy_j)

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
        clock_mhz = top_mhz if plan is None else self._mean[1]
        is_top = plan is None or (clock_mhz == top_mhz and not plan.wait_clocks)
        is_measuring = state in _MEASURING
        if is_top:
            sums = [self._top] if self._was_top else []
        else:
            sums = [self._others, self._measuring] if is_measuring else [self._others]
        self._was_top = is_top
        self._begun[iteration] = state, is_planned, clock_mhz, sums

    def add(self, measured: IterationMeasurement) -> None:
        """Note what an iteration took."""
        state, is_planned, clock_mhz, sums = self._begun.pop(measured.iteration)
        for earlier in [number for number in self._begun if number < measured.iteration]:
            del self._begun[earlier]  # was not measured
        self.steps.append(Step(measured.iteration, state, is_planned, clock_mhz, measured.time_s, measured.energy_j))
        self._num_measuring += state in _MEASURING
        for one in sums:
            one.add(measured)

    def forget_top(self) -> None:
        """Another pipeline begins, which takes something else."""
        self._saved_j = self.saved_j
        self._num_measuring = 0
        self._top, self._others, self._measuring = _Sum(), _Sum(), _Sum()
        self._was_top = False
