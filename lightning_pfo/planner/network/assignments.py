"""Assignments of options side by side: their times, their costs, and the slack they leave.

An *assignment* takes one option for every node of a DAG. Here they are the columns of an integer array of shape
(nodes, assignments), and a pass over the DAG handles all of them together, a level of the DAG at a time: what a pass
costs is mostly the number of levels, hardly the number of assignments.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np

from lightning_pfo.planner.network.arrays import Floats, Integers
from lightning_pfo.planner.network.dag import ActivityNetwork
from lightning_pfo.planner.network.options import OptionSet

Assignments = Integers

TOLERANCE = 1e-9
"""Relative to the longest path: what counts as equal times, above rounding noise and below any clock step."""


class OptionTable:
    """The options of all nodes as arrays.

    Args:
        dag: The precedences.
        options: Options of each node; nodes of one kind should share one object.

    Attributes:
        dag: The precedences.
        kinds: The distinct option sets.
        kind_of: Index into `kinds` of each node, shape (n,).
        times: Times of the options of each kind in seconds, shape (kinds, most options), padded with infinity.
        costs: Their costs in joules, padded likewise.
    """

    def __init__(self, dag: ActivityNetwork, options: Sequence[OptionSet]) -> None:
        self.dag = dag
        self.kinds = tuple(dict.fromkeys(options))
        number = {opts: i for i, opts in enumerate(self.kinds)}
        self.kind_of = np.array([number[opts] for opts in options], dtype=np.int64)
        most = max((len(opts.times) for opts in self.kinds), default=0)
        self.times, self.costs = np.full((2, len(self.kinds), most), np.inf)
        for i, opts in enumerate(self.kinds):
            self.times[i, : len(opts.times)] = opts.times
            self.costs[i, : len(opts.costs)] = opts.costs

    @cached_property
    def line(self) -> OptionLine:
        """All options in one ascending line."""
        return OptionLine(self.kinds)

    def places(self, assignments: Assignments) -> Integers:
        """Where in the line the options of each node are, shape (n, assignments)."""
        return np.asarray(assignments + self.line.first[self.kind_of][:, None])

    def options(self, places: Integers) -> Assignments:
        """Option of each node at a place in the line, shape (n, assignments)."""
        return np.asarray(places - self.line.first[self.kind_of][:, None])

    def durations(self, assignments: Assignments) -> Floats:
        """Duration of each node in seconds, shape (n, assignments)."""
        return np.asarray(self.line.times[self.places(assignments)])

    def total_costs(self, assignments: Assignments) -> Floats:
        """Sum of the costs of all nodes in joules, shape (assignments,)."""
        return np.asarray(self.line.costs[self.places(assignments)].sum(axis=0))

    def longest_paths(self, assignments: Assignments) -> Floats:
        """Longest path of each assignment in seconds, shape (assignments,)."""
        return np.asarray(self.finish_times(self.durations(assignments)).max(axis=0, initial=0.0))

    def latest_ends(self, durations: Floats, deadlines: Floats) -> Floats:
        """Latest end of each node such that everything ends by the deadlines, in seconds, shaped as `durations`."""
        order = self.dag.levels_from_the_end
        durations = durations[order.nodes]
        latest_starts, ends = np.empty(durations.shape), np.empty(durations.shape)
        for level in order.levels:
            end = level.reduce(np.minimum, latest_starts) if len(level.neighbours) else deadlines
            ends[level.positions] = end
            latest_starts[level.positions] = end - durations[level.positions]
        return np.asarray(ends[order.position_of])

    def spend_slack(self, assignments: Assignments, deadlines: Floats) -> tuple[Assignments, Floats]:
        """Slow nodes down into the slack before their successors, first nodes first, keeping to the deadlines.

        Args:
            assignments: Shape (n, assignments).
            deadlines: One for each assignment, in seconds; where it is infinite or cannot be kept to, the longest path
                stays as it is.

        Returns:
            The slowed assignments and their longest paths in seconds.
        """
        durations = self.durations(assignments)
        before_the_end = self.latest_ends(durations, np.zeros(len(deadlines)))
        longest = (durations - before_the_end).max(axis=0, initial=0.0)
        until = np.where(np.isfinite(deadlines), np.maximum(deadlines, longest), longest)
        return self.fill(assignments, before_the_end + until * (1 + TOLERANCE / 2))

    def fill(
        self, assignments: Assignments, latest_ends: Floats, *, longest: Floats | float = np.inf, on_hull: bool = False
    ) -> tuple[Assignments, Floats]:
        """Slow every node down to the slowest option that ends by its latest end; no node becomes faster.

        A node starts when its predecessors really end, so what an option leaves over is passed on to the next node.

        Args:
            assignments: Shape (n, assignments).
            latest_ends: Latest end of each node in seconds, shape (n, assignments).
            longest: Most seconds that each node may be slowed down to, shape (n, assignments).
            on_hull: Take options on the hull only. Those above it waste energy that options on it, alternating, do
                not; but where slack cannot be passed on, they are better than nothing.

        Returns:
            The slowed assignments and their longest paths in seconds.
        """
        order = self.dag.levels
        places, kinds = self.places(assignments)[order.nodes], self.kind_of[order.nodes, None]
        longest = np.broadcast_to(longest, latest_ends.shape)[order.nodes]
        latest_ends, finish = latest_ends[order.nodes], np.empty(latest_ends.shape)
        for level in order.levels:
            here = level.positions
            starts = level.reduce(np.maximum, finish) if len(level.neighbours) else 0.0
            fitting = self.line.slowest_fitting(kinds[here], np.minimum(latest_ends[here] - starts, longest[here]))
            if on_hull:
                fitting = self.line.hull_before[fitting]
            places[here] = np.maximum(fitting, places[here])
            finish[here] = starts + self.line.times[places[here]]
        return self.options(places[order.position_of]), finish.max(axis=0, initial=0.0)

    def finish_times(self, durations: Floats) -> Floats:
        """Earliest finish of each node in seconds, shaped as `durations`."""
        return finish_times(self.dag, durations)


class OptionLine:
    """The options of all kinds in one ascending line, so that one binary search finds what fits, for any kinds at once.

    Each kind begins with "nothing fits", of infinite cost. Behind the last kind is one for padding, which takes no time
    and costs nothing, whether it fits or not.

    Args:
        kinds: The distinct option sets.

    Attributes:
        times: Time at each place in seconds.
        costs: Cost at each place in joules.
        first: Place of the fastest option of each kind.
        last: Place of the slowest.
        hull_before: For each place the one of the slowest option on the hull that is not slower.
    """

    def __init__(self, kinds: Sequence[OptionSet]) -> None:
        sizes = np.array([*(len(opts.times) for opts in kinds), 1])
        self.last = np.cumsum(sizes + 1) - 1
        self.first = self.last - sizes + 1
        self.times, self.costs = np.zeros(sizes.sum() + len(sizes)), np.zeros(sizes.sum() + len(sizes))
        is_option = np.ones(len(self.times), dtype=bool)
        is_option[self.first - 1] = False
        self.times[is_option] = [*(time for opts in kinds for time in opts.times), 0.0]
        self.costs[is_option] = [*(cost for opts in kinds for cost in opts.costs), 0.0]
        self.costs[self.first[:-1] - 1] = np.inf
        is_on_hull = ~is_option
        is_on_hull[[place + k for place, opts in zip(self.first, kinds, strict=False) for k in opts.hull]] = True
        self.hull_before = np.maximum.accumulate(np.where(is_on_hull, np.arange(len(is_on_hull)), 0))
        self._longest = float(self.times.max())
        self._spacing = 3 * self._longest or 1.0  # "nothing fits" lies one below, so kinds are apart
        self._keys = self.times + self._spacing * np.repeat(np.arange(len(sizes)), sizes + 1)
        self._keys[~is_option] -= self._longest

    def slowest_fitting(self, kinds: Integers | int, rooms: Floats) -> Integers:
        """Place of the slowest option of a kind that takes at most so many seconds; the place before its first if none.

        Args:
            kinds: Numbers of the kinds; broadcast to `rooms`.
            rooms: Seconds.
        """
        within = np.maximum(np.minimum(rooms, self._longest), -self._longest)  # np.clip is slower
        keys = self._spacing * kinds + within
        return np.searchsorted(self._keys, keys, side="right") - 1


def finish_times(network: ActivityNetwork, durations: Floats) -> Floats:
    """Earliest finish of each node in seconds, for each column of `durations`."""
    order = network.levels
    finish = durations[order.nodes]
    for level in order.levels[1:]:
        finish[level.positions] += level.reduce(np.maximum, finish)
    return np.asarray(finish[order.position_of])
