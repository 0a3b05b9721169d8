r"""Improve choices by moving all events of a path at once; the longest path never grows.

An *event* is the moment at which nodes with the same predecessors start. Between two events a node takes the slowest,
that is cheapest, option that fits. With all other events where they are, what the events of a path cost is a sum over
the path, because each node that touches it lies between two of its events or between one of them and one that stays::

    off the path       ....|--- B1 ---|......|--- F2 ---|....
    the path      e0 --- F1 --- e1 --- B0 --- e2 --- F3 --- e3

So the best moments, out of some for each event, are found by dynamic programming. Worth trying are those at which a
node that touches the event just fits an option. Paths are the chains of a cover of the DAG, in a pipeline its ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lightning_pfo.planner.network.arrays import Floats, Integers
from lightning_pfo.planner.network.assignments import Assignments, OptionTable
from lightning_pfo.planner.network.dag import ActivityNetwork

_REACH, _MOMENTS = 2, 12
"""A node suggests the options up to so many places from its present one; so many moments of an event are tried."""

_EQUAL_TIMES = 1e-12
"""Relative to the deadline; a path of a thousand nodes adds it up and stays within the planner's tolerance."""


class PathMoves:
    """The events of a DAG and the options of its nodes, to improve any number of choices side by side.

    Args:
        table: The options.
    """

    def __init__(self, table: OptionTable) -> None:
        self._table, self._line, dag = table, table.line, table.dag
        self._start_of = np.array(dag.start_of, dtype=np.int64)
        self._never = len(dag.events)
        self._ends_of = [ends or (self._never,) for ends in dag.ends_of]
        self._ending: list[list[int]] = [[] for _ in range(self._never + 1)]
        self._starting: list[list[int]] = [[] for _ in range(self._never + 1)]
        for node, events in enumerate(self._ends_of):
            self._starting[dag.start_of[node]].append(node)
            for event in events:
                self._ending[event].append(node)
        self._paths = _cover(dag)

    def improve(self, choices: Assignments, deadlines: Floats, sweeps: int = 1) -> Assignments:
        """Move the events of every path `sweeps` times.

        Args:
            choices: Shape (n, choices).
            deadlines: One for each choice, in seconds; not shorter than its longest path.
            sweeps: How often to go over all paths.
        """
        durations = self._table.durations(choices)
        moments = np.empty((self._never + 1, choices.shape[1]))
        moments[self._start_of] = self._table.finish_times(durations) - durations
        moments[self._never] = deadlines * (1 + _EQUAL_TIMES)
        tolerance = _EQUAL_TIMES * float(deadlines.max(initial=0.0))
        places = self._places(moments, tolerance)
        costs = self._line.costs[places].sum(axis=0)
        for _ in range(sweeps):
            for path in self._paths:
                moved = self._move(moments, path, tolerance)
                # A node off the path that touches it twice may not fit between its two new moments.
                places = self._places(moved, tolerance)
                moved_costs = self._line.costs[places].sum(axis=0)
                better = moved_costs < costs
                moments[:, better], costs[better] = moved[:, better], moved_costs[better]
        return self._table.options(self._places(moments, tolerance))

    def _places(self, moments: Floats, tolerance: float) -> Integers:
        ends = np.array([self._limit(moments, events) for events in self._ends_of])
        rooms = ends - moments[self._start_of] + tolerance
        return self._line.slowest_fitting(self._table.kind_of[:, None], rooms)

    def _limit(self, moments: Floats, events: Sequence[int]) -> Floats:
        return np.asarray(moments[events[0]] if len(events) == 1 else moments[list(events)].min(axis=0))

    def _costs(self, node: int, rooms: Floats) -> Floats:
        return np.asarray(self._line.costs[self._line.slowest_fitting(int(self._table.kind_of[node]), rooms)])

    def _move(self, moments: Floats, path: Sequence[int], tolerance: float) -> Floats:
        """The moments with those of the events of a path at their best."""
        on_path = set(path)
        events = [int(self._start_of[node]) for node in path]
        tried = self._tried(moments, events[0], tolerance)
        total = self._costs_beside(moments, events[0], tried, on_path, tolerance)
        all_tried, best_before = [tried], []
        for node, event in zip(path, events[1:], strict=False):
            following = self._tried(moments, event, tolerance)
            ends = following[:, :, None]
            others = [end for end in self._ends_of[node] if end != event]
            if others:
                ends = np.minimum(ends, self._limit(moments, others)[:, None, None])
            sums = total[:, None, :] + self._costs(node, ends - tried[:, None, :] + tolerance)
            best_before.append(sums.argmin(axis=2))
            total = np.take_along_axis(sums, best_before[-1][:, :, None], axis=2)[:, :, 0]
            total += self._costs_beside(moments, event, following, on_path, tolerance)
            tried = following
            all_tried.append(tried)
        last = self._limit(moments, self._ends_of[path[-1]])[:, None]
        best = (total + self._costs(path[-1], last - tried + tolerance)).argmin(axis=1)
        moved, rows = moments.copy(), np.arange(moments.shape[1])
        for number in range(len(path) - 1, -1, -1):
            moved[events[number]] = all_tried[number][rows, best]
            if number:
                best = best_before[number - 1][rows, best]
        return moved

    def _tried(self, moments: Floats, event: int, tolerance: float) -> Floats:
        """Moments to try for an event, the present one first, shape (choices, moments)."""
        now = moments[event]
        if not self._table.dag.events[event]:
            return np.asarray(now[:, None])  # the begin of everything stays where it is
        tried = [now[:, None]]
        for node in self._ending[event]:
            start = moments[self._start_of[node]]
            tried.append(start[:, None] + self._nearby_times(node, now - start + tolerance))
        for node in self._starting[event]:
            end = self._limit(moments, self._ends_of[node])
            tried.append(end[:, None] - self._nearby_times(node, end - now + tolerance))
        every = np.concatenate(tried, axis=1)
        if every.shape[1] > _MOMENTS:
            distances = np.abs(every - now[:, None])
            distances[:, 0] = -1.0
            every = np.take_along_axis(every, np.argpartition(distances, _MOMENTS - 1, axis=1)[:, :_MOMENTS], axis=1)
        return every

    def _nearby_times(self, node: int, rooms: Floats) -> Floats:
        kind = int(self._table.kind_of[node])
        nearby = self._line.slowest_fitting(kind, rooms)[:, None] + np.arange(-_REACH, _REACH + 1)
        return np.asarray(self._line.times[np.clip(nearby, self._line.first[kind], self._line.last[kind])])

    def _costs_beside(self, moments: Floats, event: int, tried: Floats, on_path: set[int], tolerance: float) -> Floats:
        """What the nodes off the path that start or end at an event cost, for each moment tried."""
        total = np.zeros(tried.shape)
        for node in self._ending[event]:
            if node not in on_path:
                others = [end for end in self._ends_of[node] if end != event]
                ends = np.minimum(tried, self._limit(moments, others)[:, None]) if others else tried
                total += self._costs(node, ends - moments[self._start_of[node]][:, None] + tolerance)
        for node in self._starting[event]:
            if node not in on_path:
                total += self._costs(node, self._limit(moments, self._ends_of[node])[:, None] - tried + tolerance)
        return total


def _cover(dag: ActivityNetwork) -> list[list[int]]:
    """Disjoint paths that cover all nodes; of several successors the one nearest in number follows."""
    paths: list[list[int]] = []
    covered = [False] * dag.num_nodes
    for first in dag.order:
        if covered[first]:
            continue
        path, following = [first], [first]
        while following:
            covered[path[-1]] = True
            following = [node for node in dag.successors[path[-1]] if not covered[node]]
            if following:
                path.append(min(following, key=lambda node: abs(node - path[-1])))
        paths.append(path)
    return paths
