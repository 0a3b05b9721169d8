"""Assignments of options that a solver has found, as plans."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from operator import getitem

from lightning_pfo.core.frequency_plan import FrequencyPlan
from lightning_pfo.planner.limits.fewest_changes import equal_clocks, share_clocks
from lightning_pfo.planner.limits.wait_clocks import play_with_wait_clocks
from lightning_pfo.planner.pipeline.problem import Problem
from lightning_pfo.planner.pipeline.timeline import Simulator
from lightning_pfo.planner.search.pool import TradeoffPoint


def plans_of(problem: Problem, points: Sequence[TradeoffPoint], paid_w: float = 0.0) -> list[FrequencyPlan]:
    """Clocks for assignments; where waits may have clocks, for long waits too.

    Args:
        problem: The pipeline.
        points: The assignments, fast to slow, with energies as their costs.
        paid_w: Power that is drawn until a straggler ends, however soon an iteration does; 0 where there is none.

    Returns:
        None dominated, fast to slow.
    """
    # Where waits have clocks, equal instructions may leave unequal waits.
    equal = {} if problem.has_wait_clocks else equal_clocks(problem.profile)
    clocks_of = [options.knobs for options in problem.options]
    plans = []
    for point in points:
        clocks = list(map(getitem, clocks_of, point.assignment))
        rows = share_clocks(problem.schedule, equal, problem.schedule.by_rank(clocks))
        energy_j = _without_rounding(problem, point)
        bound_j = min(max(point.bound, 0.0), energy_j)
        plans.append(FrequencyPlan(problem.schedule, rows, point.time, energy_j, bound_j))
    return _with_wait_clocks(problem, plans, paid_w) if problem.has_wait_clocks else cheaper_one_by_one(plans, paid_w)


def cheaper_one_by_one(plans: Sequence[FrequencyPlan], paid_w: float) -> list[FrequencyPlan]:
    """Of plans from fast to slow those that are slower than all before them and need less, but for what is paid."""
    kept: list[FrequencyPlan] = []
    for plan in plans:
        more_s = plan.iteration_time_s - kept[-1].iteration_time_s if kept else 0.0
        if not kept or (more_s > 0 and plan.iteration_energy_j < kept[-1].iteration_energy_j + paid_w * more_s):
            kept.append(plan)
    return kept


def _without_rounding(problem: Problem, point: TradeoffPoint) -> float:
    """The energy of a point, J; 0 where it may be no more than the rounding of effective energies and their rate."""
    rounding = 4 * len(problem.schedule.instructions) * sys.float_info.epsilon
    return point.cost if point.cost > rounding * problem.power_w * point.time else 0.0


def _with_wait_clocks(problem: Problem, plans: Sequence[FrequencyPlan], paid_w: float) -> list[FrequencyPlan]:
    """The plans with clocks for their long waits, and what their waits really cost."""
    simulator = Simulator(problem.profile, problem.schedule, problem.blocking)
    played = []
    for plan in plans:
        timeline = play_with_wait_clocks(simulator, plan.clocks_mhz)
        energy_j = timeline.iteration_energy_j
        played.append(replace(plan, iteration_energy_j=energy_j, wait_clocks=timeline.wait_clocks))
    return cheaper_one_by_one(played, paid_w)
