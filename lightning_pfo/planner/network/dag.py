"""The instruction DAG as flat tables, and longest paths through it.

Nodes are numbered; for a pipeline schedule node i is `schedule.instructions[i]`. An instruction may start when all
its predecessors have finished and what they hand over has arrived: a precedence may have a *delay*. So the iteration
time is the longest path, every node weighing its duration and every precedence its delay.
For one set of durations the passes are plain loops over lists: on a graph this thin they are quicker than anything
vectorised by level. `levels` is for passes over many sets of durations at once (see `choices`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from lightning_pfo.core.errors import ConfigurationError

_T = TypeVar("_T")

_NARROW = 4
"""Levels whose nodes have at most so many neighbours are padded to columns, which is at most so much more work."""


@dataclass(frozen=True, eq=False)
class Level:
    """Nodes that do not wait for each other, and their direct neighbours in levels that were handled before.

    Attributes:
        positions: Where they are in the order of all levels.
        neighbours: Positions of the neighbours of each, one node after the other; empty where the nodes have none.
        begins: Where in `neighbours` those of each node begin; every node has one at least, if any has.
        delays: What is added to the value of each neighbour; None for nothing.
        columns: Positions of the first, second, ... neighbour of each, shape (m,) each, and their delays; a node with
            fewer repeats its last. Empty where a node has more than a few: padding would cost the square of the number
            of nodes.
    """

    positions: slice
    neighbours: npt.NDArray[np.int64]
    begins: npt.NDArray[np.int64]
    delays: npt.NDArray[np.float64] | None
    columns: tuple[tuple[npt.NDArray[np.int64], npt.NDArray[np.float64] | None], ...]

    def reduce(self, largest_or_least: np.ufunc, values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """The largest (`np.maximum`) or least (`np.minimum`) of the neighbours' values and delays, shape (m, ...)."""
        if not self.columns:
            delayed = _delayed(values[self.neighbours], self.delays)
            return np.asarray(largest_or_least.reduceat(delayed, self.begins, axis=0))
        found, *others = (_delayed(values[column], delays) for column, delays in self.columns)
        for other in others:
            found = largest_or_least(found, other)
        return found


@dataclass(frozen=True, eq=False)
class Levels:
    """All nodes, level by level: rows of arrays in this order are handled a slice at a time.

    Attributes:
        nodes: Node at each position, shape (n,).
        position_of: Position of each node, shape (n,).
        levels: The levels; only the first has no neighbours.
    """

    nodes: npt.NDArray[np.int64]
    position_of: npt.NDArray[np.int64]
    levels: tuple[Level, ...]


@dataclass(frozen=True, eq=False)
class ActivityNetwork:
    """A directed acyclic graph of numbered nodes.

    Attributes:
        num_nodes: Number of nodes n.
        edges: Precedences (before, after), distinct and sorted, int array of shape (num_edges, 2).
        delays: Time in seconds from the end of `before` until `after` may start, for each of `edges`, at least 0.
        order: A topological order of all nodes.
    """

    num_nodes: int
    edges: npt.NDArray[np.int64]
    delays: npt.NDArray[np.float64]
    order: tuple[int, ...]

    @cached_property
    def incoming(self) -> tuple[tuple[tuple[int, float], ...], ...]:
        """Direct predecessors of each node, each with the delay in between."""
        return _grouped(self.num_nodes, self.edges[:, 1], self._with_delays(self.edges[:, 0]))

    @cached_property
    def outgoing(self) -> tuple[tuple[tuple[int, float], ...], ...]:
        """Direct successors of each node, each with the delay in between."""
        return _grouped(self.num_nodes, self.edges[:, 0], self._with_delays(self.edges[:, 1]))

    def _with_delays(self, nodes: npt.NDArray[np.int64]) -> list[tuple[int, float]]:
        return list(zip(nodes.tolist(), self.delays.tolist(), strict=True))

    @cached_property
    def sinks(self) -> tuple[int, ...]:
        """Nodes without successors."""
        return tuple(node for node, after in enumerate(self.outgoing) if not after)

    @cached_property
    def awaited(self) -> tuple[tuple[tuple[int, float], ...], ...]:
        """The moments at which nodes start, distinct: the nodes that must have ended, and how long before."""
        return tuple(dict.fromkeys(self.incoming))

    @cached_property
    def events(self) -> tuple[tuple[int, ...], ...]:
        """The nodes that must have ended at each of these moments; where delays differ, some are the same."""
        return tuple(tuple(node for node, _ in before) for before in self.awaited)

    @cached_property
    def start_of(self) -> tuple[int, ...]:
        """Number of the event at which each node starts."""
        number = {before: event for event, before in enumerate(self.awaited)}
        return tuple(number[before] for before in self.incoming)

    @cached_property
    def sources(self) -> tuple[int, ...]:
        """Numbers of the events that wait for nothing."""
        return tuple(event for event, nodes in enumerate(self.events) if not nodes)

    @cached_property
    def waits(self) -> npt.NDArray[np.int64]:
        """Each event with each node that it waits for, ascending, shape (waits, 2)."""
        pairs = [(event, node) for event, nodes in enumerate(self.events) for node in nodes]
        return np.array(pairs, dtype=np.int64).reshape(-1, 2)

    @cached_property
    def wait_delays(self) -> npt.NDArray[np.float64]:
        """Delay of each of `waits` in seconds."""
        return np.array([delay for before in self.awaited for _, delay in before], dtype=np.float64)

    @cached_property
    def wait_of_edge(self) -> npt.NDArray[np.int64]:
        """Number of the wait that each precedence belongs to, aligned with `edges`."""
        before, after = self.edges.T
        events, nodes = self.waits.T
        wanted = np.array(self.start_of, dtype=np.int64)[after] * self.num_nodes + before
        return np.asarray(np.searchsorted(events * self.num_nodes + nodes, wanted))

    @cached_property
    def ends_of(self) -> tuple[tuple[int, ...], ...]:
        """Numbers of the events that wait for each node, ascending."""
        return _grouped(self.num_nodes, self.waits[:, 1], self.waits[:, 0].tolist())

    @cached_property
    def levels(self) -> Levels:
        """All nodes, each one level after the last of its predecessors; the first level has none."""
        return _levels(self.order, self.incoming, self.edges, self.delays)

    @cached_property
    def levels_from_the_end(self) -> Levels:
        """All nodes, each one level after the last of its successors; the first level has none. Delays count down."""
        return _levels(self.order[::-1], self.outgoing, self.edges[:, ::-1], -self.delays)

    def finish_times(self, durations: Sequence[float]) -> list[float]:
        """Earliest finish of each node in seconds."""
        finish = [0.0] * self.num_nodes
        incoming = self.incoming
        for node in self.order:
            start = 0.0
            for before, delay in incoming[node]:
                arrival = finish[before] + delay
                if arrival > start:
                    start = arrival
            finish[node] = start + durations[node]
        return finish

    def latest_starts(self, durations: Sequence[float], deadline: float) -> list[float]:
        """Latest start of each node in seconds such that everything ends by `deadline`."""
        latest = [0.0] * self.num_nodes
        outgoing = self.outgoing
        for node in reversed(self.order):
            end = deadline
            for after, delay in outgoing[node]:
                departure = latest[after] - delay
                if departure < end:
                    end = departure
            latest[node] = end - durations[node]
        return latest

    def longest_path(self, durations: Sequence[float]) -> float:
        """Length of the longest path in seconds: the iteration time."""
        return max(self.finish_times(durations), default=0.0)

    def critical_path(self, durations: Sequence[float]) -> list[int]:
        """Nodes of one longest path, first to last."""
        finish = self.finish_times(durations)
        path = [max(range(self.num_nodes), key=finish.__getitem__)]
        while self.incoming[path[-1]]:
            path.append(max(self.incoming[path[-1]], key=lambda edge: finish[edge[0]] + edge[1])[0])
        return path[::-1]


def make_network(
    num_nodes: int, edges: Iterable[tuple[int, int]], delays: Mapping[tuple[int, int], float] | None = None
) -> ActivityNetwork:
    """Build the tables from an edge list; doubled edges are merged.

    Args:
        num_nodes: Number of nodes.
        edges: Precedences (before, after).
        delays: Delays in seconds, at least 0, of those edges that have one.

    Raises:
        ConfigurationError: If the edges contain a cycle.
    """
    distinct = sorted(set(edges))
    pairs = np.array(distinct, dtype=np.int64).reshape(-1, 2)
    delay_of = np.array([delays.get(edge, 0.0) for edge in distinct]) if delays else np.zeros(len(pairs))
    after_of = _grouped(num_nodes, pairs[:, 0], pairs[:, 1].tolist())
    waiting = np.bincount(pairs[:, 1], minlength=num_nodes).tolist()
    order = [node for node in range(num_nodes) if waiting[node] == 0]
    for node in order:  # grows while it is read (Kahn 1962)
        for after in after_of[node]:
            waiting[after] -= 1
            if waiting[after] == 0:
                order.append(after)
    if len(order) < num_nodes:
        stuck = next(node for node in range(num_nodes) if waiting[node] > 0)
        raise ConfigurationError(f"Precedences must not form a cycle; node {stuck} (and others) waits for itself.")
    return ActivityNetwork(num_nodes, pairs, delay_of, tuple(order))


def _levels(
    order: Sequence[int],
    neighbours_of: Sequence[tuple[tuple[int, float], ...]],
    edges: npt.NDArray[np.int64],
    delays: npt.NDArray[np.float64],
) -> Levels:
    """Group nodes by the longest chain of neighbours that must come before them; `edges` are (neighbour, node)."""
    depth = [0] * len(order)
    for node in order:
        depth[node] = max([depth[before] + 1 for before, _ in neighbours_of[node]], default=0)
    nodes, ends = np.argsort(depth, kind="stable"), np.cumsum(np.bincount(depth)).tolist()
    position_of = np.argsort(nodes)
    neighbours, owners = position_of[edges].T
    by_owner = np.argsort(owners, kind="stable")
    flat, delays = neighbours[by_owner], delays[by_owner]
    has_delays = delays.any()

    def some_of(place: Any) -> npt.NDArray[np.float64] | None:
        return delays[place] if has_delays and delays[place].any() else None

    sizes = np.bincount(owners, minlength=len(order))
    begins = np.cumsum(sizes) - sizes
    # The first, second, ... neighbour of every node, for levels that have no node with more than a few.
    places = begins + np.minimum(np.arange(_NARROW)[:, None], sizes - 1)
    most = np.maximum.reduceat(sizes, [0, *ends[:-1]]).tolist() if len(sizes) else []
    first_of, levels = [*begins.tolist(), len(flat)], []
    for first, end, size in zip([0, *ends], ends, most, strict=False):
        here, whole = slice(first, end), slice(first_of[first], first_of[end])
        columns = tuple((flat[place], some_of(place)) for place in places[: size if size <= _NARROW else 0, here])
        levels.append(Level(here, flat[whole], begins[here] - whole.start, some_of(whole), columns))
    return Levels(nodes, position_of, tuple(levels))


def _delayed(values: npt.NDArray[np.float64], delays: npt.NDArray[np.float64] | None) -> npt.NDArray[np.float64]:
    """The values, shape (m, ...), and the delay of each row."""
    return values if delays is None else (values.T + delays).T


def _grouped(num_nodes: int, keys: npt.NDArray[np.int64], values: Iterable[_T]) -> tuple[tuple[_T, ...], ...]:
    """The values of each key from 0 on, in the order in which they come."""
    rows: list[list[_T]] = [[] for _ in range(num_nodes)]
    for key, value in zip(keys.tolist(), values, strict=True):
        rows[key].append(value)
    return tuple(map(tuple, rows))
