"""The frontier of a policy that is not the planner's own: its plans, and what is proven about any of their times."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.core.frequency_plan import FrequencyPlan
from lightning_pfo.planner.frontier.data import Frontier
from lightning_pfo.planner.limits.switching import least_energy_j
from lightning_pfo.planner.network.assignments import OptionTable
from lightning_pfo.planner.network.options import pareto_front
from lightning_pfo.planner.pipeline.problem import Problem
from lightning_pfo.planner.policies.policy import ListedPolicy, played
from lightning_pfo.planner.profile.switch_latency import SwitchLatency
from lightning_pfo.planner.relaxation.bound import LowerBound
from lightning_pfo.planner.settings import PlanSettings
from lightning_pfo.planner.straggler_plans import beyond, waiting_power_w, with_both_bounds

_MOST_PROVEN = 12
"""At so many of the plans' times bounds are proven; elsewhere the tangents of these hold."""


def policy_frontier(
    problem: Problem,
    policy: ListedPolicy,
    settings: PlanSettings,
    baseline: FrequencyPlan,
    latency: SwitchLatency,
    solve: Callable[..., Any],
) -> Frontier:
    """The plans of a policy, none dominated, fast to slow, with proven lower bounds.

    Args:
        problem: The pipeline.
        policy: Chooses the clocks.
        settings: How many plans; what only the planner's own plans reckon with is refused.
        baseline: The top clocks.
        latency: What clock changes take: other policies do not reckon with it, but suffer it.
        solve: The planner's solver (`plan.Solver`), for what it proves.

    Raises:
        ConfigurationError: If the settings ask for what other policies cannot do.
    """
    _check(policy, settings)
    kept, own = policy_plans(problem, policy, settings.num_plans, latency)
    bound = LowerBound(OptionTable(problem.network, problem.options), problem.power_w)
    _prove(problem, bound, problem.power_w, [baseline, own, *_some(kept)], solve)
    baseline, *proven = (
        replace(plan, lower_bound_j=least_energy_j(bound, plan.iteration_time_s)) for plan in (baseline, *kept)
    )
    return Frontier(
        problem.schedule,
        problem.profile,
        problem.blocking,
        baseline,
        tuple(proven),
        latency.usual_s,
        switch_pairs_s=latency.pairs_s,
        policy=policy.name,
        own_choice=proven[kept.index(own)],
        straggler_plans=_straggler_plans(problem, policy, settings, latency, bound, proven[-1], solve),
    )


def _straggler_plans(
    problem: Problem,
    policy: ListedPolicy,
    settings: PlanSettings,
    latency: SwitchLatency,
    usual: LowerBound,
    least_energy: FrequencyPlan,
    solve: Callable[..., Any],
) -> tuple[FrequencyPlan, ...]:
    """Those that it has beyond its plan of least energy; none unless they are asked for."""
    if not settings.num_straggler_plans:
        return ()
    plans = played(problem, policy.slower_rows(problem, settings.num_straggler_plans), latency)
    plans.sort(key=lambda plan: (plan.iteration_time_s, plan.iteration_energy_j))
    slower = beyond(least_energy, plans, waiting_power_w(problem))
    bound = LowerBound(usual.table)
    _prove(problem, bound, 0.0, _some(slower), solve)
    proven = (
        replace(plan, lower_bound_j=least_energy_j(bound, plan.iteration_time_s, problem.power_w)) for plan in slower
    )
    return tuple(with_both_bounds(plan, usual) for plan in proven)


def _some(plans: Sequence[FrequencyPlan]) -> Sequence[FrequencyPlan]:
    return plans[:: -(-len(plans) // _MOST_PROVEN) or 1]


def _prove(
    problem: Problem, bound: LowerBound, rate_w: float, plans: Sequence[FrequencyPlan], solve: Callable[..., Any]
) -> None:
    """Collect what is proven at the times of some plans."""
    if plans:
        solve(
            problem.network,
            problem.options,
            rate=rate_w,
            num_points=2,
            times=[plan.iteration_time_s for plan in plans],
            deadlines=(),
            effort="fast",
            bound=bound,
        )


def policy_plans(
    problem: Problem, policy: ListedPolicy, num_plans: int, latency: SwitchLatency
) -> tuple[list[FrequencyPlan], FrequencyPlan]:
    """The plans of a policy, none dominated, fast to slow, and the one of them that it takes itself.

    Args:
        problem: The pipeline.
        policy: Chooses the clocks.
        num_plans: About so many, where it could make any number.
        latency: What clock changes take.
    """
    plans = policy.plans(problem, num_plans, latency)
    own = policy.choose(problem, plans)
    times_s, energies_j = zip(*((plan.iteration_time_s, plan.iteration_energy_j) for plan in plans), strict=True)
    kept = [plans[number] for number in pareto_front(times_s, energies_j).tolist()]
    if own not in kept:  # another is as fast, and needs less
        own = next(plan for plan in reversed(kept) if plan.iteration_time_s <= own.iteration_time_s)
    return kept, own


def _check(policy: ListedPolicy, settings: PlanSettings) -> None:
    if settings.least_dwell_s or settings.change_cost_j or settings.deadlines_s:
        raise ConfigurationError(
            f"deadlines_s, least_dwell_s and change_cost_j are for the planner's own plans; policy={policy.name} knows "
            "none of them. Leave them out, or use policy=ours. A deadline selects a plan: select=2.84s."
        )
