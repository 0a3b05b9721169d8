r"""Choices that lose little against the relaxation, for many times at once.

For any choice of options and its earliest schedule, let phi_i be the dual flow through node i, f_e that along
precedence e. Weak duality holds term by term: the choice costs more than the tangent of the relaxation by exactly ::

    sum_i [c_i + phi_i t_i - min over options (c_i + phi_i t_i)]     an option off the supporting line
    + sum_e f_e slack_e                                              a valuable wait

Nodes are scheduled one by one in order of time. For the nodes scheduled so far the two sums telescope: up to a
constant they are ::

    sum of c_i  +  sum over precedences e that lead to nodes still to come of f_e x (end of e's tail)

so a partial choice is valued from its open ends alone. For every time that is wanted (a `Guide`) the best partial
choices are kept; the guides are searched side by side, as the rows of one array, so that a step of all of them costs
little more than a step of one.

Waits are lost where paths meet. What threatens at the next meetings is estimated from how far the open ends lag behind
their ends in the relaxation: a part of it is counted as if they all met now, at the latest of them. That latest lag
also says whether the choice as a whole is late or early. A guide may ask for another time than its relaxation's own;
then the schedule of the relaxation is stretched, which keeps its tight precedences tight.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
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
        meeting: Share of the lag between open ends that is expected to be lost.
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
    flow, edge_flow, ends = _stack(table, guides)
    worth = np.array([guide.relaxed.sink_flow.sum() for guide in guides])
    meeting = np.array([guide.meeting for guide in guides])
    # In units of the expected loss per second of lag, so that lags need no factor.
    unit = 1.0 / np.maximum(meeting * worth, 1e-9 * max(worth.max(), 1.0))
    unlimited = sum(guide.deadline == math.inf for guide in guides)
    menu = _menus(table, flow, options_per_node)
    # With a deadline the fastest option must be among them.
    lacking = (menu != 0).all(axis=2)
    lacking[:, :unlimited] = False
    menu[lacking, -1] = 0
    options_per_node = menu.shape[2]
    kind = table.kind_of[:, None, None]
    times = table.times[kind, menu]
    exists = np.isfinite(times)
    times[~exists] = 0.0
    flow, edge_flow = ((1 - meeting) * unit * part for part in (flow, edge_flow))
    values = table.costs[kind, menu] * unit[:, None] + flow[:, :, None] * times  # infinite where there is no option
    lags = times - ends[:, :, None]
    flow, edge_flow, ends = flow[:, :, None], edge_flow[:, :, None], ends[:, :, None]
    late = np.array([1 + guide.haste for guide in guides])[:, None, None]
    early = np.array([1 - guide.patience for guide in guides])[:, None, None]

    limits = _latest_lags(table, guides[unlimited:], ends[:, unlimited:, 0])[:, :, None, None]
    edges_into = _edges_into(table)
    open_ends = _OpenEnds(table, num_guides)
    value = np.zeros((num_guides, 1))
    trail = []
    for node in order:
        count = value.shape[1]
        before, edges = dag.predecessors[node], edges_into[node]
        start = np.zeros((num_guides, count))
        if before:
            arrivals = [open_ends.lag_of(b) + ends[b] for b in before]
            start = arrivals[0]
            for arrival in arrivals[1:]:
                start = np.maximum(start, arrival)
            value = value + flow[node] * start
            for edge, arrival in zip(edges, arrivals, strict=True):
                value = value - edge_flow[edge] * arrival
            open_ends.leave(before)
        candidates = value[:, :, None] + values[node][:, None, :]
        lag = start[:, :, None] + lags[node][:, None, :]
        if unlimited < num_guides:
            candidates[unlimited:][lag[unlimited:] > limits[node]] = np.inf
        num_candidates = count * options_per_node
        if num_candidates > width:
            latest = np.maximum(open_ends.latest_lag()[:, :, None], lag)
            score = (candidates + np.maximum(late * latest, early * latest)).reshape(num_guides, -1)
            kept = np.argpartition(score, width - 1, axis=1)[:, :width]
        else:
            kept = np.broadcast_to(np.arange(num_candidates), (num_guides, num_candidates))
        kept = kept + num_candidates * np.arange(num_guides)[:, None]
        value = candidates.ravel()[kept]
        kept = kept.ravel()
        open_ends.keep(kept // options_per_node)
        open_ends.enter(node, lag.ravel()[kept])
        trail.append(kept)

    guide_of = np.repeat(np.arange(num_guides), value.shape[1])
    choices, row = np.empty((dag.num_nodes, value.size), dtype=np.int64), np.arange(value.size)
    for node, kept in zip(reversed(order), reversed(trail), strict=True):
        candidate = kept[row]
        row = candidate // options_per_node
        choices[node] = menu[node, guide_of, candidate % options_per_node]
    # Where there are fewer choices than the beam is wide, some have taken an option that does not exist.
    return np.asarray(np.minimum(choices, np.isfinite(table.times).sum(axis=1)[table.kind_of, None] - 1))


class _OpenEnds:
    """The lags of the nodes that others still wait for: a row per node, a column per partial choice."""

    def __init__(self, table: ChoiceTable, num_guides: int) -> None:
        self._successors, self._num_guides = table.dag.successors, num_guides
        self._lags = np.full((1, num_guides), _NOWHERE)
        self._row_of: dict[int, int] = {}
        self._awaited = [len(after) for after in self._successors]
        self._free = [0]

    def lag_of(self, node: int) -> Floats:
        """Lag of an open node in every partial choice, shape (guides, choices)."""
        return np.asarray(self._lags[self._row_of[node]].reshape(self._num_guides, -1))

    def latest_lag(self) -> Floats:
        """The largest lag in every partial choice, shape (guides, choices)."""
        return np.asarray(self._lags.max(axis=0).reshape(self._num_guides, -1))

    def leave(self, nodes: Sequence[int]) -> None:
        """One node fewer waits for each of these."""
        for node in nodes:
            self._awaited[node] -= 1
            if self._awaited[node] == 0:
                self._free.append(self._row_of.pop(node))
                self._lags[self._free[-1]] = _NOWHERE

    def keep(self, columns: Integers) -> None:
        """Go on with these partial choices."""
        self._lags = self._lags.take(columns, axis=1)

    def enter(self, node: int, lag: Floats) -> None:
        """Open a node."""
        if not self._free:
            self._free.append(len(self._lags))
            self._lags = np.vstack([self._lags, np.empty((1, self._lags.shape[1]))])
        self._row_of[node] = self._free.pop()
        self._lags[self._row_of[node]] = lag


def _stack(table: ChoiceTable, guides: Sequence[Guide]) -> tuple[Floats, Floats, Floats]:
    """Flows of nodes and edges and latest ends, stretched to the time aimed at, a column per guide."""
    flow = np.array([guide.relaxed.flow for guide in guides]).T
    edge_flow = np.array([guide.relaxed.edge_flow for guide in guides]).T
    durations = np.array([guide.relaxed.durations for guide in guides]).T
    times = np.array([guide.relaxed.time for guide in guides])
    stretch = np.array([guide.time for guide in guides]) / np.where(times > 0, times, 1.0)
    return flow, edge_flow, table.latest_ends(durations, times) * stretch


def _menus(table: ChoiceTable, flow: Floats, options_per_node: int) -> Integers:
    """The options of least cost plus flow times time, shape (n, guides, options_per_node or as many as there are)."""
    most = table.times.shape[1]
    size = min(options_per_node, most)
    menu = np.zeros((*flow.shape, size), dtype=np.int64)
    if size == most:
        menu[:] = np.arange(most)
        return menu
    for kind in range(len(table.kinds)):
        nodes = np.flatnonzero(table.kind_of == kind)
        # Padding costs infinitely much, whatever the flow.
        times = np.where(np.isfinite(table.times[kind]), table.times[kind], 0.0)
        value = table.costs[kind] + flow[nodes][:, :, None] * times
        menu[nodes] = np.argpartition(value, size - 1, axis=2)[:, :, :size]
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


def _edges_into(table: ChoiceTable) -> list[list[int]]:
    """Numbers of the edges into each node, in the order of its predecessors."""
    edges_into: list[list[int]] = [[] for _ in range(table.dag.num_nodes)]
    for edge, head in enumerate(table.dag.edges[:, 1].tolist()):
        edges_into[head].append(edge)
    return edges_into
