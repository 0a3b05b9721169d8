"""The result of planning: plans from the fastest to the one of least energy, and those that pay beside a straggler."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from lightning_pfo.core.frequency_plan import FrequencyPlan
from lightning_pfo.core.schedules.schedule import PipelineSchedule
from lightning_pfo.planner.pipeline.timeline import Timeline, simulate_plan
from lightning_pfo.planner.profile.blocking_power import BlockingPower
from lightning_pfo.planner.profile.profile import Profile
from lightning_pfo.planner.profile.switch_latency import SwitchLatency

if TYPE_CHECKING:
    import pandas as pd

OURS = "ours"
"""The name of the planner's own policy."""

PREDICTED = ("iteration_time_s", "iteration_energy_j", "lower_bound_j")


@dataclass(frozen=True)
class Frontier:
    """Plans between the fastest and the one of least energy, none dominated.

    Attributes:
        schedule: The order that all plans belong to.
        profile: The measurements they were made from.
        blocking: Power of each rank's GPUs while they wait for a neighbour, by clock.
        baseline: Every stage at its top clock; every rank at one clock where `least_dwell_s` does not allow that.
        plans: From the fastest to the one of least energy.
        switch_latency_s: Time from a request until a clock changes, which the plans reckon with.
        least_dwell_s: Time for which the plans keep every clock at least.
        switch_pairs_s: Pairs of clocks (before, after, MHz) that change within another time, and that time; see
            `SwitchLatency`.
        policy: Whose plans they are; `ours` is the planner's own.
        own_choice: The one of `plans` that another policy takes when nobody says anything; None for the planner's own.
        straggler_plans: Slower ones that need more energy, but less than all faster ones where a replica waits for a
            slower one anyway: it draws the blocking power until then, whatever its plan. Fast to slow; there if asked
            for (`num_straggler_plans`). Such a plan has a second lower bound, `beside_straggler_bound_j`.
    """

    schedule: PipelineSchedule
    profile: Profile
    blocking: tuple[BlockingPower, ...]
    baseline: FrequencyPlan
    plans: tuple[FrequencyPlan, ...]
    switch_latency_s: float = 0.0
    least_dwell_s: float = 0.0
    switch_pairs_s: tuple[tuple[int, int, float], ...] = ()
    policy: str = OURS
    own_choice: FrequencyPlan | None = None
    straggler_plans: tuple[FrequencyPlan, ...] = ()

    @property
    def switch_latency(self) -> SwitchLatency:
        """Time from a request until a clock changes, which the plans reckon with."""
        return SwitchLatency(self.switch_latency_s, self.switch_pairs_s)

    @property
    def limits_changes(self) -> bool:
        """Whether the plans reckon with what changes of clocks take."""
        return bool(self.switch_latency or self.least_dwell_s)

    @property
    def p2p_blocking_powers_w(self) -> tuple[float, ...]:
        """Blocking power of each rank at its highest clock in watts."""
        return tuple(power.powers_w[0] for power in self.blocking)

    @property
    def p2p_blocking_power_w(self) -> float:
        """Mean blocking power over the ranks in watts."""
        return sum(self.p2p_blocking_powers_w) / len(self.p2p_blocking_powers_w)

    def beside_straggler_j(self, plan: FrequencyPlan, straggler_s: float) -> float:
        """Energy of a plan and of waiting until a slower replica ends its iteration, after so many seconds."""
        return plan.iteration_energy_j + sum(self.p2p_blocking_powers_w) * (straggler_s - plan.iteration_time_s)

    @property
    def fastest(self) -> FrequencyPlan:
        """The plan of least iteration time."""
        return self.plans[0]

    @property
    def least_energy(self) -> FrequencyPlan:
        """The plan of least iteration energy."""
        return self.plans[-1]

    def number_of(self, plan: FrequencyPlan) -> int:
        """The plan's number in files and in `select_plan`: 0 is the slowest, larger is faster (as Zeus counts)."""
        return len(self.plans) - 1 - self.plans.index(plan)

    def timeline(self, plan: FrequencyPlan) -> Timeline:
        """One iteration of `plan` as the profile predicts it."""
        return simulate_plan(self.profile, plan, self.blocking, switch_latency_s=self.switch_latency)

    def rows(self) -> list[dict[str, float]]:
        """The numbers of each plan, as in `frontier.csv`: from the slowest, number 0, to the fastest."""
        return [
            {
                "plan": number,
                **{name: getattr(plan, name) for name in (*PREDICTED, "gap")},
                "clock_changes": plan.num_clock_changes,
                "switching_cost_j": plan.switching_cost_j,
            }
            for number, plan in enumerate(reversed(self.plans))
        ]

    def to_frame(self) -> pd.DataFrame:
        """The numbers of each plan as a pandas table with the columns of `frontier.csv`."""
        import pandas as pd  # slow to load, and nobody else needs it

        return pd.DataFrame(self.rows())
