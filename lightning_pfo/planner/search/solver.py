"""The time-cost tradeoff on any DAG: from options per node to a frontier of choices, each with a lower bound.

A choice takes one option for every node; its time is the longest path, its cost the sum of its options' costs plus a
rate times its time. `trace_tradeoff` solves the relaxation at some times from slow to fast and searches near all
targets side by side, with the solution nearest to each as its guide. Targets whose gap is still too large get a
relaxation of their own and wider searches; what was found so far is spliced. In pipelines with a long steady state the
relaxation is a merged one, which bounds from below as well, until the last round.
"""

from __future__ import annotations

import math
from collections.abc import Sequence, Set
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from lightning_pfo.core.errors import PlanError
from lightning_pfo.core.progress import Progress
from lightning_pfo.core.wording import rounded_up
from lightning_pfo.planner.network.arrays import Integers
from lightning_pfo.planner.network.assignments import TOLERANCE, OptionTable
from lightning_pfo.planner.network.dag import ActivityNetwork
from lightning_pfo.planner.network.options import OptionSet
from lightning_pfo.planner.network.periodic_path import PeriodicPath
from lightning_pfo.planner.relaxation.aggregated import MergedTradeoff
from lightning_pfo.planner.relaxation.bound import LowerBound
from lightning_pfo.planner.relaxation.linear_programme import RelaxedTradeoff
from lightning_pfo.planner.search.beam import order_of_time, search_beam
from lightning_pfo.planner.search.guide import Guide
from lightning_pfo.planner.search.path_moves import PathMoves
from lightning_pfo.planner.search.pool import LARGEST_GAP, SMALL_PROBLEM, SolutionPool, make_targets
from lightning_pfo.planner.search.splice import splice

_POINTS_PER_RELAXATION, _DENSER = 5.2, 0.65
"""The relaxation is solved once for so many points of the frontier, more densely at its fast, curved end: at this power
of equal parts."""

_FREE = (
    *((0.0, 0.1, 0.0, 0.0), (-0.5, 0.15, 0.1, 0.1), (0.5, 0.1, 0.0, 0.0)),
    *((0.0, 0.1, 0.3, 0.3), (-0.3, 0.35, 0.3, 0.3), (0.3, 0.1, 0.3, 0.3)),
)
_KEPT = (
    *((0.0, 0.2, 0.0, 0.0), (0.0, 0.2, 1.0, 0.3), (4e-4, 0.1, 1.0, 0.3), (0.0, 0.1, 0.0, 0.0)),
    *((-3e-4, 0.2, 1.0, 0.3), (-6e-4, 0.2, 0.0, 0.0), (-3e-4, 0.1, 0.3, 0.3)),
    *((k * 2e-4, 0.1, 0.0, 0.0) for k in range(2, -10, -1)),
    *((k * 8e-4, 0.1, 0.0, 0.0) for k in (4, 2, -3, -6, -10)),
    *((k * 8e-4, 0.2, 1.0, 0.3) for k in (4, 2, -3, -6, -10)),
)
"""Guides for a target: offset of the time aimed at, meeting, haste and patience. Which does best is a matter of luck,
and several find more than a wide beam for one. Offsets are relative to the reach of a free time, to a time to keep."""

_KEPT_SEAMS = (-3e-4, -6e-4, -1e-3)
"""Where the time must be kept to, choices are spliced for somewhat shorter times as well."""


@dataclass(frozen=True)
class _Effort:
    """What a round of the search does at a target that is still open."""

    width: int
    options_per_node: int
    num_best: int
    free_guides: int
    kept_guides: int
    spliced_pairs: int
    least_polished: int


_ROUNDS = (_Effort(5, 4, 1, 1, 1, 1, 10), _Effort(12, 8, 2, 2, 7, 4, 1), _Effort(32, 8, 2, 6, len(_KEPT), 6, 1))
"""Cheap to dear."""

_SHARES_BEYOND = (0.0, 0.02, 0.05, 0.1, 0.2, 0.35, 0.6, 1.0)
"""Where choices slower than the relaxation's of least cost are searched, on the way to the slowest of all."""

_ROWS_AT_ONCE = 2_000_000
"""Nodes times partial choices searched in one go: what memory is used, and how often progress is reported."""

_POLISHED = 3
"""So many choices for a time to keep to are polished."""


@dataclass(frozen=True)
class TradeoffPoint:
    """A choice of options.

    Attributes:
        time: Longest path in seconds.
        cost: Cost of the options plus the rate times `time`, in joules.
        bound: No choice that takes at most `time` costs less.
        choice: Index into `options[node].times` for each node.
    """

    time: float
    cost: float
    bound: float
    choice: tuple[int, ...]


def proven_point(bound: LowerBound, time: float, cost: float, choice: Integers) -> TradeoffPoint:
    """A choice with what is proven about those as fast.

    Raises:
        PlanError: If the bound is above the cost: a proof is wrong.
    """
    proven = float(bound.at(time))
    if proven > cost:
        raise PlanError(
            f"A plan that takes {time!r} s costs {cost!r} J, less than the {proven!r} J that were proven to be the "
            "least possible. This is an error of the planner's: please report it with the profile and the settings."
        )
    return TradeoffPoint(time, cost, proven, tuple(choice.tolist()))


def trace_tradeoff(
    dag: ActivityNetwork,
    options: Sequence[OptionSet],
    *,
    rate: float = 0.0,
    num_points: int = 50,
    times: Sequence[float] = (),
    deadlines: Sequence[float] = (),
    runs: Sequence[PeriodicPath] = (),
    bound: LowerBound | None = None,
    on_progress: Progress | None = None,
) -> list[TradeoffPoint]:
    """Find choices from the fastest to the one of least cost, none dominated, fast to slow.

    Args:
        dag: The precedences.
        options: Options of each node; nodes of one kind should share one object.
        rate: Cost of a second of the longest path in J/s, at least 0.
        num_points: Number of times near which choices are wanted: `times`, the ends, and others equally spaced.
        times: Times in seconds that must be kept to; brought into the range of the frontier.
        deadlines: Further ones, but one shorter than the fastest choice is an error.
        runs: Middles of steady states, merged in the relaxation, see `steady_middles`.
        bound: Where proofs are collected; one of your own, for the same options and rate, tells of other times too.
        on_progress: Called with what is being done, how much of it is done, and how much there is.

    Raises:
        PlanError: If a deadline cannot be met.
    """
    fastest = fastest_time(dag, options, deadlines)
    bound = bound or LowerBound(OptionTable(dag, options), rate)
    search = _Search(dag, options, rate, fastest, runs, bound, on_progress)
    kept, extra = (
        {min(max(time, fastest), search.slowest) for time in some}
        for some in ((*times, fastest, search.slowest), deadlines)
    )
    search.relax(max(num_points - len(kept), 0), kept | extra)
    for effort in _ROUNDS:
        if not search.improve(effort):
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
    """The relaxations solved and the choices found so far."""

    def __init__(
        self,
        dag: ActivityNetwork,
        options: Sequence[OptionSet],
        rate: float,
        fastest: float,
        runs: Sequence[PeriodicPath],
        bound: LowerBound,
        on_progress: Progress | None,
    ) -> None:
        self._table, self._rate, self._on_progress = bound.table, rate, on_progress
        self._problem, self._is_merged = (dag, options), bool(runs)
        self._programme = MergedTradeoff(dag, options, runs) if runs else RelaxedTradeoff(dag, options)
        self._bound = bound
        self._relaxed = [self._programme.solve_with_rate(rate)]
        self.fastest, self.slowest = fastest, max(self._relaxed[0].time, fastest)
        self._least = self._relaxed[0]
        self._bound.add(self._least)
        self._order = order_of_time(self._table, self._least)
        self._known = SolutionPool(self._table, self._bound, rate)

    def relax(self, num_free: int, kept: Set[float]) -> None:
        """Set the targets and solve the relaxation at and between them.

        Args:
            num_free: Number of targets, equally spaced between the slowest and the fastest.
            kept: Further targets, which must be kept to.
        """
        self._targets = targets = make_targets(self.slowest, self.fastest, num_free, kept)
        shares = np.linspace(0.0, 1.0, max(int((num_free + 2) / _POINTS_PER_RELAXATION), 2)) ** _DENSER
        between = self.slowest - (self.slowest - self.fastest) * shares[1:-1]
        # Nowhere does the relaxation bend more than next to the fastest time.
        fastest_free = targets.times[~targets.is_kept][-1:]
        times = sorted({*between.tolist(), *fastest_free.tolist(), *kept}, reverse=True)
        for done, time in enumerate(times, 1):
            if time != self._relaxed[0].time:
                self._relax(time)
            self._report("relaxing", done, len(times))
        self._bound.add_mixtures()

    def improve(self, effort: _Effort) -> bool:
        """Search and splice near all targets whose gap is too large; return whether there are any."""
        targets = self._known.open_targets(self._targets)
        if targets and effort is _ROUNDS[-1]:
            self._bound.sharpen(self._known.times[self._known.best(self._targets)[0][targets]])
            targets = self._known.open_targets(self._targets)
        if not targets:
            return False
        if self._is_merged and effort is _ROUNDS[-1]:
            self._is_merged, self._programme, self._relaxed = False, RelaxedTradeoff(*self._problem), []
        guides = [guide for target in targets for guide in self._guides(target, effort)]
        guides.sort(key=lambda guide: guide.deadline < math.inf)
        at_once = max(_ROWS_AT_ONCE // (effort.width * self._table.dag.num_nodes), 1)
        for first in range(0, len(guides), at_once):
            some = guides[first : first + at_once]
            size = effort.width, effort.options_per_node, effort.num_best
            choices = search_beam(self._table, self._relaxed, some, self._order, *size)
            self._known.add(choices, [guide.deadline for guide in some] * (choices.shape[1] // len(some)))
            self._report("searching", min(first + at_once, len(guides)), len(guides))
        targets = self._known.open_targets(self._targets, with_shared=effort is _ROUNDS[0])
        if targets:
            self._splice(targets, effort.spliced_pairs)
        self._polish(effort.least_polished)
        self._known.prune(self._targets)
        return True

    def look_beyond(self) -> None:
        """Where options are so sparse that nothing comes near the least cost of the relaxation, search slower choices.

        The relaxation mixes options, so it is done sooner than the choice of least cost may be.
        """
        dag, kinds = self._table.dag, self._table.kinds
        is_small = dag.num_nodes * len(self._targets.times) <= SMALL_PROBLEM
        gap = self._bound.gaps(np.array(self.slowest), self._known.costs.min())
        if gap <= (TOLERANCE if is_small else LARGEST_GAP):
            return
        latest = dag.longest_path([kinds[kind].times[-1] for kind in self._table.kind_of])
        aims = self.slowest + (latest - self.slowest) * np.array(_SHARES_BEYOND)
        guides = [Guide(self._least.time, aim, *weights) for aim in aims.tolist() for _, *weights in _FREE]
        effort = _ROUNDS[0]
        choices = search_beam(
            self._table, [self._least], guides, self._order, effort.width, effort.options_per_node, num_best=2
        )
        self._known.add(choices, [math.inf] * choices.shape[1])

    def frontier(self, num_points: int, deadlines: Sequence[float]) -> list[TradeoffPoint]:
        """The best choice for each target and deadline, without those that another dominates, fast to slow.

        Where targets share one, further choices are taken in between, so that there are `num_points` if so many are
        known.
        """
        known = self._known
        best, gaps = known.best(self._targets)
        for found in np.unique(best[gaps > LARGEST_GAP]):  # targets may share one
            self._relax(known.times[found])  # a tangent right there is the tightest bound
            self._bound.sharpen(known.times[[found]])
        chosen: list[int] = []
        beyond = [deadline for deadline in (*deadlines, math.inf) if deadline > self.slowest]
        for limit in sorted({*known.times[best].tolist(), *beyond}):
            (found,) = known.cheapest_within(limit)
            if not chosen or known.costs[found] < known.costs[chosen[-1]]:
                chosen.append(found)
        chosen = known.fill_up(chosen, num_points)
        return [
            proven_point(self._bound, float(known.times[found]), float(known.costs[found]), known.choices[:, found])
            for found in sorted(chosen, key=known.times.__getitem__)
        ]

    def _report(self, activity: str, done: int, total: int) -> None:
        if self._on_progress is not None:
            self._on_progress(activity, done, total)

    def _relax(self, time: float) -> None:
        self._relaxed.append(self._programme.solve(time))
        self._bound.add(self._relaxed[-1])

    def _guides(self, target: int, effort: _Effort) -> list[Guide]:
        """Guides to a target; from the second round on it gets a relaxation of its own."""
        time, reach = float(self._targets.times[target]), float(self._targets.reach[target])
        if effort is not _ROUNDS[0] and all(relaxed.time != time for relaxed in self._relaxed):
            self._relax(time)
        if not self._targets.is_kept[target]:
            return [Guide(time, time + offset * reach, *weights) for offset, *weights in _FREE[: effort.free_guides]]
        guides = []
        for offset, meeting, haste, patience in _KEPT[: effort.kept_guides]:
            aim = max(time * (1 + offset), self.fastest)
            guides.append(Guide(aim, aim, meeting, haste, patience, deadline=time))
        return guides

    def _splice(self, targets: Sequence[int], num_pairs: int) -> None:
        known = self._known
        order = np.argsort(known.times, kind="stable")
        order = order[np.diff(known.times[order], prepend=-np.inf) > 0]
        is_kept, times = self._targets.is_kept[targets], self._targets.times[targets]
        deadlines = np.concatenate([np.where(is_kept, times, math.inf), *[times[is_kept]] * len(_KEPT_SEAMS)])
        aims = np.concatenate([times, *(times[is_kept] * (1 + offset) for offset in _KEPT_SEAMS)])
        some = known.choices[:, order], known.times[order], known.costs[order]
        joined, target = splice(*some, aims, self._order, num_pairs)
        if joined.size:
            self._known.add(joined, deadlines[target])

    def _polish(self, least: int) -> None:
        """Move events of the best choices where the gap is still too large, if that are so many."""
        known, targets = self._known, self._known.open_targets(self._targets)
        best, _ = known.best(self._targets)
        columns = sorted({int(best[target]) for target in targets if not self._targets.is_kept[target]})
        deadlines = known.times[columns].tolist()
        for time in self._targets.times[targets][self._targets.is_kept[targets]].tolist():
            cheapest = known.cheapest_within(time, _POLISHED)
            columns += cheapest
            deadlines += [time] * len(cheapest)
        if len(columns) >= least:
            known.add(self._moves.improve(known.choices[:, columns], np.array(deadlines)), deadlines)

    @cached_property
    def _moves(self) -> PathMoves:
        return PathMoves(self._table)
