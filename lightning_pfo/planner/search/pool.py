"""The solution pool: the assignments that a search has found, and which to take, with bounds, for the times wanted."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from lightning_pfo.planner.network.arrays import Floats, Integers
from lightning_pfo.planner.network.assignments import TOLERANCE, Assignments, OptionTable
from lightning_pfo.planner.network.options import pareto_front
from lightning_pfo.planner.relaxation.bound import LowerBound
from lightning_pfo.planner.search.effort import Effort
from lightning_pfo.planner.search.targets import Targets

_log = logging.getLogger(__name__)
_FEW_ASSIGNMENTS = 5000
"""Up to so many are all known from the beginning."""

SMALL_PROBLEM = 5000
"""With more nodes times targets, no target is open only because it shares an assignment."""

_PER_TIME = 3
"""So many assignments of about the same time are remembered."""


@dataclass(frozen=True)
class TradeoffPoint:
    """An assignment of options.

    Attributes:
        time: Longest path in seconds.
        cost: Cost of the options plus the rate times `time`, in joules.
        bound: No assignment that takes at most `time` costs less.
        assignment: Index into `options[node].times` for each node.
    """

    time: float
    cost: float
    bound: float
    assignment: tuple[int, ...]


def proven_points(bound: LowerBound, times: Floats, costs: Floats, assignments: Assignments) -> list[TradeoffPoint]:
    """Assignments with what is proven about those as fast.

    A bound above a real cost cannot be, if the proof is right; if it is wrong all the same, it is said and not claimed.

    Args:
        bound: What is proven.
        times: Longest path of each assignment in seconds.
        costs: Cost of each in joules, the rate included.
        assignments: Shape (n, assignments).
    """
    points = []
    for time, cost, proven, assignment in zip(
        times.tolist(), costs.tolist(), bound.at(times).tolist(), assignments.T.tolist(), strict=True
    ):
        if proven > cost:
            _log.error(
                "A plan that takes %r s costs %r J, less than the %r J that were taken for the least possible. It is "
                "kept, without a bound. This is an error of the planner's: please report it with the profile and the "
                "settings.",
                *(time, cost, proven),
            )
            proven = -math.inf
        points.append(TradeoffPoint(time, cost, proven, tuple(assignment)))
    return points


class SolutionPool:
    """Assignments side by side, and the lower bound on all there are.

    Args:
        table: The options.
        bound: What is proven so far; may become tighter.
        rate: Cost of a second of the longest path in J/s.
        effort: Which gaps are too large.

    Attributes:
        assignments: Option of each node, shape (n, assignments).
        times: Longest path of each assignment in seconds.
        costs: Cost of each assignment in joules, the rate included.
        are_all: Whether there are no others.
    """

    def __init__(self, table: OptionTable, bound: LowerBound, rate: float, effort: Effort) -> None:
        self._table, self._bound, self._rate, self._effort = table, bound, rate, effort
        sizes = [len(table.kinds[kind].times) for kind in table.kind_of]
        self.are_all = math.prod(sizes) <= _FEW_ASSIGNMENTS
        # If not all, the fastest: so that there is an assignment for every time.
        known = product(*map(range, sizes)) if self.are_all else [(0,) * len(sizes)]
        self.assignments = np.array(list(known), dtype=np.int64).T
        self.times = table.longest_paths(self.assignments)
        self.costs = table.total_costs(self.assignments) + rate * self.times

    def add(self, assignments: Assignments, deadlines: Sequence[float] | Floats) -> None:
        """Take in assignments, their slack spent: up to the deadline where they keep to one.

        Args:
            assignments: Shape (n, assignments).
            deadlines: One for each, in seconds; infinite where there is none.
        """
        assignments, times = self._table.spend_slack(assignments, np.asarray(deadlines))
        self.assignments = np.hstack([self.assignments, assignments])
        self.times = np.concatenate([self.times, times])
        self.costs = np.concatenate([self.costs, self._table.total_costs(assignments) + self._rate * times])

    def prune(self, targets: Targets) -> None:
        """Of the assignments of about the same time keep the best."""
        if self.are_all:
            return
        gaps = self._bound.gaps(self.times, self.costs)
        slot = np.round((self.times - self.times.min()) / np.maximum(targets.reach.max(), 1e-300))
        order = np.lexsort((gaps, slot))
        rank = np.arange(len(order)) - np.searchsorted(slot[order], slot[order])
        kept = np.union1d(order[rank < _PER_TIME], self.best(targets)[0])
        self.assignments, self.times, self.costs = self.assignments[:, kept], self.times[kept], self.costs[kept]

    def best(self, targets: Targets) -> tuple[Integers, Floats]:
        """For each target the assignment to take and its gap: within reach the least gap, otherwise the least cost."""
        gaps = self._bound.gaps(self.times, self.costs)
        distances = np.abs(self.times - targets.times[:, None])
        reach = np.where(targets.is_kept, -1.0, targets.reach)[:, None]
        near = np.where((distances <= reach) & (gaps <= self._effort.largest_gap), gaps, np.inf)
        # Rather a good assignment of a neighbour than a bad one.
        wider = np.where(distances <= 2 * reach, gaps, np.inf)
        has_good = np.asarray(np.isfinite(near).any(axis=1))
        near = np.where(has_good[:, None], near, wider)
        within = np.where(self.times <= targets.times[:, None] * (1 + TOLERANCE), self.costs, np.inf)
        is_near = np.isfinite(near).any(axis=1)
        best = np.where(is_near, near.argmin(axis=1), within.argmin(axis=1))
        return best, np.where(is_near, gaps[best], self._bound.gaps(targets.times, self.costs[best]))

    def open_targets(self, targets: Targets, with_shared: bool = False) -> list[int]:
        """Numbers of the targets to work on, those to be kept to first, then those of the largest gaps.

        A target that shares its assignment with another is one of them where there are others, or if asked for.
        """
        best, gaps = self.best(targets)
        distinct = np.unique(best, return_index=True)[1]  # as they will be on the frontier
        effort = self._effort
        limit = effort.largest_gap if np.median(gaps[distinct]) <= effort.median_gap else effort.median_gap
        is_open = gaps > np.where(targets.is_kept, min(limit, effort.kept_gap), limit)
        if with_shared or is_open.any() or len(self.assignments) * len(gaps) <= SMALL_PROBLEM:
            is_open[np.setdiff1d(np.flatnonzero(~targets.is_kept), distinct)] = True
        order = np.lexsort((-gaps, ~targets.is_kept))
        return [int(number) for number in order[is_open[order]]]

    def cheapest_within(self, deadline: float, number: int = 1) -> list[int]:
        """The cheapest assignments that keep to a deadline, cheapest first."""
        within = np.flatnonzero(self.times <= deadline * (1 + TOLERANCE))
        return [int(found) for found in within[np.argsort(self.costs[within], kind="stable")[:number]]]

    def different_within(self, deadline: float, number: int) -> list[int]:
        """The cheapest assignments of different costs that keep to a deadline, cheapest first."""
        cheapest = self.cheapest_within(deadline, len(self.costs))
        differs = np.diff(self.costs[cheapest], prepend=-np.inf) > TOLERANCE * np.abs(self.costs[cheapest])
        return [found for found, is_new in zip(cheapest, differs.tolist(), strict=True) if is_new][:number]

    def fill_up(self, chosen: Sequence[int], num_wanted: int) -> list[int]:
        """Add undominated assignments to those chosen: good ones first, the farthest in time from the others."""
        filled = list(chosen)
        times, costs, gaps = self.times, self.costs, self._bound.gaps(self.times, self.costs)
        undominated = np.zeros(len(times), dtype=bool)
        undominated[pareto_front(times, costs)] = True
        for limit in (max(np.median(gaps[filled]), self._effort.median_gap), gaps[filled].max()):
            while len(filled) < num_wanted:
                is_faster = times[filled] <= times[:, None]
                dearer = costs[filled] > costs[:, None] * (1 + TOLERANCE)
                cheaper = costs[filled] < costs[:, None] * (1 - TOLERANCE)
                between = np.where(is_faster, dearer, cheaper).all(axis=1) & undominated & (gaps <= limit)
                distance = np.where(between, np.abs(times[filled] - times[:, None]).min(axis=1), 0.0)
                farthest = int(distance.argmax())
                if distance[farthest] <= TOLERANCE * times[farthest]:
                    break
                filled.append(farthest)
        return filled
