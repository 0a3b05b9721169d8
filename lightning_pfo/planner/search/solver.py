"""The time-cost tradeoff on any activity network: from options per node to a frontier of assignments with lower bounds.

An assignment takes one option for every node; its time is the longest path, its cost the sum of its options' costs plus
a rate times its time. `trace_tradeoff` solves the relaxation at some times from slow to fast and searches near all
targets side by side, guided by mixtures of the solutions next to each. Targets whose gap is still too large are
searched again, more widely, with relaxations of their own; what was found so far is spliced, and its events are moved.
Networks that repeat themselves for long have an aggregated relaxation, which bounds from below as well.
"""

from __future__ import annotations

import math
from collections.abc import Sequence, Set
from functools import cached_property

import numpy as np

from lightning_pfo.core.errors import PlanError
from lightning_pfo.core.progress import Progress
from lightning_pfo.core.wording import rounded_up
from lightning_pfo.planner.network.assignments import TOLERANCE, OptionTable
from lightning_pfo.planner.network.dag import ActivityNetwork
from lightning_pfo.planner.network.options import OptionSet, pareto_front
from lightning_pfo.planner.network.periodic_path import PeriodicPath
from lightning_pfo.planner.relaxation.aggregated import MergedTradeoff
from lightning_pfo.planner.relaxation.bound import LowerBound
from lightning_pfo.planner.relaxation.linear_programme import RelaxedTradeoff
from lightning_pfo.planner.search.beam import order_of_time, search_beam
from lightning_pfo.planner.search.effort import EFFORTS, Effort, Round, find_effort
from lightning_pfo.planner.search.guide import Guide
from lightning_pfo.planner.search.moves import EventMoves
from lightning_pfo.planner.search.pool import SMALL_PROBLEM, SolutionPool, TradeoffPoint, proven_points
from lightning_pfo.planner.search.splice import recombine, splice
from lightning_pfo.planner.search.targets import make_targets

_FEWEST_RELAXATIONS = 6
"""However few points are wanted."""

_DENSER = 0.65
"""The relaxation is solved more densely at the fast, curved end of the frontier: at this power of equal parts."""

_STEP = 4e-4
"""By how much guides to a time that must be kept to differ in what they aim at, as a share of it."""

_SEAMS = (0.0, -3e-4, -6e-4, -1e-3)
"""Where the time must be kept to, assignments are spliced for somewhat shorter times as well."""

_SHARES_BEYOND = (0.0, 0.02, 0.05, 0.1, 0.2, 0.35, 0.6, 1.0)
"""Where assignments slower than the relaxation's of least cost are searched, on the way to the slowest of all."""

_ROWS_AT_ONCE = 2_000_000
"""Nodes times partial assignments searched in one go: what memory is used, and how often progress is reported."""

_TINY_PROBLEM = 1000
"""Up to so many nodes times points the best effort costs next to nothing, and is made whatever is asked for."""

_MOVED_PER_KEPT = 3
"""The events of so many assignments for a time to keep to are moved."""

_RECOMBINED = 8
"""So many assignments for a time to keep to are joined with each other."""


def trace_tradeoff(
    dag: ActivityNetwork,
    options: Sequence[OptionSet],
    *,
    rate: float = 0.0,
    num_points: int = 50,
    times: Sequence[float] = (),
    deadlines: Sequence[float] = (),
    periodic: Sequence[PeriodicPath] = (),
    effort: str | Effort = "default",
    begin: float = 0.0,
    bound: LowerBound | None = None,
    on_progress: Progress | None = None,
) -> list[TradeoffPoint]:
    """Find assignments from the fastest to the one of least cost, none dominated, fast to slow.

    Args:
        dag: The precedences.
        options: Options of each node; nodes of one kind should share one object.
        rate: Cost of a second of the longest path in J/s, at least 0.
        num_points: Number of times near which assignments are wanted: `times`, the ends, and others equally spaced.
        times: Times in seconds that must be kept to; brought into the range of the frontier.
        deadlines: Further ones, but one shorter than the fastest assignment is an error.
        periodic: Where the network repeats itself; aggregated in the relaxation, see `steady_middles`.
        effort: How hard to search: `fast`, `default` or `best`.
        begin: Where the frontier begins, if that is later than the fastest assignment, in seconds.
        bound: Where proofs are collected; one of your own, for the same options and rate, tells of other times too.
        on_progress: Called with what is being done, how much of it is done, and how much there is.

    Raises:
        PlanError: If a deadline cannot be met.
        ConfigurationError: If the effort is unknown.
    """
    effort = find_effort(effort, dag.num_nodes)
    if dag.num_nodes * num_points <= _TINY_PROBLEM:
        effort = EFFORTS["best"]
    fastest = max(fastest_time(dag, options, deadlines), begin)
    bound = bound or LowerBound(OptionTable(dag, options), rate)
    search = _Search(dag, options, rate, fastest, periodic, effort, bound, on_progress)
    kept, extra = (
        {min(max(time, fastest), search.slowest) for time in some}
        for some in ((*times, fastest, search.slowest), deadlines)
    )
    search.relax(max(num_points - len(kept), 0), kept | extra)
    for number in range(search.num_rounds):
        if not search.improve(number):
            break
    search.look_beyond()
    return search.frontier(num_points, deadlines)


def fastest_time(dag: ActivityNetwork, options: Sequence[OptionSet], deadlines: Sequence[float] = ()) -> float:
    """Longest path of the fastest options in seconds.

    Raises:
        PlanError: If a deadline is shorter.
    """
    fastest = dag.longest_path([opts.times[0] for opts in options])
    for deadline in deadlines:
        if not deadline >= fastest * (1 - TOLERANCE):
            raise PlanError(
                f"No plan is as fast as {deadline:g} s: a deadline must not be shorter than "
                f"{rounded_up(fastest, 6)} s, the iteration time of the fastest plan."
            )
    return fastest


class _Search:
    """The relaxations solved and the assignments found so far."""

    def __init__(
        self,
        dag: ActivityNetwork,
        options: Sequence[OptionSet],
        rate: float,
        fastest: float,
        periodic: Sequence[PeriodicPath],
        effort: Effort,
        bound: LowerBound,
        on_progress: Progress | None,
    ) -> None:
        self._table, self._bound, self._effort, self._on_progress = bound.table, bound, effort, on_progress
        self._programme = MergedTradeoff(dag, options, periodic) if periodic else RelaxedTradeoff(dag, options)
        self._relaxed = [self._programme.solve_with_rate(rate)]
        self.fastest, self.slowest = fastest, max(self._relaxed[0].time, fastest)
        self._bound.add(self._relaxed[0])
        self._order = order_of_time(self._table, self._relaxed[0])
        self._pool = SolutionPool(self._table, self._bound, rate, effort)

    def relax(self, num_free: int, kept: Set[float]) -> None:
        """Set the targets and solve the relaxation at and between them.

        Args:
            num_free: Number of targets, equally spaced between the slowest and the fastest.
            kept: Further targets, which must be kept to.
        """
        self._targets = targets = make_targets(self.slowest, self.fastest, num_free, kept)
        num_solved = max(int((num_free + 2) / self._effort.points_per_relaxation), _FEWEST_RELAXATIONS)
        shares = np.linspace(0.0, 1.0, num_solved) ** _DENSER
        between = self.slowest - (self.slowest - self.fastest) * shares[1:-1]
        # Nowhere does the relaxation bend more than next to the fastest time.
        fastest_free = targets.times[~targets.is_kept][-1:]
        times = sorted({*between.tolist(), *fastest_free.tolist(), *kept}, reverse=True)
        for done, time in enumerate(times, 1):
            if time != self._relaxed[0].time:
                self._relax(time)
            self._report("relaxing", done, len(times))
        self._bound.add_mixtures()
        is_dear = self._programme.iterations > self._effort.iterations_per_node * self._table.dag.num_nodes
        self.num_rounds = len(self._effort.rounds) - is_dear

    def improve(self, number: int) -> bool:
        """Go through a round at all targets whose gap is too large; return whether there are any."""
        pool, targets, effort = self._pool, self._targets, self._effort
        work = effort.rounds[number]
        open_targets = pool.open_targets(targets)
        if open_targets and number and number == self.num_rounds - 1:
            self._sharpen(open_targets)
            open_targets = pool.open_targets(targets)
        if not open_targets:
            return False
        if number:
            self._relax_at(targets.times[open_targets[: effort.own_relaxations]].tolist())
        guides = [guide for target in open_targets for guide in self._guides(target, work)]
        self._search_near(guides[: math.ceil(work.guides_per_target * len(targets))], work)
        open_targets = pool.open_targets(targets, with_shared=number == 0)
        if open_targets:
            self._splice(open_targets, work.spliced_pairs)
        if work.seams:
            self._recombine(work.seams)
        self._move_events(work)
        pool.prune(targets)
        return True

    def look_beyond(self) -> None:
        """Where options are so sparse that nothing comes near the least cost of the relaxation, search slower ones.

        The relaxation mixes options, so it is done sooner than the assignment of least cost may be.
        """
        dag, kinds = self._table.dag, self._table.kinds
        is_small = dag.num_nodes * len(self._targets) <= SMALL_PROBLEM
        gap = self._bound.gaps(np.array(self.slowest), self._pool.costs.min())
        if gap <= (TOLERANCE if is_small else self._effort.largest_gap):
            return
        latest = dag.longest_path([kinds[kind].times[-1] for kind in self._table.kind_of])
        aims = self.slowest + (latest - self.slowest) * np.array(_SHARES_BEYOND)
        work, slowest = self._effort.rounds[0], self._relaxed[0].time
        self._search_near([Guide(slowest, time, *aim[1:]) for time in aims.tolist() for aim in work.free_aims], work)

    def frontier(self, num_points: int, deadlines: Sequence[float]) -> list[TradeoffPoint]:
        """The best assignment for each target and deadline, without those that another dominates, fast to slow.

        Where targets share one, further ones are taken in between, so that there are `num_points` if so many are known.
        """
        pool, targets = self._pool, self._targets
        wanted = pool.best(targets)[0].tolist()
        wanted += [pool.cheapest_within(limit)[0] for limit in (*pool.times[wanted].tolist(), *deadlines, math.inf)]
        if self.fastest <= pool.times.min() * (1 + TOLERANCE):  # and not where the frontier begins later
            wanted += np.flatnonzero(pool.times <= self.fastest)[:1].tolist()
        chosen = [wanted[number] for number in pareto_front(pool.times[wanted], pool.costs[wanted]).tolist()]
        chosen = pool.fill_up(chosen, num_points)
        chosen.sort(key=pool.times.__getitem__)
        return proven_points(self._bound, pool.times[chosen], pool.costs[chosen], pool.assignments[:, chosen])

    def _report(self, activity: str, done: int, total: int) -> None:
        if self._on_progress is not None:
            self._on_progress(activity, done, total)

    def _relax(self, time: float) -> None:
        self._relaxed.append(self._programme.solve(time))
        self._bound.add(self._relaxed[-1])

    def _relax_at(self, times: Sequence[float]) -> None:
        """From one end of the times to the other, from that which is nearer to where the programme stands."""
        now = self._relaxed[-1].time
        wanted = sorted({*times} - {relaxed.time for relaxed in self._relaxed})
        if wanted and abs(wanted[-1] - now) < abs(wanted[0] - now):
            wanted.reverse()
        for time in wanted:
            self._relax(time)

    def _sharpen(self, open_targets: Sequence[int]) -> None:
        """Prove what rounding loses, for targets to be kept to first, at times spread over those of the others."""
        best = self._pool.best(self._targets)[0][open_targets]
        is_kept = self._targets.is_kept[open_targets]
        most = max(self._table.dag.num_nodes // self._effort.nodes_per_sharpened_flow, 1)
        times = self._pool.times[best[is_kept]].tolist()[:most]
        others = np.unique(self._pool.times[best[~is_kept]])
        num = min(len(others), most - len(times))
        times += others[np.unique(np.linspace(0, len(others) - 1, num).round().astype(np.int64))].tolist()
        if times:
            self._bound.sharpen(np.array(times))

    def _guides(self, target: int, work: Round) -> list[Guide]:
        time, reach = float(self._targets.times[target]), float(self._targets.reach[target])
        if not self._targets.is_kept[target]:
            return [Guide(time, time + aim.offset * reach, *aim[1:]) for aim in work.free_aims]
        times = [max(time * (1 + _STEP * aim.offset), self.fastest) for aim in work.kept_aims]
        return [Guide(at, at, *aim[1:], deadline=time) for at, aim in zip(times, work.kept_aims, strict=True)]

    def _search_near(self, guides: Sequence[Guide], work: Round) -> None:
        guides = sorted(guides, key=lambda guide: guide.deadline < math.inf)
        at_once = max(_ROWS_AT_ONCE // (work.width * self._table.dag.num_nodes), 1)
        for first in range(0, len(guides), at_once):
            some = guides[first : first + at_once]
            size = work.width, work.options_per_node
            found = search_beam(self._table, self._relaxed, some, self._order, *size)
            self._pool.add(found, [guide.deadline for guide in some])
            self._report("searching", min(first + at_once, len(guides)), len(guides))

    def _splice(self, open_targets: Sequence[int], num_pairs: int) -> None:
        pool, targets = self._pool, self._targets
        order = np.argsort(pool.times, kind="stable")
        order = order[np.diff(pool.times[order], prepend=-np.inf) > 0]
        aims: list[float] = []
        deadlines: list[float] = []
        for time, is_kept in zip(targets.times[open_targets], targets.is_kept[open_targets], strict=True):
            aims += [time * (1 + seam) for seam in (_SEAMS if is_kept else (0.0,))]
            deadlines += [time if is_kept else math.inf] * (len(aims) - len(deadlines))
        some = pool.assignments[:, order], pool.times[order], pool.costs[order]
        joined, target = splice(*some, np.array(aims), self._order, num_pairs)
        if joined.size:
            pool.add(joined, np.array(deadlines)[target])

    def _recombine(self, num_seams: int) -> None:
        """Join parts of the assignments that keep to a time, where the gap is still too large."""
        pool, targets = self._pool, self._targets
        for target in pool.open_targets(targets):
            if targets.is_kept[target]:
                time = float(targets.times[target])
                some = pool.assignments[:, pool.different_within(time, _RECOMBINED)]
                joined = recombine(some, self._order, num_seams)
                joined = joined[:, self._table.longest_paths(joined) <= time * (1 + TOLERANCE)]
                pool.add(joined, np.full(joined.shape[1], time))

    def _move_events(self, work: Round) -> None:
        """Move events of the best assignments where the gap is still too large."""
        if not work.moved_per_target:
            return
        pool, targets = self._pool, self._targets
        best, _ = pool.best(targets)
        moved: list[tuple[int, float]] = []
        for target in pool.open_targets(targets):
            time = float(targets.times[target])
            if targets.is_kept[target]:
                moved += [(found, time) for found in pool.cheapest_within(time, _MOVED_PER_KEPT)]
            else:
                moved.append((int(best[target]), float(pool.times[best[target]])))
        moved = list(dict.fromkeys(moved))[: math.ceil(work.moved_per_target * len(targets))]
        if moved:
            columns, deadlines = zip(*moved, strict=True)
            better = self._moves.improve(pool.assignments[:, list(columns)], np.array(deadlines), work.sweeps)
            pool.add(better, deadlines)

    @cached_property
    def _moves(self) -> EventMoves:
        return EventMoves(self._table)
