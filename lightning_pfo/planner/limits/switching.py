"""Plans that change clocks seldom: what switch latency and a least dwell leave of a frontier, and what they cost.

Late clocks and what changes cost are searched for (`late_search`). With a least dwell, and where a time is short, each
plan of the unlimited frontier is a start (`start`). Then the ranks are planned anew (`rank_programme`) within time
windows that leave their neighbours as they are (`windows`), all ranks at once that hand nothing to each other. A few
rounds, with windows that leave slack to what comes before or after, do. Each step is played exactly, late clocks
included, and kept if time, energy and dwell prove right, and else by halves; the windows are only where to look.

The top clocks are always a plan: a rank that changes no clock keeps to every dwell.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice, pairwise

import numpy as np

from lightning_pfo.core.errors import ConfigurationError, PlanError
from lightning_pfo.core.frequency_plan import FrequencyPlan
from lightning_pfo.core.progress import Progress
from lightning_pfo.planner.limits.late_search import LateSearch
from lightning_pfo.planner.limits.limited_pipeline import EQUAL_TIMES, LimitedPipeline, make_limited_pipeline
from lightning_pfo.planner.limits.start import start_from
from lightning_pfo.planner.limits.windows import independent_ranks, schedule_between, time_windows
from lightning_pfo.planner.pipeline.problem import Problem
from lightning_pfo.planner.pipeline.timeline import Timeline
from lightning_pfo.planner.profile.switch_latency import SwitchLatency
from lightning_pfo.planner.relaxation.bound import LowerBound

_S_PER_INSTRUCTION = 1e-3
"""CPU time per plan on a busy core, measured: most of it chooses clocks rank by rank, the rest plays them."""

_MOST_S = 1200.0
_FAST_PLANS = 5
"""So many plans at the fast end are improved rank by rank."""

_AT_ONCE = SwitchLatency()

_SHARES_OF_SLACK = (0.5, 1.0, 0.0)
"""Where windows lie between the earliest and the latest schedule, round by round."""


def limit_switching(
    plans: Sequence[FrequencyPlan],
    problem: Problem,
    bound: LowerBound,
    *,
    starts: Sequence[FrequencyPlan] = (),
    deadlines_s: Sequence[float] = (),
    switch_latency: SwitchLatency = _AT_ONCE,
    least_dwell_s: float = 0.0,
    change_cost_j: float = 0.0,
    paid_w: float = 0.0,
    on_progress: Progress | None = None,
) -> list[FrequencyPlan]:
    """Find plans within the limits, none dominated, fast to slow; each says what the limits cost it.

    Args:
        plans: Plans without limits, fast to slow.
        problem: What they were planned for.
        bound: What is proven about all plans, limited or not, and the solutions of the relaxation it is from.
        starts: Further plans to start from, such as all clocks at the top.
        deadlines_s: Times that are to be kept to where that is possible; other plans may take a little longer than the
            unlimited plan they come from, as late clocks do.
        switch_latency: Time from a request until the clock changes.
        least_dwell_s: Least time between two requests of a rank within the iteration.
        change_cost_j: What it is worth to save a change of clocks, in joules; not part of the energies reported. At 0
            fewer changes only decide between plans that are equal otherwise.
        paid_w: Power that is drawn until a straggler ends, however soon an iteration does; 0 where there is none.
        on_progress: Called with what is being done, how much of it is done, and how much there is.

    Raises:
        PlanError: If no plan keeps the dwell, as the instructions of a rank have no clock in common.
    """
    pipeline = make_limited_pipeline(
        problem,
        switch_latency=switch_latency,
        least_dwell_s=least_dwell_s,
        change_cost_j=change_cost_j,
        paid_w=paid_w,
    )
    report = on_progress or _unreported
    groups = independent_ranks(pipeline.schedule)
    found: list[Timeline] = []
    if least_dwell_s:
        sources = [*starts, *plans]
        for done, plan in enumerate(sources, 1):
            begun = start_from(pipeline, plan.clocks_mhz, plan.iteration_time_s)
            if begun is not None:
                deadline_s = max(begun.iteration_time_s, plan.iteration_time_s)
                rate_w = _rate_w(plans, plan.iteration_time_s, paid_w)
                found.append(_improve(pipeline, groups, begun, deadline_s, rate_w))
            report("limiting clock changes", done, len(sources))
    else:
        found = _searched(pipeline, groups, bound, plans, starts, deadlines_s)
        report("limiting clock changes", 1, 1)
    if not found:
        raise PlanError(
            f"No plan keeps every clock for least_dwell_s={least_dwell_s:g} s: a rank that cannot change its clock "
            "needs one at which all of its instructions were measured. Profile all stages of a rank at the same "
            "clocks, or ask for a shorter dwell."
        )
    found += _for_deadlines(pipeline, groups, found, plans, deadlines_s)
    kept = _frontier(pipeline, found, plans, bound, problem.power_w if paid_w else 0.0)
    return _thinned(kept, len(plans) + len(starts) + len(deadlines_s), deadlines_s)


def _unreported(activity: str, done: int, total: int) -> None:
    """Nobody wants to know."""


def _searched(
    pipeline: LimitedPipeline,
    groups: Sequence[Sequence[int]],
    bound: LowerBound,
    plans: Sequence[FrequencyPlan],
    starts: Sequence[FrequencyPlan],
    deadlines_s: Sequence[float],
) -> list[Timeline]:
    """Without a dwell: what a beam search finds, which knows of late clocks and of what changes cost.

    At the fast end, where most instructions are critical, what it finds is longer than it was to be. There, and where
    a time must be kept to, some plans are planned anew as with a dwell.
    """
    search = LateSearch(pipeline, bound.table, bound.solutions)
    found = search.near([plan.iteration_time_s for plan in plans])
    for deadline_s in deadlines_s:
        found += search.around(deadline_s)
    known = starts if pipeline.change_cost_j else (*starts, *plans)  # which know nothing of what a change costs
    found += [pipeline.play(plan.clocks_mhz) for plan in known]

    begun_from = {}
    for deadline_s in deadlines_s:
        within = [plan for plan in plans if plan.iteration_time_s <= deadline_s * (1 + EQUAL_TIMES)]
        if within:
            begun_from[deadline_s] = within[-1]
    limit_s = plans[0].iteration_time_s + 2 * search.late_s
    fast = [plan for plan in plans if plan.iteration_time_s <= limit_s and not pipeline.paid_w]
    for number in [] if not fast else np.unique(np.linspace(0, len(fast) - 1, _FAST_PLANS).astype(np.int64)):
        begun_from.setdefault(fast[number].iteration_time_s, fast[number])
    for deadline_s, plan in begun_from.items():
        begun = start_from(pipeline, plan.clocks_mhz, deadline_s)
        if begun is not None:
            deadline_s = max(begun.iteration_time_s, deadline_s)
            rate_w = _rate_w(plans, plan.iteration_time_s, pipeline.paid_w)
            found.append(_improve(pipeline, groups, begun, deadline_s, rate_w))
    return found


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
            best = min(within, key=pipeline.own_energy)
            improved.append(_improve(pipeline, groups, best, deadline_s, _rate_w(plans, deadline_s, pipeline.paid_w)))
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
            f"Planning with least_dwell_s may take {_MOST_S / 60:.0f} minutes of CPU time; {num_plans} plans of "
            f"{num_instructions} instructions would take about {num_plans * plan_s / 60:.0f}. Plan for "
            f"{max(int(_MOST_S / plan_s), 2)} iteration times or fewer (num_plans and deadlines_s together) or fewer "
            "microbatches, or leave out least_dwell_s."
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


def _thinned(plans: Sequence[FrequencyPlan], number: int, deadlines_s: Sequence[float]) -> list[FrequencyPlan]:
    """At most so many: those with the nearest neighbours in time go first, never an end or the best by a deadline."""
    times_s = [plan.iteration_time_s for plan in plans]
    stays = {0, len(plans) - 1}
    stays.update(sum(time_s <= deadline_s * (1 + EQUAL_TIMES) for time_s in times_s) - 1 for deadline_s in deadlines_s)
    kept = list(range(len(plans)))
    while len(kept) > number:
        apart_s = {
            b: times_s[c] - times_s[a] for a, b, c in zip(kept, kept[1:], kept[2:], strict=False) if b not in stays
        }
        if not apart_s:
            break
        kept.remove(min(apart_s, key=apart_s.__getitem__))
    return [plans[k] for k in kept]


def least_energy_j(bound: LowerBound, time_s: float, paid_w: float = 0.0) -> float:
    """What is proven about the energy of all plans that take at most so many seconds, in joules.

    Args:
        bound: The proofs.
        time_s: The time.
        paid_w: Power that is drawn until then, however soon a plan ends; see `LowerBound.at`.
    """
    return max(float(bound.at(time_s, paid_w)), 0.0)  # neither energies nor powers are negative


def _rate_w(plans: Sequence[FrequencyPlan], time_s: float, paid_w: float) -> float:
    """Price of a second near a time, in J/s: the slope of the unlimited frontier, and what is paid for anyway."""
    for fast, slow in pairwise(plans):
        if time_s <= slow.iteration_time_s and fast.iteration_time_s < slow.iteration_time_s:
            less_j = fast.iteration_energy_j - slow.iteration_energy_j
            return max(less_j / (slow.iteration_time_s - fast.iteration_time_s) + paid_w, 0.0)
    return 0.0


def _frontier(
    pipeline: LimitedPipeline,
    found: Sequence[Timeline],
    plans: Sequence[FrequencyPlan],
    bound: LowerBound,
    paid_w: float,
) -> list[FrequencyPlan]:
    """Those that no other dominates, with their bounds, and costs from the unlimited plans."""
    times_s = [one.iteration_time_s for one in plans]
    kept: list[FrequencyPlan] = []
    least_j = np.inf
    for timeline in sorted(found, key=lambda one: (one.iteration_time_s, pipeline.score(one))):
        time_s, energy_j = timeline.iteration_time_s, timeline.iteration_energy_j
        own_j = pipeline.own_energy(timeline)
        if kept and (own_j >= least_j or time_s == kept[-1].iteration_time_s):
            continue  # of equal times the one of the best score stays, though one with more changes may need less
        least_j = own_j
        unlimited_j = float(np.interp(time_s, times_s, [one.iteration_energy_j for one in plans]))
        kept.append(
            FrequencyPlan(
                timeline.schedule,
                timeline.clocks_by_rank,
                time_s,
                energy_j,
                lower_bound_j=least_energy_j(bound, time_s, paid_w),
                wait_clocks=timeline.wait_clocks,
                switching_cost_j=energy_j - unlimited_j,
            )
        )
    return kept
