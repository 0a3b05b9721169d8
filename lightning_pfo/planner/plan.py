"""From a profile to the Pareto frontier of iteration time and iteration energy: the method, step by step.

::

    profile, schedule, blocking power   -> Problem          what each instruction costs at each clock
    Problem                             -> TradeoffPoints   relax (lower bounds), search (assignments near them)
    TradeoffPoints                      -> FrequencyPlans   clocks by rank, and clocks for long waits
    FrequencyPlans                      -> FrequencyPlans   fewer changes, for GPUs that change clocks slowly
    FrequencyPlans                      -> Frontier

With another `policy` its plans take the place of those searched for (`policy_frontier`).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.core.frequency_plan import FrequencyPlan
from lightning_pfo.core.progress import Progress
from lightning_pfo.core.ranges import Quantity
from lightning_pfo.core.schedules.registry import (
    check_schedule_name,
    file_of,
    load_schedule,
    make_schedule,
    num_ranks_for,
)
from lightning_pfo.core.schedules.schedule import PipelineSchedule
from lightning_pfo.core.wording import shortened
from lightning_pfo.planner.found_plans import cheaper_one_by_one, plans_of
from lightning_pfo.planner.frontier.data import Frontier
from lightning_pfo.planner.frontier.select import selected_time
from lightning_pfo.planner.limits.limited_pipeline import make_limited_pipeline
from lightning_pfo.planner.limits.switching import check_effort, least_energy_j, limit_switching
from lightning_pfo.planner.network.assignments import TOLERANCE, OptionTable
from lightning_pfo.planner.network.dag import ActivityNetwork
from lightning_pfo.planner.network.options import OptionSet
from lightning_pfo.planner.pipeline.problem import Problem, Rows
from lightning_pfo.planner.pipeline.steady_state import steady_middles
from lightning_pfo.planner.policies.policy import Policy, played
from lightning_pfo.planner.policies.registry import LISTED_POLICIES, OWN_POLICY, find_policy
from lightning_pfo.planner.policies.top_clocks import top_clocks, top_clocks_of_ranks
from lightning_pfo.planner.policy_frontier import policy_frontier
from lightning_pfo.planner.profile.blocking_power import resolve_blocking
from lightning_pfo.planner.profile.denoise import regularise
from lightning_pfo.planner.profile.profile import Profile
from lightning_pfo.planner.profile.profile_csv import read_profile
from lightning_pfo.planner.profile.switch_latency import SwitchLatency
from lightning_pfo.planner.profile.unreached import check_reached
from lightning_pfo.planner.relaxation.bound import LowerBound
from lightning_pfo.planner.search.long_solver import LONG_MARGIN, LONG_PIECES, LONG_PIPELINE, trace_long_tradeoff
from lightning_pfo.planner.search.pool import TradeoffPoint
from lightning_pfo.planner.search.solver import trace_tradeoff
from lightning_pfo.planner.settings import PlanSettings, changed
from lightning_pfo.planner.straggler_plans import straggler_plans

if TYPE_CHECKING:
    import pandas as pd

_MERGED_PIPELINE, _MERGED_MARGIN = 500, 8
"""From so many instructions on, steady states are merged in the relaxation, without so many microbatches at either end:
the bound is looser by less than 0.01 %, and the relaxation 10 times as fast."""

_COUNT = Quantity("a number of microbatches or stages", "", 1, 100_000, is_whole=True)


class Solver(Protocol):
    """Traces the time-cost tradeoff of an activity network."""

    def __call__(
        self,
        network: ActivityNetwork,
        options: Sequence[OptionSet],
        *,
        rate: float,
        num_points: int,
        times: Sequence[float],
        deadlines: Sequence[float],
        effort: str = "default",
        begin: float = 0.0,
        bound: LowerBound | None = None,
        on_progress: Progress | None = None,
    ) -> list[TradeoffPoint]:
        """Find assignments from the fastest to the one of least cost, none dominated, fast to slow.

        Args:
            network: The precedences.
            options: Options of each activity.
            rate: Cost of a second of the longest path in J/s.
            num_points: Number of times near which assignments are wanted.
            times: Times in seconds that must be kept to; brought into the range of the frontier.
            deadlines: Further ones, but one shorter than the fastest assignment is a `PlanError`.
            effort: How hard to search (`search.effort`).
            begin: Where the frontier begins, if that is later than the fastest assignment, in seconds.
            bound: Where to collect what is proven, for these options and this rate; a new one if there is none.
            on_progress: Called with what is being done, how much of it is done, and how much there is.
        """
        ...


def plan_frontier(
    profile: Profile | str | os.PathLike[str] | pd.DataFrame,
    settings: PlanSettings | None = None,
    *,
    num_microbatches: int | None = None,
    schedule: str | PipelineSchedule = "1f1b",
    stages_per_rank: int | None = None,
    on_progress: Progress | None = None,
    **changes: Any,
) -> Frontier:
    """Find the cheapest clocks for every instruction, for iteration times from the fastest to the least energy.

    The top clocks' iteration time is always among those planned for, so that "no slowdown" is on the frontier.

    Args:
        profile: Measurements, the path of their CSV file, or a pandas table with its columns.
        settings: How to plan; None for the defaults.
        num_microbatches: Microbatches per iteration; not needed where `schedule` is a `PipelineSchedule`.
        schedule: Name of a schedule, `file:PATH` of an order of your own, or the order itself.
        stages_per_rank: Stages that share a GPU, for schedules that leave it open; None takes what is usual.
        on_progress: Called with what is being done, how much of it is done, and how much there is.
        **changes: Fields of `PlanSettings`, such as num_plans=20 or p2p_blocking_power_w=85.

    Raises:
        ProfileError: If the profile cannot be used, or has no blocking power and none is given.
        ConfigurationError: If an argument is out of range or the schedule cannot be executed.
        PlanError: If a deadline is shorter than the fastest plan's time.
    """
    settings = changed(settings or PlanSettings(), changes)
    settings.check()
    policy = find_policy(settings.policy)
    problem, latency = make_problem(profile, settings, num_microbatches, schedule, stages_per_rank)
    if settings.least_dwell_s:
        check_effort(len(problem.schedule.instructions), settings.num_plans + len(settings.deadlines_s))
    if policy is not None:
        problem = policy.problem_for(problem)
        baseline = predict(problem, top_clocks, latency=latency)
        return policy_frontier(problem, policy, settings, baseline, latency, solver_for(problem.schedule))
    bound = LowerBound(OptionTable(problem.network, problem.options), problem.power_w)
    return own_frontier(problem, settings, latency, bound, on_progress)


def make_problem(
    profile: Profile | str | os.PathLike[str] | pd.DataFrame,
    settings: PlanSettings,
    num_microbatches: int | None,
    schedule: str | PipelineSchedule,
    stages_per_rank: int | None,
) -> tuple[Problem, SwitchLatency]:
    """What is to be planned, and what clock changes take; see `plan_frontier`.

    Raises:
        ProfileError: If the profile cannot be used, or has no blocking power and none is given.
        ConfigurationError: If an argument is out of range or the schedule cannot be executed.
    """
    for name, number in {"num_microbatches": num_microbatches, "stages_per_rank": stages_per_rank}.items():
        if number is not None and not _COUNT.allows(number):
            raise ConfigurationError(
                f"{name} is a whole number, at least {_COUNT.least} and at most {_COUNT.most:,}; got "
                f"{name}={shortened(number)}."
            )
    if not isinstance(schedule, (str, PipelineSchedule)):
        raise ConfigurationError(f"schedule is a name or a PipelineSchedule; got {shortened(schedule)}.")
    if not isinstance(profile, Profile):
        profile = read_profile(profile)
    if not settings.use_unreached:
        check_reached(profile)
    if settings.regularise:
        profile = regularise(profile).profile
    schedule = _resolve_schedule(schedule, profile, num_microbatches, stages_per_rank)
    blocking = resolve_blocking(profile, schedule, settings.p2p_blocking_power_w)
    return Problem(profile, schedule, blocking), _switch_latency(settings, profile)


def own_frontier(
    problem: Problem,
    settings: PlanSettings,
    latency: SwitchLatency,
    bound: LowerBound,
    on_progress: Progress | None = None,
) -> Frontier:
    """The frontier of the planner's own plans.

    Args:
        problem: What is to be planned.
        settings: How.
        latency: What clock changes take.
        bound: Where proofs are collected.
        on_progress: Called with what is being done, how much of it is done, and how much there is.
    """
    baseline = _baseline(problem, settings, latency)
    top_s = baseline.iteration_time_s
    selected_s = selected_time(settings.select, top_s)
    wanted_s = [] if selected_s is None else [selected_s]
    points = solver_for(problem.schedule)(
        problem.network,
        problem.options,
        rate=problem.power_w,
        num_points=settings.num_plans,
        times=[top_s, *wanted_s],
        deadlines=settings.deadlines_s,
        effort=settings.effort,
        bound=bound,
        on_progress=on_progress,
    )
    plans = plans_of(problem, points)
    if latency or settings.least_dwell_s or settings.change_cost_j:
        plans = limit_switching(
            plans,
            problem,
            bound,
            starts=[baseline],
            deadlines_s=[top_s, *settings.deadlines_s, *(time_s for time_s in wanted_s if time_s >= top_s)],
            switch_latency=latency,
            least_dwell_s=settings.least_dwell_s,
            change_cost_j=settings.change_cost_j,
            on_progress=on_progress,
        )
    baseline = replace(baseline, lower_bound_j=least_energy_j(bound, baseline.iteration_time_s))
    plans = _none_worse_than(baseline, plans)
    for time_s in (*settings.deadlines_s, *wanted_s):
        plans = _bounded_at(plans, time_s, bound)
    solve = solver_for(problem.schedule)
    slower = straggler_plans(problem, settings, wanted_s, latency, bound, plans[-1], solve, on_progress)
    return Frontier(
        problem.schedule,
        problem.profile,
        problem.blocking,
        baseline,
        tuple(plans),
        latency.usual_s,
        settings.least_dwell_s,
        latency.pairs_s,
        straggler_plans=slower,
    )


def _baseline(problem: Problem, settings: PlanSettings, latency: SwitchLatency) -> FrequencyPlan:
    """The top clocks; where stages of a rank have different ones, as far as the dwell allows."""
    policy: Policy = top_clocks
    if settings.least_dwell_s:
        pipeline = make_limited_pipeline(
            problem,
            switch_latency=latency,
            least_dwell_s=settings.least_dwell_s,
            change_cost_j=settings.change_cost_j,
        )
        if not pipeline.keeps_dwell(pipeline.simulator.play(top_clocks(problem))):
            policy = top_clocks_of_ranks
    return predict(problem, policy, latency=latency)


def _none_worse_than(baseline: FrequencyPlan, plans: list[FrequencyPlan]) -> list[FrequencyPlan]:
    """The plans, with the baseline where none of them is as good: searches know of waits only what they need at least.

    Args:
        baseline: The top clocks.
        plans: None dominated, fast to slow.
    """
    time_s, energy_j = (1 + TOLERANCE) * baseline.iteration_time_s, (1 + TOLERANCE) * baseline.iteration_energy_j
    if any(plan.iteration_time_s <= time_s and plan.iteration_energy_j <= energy_j for plan in plans):
        return plans
    by_time = sorted([*plans, baseline], key=lambda plan: (plan.iteration_time_s, plan.iteration_energy_j))
    return cheaper_one_by_one(by_time, 0.0)


def _bounded_at(plans: list[FrequencyPlan], deadline_s: float, bound: LowerBound) -> list[FrequencyPlan]:
    """The plans, of which the one for a deadline has the bound of that: it may be faster, where more is proven."""
    number = sum(plan.iteration_time_s <= deadline_s * (1 + TOLERANCE) for plan in plans) - 1
    if number < 0:
        return plans
    plan = plans[number]
    least_j = min(plan.lower_bound_j, least_energy_j(bound, deadline_s))
    return [*plans[:number], replace(plan, lower_bound_j=least_j), *plans[number + 1 :]]


def _switch_latency(settings: PlanSettings, profile: Profile) -> SwitchLatency:
    """What was asked for, or else what the profile has measured."""
    if settings.switch_latency_s is None:
        return profile.switch_latency or SwitchLatency()
    return SwitchLatency(settings.switch_latency_s)


def predict(
    problem: Problem, policy: Policy, deadline_s: float | None = None, *, latency: SwitchLatency | None = None
) -> FrequencyPlan:
    """A policy's plan, with the time and energy that the profile predicts.

    Args:
        problem: The pipeline.
        policy: Chooses the clocks.
        deadline_s: Iteration time in seconds for the policy to keep to.
        latency: What clock changes take; None: nothing.
    """
    (plan,) = played(problem, [policy(problem, deadline_s)], latency or SwitchLatency())
    return plan


def least_energy(problem: Problem, deadline_s: float | None = None) -> Rows:
    """The planner's own policy: the least energy that was found, at the top clocks' time unless told otherwise."""
    if deadline_s is None:
        deadline_s = predict(problem, top_clocks).iteration_time_s
    points = solver_for(problem.schedule)(
        problem.network,
        problem.options,
        rate=problem.power_w,
        num_points=2,
        times=(),
        deadlines=[deadline_s],
    )
    within = [plan for plan in plans_of(problem, points) if plan.iteration_time_s <= deadline_s * (1 + TOLERANCE)]
    return within[-1].clocks_mhz


POLICIES: dict[str, Policy] = {
    "top_clocks": top_clocks,
    "least_energy": least_energy,
    **LISTED_POLICIES,
    OWN_POLICY: least_energy,
}
"""Policies by name; `policies.registry` says what they are."""


def solver_for(schedule: PipelineSchedule) -> Solver:
    """The solver for a pipeline of this length; it is told which steady states to merge in the relaxation."""
    size = len(schedule.instructions)
    if size >= LONG_PIPELINE:
        middles = steady_middles(schedule, margin=LONG_MARGIN, pieces=LONG_PIECES)
        if middles:
            return partial(trace_long_tradeoff, periodic=middles)
    middles = steady_middles(schedule, margin=_MERGED_MARGIN) if size >= _MERGED_PIPELINE else []
    return partial(trace_tradeoff, periodic=middles)


def _resolve_schedule(
    schedule: str | PipelineSchedule, profile: Profile, num_microbatches: int | None, stages_per_rank: int | None
) -> PipelineSchedule:
    if isinstance(schedule, str):
        check_schedule_name(schedule)
        path = file_of(schedule)
        if path is None:
            num_ranks = num_ranks_for(schedule, profile.num_stages, stages_per_rank)
            if num_microbatches is None:
                raise ConfigurationError(
                    f"Planning for schedule {schedule!r} needs the number of microbatches per iteration: "
                    "give num_microbatches, e.g. num_microbatches=12."
                )
            return make_schedule(schedule, num_ranks, num_microbatches, stages_per_rank)
        schedule = load_schedule(path)
    schedule.check_numbers(num_microbatches=num_microbatches, stages_per_rank=stages_per_rank)
    if schedule.num_stages != profile.num_stages:
        raise ConfigurationError(
            f"The profile must have the stages of the schedule: {schedule.name!r} has {schedule.num_stages} stages, "
            f"the profile {profile.num_stages}. Profile a pipeline of {schedule.num_stages} stages."
        )
    return schedule
