"""The choices that a search has found, and which of them to take for the times that are wanted."""

from __future__ import annotations

import math
from collections.abc import Sequence, Set
from dataclasses import dataclass
from itertools import product

import numpy as np
import numpy.typing as npt

from lightning_pfo.planner.network.arrays import Floats, Integers
from lightning_pfo.planner.network.assignments import TOLERANCE, Assignments, OptionTable
from lightning_pfo.planner.relaxation.bound import LowerBound

LARGEST_GAP, _MEDIAN_GAP = 0.0022, 0.001
"""A target is open while its gap exceeds the first, or the second while the median of all targets does."""

_KEPT_GAP = 0.0018
"""And while that of a time to keep to, such as the top clocks', exceeds this."""

_FEW_CHOICES = 5000
"""Up to so many are all known from the beginning."""

SMALL_PROBLEM = 5000
"""With more nodes times targets, no target is open only because it shares a choice."""

_KEPT_PER_TIME = 3


@dataclass(frozen=True, eq=False)
class Targets:
    """The times for which choices are wanted.

    Attributes:
        times: In seconds, slow to fast, shape (targets,).
        is_kept: Whether a time must be kept to.
        reach: By how many seconds the others may be missed: half the distance to the next one.
    """

    times: Floats
    is_kept: npt.NDArray[np.bool_]
    reach: Floats


def make_targets(slowest: float, fastest: float, num_free: int, kept: Set[float]) -> Targets:
    """Spread targets equally between the slowest and the fastest time, and add those that must be kept to.

    Args:
        slowest: In seconds.
        fastest: In seconds.
        num_free: Number of targets in between that need not be kept to.
        kept: Times in seconds that must be.
    """
    free = np.linspace(slowest, fastest, num_free + 2)[1:-1]
    times = np.array(sorted([*free, *kept], reverse=True))
    is_kept = np.isin(times, list(kept))
    return Targets(times, is_kept, np.where(is_kept, 0.0, (slowest - fastest) / (num_free + 1) / 2))


class SolutionPool:
    """Choices side by side, and the lower bound on all there are.

    Args:
        table: The options.
        bound: What is proven so far; may become tighter.
        rate: Cost of a second of the longest path in J/s.

    Attributes:
        choices: Option of each node, shape (n, choices).
        times: Longest path of each choice in seconds.
        costs: Cost of each choice in joules, the rate included.
        are_all: Whether there are no others.
    """

    def __init__(self, table: OptionTable, bound: LowerBound, rate: float) -> None:
        self._table, self._bound, self._rate = table, bound, rate
        sizes = [len(table.kinds[kind].times) for kind in table.kind_of]
        self.are_all = math.prod(sizes) <= _FEW_CHOICES
        # If not all, the fastest: so that there is a choice for every time.
        known = product(*map(range, sizes)) if self.are_all else [(0,) * len(sizes)]
        self.choices = np.array(list(known), dtype=np.int64).T
        self.times = table.longest_paths(self.choices)
        self.costs = table.total_costs(self.choices) + rate * self.times

    def add(self, choices: Assignments, deadlines: Sequence[float] | Floats) -> None:
        """Take in choices, their slack spent: up to the deadline where they keep to one.

        Args:
            choices: Shape (n, choices).
            deadlines: One for each choice, in seconds; infinite where there is none.
        """
        choices, times = self._table.spend_slack(choices, np.asarray(deadlines))
        self.choices = np.hstack([self.choices, choices])
        self.times = np.concatenate([self.times, times])
        self.costs = np.concatenate([self.costs, self._table.total_costs(choices) + self._rate * times])

    def prune(self, targets: Targets) -> None:
        """Of the choices of about the same time keep the best."""
        if self.are_all:
            return
        gaps = self._bound.gaps(self.times, self.costs)
        slot = np.round((self.times - self.times.min()) / np.maximum(targets.reach.max(), 1e-300))
        order = np.lexsort((gaps, slot))
        rank = np.arange(len(order)) - np.searchsorted(slot[order], slot[order])
        kept = np.union1d(order[rank < _KEPT_PER_TIME], self.best(targets)[0])
        self.choices, self.times, self.costs = self.choices[:, kept], self.times[kept], self.costs[kept]

    def best(self, targets: Targets) -> tuple[Integers, Floats]:
        """For each target the choice to take and its gap: within reach the least gap, otherwise the least cost."""
        gaps = self._bound.gaps(self.times, self.costs)
        distances = np.abs(self.times - targets.times[:, None])
        reach = np.where(targets.is_kept, -1.0, targets.reach)[:, None]
        near = np.where((distances <= reach) & (gaps <= LARGEST_GAP), gaps, np.inf)
        # Rather a good choice of a neighbour than a bad one.
        wider = np.where(distances <= 2 * reach, gaps, np.inf)
        has_good = np.asarray(np.isfinite(near).any(axis=1))
        near = np.where(has_good[:, None], near, wider)
        within = np.where(self.times <= targets.times[:, None] * (1 + TOLERANCE), self.costs, np.inf)
        is_near = np.isfinite(near).any(axis=1)
        best = np.where(is_near, near.argmin(axis=1), within.argmin(axis=1))
        return best, np.where(is_near, gaps[best], self._bound.gaps(targets.times, self.costs[best]))

    def open_targets(self, targets: Targets, with_shared: bool = False) -> list[int]:
        """Numbers of the targets to work on; where there are any, also of those whose choice another has as well."""
        best, gaps = self.best(targets)
        distinct = np.unique(best, return_index=True)[1]  # as they will be on the frontier
        limit = LARGEST_GAP if np.median(gaps[distinct]) <= _MEDIAN_GAP else _MEDIAN_GAP
        is_open = gaps > np.where(targets.is_kept, min(limit, _KEPT_GAP), limit)
        if with_shared or is_open.any() or len(self.choices) * len(gaps) <= SMALL_PROBLEM:
            is_open[np.setdiff1d(np.flatnonzero(~targets.is_kept), distinct)] = True
        return [int(number) for number in np.flatnonzero(is_open)]

    def cheapest_within(self, deadline: float, number: int = 1) -> list[int]:
        """The cheapest choices that keep to a deadline, cheapest first."""
        within = np.flatnonzero(self.times <= deadline * (1 + TOLERANCE))
        return [int(found) for found in within[np.argsort(self.costs[within], kind="stable")[:number]]]

    def fill_up(self, chosen: Sequence[int], num_wanted: int) -> list[int]:
        """Add choices to those chosen, none dominated: good ones first, and the farthest in time from the others."""
        filled = list(chosen)
        times, costs, gaps = self.times, self.costs, self._bound.gaps(self.times, self.costs)
        order = np.lexsort((costs, times))
        undominated = np.zeros(len(order), dtype=bool)
        undominated[order] = np.diff(np.minimum.accumulate(costs[order]), prepend=np.inf) < 0
        for limit in (max(np.median(gaps[filled]), _MEDIAN_GAP), gaps[filled].max()):
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
