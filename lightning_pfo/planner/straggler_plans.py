"""Plans that only pay beside a straggler: slower than the plan of least energy.

Replicas wait for the slowest one. A replica that waits draws the blocking power P on all its ranks until the straggler
ends its iteration, at T', whatever its own plan; so what its plan is to blame for is

    energy - P x iteration time = sum of effective energies

Without the price of a second, the tradeoff goes on beyond the plan of least energy, to the slowest clocks that still
need less effective energy. It is the same programme with the rate 0, and the same proof: no plan that takes at most T'
has less effective energy than its bound there, so none needs less than that and P T' together (`LowerBound.at`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from lightning_pfo.core.frequency_plan import FrequencyPlan
from lightning_pfo.core.progress import Progress
from lightning_pfo.planner.found_plans import cheaper_one_by_one, plans_of
from lightning_pfo.planner.frontier.select import asks_for_straggler
from lightning_pfo.planner.limits.switching import least_energy_j, limit_switching
from lightning_pfo.planner.pipeline.problem import Problem
from lightning_pfo.planner.profile.switch_latency import SwitchLatency
from lightning_pfo.planner.relaxation.bound import LowerBound
from lightning_pfo.planner.search.pool import TradeoffPoint
from lightning_pfo.planner.settings import PlanSettings


def straggler_plans(
    problem: Problem,
    settings: PlanSettings,
    wanted_s: Sequence[float],
    latency: SwitchLatency,
    usual: LowerBound,
    least_energy: FrequencyPlan,
    solve: Callable[..., list[TradeoffPoint]],
    on_progress: Progress | None = None,
) -> tuple[FrequencyPlan, ...]:
    """The planner's own, fast to slow; none unless they are asked for.

    Args:
        problem: What is to be planned.
        settings: How, and how many of them; as many as other plans, if one is to be selected beside a straggler.
        wanted_s: Iteration times to plan for besides.
        latency: What clock changes take.
        usual: What is proven without a straggler.
        least_energy: Where they begin.
        solve: The planner's solver (`plan.Solver`).
        on_progress: Called with what is being done, how much of it is done, and how much there is.
    """
    num_plans = settings.num_straggler_plans or (settings.num_plans if asks_for_straggler(settings.select) else 0)
    if not num_plans:
        return ()
    bound, begin_s = LowerBound(usual.table), least_energy.iteration_time_s
    deadlines_s = [time_s for time_s in (*settings.deadlines_s, *wanted_s) if time_s > begin_s]
    points = solve(
        problem.network,
        problem.options,
        rate=0.0,
        num_points=num_plans,
        times=(),
        deadlines=deadlines_s,
        effort=settings.effort,
        begin=begin_s,
        bound=bound,
        on_progress=on_progress,
    )
    paid_w = waiting_power_w(problem)
    plans = plans_of(problem, [_with_rate(point, problem.power_w, bound) for point in points], paid_w)
    if latency or settings.least_dwell_s or settings.change_cost_j:
        plans = limit_switching(
            plans,
            problem,
            bound,
            starts=[least_energy],
            deadlines_s=deadlines_s,
            switch_latency=latency,
            least_dwell_s=settings.least_dwell_s,
            change_cost_j=settings.change_cost_j,
            paid_w=paid_w,
            on_progress=on_progress,
        )
    return tuple(with_both_bounds(plan, usual) for plan in beyond(least_energy, plans, paid_w))


def with_both_bounds(plan: FrequencyPlan, usual: LowerBound) -> FrequencyPlan:
    """A plan whose bound counts waiting until its time, with the usual one too: of the iteration by itself."""
    least_j = least_energy_j(usual, plan.iteration_time_s)
    return replace(plan, lower_bound_j=least_j, beside_straggler_bound_j=plan.lower_bound_j)


def beyond(least_energy: FrequencyPlan, plans: list[FrequencyPlan], paid_w: float) -> tuple[FrequencyPlan, ...]:
    """Of plans from fast to slow those that are slower than the one of least energy and pay beside a straggler.

    Args:
        least_energy: Where they begin.
        plans: What there is.
        paid_w: Power that is drawn until a straggler ends.
    """
    slower = [plan for plan in plans if plan.iteration_time_s > least_energy.iteration_time_s]
    return tuple(cheaper_one_by_one([least_energy, *slower], paid_w)[1:])


def waiting_power_w(problem: Problem) -> float:
    """What all ranks of a replica draw together while they wait for another one; where it varies, the most."""
    return sum(power.powers_w[0] for power in problem.blocking)


def _with_rate(point: TradeoffPoint, rate_w: float, bound: LowerBound) -> TradeoffPoint:
    """A point of effective energies as one of energies, with what is proven about waiting until its time."""
    proven = float(bound.at(point.time, rate_w)) if math.isfinite(point.bound) else point.bound
    return replace(point, cost=point.cost + rate_w * point.time, bound=proven)
