"""The instruction DAG as flat tables, and longest paths through it.

Nodes are numbered; for a pipeline schedule node i is `schedule.instructions[i]`. An instruction may start when all
its predecessors have finished, so the iteration time is the longest path, every node weighing its duration.
For one set of durations the passes are plain loops over lists: on a graph this thin they are quicker than anything
vectorised by level. `levels` is for passes over many sets of durations at once (see `choices`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from lightning_pfo.core.errors import ConfigurationError

_NARROW = 4
"""Levels whose nodes have at most so many neighbours are padded to columns, which is at most so much more work."""


@dataclass(frozen=True, eq=False)
class Level:
    """Nodes that do not wait for each other, and their direct neighbours in levels that were handled before.

    Attributes:
        positions: Where they are in the order of all levels.
        neighbours: Positions of the neighbours of each, one node after the other; empty where the nodes have none.
        begins: Where in `neighbours` those of each node begin; every node has one at least, if any has.
        columns: Positions of the first, second, ... neighbour of each, shape (m,) each; one with fewer repeats its
            last. Empty where a node has more than a few: padding would cost the square of the number of nodes.
    """

    positions: slice
    neighbours: npt.NDArray[np.int64]
    begins: npt.NDArray[np.int64]
    columns: tuple[npt.NDArray[np.int64], ...]

    def reduce(self, largest_or_least: np.ufunc, values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """The largest (`np.maximum`) or least (`np.minimum`) value of the neighbours of each node, shape (m, ...)."""
        if not self.columns:
            return np.asarray(largest_or_least.reduceat(values[self.neighbours], self.begins, axis=0))
        found = values[self.columns[0]]
        for column in self.columns[1:]:
            found = largest_or_least(found, values[column])
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
        order: A topological order of all nodes.
    """

    num_nodes: int
    edges: npt.NDArray[np.int64]
    order: tuple[int, ...]

    @cached_property
    def predecessors(self) -> tuple[tuple[int, ...], ...]:
        """Direct predecessors of each node."""
        return _adjacency(self.num_nodes, self.edges[:, ::-1])

    @cached_property
    def successors(self) -> tuple[tuple[int, ...], ...]:
        """Direct successors of each node."""
        return _adjacency(self.num_nodes, self.edges)

    @cached_property
    def sinks(self) -> tuple[int, ...]:
        """Nodes without successors."""
        return tuple(node for node, after in enumerate(self.successors) if not after)

    @cached_property
    def events(self) -> tuple[tuple[int, ...], ...]:
        """The moments at which nodes start: the nodes that must have ended, distinct."""
        return tuple(dict.fromkeys(self.predecessors))

    @cached_property
    def start_of(self) -> tuple[int, ...]:
        """Number of the event at which each node starts."""
        number = {before: event for event, before in enumerate(self.events)}
        return tuple(number[before] for before in self.predecessors)

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
    def wait_of_edge(self) -> npt.NDArray[np.int64]:
        """Number of the wait that each precedence belongs to, aligned with `edges`."""
        before, after = self.edges.T
        events, nodes = self.waits.T
        wanted = np.array(self.start_of, dtype=np.int64)[after] * self.num_nodes + before
        return np.asarray(np.searchsorted(events * self.num_nodes + nodes, wanted))

    @cached_property
    def ends_of(self) -> tuple[tuple[int, ...], ...]:
        """Numbers of the events that wait for each node, ascending."""
        return _adjacency(self.num_nodes, self.waits[:, ::-1])

    @cached_property
    def levels(self) -> Levels:
        """All nodes, each one level after the last of its predecessors; the first level has none."""
        return _levels(self.order, self.predecessors)

    @cached_property
    def levels_from_the_end(self) -> Levels:
        """All nodes, each one level after the last of its successors; the first level has none."""
        return _levels(self.order[::-1], self.successors)

    def finish_times(self, durations: Sequence[float]) -> list[float]:
        """Earliest finish of each node in seconds."""
        finish = [0.0] * self.num_nodes
        before_of = self.predecessors
        for node in self.order:
            start = 0.0
            for before in before_of[node]:
                if finish[before] > start:
                    start = finish[before]
            finish[node] = start + durations[node]
        return finish

    def latest_starts(self, durations: Sequence[float], deadline: float) -> list[float]:
        """Latest start of each node in seconds such that everything ends by `deadline`."""
        latest = [0.0] * self.num_nodes
        after_of = self.successors
        for node in reversed(self.order):
            end = deadline
            for after in after_of[node]:
                if latest[after] < end:
                    end = latest[after]
            latest[node] = end - durations[node]
        return latest

    def longest_path(self, durations: Sequence[float]) -> float:
        """Length of the longest path in seconds: the iteration time."""
        return max(self.finish_times(durations), default=0.0)

    def critical_path(self, durations: Sequence[float]) -> list[int]:
        """Nodes of one longest path, first to last."""
        finish = self.finish_times(durations)
        path = [max(range(self.num_nodes), key=finish.__getitem__)]
        while self.predecessors[path[-1]]:
            path.append(max(self.predecessors[path[-1]], key=finish.__getitem__))
        return path[::-1]


def make_network(num_nodes: int, edges: Iterable[tuple[int, int]]) -> ActivityNetwork:
    """Build the tables from an edge list; doubled edges are merged.

    Raises:
        ConfigurationError: If the edges contain a cycle.
    """
    pairs = np.array(sorted(set(edges)), dtype=np.int64).reshape(-1, 2)
    after_of = _adjacency(num_nodes, pairs)
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
    return ActivityNetwork(num_nodes, pairs, tuple(order))


def _levels(order: Sequence[int], neighbours_of: Sequence[tuple[int, ...]]) -> Levels:
    """Group nodes by the longest chain of neighbours that must come before them."""
    depth = [0] * len(order)
    for node in order:
        depth[node] = max([depth[before] + 1 for before in neighbours_of[node]], default=0)
    nodes, ends = np.argsort(depth, kind="stable"), np.cumsum(np.bincount(depth)).tolist()
    position_of = np.argsort(nodes)
    rows = [neighbours_of[node] for node in nodes.tolist()]
    flat = position_of[np.fromiter((other for row in rows for other in row), dtype=np.int64)]
    sizes = np.array([len(row) for row in rows], dtype=np.int64)
    begins = np.cumsum(sizes) - sizes
    levels = []
    for first, end in pairwise([0, *ends]):
        here, before = slice(first, end), int(begins[first])
        columns = tuple(
            flat[begins[here] + np.minimum(number, sizes[here] - 1)]
            for number in range(sizes[here].max() if sizes[here].max() <= _NARROW else 0)
        )
        neighbours = flat[before : before + int(sizes[here].sum())]
        levels.append(Level(here, neighbours, begins[here] - before, columns))
    return Levels(nodes, position_of, tuple(levels))


def _adjacency(num_nodes: int, pairs: npt.NDArray[np.int64]) -> tuple[tuple[int, ...], ...]:
    rows: list[list[int]] = [[] for _ in range(num_nodes)]
    for source, target in pairs.tolist():
        rows[source].append(target)
    return tuple(map(tuple, rows))
