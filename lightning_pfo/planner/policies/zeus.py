"""Zeus's two policies for pipelines: one state of the knob for all GPUs, or one for each stage.

*Global*: every GPU has the same power limit or clock. *Per stage*: the heaviest stage has a state, and every other
stage is slowed until its forward takes about as long (as in the artifact of Perseus, SOSP 2024, where the latter is the
stronger baseline). Either has as many plans as the knob has states; of these Zeus takes the one of least cost
(You et al., Zeus, NSDI 2023)::

    cost = eta x energy + (1 - eta) x largest power x time

With eta = 0.5 energy and time count alike. The largest power is the most that any instruction of the profile draws, on
all GPUs: the limits of the GPU itself are not in a profile.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.core.frequency_plan import FrequencyPlan
from lightning_pfo.core.instruction import InstructionType
from lightning_pfo.core.ranges import check_between
from lightning_pfo.core.wording import did_you_mean, shortened
from lightning_pfo.planner.pipeline.problem import Problem, Rows
from lightning_pfo.planner.policies.knobs import KNOBS, State, largest_power_w, rows_of, states_of
from lightning_pfo.planner.policies.policy import ListedPolicy


@dataclass(frozen=True)
class ZeusGlobal(ListedPolicy):
    """The same state on every GPU.

    Attributes:
        knob: `frequency` or `power_limit`.
        eta: Weight of energy against time, 0 to 1.
    """

    knob: str = "frequency"
    eta: float = 0.5
    _who: ClassVar[str] = "zeus_global"

    def __post_init__(self) -> None:
        if self.knob not in KNOBS:
            raise ConfigurationError(
                f"Zeus's knob is one of {', '.join(KNOBS)}; got {shortened(self.knob)}.{did_you_mean(self.knob, KNOBS)}"
            )
        check_between("eta", self.eta, 0, 1)

    @property
    def name(self) -> str:
        """Such as `zeus_global_power_limit`; the knob is named where it is not the clock."""
        return f"{self._who}_{self.knob}".removesuffix("_frequency")

    def rows(self, problem: Problem, num_plans: int) -> Sequence[Rows]:
        """One plan for each state of the knob."""
        return [rows_of(problem, state) for state in states_of(problem, self.knob)]

    def choose(self, problem: Problem, plans: Sequence[FrequencyPlan]) -> FrequencyPlan:
        """The plan of least cost."""
        most_w = largest_power_w(problem) * problem.schedule.num_ranks

        def cost_j(plan: FrequencyPlan) -> float:
            return self.eta * plan.iteration_energy_j + (1 - self.eta) * most_w * plan.iteration_time_s

        return min(plans, key=cost_j)


@dataclass(frozen=True)
class ZeusPerStage(ZeusGlobal):
    """A state for each stage, such that all forwards take about as long."""

    _who: ClassVar[str] = "zeus_per_stage"

    def rows(self, problem: Problem, num_plans: int) -> Sequence[Rows]:
        """One plan for each state of the heaviest stage."""
        states = states_of(problem, self.knob)
        forwards = [self._forwards_s(problem, state) for state in states]
        heaviest = max(range(len(forwards[0])), key=forwards[0].__getitem__)
        rows = []
        for number, state in enumerate(states):
            chosen = dict(state)
            for stage in range(len(forwards[0])):
                if stage != heaviest:
                    times_s = [of_state[stage] for of_state in forwards]
                    slowed = states[_first_nearest(times_s, forwards[number][heaviest])]
                    chosen |= {kind: clock for kind, clock in slowed.items() if kind[0] == stage}
            rows.append(rows_of(problem, chosen))
        return rows

    def _forwards_s(self, problem: Problem, state: State) -> list[float]:
        kind = InstructionType.FORWARD
        return [
            problem.profile.of(stage, kind).at(state[stage, kind])[0] for stage in range(problem.schedule.num_stages)
        ]


def _first_nearest(times_s: Sequence[float], wanted_s: float) -> int:
    """From the fastest on, the state after which the distance begins to grow."""
    number = 0
    while number + 1 < len(times_s) and abs(times_s[number + 1] - wanted_s) <= abs(times_s[number] - wanted_s):
        number += 1
    return number
