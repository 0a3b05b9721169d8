r"""Choices that lose little against the relaxation, for many times at once.

For any choice of options and its earliest schedule, let phi_i be the dual flow through node i, f_e that along
precedence e. Weak duality holds term by term: the choice costs more than the tangent of the relaxation by exactly ::

    sum_i [c_i + phi_i t_i - min over options (c_i + phi_i t_i)]     an option off the supporting line
    + sum_e f_e slack_e                                              a valuable wait

Options are chosen node by node in the order in which nodes end. What an option loses is known at once, what a wait
loses as soon as all nodes that must have ended at that moment (an *event*) have their options, often long before the
nodes that start there get theirs. So partial choices are compared by all that is certain to be lost. For every time
that is wanted (a `Guide`) the best are kept; the guides are searched side by side, as the rows of one array, so that a
step of all of them costs little more than a step of one.

What threatens at the next events is estimated from how far open ends and starts lag behind the relaxation: a part of it
is counted as if they all met now, at the latest of them. That latest lag also says whether the choice as a whole is
late or early. A guide may ask for another time than its relaxation's own; then the schedule of the relaxation is
stretched, which keeps its tight precedences tight.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from lightning_pfo.planner.choices import TOLERANCE, Choices, ChoiceTable, Floats, Integers
from lightning_pfo.planner.linear_programme import RelaxedSolution

_NOWHERE = -1e30
"""Lag of an end that nothing waits for any longer."""


@dataclass(frozen=True, eq=False)
class Guide:
    """What to search for.

    Attributes:
        relaxed: The relaxation whose flows value options and waits.
        time: Longest path to aim at, near that of the relaxation, in seconds.
        meeting: Share of the lags at present that is expected to be lost.
        haste: What being late costs beyond its loss, in units of the expected loss at a meeting.
        patience: What being early costs beyond its loss, likewise.
        deadline: Longest path allowed in seconds; exceeded only where no option tried keeps to it.
    """

    relaxed: RelaxedSolution
    time: float
    meeting: float
    haste: float
    patience: float
    deadline: float = math.inf


def search_beam(
    table: ChoiceTable, guides: Sequence[Guide], order: Sequence[int], width: int, options_per_node: int
) -> Choices:
    """Choose an option for every node, `width` times for each guide.

    Args:
        table: The options.
        guides: What to search for; those with a deadline last.
        order: All nodes in order of time, predecessors first.
        width: Number of partial choices kept for each guide.
        options_per_node: Number of options tried at each node: those off the supporting line by least.

    Returns:
        Indices into the options, shape (n, guides x width), guide by guide; fewer where there are not so many choices.
    """
    dag, num_guides = table.dag, len(guides)
    flow, edge_flow, starts, ends = _stack(table, guides)
    worth = np.array([guide.relaxed.sink_flow.sum() for guide in guides])
    meeting = np.array([guide.meeting for guide in guides])
    # In units of the expected loss per second of lag, so that lags need no factor.
    unit = 1.0 / np.maximum(meeting * worth, 1e-9 * max(worth.max(), 1.0))
    unlimited = sum(guide.deadline == math.inf for guide in guides)
    menu = _menus(table, flow, options_per_node)
    # With a deadline the fastest option must be among them.
    lacking = (menu != 0).all(axis=1)
    lacking[:, :unlimited] = False
    menu[:, -1][lacking] = 0
    options_per_node = menu.shape[1]
    kind = table.kind_of[:, None, None]
    times = table.times[kind, menu]
    times[~np.isfinite(times)] = 0.0
    flow, edge_flow = ((1 - meeting) * unit * part for part in (flow, edge_flow))
    values = table.costs[kind, menu] * unit + flow[:, None] * times  # infinite where there is no option
    lags = times - ends[:, None]
    late = np.array([1 + guide.haste for guide in guides])
    early = np.array([1 - guide.patience for guide in guides])
    limits = _latest_lags(table, guides[unlimited:], ends[:, unlimited:])

    open_ends = _OpenEnds(table, starts, ends, edge_flow)
    guide_of = np.arange(num_guides)
    menu_size = options_per_node * num_guides
    # Partial choices, their extensions by each option and guides are numbered with the guides last.
    column_of = (np.arange(width)[:, None, None] * num_guides + np.zeros((options_per_node, 1), int) + guide_of).ravel()
    value = np.zeros((1, num_guides))
    trail = []
    for node in order:
        lag = open_ends.start(node)[:, None] + lags[node]
        candidates = value[:, None] + values[node]
        if unlimited < num_guides:
            candidates[..., unlimited:][lag[..., unlimited:] > limits[node]] = np.inf
        opened = open_ends.end(node, lag, candidates)
        num_candidates = len(value) * options_per_node
        if num_candidates > width:
            latest = open_ends.latest_lag(opened)
            score = (candidates + np.maximum(late * latest, early * latest)).reshape(num_candidates, num_guides)
            kept = score.argpartition(width - 1, axis=0)[:width] * num_guides + guide_of
        else:
            kept = np.arange(num_candidates * num_guides).reshape(num_candidates, num_guides)
        value = candidates.ravel()[kept]
        kept = kept.ravel()
        open_ends.keep(column_of[kept], {end: lag.ravel()[kept] for end, lag in opened.items()})
        trail.append(kept)

    choices = np.empty((dag.num_nodes, value.size), dtype=np.int64)
    column = np.arange(value.size).reshape(value.shape).T.ravel()  # guide by guide
    for node, kept in zip(reversed(order), reversed(trail), strict=True):
        candidate = kept[column]
        choices[node] = menu[node].ravel()[candidate % menu_size]
        column = column_of[candidate]
    # Where there are fewer choices than the beam is wide, some have taken an option that does not exist.
    return np.asarray(np.minimum(choices, np.isfinite(table.times).sum(axis=1)[table.kind_of, None] - 1))


class _OpenEnds:
    """Ends of nodes that an event waits for, and starts of nodes still to come, in every partial choice.

    Kept as lags behind the (stretched) relaxation: a row for each end (its key is the node's number) and each event (-1
    minus its number), a column per partial choice.
    """

    def __init__(self, table: ChoiceTable, starts: Floats, ends: Floats, edge_flow: Floats) -> None:
        self._dag = dag = table.dag
        self._ends = ends
        self._moments = np.full((len(dag.events), ends.shape[1]), np.inf)
        np.minimum.at(self._moments, list(dag.start_of), starts)
        self._flows: dict[tuple[int, int], Floats] = {}
        for (before, after), flow in zip(dag.edges.tolist(), edge_flow, strict=True):
            key = before, dag.start_of[after]
            self._flows[key] = self._flows[key] + flow if key in self._flows else flow
        self._lags = np.full((1, ends.shape[1]), _NOWHERE)
        self._row_of: dict[int, int] = {}
        self._free = [0]
        self._unknown = [len(before) for before in dag.events]
        self._awaited = [len(events) for events in dag.ends_of]
        self._to_start = np.bincount(dag.start_of, minlength=len(dag.events)).tolist()
        for event, before in enumerate(dag.events):
            if not before:
                self._enter(-1 - event, -self._moments[event])

    def start(self, node: int) -> Floats:
        """Start of a node in every partial choice in seconds, shape (choices, guides)."""
        event = self._dag.start_of[node]
        start = self._lag_of(-1 - event) + self._moments[event]
        self._to_start[event] -= 1
        if not self._to_start[event]:
            self._leave(-1 - event)
        return np.asarray(start)

    def end(self, node: int, lag: Floats, values: Floats) -> dict[int, Floats]:
        """End a node: what is lost at the events that it was the last to be awaited for is added to `values`.

        Args:
            node: The node.
            lag: Lag of its end, shape (choices, options, guides).
            values: Loss so far, likewise; changed in place.

        Returns:
            Lags of what is open from now on, by row key.
        """
        opened: dict[int, Floats] = {}
        end = lag + self._ends[node]
        for event in self._dag.ends_of[node]:
            self._unknown[event] -= 1
            if self._unknown[event]:
                continue
            others = [before for before in self._dag.events[event] if before != node]
            arrivals = [(self._lag_of(before) + self._ends[before])[:, None] for before in others]
            start = end
            for arrival in arrivals:
                start = np.maximum(start, arrival)
            if others:
                values += self._flows[node, event] * (start - end)
            for before, arrival in zip(others, arrivals, strict=True):
                values += self._flows[before, event] * (start - arrival)
                self._awaited[before] -= 1
                if not self._awaited[before]:
                    self._leave(before)
            self._awaited[node] -= 1
            opened[-1 - event] = start - self._moments[event]
        if self._awaited[node] or not self._dag.ends_of[node]:
            opened[node] = lag
        return opened

    def latest_lag(self, opened: Mapping[int, Floats]) -> Floats:
        """The largest lag in every partial choice, shape (choices, options, guides)."""
        latest = self._lags.max(axis=0).reshape(-1, 1, self._ends.shape[1])
        for lag in opened.values():
            latest = np.maximum(latest, lag)
        return np.asarray(latest)

    def keep(self, columns: Integers, opened: Mapping[int, Floats]) -> None:
        """Go on with these partial choices, and with what was opened in them."""
        self._lags = self._lags.take(columns, axis=1)
        for key, lag in opened.items():
            self._enter(key, lag)

    def _lag_of(self, key: int) -> Floats:
        return np.asarray(self._lags[self._row_of[key]].reshape(-1, self._ends.shape[1]))

    def _enter(self, key: int, lag: Floats) -> None:
        if not self._free:
            self._free.append(len(self._lags))
            self._lags = np.vstack([self._lags, np.empty((1, self._lags.shape[1]))])
        self._row_of[key] = self._free.pop()
        self._lags[self._row_of[key]] = lag

    def _leave(self, key: int) -> None:
        self._free.append(self._row_of.pop(key))
        self._lags[self._free[-1]] = _NOWHERE


def _stack(table: ChoiceTable, guides: Sequence[Guide]) -> tuple[Floats, Floats, Floats, Floats]:
    """Flows of nodes and edges, latest starts and ends stretched to the time aimed at; a column per guide."""
    flow = np.array([guide.relaxed.flow for guide in guides]).T
    edge_flow = np.array([guide.relaxed.edge_flow for guide in guides]).T
    durations = np.array([guide.relaxed.durations for guide in guides]).T
    times = np.array([guide.relaxed.time for guide in guides])
    stretch = np.array([guide.time for guide in guides]) / np.where(times > 0, times, 1.0)
    ends = table.latest_ends(durations, times)
    return flow, edge_flow, (ends - durations) * stretch, ends * stretch


def _menus(table: ChoiceTable, flow: Floats, options_per_node: int) -> Integers:
    """The options of least cost plus flow times time, shape (n, options_per_node or as many as there are, guides)."""
    most = table.times.shape[1]
    size = min(options_per_node, most)
    menu = np.zeros((len(flow), size, flow.shape[1]), dtype=np.int64)
    if size == most:
        menu[:] = np.arange(most)[:, None]
        return menu
    for kind in range(len(table.kinds)):
        nodes = np.flatnonzero(table.kind_of == kind)
        # Padding costs infinitely much, whatever the flow.
        times = np.where(np.isfinite(table.times[kind]), table.times[kind], 0.0)
        value = table.costs[kind] + flow[nodes][:, :, None] * times
        menu[nodes] = np.argpartition(value, size - 1, axis=2)[:, :, :size].transpose(0, 2, 1)
    return menu


def _latest_lags(table: ChoiceTable, guides: Sequence[Guide], ends: Floats) -> Floats:
    """The lag at which even the fastest options just keep to the deadline, a column per guide."""
    fastest = table.times[table.kind_of, 0]
    to_the_end = -np.array(table.dag.latest_starts(fastest.tolist(), 0.0)) - fastest
    deadlines = np.array([guide.deadline for guide in guides]) * (1 + TOLERANCE / 2)
    return np.asarray(deadlines - to_the_end[:, None] - ends)


def order_of_time(table: ChoiceTable, relaxed: RelaxedSolution) -> list[int]:
    """All nodes by their end in a relaxation, predecessors first."""
    dag = table.dag
    position = np.empty(dag.num_nodes, dtype=np.int64)
    position[list(dag.order)] = np.arange(dag.num_nodes)
    order: list[int] = np.lexsort((position, np.array(dag.finish_times(relaxed.durations.tolist())))).tolist()
    return order
