r"""Improve assignments by moving one event at a time; the longest path never grows.

An *event* is the moment at which nodes with the same predecessors and delays start. Between two events a node takes the
slowest, that is cheapest, option that fits. Moving an event gives time to the nodes that end there and takes it from
those that start there (or the other way round), and concerns no others. So each event is moved, all else fixed, to the
moment where these few nodes together cost least. Worth trying are only the moments at which one of them just fits an
option.

Events that share no node are moved at once, so a sweep over all events is a few passes of array arithmetic: a greedy
colouring of the events says which ones. In a pipeline's steady state events are barriers between neighbouring stages
(`F` of one stage and `B` of the next end there, `B` of the one and `F` of the other start), and few colours suffice.
With delays such a barrier is two events, as each stage has the results of its own earlier than its neighbour's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from lightning_pfo.planner.network.arrays import Floats, Integers
from lightning_pfo.planner.network.assignments import Assignments, OptionTable
from lightning_pfo.planner.network.dag import ActivityNetwork

_REACH = 2
"""A node tries options up to so many places from its present one."""

_AT_ONCE = 30_000
"""Events times assignments that are moved in one go: what memory is used."""

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
        delays: How much earlier than at the event the nodes of `ending` must end; how much earlier than that, counted
            in this way, at `others`; and how much earlier than at `ends` those of `starting`. Shaped like these; None
            where there are no delays.
    """

    events: Integers
    ending: Integers
    others: Integers
    starting: Integers
    ends: Integers
    delays: tuple[Floats, Floats, Floats] | None


class EventMoves:
    """The events of a network and the options of its nodes, to improve any number of assignments side by side.

    Args:
        table: The options.
    """

    def __init__(self, table: OptionTable) -> None:
        self._table, self._line = table, table.line
        # The node behind the last is the padding.
        self._kind_of = np.append(table.kind_of, len(table.kinds))
        self._first, self._last = self._line.first[self._kind_of], self._line.last[self._kind_of]
        self._start_of, self._num_events, self._batches = _events(table.dag)

    def improve(self, assignments: Assignments, deadlines: Floats, sweeps: int) -> Assignments:
        """Move every event `sweeps` times.

        Args:
            assignments: Option of each node, shape (n, assignments).
            deadlines: Time in seconds that each keeps to; where its longest path is longer, that is not exceeded.
            sweeps: How often to go over all events.
        """
        at_once = max(_AT_ONCE // max(self._num_events, 1), 1)
        parts = range(0, assignments.shape[1], at_once)
        improved = [
            self._improve(assignments[:, first : first + at_once], deadlines[first : first + at_once], sweeps)
            for first in parts
        ]
        return np.hstack(improved) if improved else assignments

    def _improve(self, assignments: Assignments, deadlines: Floats, sweeps: int) -> Assignments:
        durations = self._table.durations(assignments)
        finish = self._table.finish_times(durations)
        num = assignments.shape[1]
        moments = np.zeros((num, self._num_events + 2))
        moments[:, self._start_of[:-1]] = (finish - durations).T
        moments[:, -2], moments[:, -1] = np.maximum(deadlines, finish.max(axis=0)), np.inf
        chosen = np.hstack([self._table.places(assignments).T, np.full((num, 1), self._first[-1])])
        tolerance = (_EQUAL_TIMES * moments[:, -2])[:, None, None, None]
        for _ in range(sweeps):
            for batch in self._batches:
                self._move(batch, moments, chosen, tolerance)
        return self._table.options(chosen[:, :-1].T)

    def _move(self, batch: _Batch, moments: Floats, chosen: Integers, tolerance: Floats) -> None:
        """Move the events of a batch to their best moments; `moments` and `chosen` change in place."""
        now = moments[:, batch.events]
        starts, limits = moments[:, self._start_of[batch.ending]], moments[:, batch.others]
        ends = moments[:, batch.ends]
        if batch.delays is not None:
            # What ends at the event counts as if it started later by its delay.
            starts, limits, ends = starts + batch.delays[0], limits - batch.delays[1], ends - batch.delays[2]
        limits, ends = limits.min(axis=3), ends.min(axis=3)
        just_fit = [
            starts[..., None] + self._nearby_times(batch.ending, chosen),
            ends[..., None] - self._nearby_times(batch.starting, chosen),
        ]
        tried = np.concatenate([now[..., None], *(times.reshape(*now.shape, -1) for times in just_fit)], axis=2)
        tried = np.where(np.isfinite(tried), tried, now[..., None])  # what padding suggests
        rooms = [
            np.minimum(tried[:, :, None], limits[..., None]) - starts[..., None],
            ends[..., None] - tried[:, :, None],
        ]
        nodes = np.concatenate([batch.ending, batch.starting], axis=1)
        fitting = self._line.slowest_fitting(self._kind_of[nodes][..., None], np.concatenate(rooms, axis=2) + tolerance)
        total = self._line.costs[fitting].sum(axis=2)
        best = total.argmin(axis=2)[..., None]
        row, event = np.nonzero(np.isfinite(np.take_along_axis(total, best, axis=2)[..., 0]))
        moments[row, batch.events[event]] = np.take_along_axis(tried, best, axis=2)[row, event, 0]
        chosen[row[:, None], nodes[event]] = np.take_along_axis(fitting, best[:, :, None], axis=3)[row, event, :, 0]

    def _nearby_times(self, nodes: Integers, chosen: Integers) -> Floats:
        """Times of the options next to those chosen for some nodes, shape (assignments, *nodes.shape, options)."""
        nearby = chosen[:, nodes][..., None] + np.arange(-_REACH, _REACH + 1)
        first, last = self._first[nodes][..., None], self._last[nodes][..., None]
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
    is_delayed = dag.wait_delays > 0
    pairs = map(tuple, dag.waits[is_delayed, ::-1].tolist())
    delay_of = dict(zip(pairs, dag.wait_delays[is_delayed].tolist(), strict=True))
    batches = []
    for events in by_colour:
        ending_at = _table([ending[event] for event in events], padding)
        starting_at = _table([starting[event] for event in events], padding)
        others = _table_of_tables(
            [
                [[end for end in ends_of[node] if end != event] for node in row]
                for event, row in zip(events, ending_at.tolist(), strict=True)
            ],
            never,
        )
        ends = _table_of_tables([[ends_of[node] for node in row] for row in starting_at.tolist()], never)
        delays = None
        if delay_of:
            own = _delays(delay_of, ending_at, np.array(events)[:, None])
            of_others = _delays(delay_of, ending_at[..., None], others) - own[..., None]
            delays = own, of_others, _delays(delay_of, starting_at[..., None], ends)
        batches.append(_Batch(np.array(events), ending_at, others, starting_at, ends, delays))
    return np.array([*start_of, never]), num_events, batches


def _delays(delay_of: Mapping[tuple[int, int], float], nodes: Integers, events: Integers) -> Floats:
    """Delays between the ends of nodes and events, broadcast; 0 where an event does not wait for a node."""
    pairs = np.broadcast_arrays(nodes, events)
    delays = [delay_of.get(pair, 0.0) for pair in zip(*(side.ravel().tolist() for side in pairs), strict=True)]
    return np.array(delays).reshape(pairs[0].shape)


def _table(rows: Sequence[Sequence[int]], padding: int) -> Integers:
    """Rows of unequal length as an array; at least one column."""
    width = max([1, *map(len, rows)])
    return np.array([[*row, *[padding] * (width - len(row))] for row in rows], dtype=np.int64)


def _table_of_tables(tables: Sequence[Sequence[Sequence[int]]], padding: int) -> Integers:
    """The same with one more axis; all tables have as many rows."""
    return _table([row for table in tables for row in table], padding).reshape(len(tables), len(tables[0]), -1)
