r"""Plans that change clocks seldom: what switch latency and a least dwell leave of a frontier, and what they cost.

Each plan of the unlimited frontier is a start. Clocks that it keeps for less than the least dwell are merged into the
faster of their neighbours, which only makes the iteration shorter. Then one rank after the other is planned anew
(`rank_programme`) within time windows that leave all others as they are::

    other ranks     ...--| F3 |          | B3 |--...
                              \ release        ^ due
    this rank                  [.... F3 ....] /
                               [......... B2 ..........]

The windows come from one schedule of the whole pipeline, between the earliest and the latest that meets the deadline,
so that whatever a rank does within its windows, the iteration takes no longer. A few rounds over all ranks, with
windows that leave slack to what comes before or after, do. Each step is simulated exactly, late clocks included, and
kept if time, energy and dwell prove right; the windows are only where to look.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby, pairwise

import numpy as np

from lightning_pfo.core.frequency_plan import FrequencyPlan
from lightning_pfo.core.progress import Progress
from lightning_pfo.core.schedules.schedule import PipelineSchedule
from lightning_pfo.planner.limits.rank_programme import RankProgramme
from lightning_pfo.planner.limits.wait_clocks import choose_wait_clocks
from lightning_pfo.planner.network.options import OptionSet
from lightning_pfo.planner.pipeline.timeline import Simulator, Timeline
from lightning_pfo.planner.profile.blocking_power import BlockingPower
from lightning_pfo.planner.profile.profile import Profile

_EQUAL_TIMES = 1e-9
_EQUAL_ENERGIES = 1e-6
"""Plans that differ by less, relative to the energy, are equal; the one with fewer changes is better."""

_SHARES_OF_SLACK = (0.5, 1.0, 0.0)
"""Where windows lie between the earliest and the latest schedule, round by round."""

_STARTING_ROUNDS = 100

Rows = tuple[tuple[int, ...], ...]


def limit_switching(
    plans: Sequence[FrequencyPlan],
    profile: Profile,
    blocking: Sequence[BlockingPower],
    options: Sequence[OptionSet],
    *,
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
        starts: Further plans to start from, such as all clocks at the top.
        deadlines_s: Times that are to be kept to where that is possible; other plans may take a little longer than the
            unlimited plan they come from, as late clocks do.
        switch_latency_s: Time from a request until the clock changes.
        least_dwell_s: Least time between two requests of a rank within the iteration.
        change_cost_j: What it is worth to save a change of clocks, in joules; not part of the energies reported. At 0
            fewer changes only decide between plans that are equal otherwise.
        on_progress: Called with what is being done, how much of it is done, and how much there is.
    """
    schedule = plans[0].schedule
    limits = _Limits(profile, schedule, blocking, options, switch_latency_s, least_dwell_s, change_cost_j)
    found: list[Timeline] = []
    sources = [*starts, *plans]
    for done, plan in enumerate(sources, 1):
        begun = limits.start(plan.clocks_mhz, plan.iteration_time_s)
        if begun is not None:
            deadline = max(begun.iteration_time_s, plan.iteration_time_s)
            found.append(limits.improve(begun, deadline, _price(plans, plan.iteration_time_s)))
        if on_progress is not None:
            on_progress("limiting clock changes", done, len(sources))
    for deadline in deadlines_s:
        within = [one for one in found if one.iteration_time_s <= deadline * (1 + _EQUAL_TIMES)]
        if within:
            best = min(within, key=lambda one: one.iteration_energy_j)
            found.append(limits.improve(best, deadline, _price(plans, deadline)))
    return _frontier(found, plans)


class _Limits:
    """Moves from one timeline within the limits to a better one."""

    def __init__(
        self,
        profile: Profile,
        schedule: PipelineSchedule,
        blocking: Sequence[BlockingPower],
        options: Sequence[OptionSet],
        latency_s: float,
        least_dwell_s: float,
        change_cost_j: float,
    ) -> None:
        self._schedule, self._blocking = schedule, blocking
        self._latency_s, self._least_dwell_s = latency_s, least_dwell_s
        self._change_cost_j = change_cost_j
        self._simulator = Simulator(profile, schedule, blocking, latency_s)
        self._programmes: list[RankProgramme] = []
        self._ranks = [rank for rank, order in enumerate(schedule.orders) for _ in order]
        self._positions = [position for order in schedule.orders for position in range(len(order))]
        first = 0
        for order, power in zip(schedule.orders, blocking, strict=True):
            here = options[first : first + len(order)]
            first += len(order)
            kinds = list(dict.fromkeys((inst.stage, inst.type) for inst in order))
            measured = [profile.of(*kind) for kind in kinds]
            tops = {min(one.clocks_mhz[0] for one in measured)}
            clocks = sorted({knob for opts in set(here) for knob in opts.knobs} | tops, reverse=True)
            costs = np.array([[one.near(clock) for clock in clocks] for one in measured])
            self._programmes.append(
                RankProgramme(
                    clocks_mhz=tuple(clocks),
                    kinds=tuple(kinds.index((inst.stage, inst.type)) for inst in order),
                    times=costs[:, :, 0],
                    energies=costs[:, :, 1],
                    allowed=np.array([[clock in one.clocks_mhz for clock in clocks] for one in measured]),
                    powers=np.array([power.at(clock) for clock in clocks]),
                    least_power=power.least_w,
                    latency=latency_s,
                    least_dwell=least_dwell_s,
                )
            )

    def start(self, rows: Rows, deadline_s: float) -> Timeline | None:
        """The plan with faster clocks where the limits ask for them; None if that does not succeed.

        Clocks are merged until all are kept for the least dwell; and where an instruction of the critical path begins
        at a slower clock, because its own lands late, the one before it gets that clock already. If the deadline is
        still exceeded, so be it.
        """
        timeline = self._play(rows)
        for _ in range(_STARTING_ROUNDS):
            if not self._dwells(timeline):
                rows = tuple(
                    self._merged(rank, row, [begin_s for begin_s, _ in timeline.waits_of(rank)])
                    for rank, row in enumerate(rows)
                )
            elif timeline.iteration_time_s > deadline_s * (1 + _EQUAL_TIMES):
                raised = self._raised(timeline)
                if raised == rows:
                    break
                rows = raised
            else:
                break
            timeline = self._play(rows)
        return timeline if self._dwells(timeline) else None

    def _raised(self, timeline: Timeline) -> Rows:
        """The clocks, those before a critical instruction that begins too slowly raised to its own."""
        clocks = list(timeline.clocks_mhz)
        for node in timeline.critical_path:
            before, position = node - 1, self._positions[node]
            if position and clocks[before] < clocks[node]:
                rank = self._ranks[node]
                own_s = self._programmes[rank].time_s(position, timeline.clocks_mhz[node])
                if timeline.durations_s[node] > own_s * (1 + _EQUAL_TIMES):
                    clocks[before] = self._shared_clock(rank, [position - 1], clocks[node])
        return _rows(timeline.schedule, clocks)

    def improve(self, timeline: Timeline, deadline_s: float, price: float) -> Timeline:
        """Plan one rank after the other anew; the iteration ends by `deadline_s`."""
        price /= len(self._programmes)
        for share in _SHARES_OF_SLACK:
            for rank, programme in enumerate(self._programmes):
                release, due = self._windows(timeline, rank, deadline_s, share)
                change_cost = _change_cost(timeline, self._change_cost_j)
                row = programme.cheapest(release, due, deadline_s, change_cost=change_cost, price=price)
                rows = _rows(self._schedule, timeline.clocks_mhz)
                if row is None or tuple(row) == rows[rank]:
                    continue
                found = self._play((*rows[:rank], tuple(row), *rows[rank + 1 :]))
                if (
                    found.iteration_time_s <= deadline_s * (1 + _EQUAL_TIMES)
                    and _score(found, self._change_cost_j) < _score(timeline, self._change_cost_j)
                    and self._dwells(found)
                ):
                    timeline = found
        return timeline

    def _play(self, rows: Rows) -> Timeline:
        timeline = self._simulator.run(rows)
        waits = choose_wait_clocks(
            timeline, self._blocking, switch_latency_s=self._latency_s, least_dwell_s=self._least_dwell_s
        )
        return self._simulator.run(rows, waits) if waits else timeline

    def _dwells(self, timeline: Timeline) -> bool:
        """Whether all clocks are kept for the least dwell; what is asked for at the end is for the next iteration."""
        for rank, requests in enumerate(timeline.requests):
            last_s = timeline.waits_of(rank)[-1][0]
            within = [time_s for time_s, _ in requests if time_s < last_s]
            if any(b - a < self._least_dwell_s * (1 - _EQUAL_TIMES) for a, b in pairwise(within)):
                return False
        return True

    def _merged(self, rank: int, row: Sequence[int], asked_s: Sequence[float]) -> tuple[int, ...]:
        """Merge runs of one clock that are too short with a neighbour, at the faster clock of the two.

        Args:
            rank: The rank.
            row: Its clocks.
            asked_s: When each instruction's clock is asked for.
        """
        runs = [list(numbers) for _, numbers in groupby(range(len(row)), key=row.__getitem__)]
        merged = list(row)
        while True:
            short = next(
                (
                    i
                    for i, (run, after) in enumerate(pairwise(runs))
                    if asked_s[after[0]] - (asked_s[run[0]] if i else 0.0) < self._least_dwell_s
                ),
                None,
            )
            if short is None:
                return tuple(merged)
            clock = merged[runs[short][0]]
            neighbours = [i for i in (short - 1, short + 1) if 0 <= i < len(runs)]
            other = min(neighbours, key=lambda i: abs(merged[runs[i][0]] - clock))
            joined = sorted(runs[short] + runs[other])
            fast = self._shared_clock(rank, joined, max(clock, merged[runs[other][0]]))
            for number in joined:
                merged[number] = fast
            # The new clock may be that of further neighbours too.
            numbers = [number for run in runs for number in run]
            runs = [list(group) for _, group in groupby(numbers, key=merged.__getitem__)]

    def _shared_clock(self, rank: int, numbers: Sequence[int], clock_mhz: int) -> int:
        """The lowest clock, not below `clock_mhz`, that was measured for all these instructions."""
        programme = self._programmes[rank]
        kinds = sorted({programme.kinds[number] for number in numbers})
        measured = np.flatnonzero(programme.allowed[kinds].all(axis=0))
        common = [programme.clocks_mhz[i] for i in measured]
        return min([clock for clock in common if clock >= clock_mhz] or common[:1] or [clock_mhz])

    def _windows(
        self, timeline: Timeline, rank: int, deadline_s: float, share: float
    ) -> tuple[list[float], list[float]]:
        """Earliest start and latest end of each instruction of a rank, the others being where they are."""
        dag, durations = self._simulator.dag, timeline.durations_s
        latest = dag.latest_starts(durations, deadline_s)
        at = [early + share * (late - early) for early, late in zip(timeline.starts_s, latest, strict=True)]
        first = sum(map(len, self._schedule.orders[:rank]))
        numbers = range(first, first + len(self._schedule.orders[rank]))
        release = [
            max([at[node] + durations[node] for node in dag.predecessors[number] if node not in numbers], default=0.0)
            for number in numbers
        ]
        tolerance = _EQUAL_TIMES * deadline_s
        due = [
            min([at[node] for node in dag.successors[number] if node not in numbers], default=deadline_s) + tolerance
            for number in numbers
        ]
        programme = self._programmes[rank]
        fastest = programme.times.min(axis=1, where=programme.allowed, initial=math.inf)
        for i in range(len(due) - 2, -1, -1):
            due[i] = min(due[i], due[i + 1] - float(fastest[programme.kinds[i + 1]]))
        return release, due


def _rows(schedule: PipelineSchedule, clocks_mhz: Sequence[int]) -> Rows:
    rest = iter(clocks_mhz)
    return tuple(tuple(next(rest) for _ in order) for order in schedule.orders)


def _plan(timeline: Timeline) -> FrequencyPlan:
    time_s, energy_j = timeline.iteration_time_s, timeline.iteration_energy_j
    rows = _rows(timeline.schedule, timeline.clocks_mhz)
    return FrequencyPlan(timeline.schedule, rows, time_s, energy_j, wait_clocks=timeline.wait_clocks)


def _change_cost(timeline: Timeline, change_cost_j: float) -> float:
    return max(change_cost_j, _EQUAL_ENERGIES * timeline.iteration_energy_j)


def _score(timeline: Timeline, change_cost_j: float = 0.0) -> float:
    changes = sum(len(requests) - 1 for requests in timeline.requests)
    return timeline.iteration_energy_j + _change_cost(timeline, change_cost_j) * changes


def _price(plans: Sequence[FrequencyPlan], time_s: float) -> float:
    """What a second is worth near a time, in J/s: the slope of the unlimited frontier."""
    for fast, slow in pairwise(plans):
        if time_s <= slow.iteration_time_s:
            return (fast.iteration_energy_j - slow.iteration_energy_j) / (slow.iteration_time_s - fast.iteration_time_s)
    return 0.0


def _frontier(found: Sequence[Timeline], plans: Sequence[FrequencyPlan]) -> list[FrequencyPlan]:
    """Those that no other dominates, with bounds and costs from the unlimited plans."""
    kept: list[FrequencyPlan] = []
    for timeline in sorted(found, key=lambda one: (one.iteration_time_s, _score(one))):
        if kept and timeline.iteration_energy_j >= kept[-1].iteration_energy_j:
            continue
        plan = _plan(timeline)
        # A bound of a plan holds for everything that is at least as fast, with limits or without.
        slower = [one for one in plans if one.iteration_time_s >= plan.iteration_time_s * (1 - _EQUAL_TIMES)]
        bound_j = (slower or plans[-1:])[0].lower_bound_j
        unlimited_j = np.interp(
            plan.iteration_time_s,
            [one.iteration_time_s for one in plans],
            [one.iteration_energy_j for one in plans],
        )
        kept.append(replace(plan, lower_bound_j=bound_j, switching_cost_j=plan.iteration_energy_j - float(unlimited_j)))
    return kept
