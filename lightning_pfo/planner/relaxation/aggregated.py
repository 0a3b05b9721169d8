r"""The relaxation of a very long pipeline: the middle of each rank's steady state in a few nodes.

A run of consecutive instructions of a rank is a path of the DAG, so only the sum of its durations matters at its ends.
A periodic run is a first period and its N - 1 recurrences. `MergedTradeoff` keeps one node per instruction of the
period, with the hull of all N together (N times as long and as dear), and solves two linear programmes of that smaller
DAG:

*From below.* Precedences between inner instructions of a run and other ranks are dropped. That can only lower the
optimum, so it remains a lower bound for every plan, whatever is merged. Its duals are a flow in the whole DAG too, the
flow through a merged node being that through each of its instructions, with none on the dropped precedences. So the
bound is evaluated from the flow alone, by weak duality and without trust in how the flow was found::

    cost >= sum_i min over options (c_i + phi_i t_i) - phi T        phi_i: flow through i, phi: flow in all

*From above.* All periods of a run are alike and follow each other at the same pace. Inner starts are then affine in
the number of the period, and a precedence between two runs is one more linear constraint; added are those found to be
violated, until none is. The optimum is a timetable of the whole DAG.

The two meet where steady states are really steady: in 1F1B with 16 microbatches at either end left as they are, they
differ by about a hundredth of a per cent.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from lightning_pfo.core.errors import PlanError
from lightning_pfo.planner.network.arrays import Floats
from lightning_pfo.planner.network.dag import ActivityNetwork, make_network
from lightning_pfo.planner.network.options import OptionSet
from lightning_pfo.planner.network.periodic_path import PeriodicPath
from lightning_pfo.planner.relaxation.linear_programme import RelaxedSolution, RelaxedTradeoff

_VIOLATED = 1e-3
"""A precedence is violated if it is by this part of a typical duration."""

_MOST_ROUNDS = 12

_STRETCHES = (1.0, 1.001, 1.003, 1.01)
"""Where a time cannot be kept to with uniform steady states, these multiples of it are tried."""
_END = OptionSet((0.0,), (0.0,), (0,), (0,))


class MergedTradeoff:
    """The parametric linear programme of a DAG with merged runs; solved and asked like `RelaxedTradeoff`.

    Args:
        dag: The precedences.
        options: Options of each node; nodes of one kind should share one object.
        runs: Disjoint runs of consecutively numbered nodes, in ascending order, each a path of the DAG whose options
            recur in every period.
    """

    def __init__(self, dag: ActivityNetwork, options: Sequence[OptionSet], runs: Sequence[PeriodicPath]) -> None:
        self._dag = dag
        self._map = _Map(dag, options, runs)
        self._below = RelaxedTradeoff(self._map.dag, self._map.options)

    def solve(self, time: float) -> RelaxedSolution:
        """Optimum from below for iteration time `time` in seconds; its durations are mostly somewhat too long for it.

        Raises:
            PlanError: If the time is shorter than the longest path of the fastest options.
        """
        return self._bounded(self._below.solve(time))

    def solve_with_rate(self, rate: float) -> RelaxedSolution:
        """Optimum from below over all iteration times when every second costs `rate` joules more."""
        return self._bounded(self._below.solve_with_rate(rate))

    def with_timetable(self, below: RelaxedSolution) -> RelaxedSolution:
        """The same with starts and durations of the optimum from above.

        Where no uniform steady state is as fast (near the fastest time), the timetable is that of a longer time,
        compressed: its durations do not fit it. Where none is found, it remains as it is.
        """
        for stretch in _STRETCHES:
            try:
                starts, durations = self._timetable(below.time * stretch)
            except PlanError:
                continue
            return replace(below, starts=starts / stretch, durations=durations)
        return below

    @cached_property
    def _above(self) -> RelaxedTradeoff:
        return RelaxedTradeoff(self._map.dag, self._map.options)

    def _bounded(self, merged: RelaxedSolution) -> RelaxedSolution:
        """From the merged DAG to the whole one, with the bound of the flow as the cost."""
        dag, to_merged = self._dag, self._map
        edge_flow, sink_flow = to_merged.spread_flow(dag, merged)
        outflow = _sums(dag.edges[:, 0], edge_flow, dag.num_nodes) + _sums(
            np.array(dag.sinks), sink_flow, dag.num_nodes
        )
        slope = -float(sink_flow.sum())
        starts, durations = to_merged.spread_times(merged)
        return RelaxedSolution(
            time=merged.time,
            cost=merged.cost,
            slope=slope,
            starts=starts,
            durations=durations,
            edge_flow=edge_flow,
            sink_flow=sink_flow,
            flow=outflow,
        )

    def _timetable(self, time: float) -> tuple[Floats, Floats]:
        """Starts and durations of all nodes, from above."""
        tails, heads = self._map.dropped.T
        for _ in range(_MOST_ROUNDS):
            starts, durations = self._map.spread_times(self._above.solve(time))
            late = starts[tails] + durations[tails] - starts[heads]
            worst = np.lexsort((-late, self._map.family))
            worst = worst[np.diff(self._map.family[worst], prepend=-1) > 0]  # one of each family
            violated = worst[late[worst] > _VIOLATED * float(durations.mean())]
            if not len(violated):
                break
            for tail, head in zip(tails[violated].tolist(), heads[violated].tolist(), strict=True):
                self._above.require(*self._map.precedence(tail, head))
        return starts, durations


class _Map:
    """Which merged node stands for which nodes of the whole DAG.

    Attributes:
        dag: The merged DAG. A run has a node per instruction of its period and then one, of no duration, for its end.
        options: Options of each merged node.
        dropped: Edges of the whole DAG that have no counterpart, shape (number, 2).
        family: A number for each of them: what recurs in every period of the same two runs is of one family.
    """

    def __init__(self, dag: ActivityNetwork, options: Sequence[OptionSet], runs: Sequence[PeriodicPath]) -> None:
        n = dag.num_nodes
        self._runs = runs
        self._run_of = np.full(n, -1)
        self._node_of, self._enter, self._leave = np.empty((3, n), dtype=np.int64)
        self._share = np.ones(n)
        self.options: list[OptionSet] = []
        chains: list[tuple[int, int]] = []
        explicit = 0
        for number, run in enumerate(runs):
            self._add_explicit(options, explicit, run.begin)
            explicit, inside, first = run.end, slice(run.begin, run.end), len(self.options)
            num_periods = (run.end - run.begin) // run.period
            recurring = options[run.begin : run.begin + run.period]
            repeated = {opts: _repeated(opts, num_periods) for opts in set(recurring)}
            self.options += [*(repeated[opts] for opts in recurring), _END]
            self._run_of[inside] = number
            self._node_of[inside] = first + np.arange(run.end - run.begin) % run.period
            self._enter[inside], self._leave[inside] = first, first + run.period
            self._share[inside] = 1 / num_periods
            chains += [(i, i + 1) for i in range(first, first + run.period)]
        self._add_explicit(options, explicit, n)

        tails, heads = dag.edges.T
        chained = (self._run_of[tails] >= 0) & (self._run_of[tails] == self._run_of[heads]) & (heads == tails + 1)
        is_first, is_last = self._run_of < 0, self._run_of < 0
        is_first[[run.begin for run in runs]] = is_last[[run.end - 1 for run in runs]] = True
        kept = ~chained & is_last[tails] & is_first[heads]
        self.dropped = dag.edges[~chained & ~kept]
        self.family = self._families()
        pairs = np.stack([self._leave[tails[kept]], self._enter[heads[kept]]], axis=1)
        self.dag = make_network(len(self.options), [*map(tuple, pairs.tolist()), *chains])
        self._kept, self._chained = np.flatnonzero(kept), np.flatnonzero(chained)
        self._run_end_of_chained = self._leave[tails[chained]]
        keys = self.dag.edges @ [self.dag.num_nodes, 1]
        self._merged_edge = np.searchsorted(keys, pairs @ [self.dag.num_nodes, 1])

    def _add_explicit(self, options: Sequence[OptionSet], begin: int, end: int) -> None:
        numbers = np.arange(len(self.options), len(self.options) + end - begin)
        self._node_of[begin:end] = self._enter[begin:end] = self._leave[begin:end] = numbers
        self.options += options[begin:end]

    def _families(self) -> npt.NDArray[np.int64]:
        place = np.arange(len(self._run_of))
        for run in self._runs:
            place[run.begin : run.end] = run.begin + (place[run.begin : run.end] - run.begin) % run.period
        return np.unique(place[self.dropped], axis=0, return_inverse=True)[1].ravel()

    def spread_flow(self, dag: ActivityNetwork, merged: RelaxedSolution) -> tuple[Floats, Floats]:
        """Flow along each edge and out of each sink of the whole DAG."""
        edge_flow = np.zeros(len(dag.edges))
        edge_flow[self._kept] = merged.edge_flow[self._merged_edge]
        edge_flow[self._chained] = merged.flow[self._run_end_of_chained]
        out_of = dict(zip(self.dag.sinks, merged.sink_flow.tolist(), strict=True))
        return edge_flow, np.array([out_of[int(self._leave[sink])] for sink in dag.sinks])

    def spread_times(self, merged: RelaxedSolution) -> tuple[Floats, Floats]:
        """Starts and durations of all nodes of the whole DAG; in a run, periods of equal length."""
        durations = merged.durations[self._node_of] * self._share
        starts = merged.starts[self._node_of]
        for run in self._runs:
            inside = slice(run.begin, run.end)
            begin, end = merged.starts[self._enter[run.begin]], merged.starts[self._leave[run.begin]]
            periods = np.arange(run.end - run.begin) // run.period
            starts[inside] = begin + (periods * (end - begin) + starts[inside] - begin) * self._share[inside]
        return starts, durations

    def precedence(self, before: int, after: int) -> tuple[dict[int, float], dict[int, float]]:
        """Weights of merged starts and durations whose sum is what lies between one node's end and another's start."""
        starts: dict[int, float] = defaultdict(float)
        for sign, node in ((1.0, after), (-1.0, before)):
            for merged, weight in self._start_of(node):
                starts[merged] += sign * weight
        return starts, {int(self._node_of[before]): -float(self._share[before])}

    def _start_of(self, node: int) -> list[tuple[int, float]]:
        """Weights of merged starts whose sum is the start of a node; see `spread_times`."""
        number, share = self._run_of[node], float(self._share[node])
        if number < 0:
            return [(int(self._node_of[node]), 1.0)]
        run = self._runs[number]
        periods = (node - run.begin) // run.period
        enter, leave = int(self._enter[node]), int(self._leave[node])
        return [(enter, 1 - (periods + 1) * share), (leave, periods * share), (int(self._node_of[node]), share)]


def _repeated(options: OptionSet, count: int) -> OptionSet:
    """The hull of `count` instructions of a kind together."""
    times, costs = zip(*options.hull_points, strict=True)
    corners = tuple(range(len(times)))
    return OptionSet(tuple(count * t for t in times), tuple(count * c for c in costs), corners, corners)


def _sums(groups: npt.NDArray[np.int64], values: Floats, num_groups: int) -> Floats:
    return np.asarray(np.bincount(groups, values, minlength=num_groups), dtype=np.float64)
