"""Everybody's plans for one pipeline, side by side: what each policy takes itself, and the planner's own at that time.

The baseline is the same for all: every stage at its top *locked* clock. A slowdown is what it is, never taken for 0.
For each policy's time the planner plans too, under the same order of instructions; where a policy's plan needs less
energy than the planner's, `beats_ours_percent` says by how much. An order of its own, as EnvPipe has, may need less
energy than any plan under the one asked for; what it takes of memory is `most_in_flight`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.core.frequency_plan import FrequencyPlan, saving_percent
from lightning_pfo.core.progress import Progress
from lightning_pfo.core.schedules.in_flight import peak_in_flight
from lightning_pfo.core.schedules.schedule import PipelineSchedule
from lightning_pfo.core.wording import shortened
from lightning_pfo.planner.frontier.data import OURS, Frontier
from lightning_pfo.planner.frontier.select import select_plan
from lightning_pfo.planner.limits.switching import least_energy_j
from lightning_pfo.planner.network.assignments import OptionTable
from lightning_pfo.planner.pipeline.problem import Problem
from lightning_pfo.planner.plan import make_problem, own_frontier, predict
from lightning_pfo.planner.policies.envpipe import EARLY, EnvPipe
from lightning_pfo.planner.policies.policy import ListedPolicy, Policy
from lightning_pfo.planner.policies.registry import LISTED_POLICIES, find_policy
from lightning_pfo.planner.policies.top_clocks import top_clocks
from lightning_pfo.planner.policy_frontier import policy_plans
from lightning_pfo.planner.profile.profile import Profile
from lightning_pfo.planner.profile.switch_latency import SwitchLatency
from lightning_pfo.planner.relaxation.bound import LowerBound
from lightning_pfo.planner.settings import PlanSettings, changed

if TYPE_CHECKING:
    import pandas as pd

_SAME = 1e-9


@dataclass(frozen=True)
class ComparedPolicy:
    """A policy among others.

    Attributes:
        name: Its name; it ends with `_early_forwards` under EnvPipe's order of instructions.
        plan: The plan that it takes itself.
        plans: All its plans, none dominated, fast to slow.
        ours: The planner's own plan for the same order that is no slower than `plan`.
        baseline: The top clocks under the order that was asked for.
        lower_bound_j: No plan of the same order and profile that is no slower than `plan` needs less.
    """

    name: str
    plan: FrequencyPlan
    plans: tuple[FrequencyPlan, ...]
    ours: FrequencyPlan
    baseline: FrequencyPlan
    lower_bound_j: float

    @property
    def saving_percent(self) -> float:
        """Energy that the plan saves against the top clocks."""
        return saving_percent(self.plan.iteration_energy_j, self.baseline.iteration_energy_j)

    @property
    def slowdown_percent(self) -> float:
        """By how much the plan is slower than the top clocks; below 0 where it is faster."""
        return 100 * (self.plan.iteration_time_s / self.baseline.iteration_time_s - 1)

    @property
    def beats_ours_percent(self) -> float:
        """How much less energy than the planner's own plan of the same time it needs; 0 where it does not."""
        ours_j, plan_j = self.ours.iteration_energy_j, self.plan.iteration_energy_j
        return max(saving_percent(plan_j, ours_j), 0.0) if plan_j < ours_j * (1 - _SAME) else 0.0

    @property
    def most_in_flight(self) -> int:
        """Most activations that a rank keeps under the plan's order: what it takes of memory."""
        return max(peak_in_flight(self.plan.schedule))

    def as_dict(self) -> dict[str, Any]:
        """The numbers of the row."""
        top_j = self.baseline.iteration_energy_j
        return {
            "iteration_time_s": self.plan.iteration_time_s,
            "iteration_energy_j": self.plan.iteration_energy_j,
            "saving_percent": self.saving_percent,
            "slowdown_percent": self.slowdown_percent,
            "ours_saving_percent_at_this_time": saving_percent(self.ours.iteration_energy_j, top_j),
            "bound_saving_percent_at_this_time": saving_percent(self.lower_bound_j, top_j),
            "beats_ours_percent": self.beats_ours_percent,
            "clock_changes": self.plan.num_clock_changes,
            "schedule": self.plan.schedule.name,
            "most_in_flight": self.most_in_flight,
        }


@dataclass(frozen=True)
class Comparison:
    """All policies on one profile.

    Attributes:
        frontier: The planner's own plans under the order that was asked for.
        policies: Everybody by name, the planner's own (`ours`) last.
    """

    frontier: Frontier
    policies: dict[str, ComparedPolicy]

    def as_dict(self) -> dict[str, dict[str, Any]]:
        """The numbers of each policy by name."""
        return {name: policy.as_dict() for name, policy in self.policies.items()}

    def beats_ours(self, policy: ComparedPolicy) -> bool:
        """Whether a policy needs less energy than the planner's own, under its order or the one asked for.

        That is, less than the planner's plan of its time and order; or it is no slower than `ours`, and needs less.
        """
        if policy.name.startswith(OURS):
            return False
        ours = self.policies[OURS].plan
        is_no_slower = policy.plan.iteration_time_s <= ours.iteration_time_s * (1 + _SAME)
        needs_less = policy.plan.iteration_energy_j < ours.iteration_energy_j * (1 - _SAME)
        return policy.beats_ours_percent > 0 or (is_no_slower and needs_less)


def compare(
    profile: Profile | str | os.PathLike[str] | pd.DataFrame,
    settings: PlanSettings | None = None,
    *,
    policies: Sequence[str | Policy] | None = None,
    num_microbatches: int | None = None,
    schedule: str | PipelineSchedule = "1f1b",
    stages_per_rank: int | None = None,
    max_in_flight: int | None = None,
    on_progress: Progress | None = None,
    **changes: Any,
) -> Comparison:
    """Plan by every policy, and by the planner at every policy's time.

    Where a policy has an order of instructions of its own, the planner plans under it too (`ours_early_forwards`).

    Args:
        profile: Measurements, the path of their CSV file, or a pandas table with its columns.
        settings: How to plan; None for the defaults.
        policies: Names, or policies of your own; None for all there are.
        num_microbatches: Microbatches per iteration; not needed where `schedule` is a `PipelineSchedule`.
        schedule: Name of a schedule, `file:PATH` of an order of your own, or the order itself.
        stages_per_rank: Stages that share a GPU, for schedules that leave it open.
        max_in_flight: Most microbatches whose activations fit into memory, for the early forwards; None for no limit.
        on_progress: Called with what is being done, how much of it is done, and how much there is.
        **changes: Fields of `PlanSettings`, such as num_plans=20 or p2p_blocking_power_w=85.

    Raises:
        ProfileError: If the profile cannot be used, or has no blocking power and none is given.
        ConfigurationError: If an argument is out of range or the schedule cannot be executed.
    """
    settings = changed(settings or PlanSettings(), changes)
    settings.check()
    if settings.policy != OURS or settings.least_dwell_s or settings.change_cost_j:
        raise ConfigurationError(
            "All policies are compared under the same conditions: policies=[...] says which, and least_dwell_s and "
            "change_cost_j, which only the planner's own reckons with, stay 0; got "
            f"policy={shortened(settings.policy)}, least_dwell_s={settings.least_dwell_s} and "
            f"change_cost_j={settings.change_cost_j}."
        )
    problem, latency = make_problem(profile, settings, num_microbatches, schedule, stages_per_rank)
    baseline = predict(problem, top_clocks, latency=latency)
    of_order: dict[PipelineSchedule, tuple[Problem, list[ListedPolicy]]] = {problem.schedule: (problem, [])}
    for policy in _wanted(policies, problem, max_in_flight):
        own = policy.problem_for(problem)
        of_order.setdefault(own.schedule, (own, []))[1].append(policy)
    compared: list[ComparedPolicy] = []
    for order, (its_problem, some) in of_order.items():
        ours = OURS if order == problem.schedule else OURS + EARLY
        frontier, more = _side_by_side(its_problem, some, settings, latency, baseline, ours, on_progress)
        if order == problem.schedule:
            asked_for, last = frontier, more.pop()
        compared += more
    return Comparison(asked_for, {policy.name: policy for policy in (*compared, last)})


def _wanted(policies: Sequence[str | Policy] | None, problem: Problem, max_in_flight: int | None) -> list[ListedPolicy]:
    """The other systems' policies; of all there are, those that suit the order of instructions."""
    found = [find_policy(policy) for policy in (LISTED_POLICIES if policies is None else policies)]
    others = [policy for policy in found if policy is not None]
    if policies is None and problem.schedule.name != "1f1b":
        others = [policy for policy in others if not (isinstance(policy, EnvPipe) and policy.runs_early)]
    return [
        replace(policy, max_in_flight=max_in_flight) if isinstance(policy, EnvPipe) and max_in_flight else policy
        for policy in others
    ]


def _side_by_side(
    problem: Problem,
    policies: Sequence[ListedPolicy],
    settings: PlanSettings,
    latency: SwitchLatency,
    baseline: FrequencyPlan,
    ours: str,
    on_progress: Progress | None,
) -> tuple[Frontier, list[ComparedPolicy]]:
    """The policies under one order of instructions, the planner's own last."""
    plans_of: dict[str, tuple[list[FrequencyPlan], FrequencyPlan]] = {}
    for done, policy in enumerate(policies):
        if on_progress is not None:
            on_progress(policy.name, done, len(policies))
        plans_of[policy.name] = policy_plans(problem, policy, settings.num_plans, latency)
    times_s = {own.iteration_time_s for _, own in plans_of.values()} | {baseline.iteration_time_s}
    bound = LowerBound(OptionTable(problem.network, problem.options), problem.power_w)
    deadlines_s = [*settings.deadlines_s, *sorted(times_s)]
    frontier = own_frontier(problem, replace(settings, deadlines_s=deadlines_s), latency, bound, on_progress)
    plans_of[ours] = list(frontier.plans), select_plan(frontier, f"{baseline.iteration_time_s!r}s")
    compared = [
        ComparedPolicy(
            name,
            own,
            tuple(plans),
            select_plan(frontier, f"{own.iteration_time_s!r}s"),
            baseline,
            least_energy_j(bound, own.iteration_time_s),
        )
        for name, (plans, own) in plans_of.items()
    ]
    return frontier, compared
