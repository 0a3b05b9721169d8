"""The time-cost tradeoff on any DAG: from options per node to a frontier of choices, each with a lower bound.

A choice takes one option for every node; its time is the longest path, its cost the sum of its options' costs plus a
rate times its time. `trace_tradeoff` solves the relaxation at some times from slow to fast and searches near all
targets side by side, with the solution nearest to each as its guide. Targets whose gap is still too large get a
relaxation of their own and wider searches; what was found so far is spliced. In pipelines with a long steady state the
relaxation is a merged one, which bounds from below as well, until the last round.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from itertools import product

import numpy as np

from lightning_pfo.core.errors import PlanError, rounded_up
from lightning_pfo.planner.beam_search import order_of_time, search_beam
from lightning_pfo.planner.choices import TOLERANCE, Choices, ChoiceTable, Floats, Integers
from lightning_pfo.planner.guide import Guide
from lightning_pfo.planner.hull import OptionSet
from lightning_pfo.planner.instruction_dag import InstructionDag
from lightning_pfo.planner.linear_programme import RelaxedSolution, RelaxedTradeoff
from lightning_pfo.planner.local_search import PathMoves
from lightning_pfo.planner.lower_bound import LowerBound
from lightning_pfo.planner.merged_programme import MergedTradeoff
from lightning_pfo.planner.splicing import splice
from lightning_pfo.planner.steady_state import Run

_LARGEST_GAP, _MEDIAN_GAP = 0.0022, 0.001
"""Work goes on at a target while its gap exceeds the first, or the second while the median of all targets does."""

_KEPT_GAP = 0.0018
"""And while that of a time to keep to, such as the top clocks', exceeds this."""

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

_FEW_CHOICES = 5000
"""Up to so many are all tried."""

_SMALL = 5000
"""With more nodes times targets, no further round is begun only because targets share a choice."""

_KEPT_PER_TIME, _POLISHED = 3, 3

Progress = Callable[[str, int, int], None]
"""Called with what is being done, how much of it is done, and how much there is."""


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


def trace_tradeoff(
    dag: InstructionDag,
    options: Sequence[OptionSet],
    *,
    rate: float = 0.0,
    num_points: int = 50,
    times: Sequence[float] = (),
    deadlines: Sequence[float] = (),
    runs: Sequence[Run] = (),
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
        on_progress: Called with what is being done, how much of it is done, and how much there is.

    Raises:
        PlanError: If a deadline cannot be met.
    """
    fastest = fastest_time(dag, options, deadlines)
    search = _Search(dag, options, rate, fastest, runs, on_progress)
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


def fastest_time(dag: InstructionDag, options: Sequence[OptionSet], deadlines: Sequence[float] = ()) -> float:
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
        dag: InstructionDag,
        options: Sequence[OptionSet],
        rate: float,
        fastest: float,
        runs: Sequence[Run],
        on_progress: Progress | None,
    ) -> None:
        self._table, self._rate, self._on_progress = ChoiceTable(dag, options), rate, on_progress
        self._problem, self._is_merged = (dag, options), bool(runs)
        self._programme = MergedTradeoff(dag, options, runs) if runs else RelaxedTradeoff(dag, options)
        self._bound = LowerBound(self._table, rate)
        self._relaxed = [self._programme.solve_with_rate(rate)]
        self.fastest, self.slowest = fastest, max(self._relaxed[0].time, fastest)
        self._least = self._relaxed[0]
        self._bound.add(self._least)
        self._order = order_of_time(self._table, self._least)
        # The fastest, so that there is a choice for every time; and all where they are few.
        sizes = [len(opts.times) for opts in options]
        self._has_all = math.prod(sizes) <= _FEW_CHOICES
        known = product(*map(range, sizes)) if self._has_all else [(0,) * dag.num_nodes]
        self._choices = np.array(list(known), dtype=np.int64).T
        self._times = self._table.longest_paths(self._choices)
        self._costs = self._table.total_costs(self._choices) + rate * self._times

    def relax(self, num_free: int, kept: Set[float]) -> None:
        """Set the targets and solve the relaxation at and between them.

        Args:
            num_free: Number of targets, equally spaced between the slowest and the fastest.
            kept: Further targets, which must be kept to.
        """
        span, num_points = self.slowest - self.fastest, num_free + 2
        free = np.linspace(self.slowest, self.fastest, num_points)[1:-1]
        self._targets = np.array(sorted([*free, *kept], reverse=True))
        self._is_kept = np.isin(self._targets, list(kept))
        # A time that need not be kept to may be missed by half the distance to the next one.
        self._reach = np.where(self._is_kept, 0.0, span / (num_points - 1) / 2)
        shares = np.linspace(0.0, 1.0, max(int(num_points / _POINTS_PER_RELAXATION), 2)) ** _DENSER
        # Nowhere does the relaxation bend more than next to the fastest time.
        times = sorted({*(self.slowest - span * shares[1:-1]).tolist(), *free[-1:].tolist(), *kept}, reverse=True)
        for done, time in enumerate(times, 1):
            if time != self._relaxed[0].time:
                self._relax(time)
            self._report("relaxing", done, len(times))
        self._bound.add_mixtures(self._relaxed)

    def improve(self, effort: _Effort) -> bool:
        """Search and splice near all targets whose gap is too large; return whether there are any."""
        targets = self._unsatisfied()
        if targets and effort is _ROUNDS[-1]:
            self._sharpen(targets)
            targets = self._unsatisfied()
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
            self._add(choices, [guide.deadline for guide in some] * (choices.shape[1] // len(some)))
            self._report("searching", min(first + at_once, len(guides)), len(guides))
        targets = self._unsatisfied(with_shared=effort is _ROUNDS[0])
        if targets:
            self._splice(targets, effort.spliced_pairs)
        self._polish(effort.least_polished)
        self._prune()
        return True

    def look_beyond(self) -> None:
        """Where options are so sparse that nothing comes near the least cost of the relaxation, search slower choices.

        The relaxation mixes options, so it is done sooner than the choice of least cost may be.
        """
        dag, kinds = self._table.dag, self._table.kinds
        is_small = dag.num_nodes * len(self._targets) <= _SMALL
        if self._bound.gaps(np.array(self.slowest), self._costs.min()) <= (TOLERANCE if is_small else _LARGEST_GAP):
            return
        latest = dag.longest_path([kinds[kind].times[-1] for kind in self._table.kind_of])
        aims = self.slowest + (latest - self.slowest) * np.array(_SHARES_BEYOND)
        guides = [Guide(self._least.time, aim, *weights) for aim in aims.tolist() for _, *weights in _FREE]
        effort = _ROUNDS[0]
        choices = search_beam(
            self._table, [self._least], guides, self._order, effort.width, effort.options_per_node, num_best=2
        )
        self._add(choices, [math.inf] * choices.shape[1])

    def frontier(self, num_points: int, deadlines: Sequence[float]) -> list[TradeoffPoint]:
        """The best choice for each target and deadline, without those that another dominates, fast to slow.

        Where targets share one, further choices are taken in between, so that there are `num_points` if so many are
        known.
        """
        best, gaps = self._best()
        for found in best[gaps > _LARGEST_GAP]:
            self._relax(self._times[found])  # a tangent right there is the tightest bound
            self._bound.sharpen(self._times[[found]])
        chosen: list[int] = []
        beyond = [deadline for deadline in (*deadlines, math.inf) if deadline > self.slowest]
        limits = sorted({*self._times[best].tolist(), *beyond})
        for found in map(self._cheapest_within, limits):
            if not chosen or self._costs[found] < self._costs[chosen[-1]]:
                chosen.append(found)
        self._fill(chosen, num_points)
        # Solver tolerance may put the bound of a perfect choice a hair above the choice itself; and what takes longer
        # than the relaxation of least cost is no bound for choices that take less.
        bounds = np.minimum(self._bound.at(np.minimum(self._times, self.slowest)), self._costs)
        return [
            TradeoffPoint(
                float(self._times[found]),
                float(self._costs[found]),
                float(bounds[found]),
                tuple(self._choices[:, found].tolist()),
            )
            for found in sorted(chosen, key=self._times.__getitem__)
        ]

    def _cheapest_within(self, deadline: float) -> int:
        return int(np.where(self._times <= deadline * (1 + TOLERANCE), self._costs, np.inf).argmin())

    def _fill(self, chosen: list[int], num_points: int) -> None:
        """Add choices to those chosen, none dominated: good ones first, and the farthest in time from the others."""
        times, costs, gaps = self._times, self._costs, self._bound.gaps(self._times, self._costs)
        order = np.lexsort((costs, times))
        undominated = np.zeros(len(order), dtype=bool)
        undominated[order] = np.diff(np.minimum.accumulate(costs[order]), prepend=np.inf) < 0
        for limit in (max(np.median(gaps[chosen]), _MEDIAN_GAP), gaps[chosen].max()):
            while len(chosen) < num_points:
                is_faster = times[chosen] <= times[:, None]
                dearer = costs[chosen] > costs[:, None] * (1 + TOLERANCE)
                cheaper = costs[chosen] < costs[:, None] * (1 - TOLERANCE)
                between = np.where(is_faster, dearer, cheaper).all(axis=1) & undominated & (gaps <= limit)
                distance = np.where(between, np.abs(times[chosen] - times[:, None]).min(axis=1), 0.0)
                farthest = int(distance.argmax())
                if distance[farthest] <= TOLERANCE * times[farthest]:
                    break
                chosen.append(farthest)

    def _report(self, activity: str, done: int, total: int) -> None:
        if self._on_progress is not None:
            self._on_progress(activity, done, total)

    def _sharpen(self, targets: Sequence[int]) -> None:
        """Raise the bound where the best choices of some targets are."""
        self._bound.sharpen(self._times[self._best()[0][targets]])

    def _relax(self, time: float) -> RelaxedSolution:
        self._relaxed.append(self._programme.solve(time))
        self._bound.add(self._relaxed[-1])
        return self._relaxed[-1]

    def _guides(self, target: int, effort: _Effort) -> list[Guide]:
        """Guides to a target; from the second round on it gets a relaxation of its own."""
        time, reach = float(self._targets[target]), float(self._reach[target])
        if effort is not _ROUNDS[0] and all(relaxed.time != time for relaxed in self._relaxed):
            self._relax(time)
        if not self._is_kept[target]:
            return [Guide(time, time + offset * reach, *weights) for offset, *weights in _FREE[: effort.free_guides]]
        guides = []
        for offset, meeting, haste, patience in _KEPT[: effort.kept_guides]:
            aim = max(time * (1 + offset), self.fastest)
            guides.append(Guide(aim, aim, meeting, haste, patience, deadline=time))
        return guides

    def _splice(self, targets: Sequence[int], num_pairs: int) -> None:
        order = np.argsort(self._times, kind="stable")
        order = order[np.diff(self._times[order], prepend=-np.inf) > 0]
        known = self._choices[:, order], self._times[order], self._costs[order]
        is_kept = self._is_kept[targets]
        times = self._targets[targets]
        deadlines = np.concatenate([np.where(is_kept, times, math.inf), *[times[is_kept]] * len(_KEPT_SEAMS)])
        aims = np.concatenate([times, *(times[is_kept] * (1 + offset) for offset in _KEPT_SEAMS)])
        joined, target = splice(*known, aims, self._order, num_pairs)
        if joined.size:
            self._add(joined, deadlines[target])

    def _polish(self, least: int) -> None:
        """Move events of the best choices where the gap is still too large, if that are so many."""
        targets = self._unsatisfied()
        best, _ = self._best()
        columns = sorted({int(best[target]) for target in targets if not self._is_kept[target]})
        deadlines = self._times[columns].tolist()
        for target in targets:
            if self._is_kept[target]:
                time = float(self._targets[target])
                within = np.flatnonzero(self._times <= time * (1 + TOLERANCE))
                cheapest = within[np.argsort(self._costs[within])[:_POLISHED]]
                columns += cheapest.tolist()
                deadlines += [time] * len(cheapest)
        if len(columns) >= least:
            self._add(self._moves.improve(self._choices[:, columns], np.array(deadlines)), deadlines)

    @cached_property
    def _moves(self) -> PathMoves:
        return PathMoves(self._table)

    def _add(self, choices: Choices, deadlines: Sequence[float] | Floats) -> None:
        """Take in choices, their slack spent: up to the deadline where they keep to one.

        Args:
            choices: Shape (n, choices).
            deadlines: One for each choice, in seconds; infinite where there is none.
        """
        choices, times = self._table.spend_slack(choices, np.asarray(deadlines))
        self._choices = np.hstack([self._choices, choices])
        self._times = np.concatenate([self._times, times])
        self._costs = np.concatenate([self._costs, self._table.total_costs(choices) + self._rate * times])

    def _prune(self) -> None:
        """Of the choices of about the same time keep the best."""
        if self._has_all:
            return
        gaps = self._bound.gaps(self._times, self._costs)
        slot = np.round((self._times - self.fastest) / np.maximum(self._reach.max(), 1e-300))
        order = np.lexsort((gaps, slot))
        rank = np.arange(len(order)) - np.searchsorted(slot[order], slot[order])
        kept = np.union1d(order[rank < _KEPT_PER_TIME], self._best()[0])
        self._choices, self._times, self._costs = self._choices[:, kept], self._times[kept], self._costs[kept]

    def _best(self) -> tuple[Integers, Floats]:
        """For each target the choice to take and its gap: within reach the least gap, otherwise the least cost."""
        gaps = self._bound.gaps(self._times, self._costs)
        distances = np.abs(self._times - self._targets[:, None])
        reach = np.where(self._is_kept, -1.0, self._reach)[:, None]
        near = np.where((distances <= reach) & (gaps <= _LARGEST_GAP), gaps, np.inf)
        # Rather a good choice of a neighbour than a bad one.
        wider = np.where(distances <= 2 * reach, gaps, np.inf)
        has_good = np.asarray(np.isfinite(near).any(axis=1))
        near = np.where(has_good[:, None], near, wider)
        within = np.where(self._times <= self._targets[:, None] * (1 + TOLERANCE), self._costs, np.inf)
        is_near = np.isfinite(near).any(axis=1)
        best = np.where(is_near, near.argmin(axis=1), within.argmin(axis=1))
        return best, np.where(is_near, gaps[best], self._bound.gaps(self._targets, self._costs[best]))

    def _unsatisfied(self, with_shared: bool = False) -> list[int]:
        """Targets to work on; where there are any, those for which there is only a choice that another has as well."""
        best, gaps = self._best()
        distinct = np.unique(best, return_index=True)[1]  # as they will be on the frontier
        limit = _LARGEST_GAP if np.median(gaps[distinct]) <= _MEDIAN_GAP else _MEDIAN_GAP
        open_targets = set(np.flatnonzero(gaps > np.where(self._is_kept, min(limit, _KEPT_GAP), limit)).tolist())
        if with_shared or open_targets or self._table.dag.num_nodes * len(gaps) <= _SMALL:
            open_targets.update(np.setdiff1d(np.flatnonzero(~self._is_kept), distinct).tolist())
        return sorted(open_targets)
