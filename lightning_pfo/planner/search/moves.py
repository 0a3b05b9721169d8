r"""Improve a choice of options by moving one event at a time; the longest path never grows.

An *event* is the moment at which nodes with the same predecessors start. Between two events a node takes the slowest,
that is cheapest, option that fits. Moving an event gives time to the nodes that end there and takes it from those that
start there (or the other way round), and concerns no others. So each event is moved, all else fixed, to the moment
where these few nodes together cost least. Worth trying are only the moments at which one of them just fits an option.

Events that share no node are moved at once, so a sweep over all events is a few passes of array arithmetic: a greedy
colouring of the events says which ones. In a pipeline's steady state events are barriers between neighbouring stages
(`F` of one stage and `B` of the next end there, `B` of the one and `F` of the other start), and few colours suffice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lightning_pfo.planner.network.arrays import Floats, Integers
from lightning_pfo.planner.network.assignments import Assignments, OptionTable
from lightning_pfo.planner.network.dag import ActivityNetwork

_REACH = 3
"""A node tries options up to so many places from its present one."""

_EQUAL_TIMES = 1e-12
"""Relative to the longest path; a path of ten thousand nodes adds it up and stays within the planner's tolerance."""


@dataclass(frozen=True)
class _Batch:
    """Events that share no node. Rows are padded with a node without cost and events out of the way.

    Attributes:
        events: Shape (e,).
        ending: Nodes that end at each event, shape (e, a).
        others: Other events that limit the end of each of them, shape (e, a, b).
        starting: Nodes that start at each event, shape (e, c).
        ends: Events that limit the end of each of those, shape (e, c, d).
    """

    events: Integers
    ending: Integers
    others: Integers
    starting: Integers
    ends: Integers


class EventMoves:
    """The events of a DAG and the options of its nodes, to improve any number of choices.

    Args:
        table: The options.
    """

    def __init__(self, table: OptionTable) -> None:
        self._table, self._line = table, table.line
        # The node behind the last is the padding.
        self._kind_of = np.append(table.kind_of, len(table.kinds))
        self._first, self._last = self._line.first[self._kind_of], self._line.last[self._kind_of]
        self._start_of, self._num_events, self._batches = _events(table.dag)

    def improve(self, choice: Assignments, deadline: float, sweeps: int) -> Assignments:
        """Move every event `sweeps` times.

        Args:
            choice: Option of each node, shape (n, 1).
            deadline: Time in seconds to keep to, at least the longest path of `choice`.
            sweeps: How often to go over all events.
        """
        durations = self._table.durations(choice)
        finish = self._table.finish_times(durations)
        moments = np.append(np.zeros(self._num_events), [max(deadline, finish.max()), np.inf])
        moments[self._start_of[:-1]] = (finish - durations)[:, 0]
        chosen = np.append(self._table.places(choice), self._first[-1])
        for _ in range(sweeps):
            for batch in self._batches:
                self._move(batch, moments, chosen, _EQUAL_TIMES * deadline)
        return self._table.options(chosen[:-1, None])

    def _move(self, batch: _Batch, moments: Floats, chosen: Integers, tolerance: float) -> None:
        """Move the events of a batch to their best moments; `moments` and `chosen` change in place."""
        now = moments[batch.events]
        starts = moments[self._start_of[batch.ending]]
        limits = moments[batch.others].min(axis=2)
        ends = moments[batch.ends].min(axis=2)
        just_fit = [
            starts[:, :, None] + self._nearby_times(batch.ending, chosen),
            ends[:, :, None] - self._nearby_times(batch.starting, chosen),
        ]
        tried = np.concatenate([now[:, None], *(times.reshape(len(now), -1) for times in just_fit)], axis=1)
        tried = np.where(np.isfinite(tried), tried, now[:, None])  # what padding suggests
        rooms = [
            np.minimum(tried[:, None, :], limits[:, :, None]) - starts[:, :, None],
            ends[:, :, None] - tried[:, None, :],
        ]
        nodes = np.concatenate([batch.ending, batch.starting], axis=1)
        fitting = self._line.slowest_fitting(
            self._kind_of[nodes][:, :, None], np.concatenate(rooms, axis=1) + tolerance
        )
        costs = self._line.costs[fitting]
        total = costs.sum(axis=1)
        best = total.argmin(axis=1)
        rows = np.flatnonzero(np.isfinite(total[np.arange(len(best)), best]))
        moments[batch.events[rows]] = tried[rows, best[rows]]
        chosen[nodes[rows]] = fitting[rows, :, best[rows]]

    def _nearby_times(self, nodes: Integers, chosen: Integers) -> Floats:
        nearby = chosen[nodes][:, :, None] + np.arange(-_REACH, _REACH + 1)
        first, last = self._first[nodes][:, :, None], self._last[nodes][:, :, None]
        return np.asarray(self._line.times[np.clip(nearby, first, last)])


def _events(dag: ActivityNetwork) -> tuple[Integers, int, list[_Batch]]:
    """The event at which each node starts (and "never" for padding), their number, and batches of those to move."""
    start_of, ending, num_events = dag.start_of, dag.events, len(dag.events)
    starting: list[list[int]] = [[] for _ in ending]
    for node, event in enumerate(start_of):
        starting[event].append(node)
    ends_of = [list(events) or [num_events] for events in dag.ends_of]

    colour_of = [-1] * (num_events + 1)
    by_colour: list[list[int]] = []
    for event, nodes in enumerate(ending):
        if not nodes:
            continue  # the begin of everything stays where it is
        neighbours = {start_of[node] for node in nodes}
        neighbours.update(*(ends_of[node] for node in (*nodes, *starting[event])))
        taken = {colour_of[neighbour] for neighbour in neighbours}
        colour = next(c for c in range(len(taken) + 1) if c not in taken)
        colour_of[event] = colour
        if colour == len(by_colour):
            by_colour.append([])
        by_colour[colour].append(event)

    never = num_events + 1
    padding = dag.num_nodes
    ends_of.append([never])
    batches = [
        _Batch(
            events=np.array(events),
            ending=(last := _table([ending[event] for event in events], padding)),
            others=_table_of_tables(
                [
                    [[end for end in ends_of[node] if end != event] for node in row]
                    for event, row in zip(events, last.tolist(), strict=True)
                ],
                never,
            ),
            starting=(first := _table([starting[event] for event in events], padding)),
            ends=_table_of_tables([[ends_of[node] for node in row] for row in first.tolist()], never),
        )
        for events in by_colour
    ]
    return np.array([*start_of, never]), num_events, batches


def _table(rows: Sequence[Sequence[int]], padding: int) -> Integers:
    """Rows of unequal length as an array; at least one column."""
    width = max([1, *map(len, rows)])
    return np.array([[*row, *[padding] * (width - len(row))] for row in rows], dtype=np.int64)


def _table_of_tables(tables: Sequence[Sequence[Sequence[int]]], padding: int) -> Integers:
    """The same with one more axis; all tables have as many rows."""
    return _table([row for table in tables for row in table], padding).reshape(len(tables), len(tables[0]), -1)
