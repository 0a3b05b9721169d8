"""Plans that change clocks seldom: what switch latency and a least dwell leave of a frontier, and what they cost.

Each plan of the unlimited frontier is a start (`start`). Then the ranks are planned anew (`rank_programme`) within time
windows that leave their neighbours as they are (`windows`), all ranks at once that hand nothing to each other. A few
rounds, with windows that leave slack to what comes before or after, do. Each step is played exactly, late clocks
included, and kept if time, energy and dwell prove right, and else by halves; the windows are only where to look.

The top clocks are always a plan: a rank that changes no clock keeps to every dwell.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import islice, pairwise

import numpy as np

from lightning_pfo.core.errors import ConfigurationError, PlanError
from lightning_pfo.core.frequency_plan import FrequencyPlan
from lightning_pfo.core.progress import Progress
from lightning_pfo.planner.limits.limited_pipeline import EQUAL_TIMES, LimitedPipeline, make_limited_pipeline
from lightning_pfo.planner.limits.start import start_from
from lightning_pfo.planner.limits.windows import independent_ranks, schedule_between, time_windows
from lightning_pfo.planner.network.options import OptionSet
from lightning_pfo.planner.pipeline.timeline import Timeline
from lightning_pfo.planner.profile.blocking_power import BlockingPower
from lightning_pfo.planner.profile.profile import Profile

_S_PER_INSTRUCTION = 1e-3
"""CPU time per plan on a busy core, measured: most of it chooses clocks rank by rank, the rest plays them."""

_MOST_S = 1200.0

_SHARES_OF_SLACK = (0.5, 1.0, 0.0)
"""Where windows lie between the earliest and the latest schedule, round by round."""


def limit_switching(
    plans: Sequence[FrequencyPlan],
    profile: Profile,
    blocking: Sequence[BlockingPower],
    options: Sequence[OptionSet],
    *,
    least_energy_j: Callable[[float], float],
    starts: Sequence[FrequencyPlan] = (),
    deadlines_s: Sequence[float] = (),
    switch_latency_s: float = 0.0,
    least_dwell_s: float = 0.0,
    change_cost_j: float = 0.0,
    on_progress: Progress | None = None,
) -> list[FrequencyPlan]:
    """Find plans within the limits, none dominated, fast to slow; each says what the limits cost it.

    Args:
        plans: Plans without limits, fast to slow.
        profile: Times and energies.
        blocking: Blocking power of each rank.
        options: Options of each instruction.
        least_energy_j: A lower bound on the energy of all plans that take at most so many seconds, limited or not.
        starts: Further plans to start from, such as all clocks at the top.
        deadlines_s: Times that are to be kept to where that is possible; other plans may take a little longer than the
            unlimited plan they come from, as late clocks do.
        switch_latency_s: Time from a request until the clock changes.
        least_dwell_s: Least time between two requests of a rank within the iteration.
        change_cost_j: What it is worth to save a change of clocks, in joules; not part of the energies reported. At 0
            fewer changes only decide between plans that are equal otherwise.
        on_progress: Called with what is being done, how much of it is done, and how much there is.

    Raises:
        PlanError: If no plan keeps the dwell, as the instructions of a rank have no clock in common.
    """
    pipeline = make_limited_pipeline(
        profile,
        plans[0].schedule,
        blocking,
        options,
        switch_latency_s=switch_latency_s,
        least_dwell_s=least_dwell_s,
        change_cost_j=change_cost_j,
    )
    groups = independent_ranks(pipeline.schedule)
    found: list[Timeline] = []
    sources = [*starts, *plans]
    for done, plan in enumerate(sources, 1):
        begun = start_from(pipeline, plan.clocks_mhz, plan.iteration_time_s)
        if begun is not None:
            deadline_s = max(begun.iteration_time_s, plan.iteration_time_s)
            found.append(_improve(pipeline, groups, begun, deadline_s, _rate_w(plans, plan.iteration_time_s)))
        if on_progress is not None:
            on_progress("limiting clock changes", done, len(sources))
    if not found:
        raise PlanError(
            f"No plan keeps every clock for least_dwell_s={least_dwell_s:g} s: a rank that cannot change its clock "
            "needs one at which all of its instructions were measured. Profile all stages of a rank at the same "
            "clocks, or ask for a shorter dwell."
        )
    found += _for_deadlines(pipeline, groups, found, plans, deadlines_s)
    return _frontier(pipeline, found, plans, least_energy_j)


def _for_deadlines(
    pipeline: LimitedPipeline,
    groups: Sequence[Sequence[int]],
    found: Sequence[Timeline],
    plans: Sequence[FrequencyPlan],
    deadlines_s: Sequence[float],
) -> list[Timeline]:
    """What is cheapest by each deadline, improved until then."""
    improved = []
    for deadline_s in deadlines_s:
        within = [one for one in found if one.iteration_time_s <= deadline_s * (1 + EQUAL_TIMES)]
        if within:
            best = min(within, key=lambda one: one.iteration_energy_j)
            improved.append(_improve(pipeline, groups, best, deadline_s, _rate_w(plans, deadline_s)))
    return improved


def check_effort(num_instructions: int, num_plans: int) -> None:
    """Refuse what would take too long, before anything is planned.

    Args:
        num_instructions: Instructions of an iteration, all ranks together.
        num_plans: Number of plans that are limited.

    Raises:
        ConfigurationError: If it would; the message says what would not.
    """
    plan_s = num_instructions * _S_PER_INSTRUCTION
    if num_plans * plan_s > _MOST_S:
        raise ConfigurationError(
            f"Planning for few clock changes may take {_MOST_S / 60:.0f} minutes of CPU time; {num_plans} plans of "
            f"{num_instructions} instructions would take about {num_plans * plan_s / 60:.0f}. Plan for "
            f"{max(int(_MOST_S / plan_s), 2)} iteration times or fewer (num_plans and deadlines_s together) or fewer "
            "microbatches, or leave out switch_latency_s, least_dwell_s and change_cost_j."
        )


def _improve(
    pipeline: LimitedPipeline, groups: Sequence[Sequence[int]], timeline: Timeline, deadline_s: float, rate_w: float
) -> Timeline:
    """Plan the ranks anew, group by group; the iteration ends by `deadline_s`, and a second costs `rate_w`."""
    schedule, dag, num_ranks = pipeline.schedule, pipeline.simulator.dag, len(pipeline.programmes)
    for share in _SHARES_OF_SLACK:
        for group in groups:
            starts_s = schedule_between(dag, timeline, deadline_s, share)
            change_cost, present = pipeline.change_cost(timeline), timeline.clocks_by_rank
            rows = {}
            for rank in group:
                programme, span = pipeline.programmes[rank], schedule.span(rank)
                release, due = time_windows(dag, programme, span, starts_s, timeline.durations_s, deadline_s)
                row = programme.cheapest(release, due, deadline_s, change_cost=change_cost, rate_w=rate_w / num_ranks)
                if row is not None and row != present[rank]:
                    rows[rank] = row
            timeline = _with_what_proves_right(pipeline, timeline, rows, deadline_s)
    return timeline


def _with_what_proves_right(
    pipeline: LimitedPipeline, timeline: Timeline, rows: Mapping[int, tuple[int, ...]], deadline_s: float
) -> Timeline:
    """The timeline with the clocks of `rows` by rank, or with those of either half of them, and so on."""
    if not rows:
        return timeline
    clocks = timeline.clocks_by_rank
    found = pipeline.play(tuple(rows.get(rank, row) for rank, row in enumerate(clocks)))
    if (
        found.iteration_time_s <= deadline_s * (1 + EQUAL_TIMES)
        and pipeline.score(found) < pipeline.score(timeline)
        and pipeline.keeps_dwell(found)
    ):
        return found
    if len(rows) > 1:
        ranks = iter(rows)
        for half in (list(islice(ranks, len(rows) // 2)), list(ranks)):
            timeline = _with_what_proves_right(pipeline, timeline, {rank: rows[rank] for rank in half}, deadline_s)
    return timeline


def _rate_w(plans: Sequence[FrequencyPlan], time_s: float) -> float:
    """Price of a second near a time, in J/s: the slope of the unlimited frontier."""
    for fast, slow in pairwise(plans):
        if time_s <= slow.iteration_time_s and fast.iteration_time_s < slow.iteration_time_s:
            return (fast.iteration_energy_j - slow.iteration_energy_j) / (slow.iteration_time_s - fast.iteration_time_s)
    return 0.0


def _frontier(
    pipeline: LimitedPipeline,
    found: Sequence[Timeline],
    plans: Sequence[FrequencyPlan],
    least_energy_j: Callable[[float], float],
) -> list[FrequencyPlan]:
    """Those that no other dominates, with their bounds, and costs from the unlimited plans."""
    times_s = [one.iteration_time_s for one in plans]
    kept: list[FrequencyPlan] = []
    for timeline in sorted(found, key=lambda one: (one.iteration_time_s, pipeline.score(one))):
        time_s, energy_j = timeline.iteration_time_s, timeline.iteration_energy_j
        if kept and (energy_j >= kept[-1].iteration_energy_j or time_s == kept[-1].iteration_time_s):
            continue  # of equal times the one of the best score stays, though one with more changes may need less
        unlimited_j = float(np.interp(time_s, times_s, [one.iteration_energy_j for one in plans]))
        kept.append(
            FrequencyPlan(
                timeline.schedule,
                timeline.clocks_by_rank,
                time_s,
                energy_j,
                lower_bound_j=least_energy_j(time_s),
                wait_clocks=timeline.wait_clocks,
                switching_cost_j=energy_j - unlimited_j,
            )
        )
    return kept
