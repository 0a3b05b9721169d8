"""What a run has taken so far, and what it would have taken at the top clocks."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any

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
        time_s: What it took.
        energy_j: Of all GPUs.
    """

    iteration: int
    state: State
    is_planned: bool
    time_s: float
    energy_j: float

    def as_dict(self) -> dict[str, Any]:
        """As plain values."""
        return {**asdict(self), "state": self.state.value}


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
        self._num, self._used_j = 0, 0.0  # of this one
        self._begun: dict[int, tuple[State, bool]] = {}

    @property
    def knows_top(self) -> bool:
        """Whether it is known what the top clocks take."""
        return not math.isnan(self.top_s)

    @property
    def saved_j(self) -> float:
        """Energy of all iterations, less than as many at the top clocks; 0 until it is known what these take."""
        return self._saved_j + (self._num * self.top_j - self._used_j if self.knows_top else 0.0)

    def begin(self, iteration: int, state: State, *, is_planned: bool) -> None:
        """Note what an iteration is for; on CUDA it is measured when the next one is under way."""
        self._begun[iteration] = state, is_planned

    def add(self, measured: IterationMeasurement) -> Step:
        """Note what an iteration took."""
        state, is_planned = self._begun.pop(measured.iteration)
        for earlier in [number for number in self._begun if number < measured.iteration]:
            del self._begun[earlier]  # was not measured
        step = Step(measured.iteration, state, is_planned, measured.time_s, measured.energy_j)
        self.steps.append(step)
        self._num += 1
        self._used_j += measured.energy_j
        return step

    def take_for_top(self, time_s: float, energy_j: float) -> None:
        """Say what an iteration at the top clocks takes; that counts for those of before too."""
        self.top_s, self.top_j = time_s, energy_j

    def forget_top(self) -> None:
        """Another pipeline begins, which takes something else."""
        self._saved_j = self.saved_j
        self._num, self._used_j = 0, 0.0
        self.top_s = self.top_j = math.nan
