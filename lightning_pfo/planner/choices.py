"""Many choices of options at once: their times, their costs, and the slack they leave.

A *choice* takes one option for every node of a DAG. Here they are the columns of an integer array of shape
(nodes, choices), and a pass over the DAG handles all of them together, a level of the DAG at a time: what a pass costs
is mostly the number of levels, hardly the number of choices.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from lightning_pfo.planner.hull import OptionSet
from lightning_pfo.planner.instruction_dag import InstructionDag, Level

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]
Choices = Integers

TOLERANCE = 1e-9
"""Relative to the longest path: what counts as equal times, above rounding noise and below any clock step."""


class ChoiceTable:
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

    def __init__(self, dag: InstructionDag, options: Sequence[OptionSet]) -> None:
        self.dag = dag
        self.kinds = tuple(dict.fromkeys(options))
        number = {opts: i for i, opts in enumerate(self.kinds)}
        self.kind_of = np.array([number[opts] for opts in options], dtype=np.int64)
        most = max((len(opts.times) for opts in self.kinds), default=0)
        self.times, self.costs = np.full((2, len(self.kinds), most), np.inf)
        for i, opts in enumerate(self.kinds):
            self.times[i, : len(opts.times)] = opts.times
            self.costs[i, : len(opts.costs)] = opts.costs

    def places(self, choices: Integers) -> Integers:
        """Where in the flattened `times` and `costs` the options are that are given by node, shape (n, ...)."""
        first = self.kind_of * self.times.shape[1]
        return np.asarray(choices + first.reshape(-1, *(1,) * (choices.ndim - 1)))

    def durations(self, choices: Choices) -> Floats:
        """Duration of each node in seconds, shape (n, choices)."""
        return np.asarray(self.times.ravel()[self.places(choices)])

    def total_costs(self, choices: Choices) -> Floats:
        """Sum of the costs of all nodes in joules, shape (choices,)."""
        return np.asarray(self.costs.ravel()[self.places(choices)].sum(axis=0))

    def longest_paths(self, choices: Choices) -> Floats:
        """Longest path of each choice in seconds, shape (choices,)."""
        return np.asarray(self._finish_times(self.durations(choices)).max(axis=0, initial=0.0))

    def latest_ends(self, durations: Floats, deadlines: Floats) -> Floats:
        """Latest end of each node such that everything ends by the deadlines, in seconds, shaped as `durations`."""
        latest_starts, ends = np.empty(durations.shape), np.empty(durations.shape)
        for level in self.dag.levels_from_the_end:
            nodes = level.nodes
            if level.neighbours:
                end = latest_starts[level.neighbours[0]]
                for after in level.neighbours[1:]:
                    end = np.minimum(end, latest_starts[after])
            else:
                end = np.broadcast_to(deadlines, (len(nodes), len(deadlines)))
            ends[nodes] = end
            latest_starts[nodes] = end - durations[nodes]
        return ends

    def spend_slack(self, choices: Choices, deadlines: Floats) -> tuple[Choices, Floats]:
        """Slow nodes down into the slack before their successors, first nodes first, keeping to the deadlines.

        Each node takes the slowest option that ends by its latest end. It starts when its predecessors really end, so
        what an option leaves over is passed on to the next node. No node becomes faster.

        Args:
            choices: Shape (n, choices).
            deadlines: One for each choice, in seconds; not shorter than its longest path.

        Returns:
            The slowed choices and their longest paths in seconds.
        """
        latest_ends = self.latest_ends(self.durations(choices), deadlines * (1 + TOLERANCE / 2))
        slowed, finish = choices.copy(), np.empty(latest_ends.shape)
        for level in self.dag.levels:
            starts = _latest(finish, level) if level.neighbours else np.zeros((len(level.nodes), 1))
            for node, start in zip(level.nodes.tolist(), starts, strict=True):
                times = self.times[self.kind_of[node]]
                fitting = times.searchsorted(latest_ends[node] - start, side="right") - 1
                slowed[node] = np.maximum(fitting, slowed[node])
                finish[node] = start + times[slowed[node]]
        return slowed, finish.max(axis=0, initial=0.0)

    def _finish_times(self, durations: Floats) -> Floats:
        finish = durations.copy()
        for level in self.dag.levels[1:]:
            finish[level.nodes] += _latest(finish, level)
        return finish


def _latest(finish: Floats, level: Level) -> Floats:
    """When the last predecessor of each node of the level ends."""
    latest = finish[level.neighbours[0]]
    for before in level.neighbours[1:]:
        latest = np.maximum(latest, finish[before])
    return latest
