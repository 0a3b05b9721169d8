r"""What a merged relaxation loses of the precedences between its paths, as sums over all that recurs.

`aggregated` drops the precedences between inner activities of a path and other ranks. Without delays that costs next to
nothing. With them a rank waits for its neighbours in every period, and the waits add up. But a sum of precedences is a
precedence of means: with M_i the mean start of the N activities at place i of a path's period, D_i the sum of their
durations, A the path's begin and E its end::

    N (M_j - M_i)            >= D_i                  for the next place j, in every period
    E - A - N (M_last - M_0) >= D_last               from every period to the next
    sum of starts of heads - sum of ends of tails >= sum of delays

The last for all precedences between two kinds of activities that touch a path, where they touch all activities of a
place or none, as in a pipeline: then the sums are N M, N M + D and what is not merged, one by one. All of these hold
for every assignment, so the optimum remains a lower bound. A dual of such a row is a flow along each precedence in it.

Example:
    Two ranks of five activities of 1 s or 2 s each. Every one waits for the one before on its own rank and, half a
    second after its end, for the one before on the other. At 9 s each may so take 1.4 s on average. Merging the middle
    three of each rank drops the precedences between these; their sums bring them back.

    >>> from lightning_pfo.planner.network.options import make_option_set
    >>> from lightning_pfo.planner.relaxation.aggregated import MergedTradeoff
    >>> along = [(i, i + 1) for i in (0, 1, 2, 3, 5, 6, 7, 8)]
    >>> across = {(i + a, i + b + 1): 0.5 for i in range(4) for a, b in ((0, 5), (5, 0))}
    >>> network = make_network(10, [*along, *across], across)
    >>> options = [make_option_set([1, 2], [9, 5], [2, 1])] * 5 + [make_option_set([1, 2], [9, 5], [2, 1])] * 5
    >>> merged = MergedTradeoff(network, options, [PeriodicPath(1, 4, 1), PeriodicPath(6, 9, 1)])
    >>> round(merged.solve(9.0).cost, 6), round(RelaxedTradeoff(network, options).solve(9.0).cost, 6)
    (74.0, 74.0)
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from lightning_pfo.planner.network.arrays import Floats, Integers
from lightning_pfo.planner.network.dag import ActivityNetwork, make_network
from lightning_pfo.planner.network.options import OptionSet
from lightning_pfo.planner.network.periodic_path import PeriodicPath
from lightning_pfo.planner.relaxation.linear_programme import RelaxedSolution, RelaxedTradeoff

_MEAN = OptionSet((0.0,), (0.0,), (0,), (0,))


class RecurringPrecedences:
    """A merged programme with the sums of what recurs; the duals of these as a flow in the whole network.

    Args:
        network: The whole network.
        options: Options of each of its activities; activities of one kind share one object.
        paths: What is merged.
        merged: The merged network.
        merged_options: Options of its activities.
        merged_of: Activity of it that stands for each of the whole network; those of a path's period are consecutive,
            and the next one is the path's end.

    Attributes:
        programme: The merged programme: the activities of `merged`, then those that stand for mean starts.
    """

    def __init__(
        self,
        network: ActivityNetwork,
        options: Sequence[OptionSet],
        paths: Sequence[PeriodicPath],
        merged: ActivityNetwork,
        merged_options: Sequence[OptionSet],
        merged_of: Integers,
    ) -> None:
        self._network, self._paths, self._merged, self._merged_of = network, paths, merged, merged_of
        self._mean_of = np.full(network.num_nodes, -1)
        self._periods = np.ones(network.num_nodes)
        edges = list(map(tuple, merged.edges.tolist()))
        delays = dict(zip(edges, merged.delays.tolist(), strict=True))
        num_nodes, links = merged.num_nodes, []
        for path in paths:
            inside, end = slice(path.begin, path.end), int(merged_of[path.begin]) + path.period
            # A node of its own before the means, as nodes that wait for the same start together.
            means = range(num_nodes + 1, num_nodes + 1 + path.period)
            num_nodes = means.stop
            self._mean_of[inside] = means.start + np.arange(path.end - path.begin) % path.period
            self._periods[inside] = (path.end - path.begin) // path.period
            edges.append((means.start - 1, means.start))
            links.append([*zip(means, [*means[1:], end], strict=True), (end - 1, end)])
        extended = make_network(num_nodes, [*edges, *(link for some in links for link in some)], delays)
        keys, weights = extended.edges @ [num_nodes, 1], [num_nodes, 1]
        self._links = [np.searchsorted(keys, np.array(some) @ weights) for some in links]
        self._merged_edges = np.searchsorted(keys, merged.edges @ weights)
        self.programme = RelaxedTradeoff(extended, [*merged_options, *[_MEAN] * (num_nodes - merged.num_nodes)])
        self._rows = [self._edges_along(path) for path in paths]
        for path in paths:
            self._require_means(path)
        self._sums = list(self._closed_sums(options))
        for summed in self._sums:
            self._require_sum(summed)

    def unfold(self, solution: RelaxedSolution) -> tuple[RelaxedSolution, Floats]:
        """A solution as one of the merged network, and the flow along and between paths in the whole one."""
        flow = np.zeros(len(self._network.edges))
        duals = iter(solution.required.tolist())
        for path, links, row in zip(self._paths, self._links, self._rows, strict=True):
            *between, to_the_end, chain = solution.edge_flow[links].tolist()
            num_periods = (path.end - path.begin) // path.period
            at_place = [next(duals) + own / num_periods for own in between]
            at_place.append(next(duals))
            place, period = np.arange(len(row)) % path.period, np.arange(len(row)) // path.period
            passed = period + (place == path.period - 1)
            flow[row] = chain + np.array(at_place)[place] + to_the_end * passed / num_periods
        for summed, dual in zip(self._sums, duals, strict=True):
            flow[summed] += dual
        n = self._merged.num_nodes
        merged = replace(
            solution,
            starts=solution.starts[:n],
            durations=solution.durations[:n],
            flow=solution.flow[:n],
            edge_flow=solution.edge_flow[self._merged_edges],
        )
        return merged, flow

    def _edges_along(self, path: PeriodicPath) -> Integers:
        """Numbers of the edges from each activity of a path to the next."""
        n, tails = self._network.num_nodes, np.arange(path.begin, path.end - 1)
        return np.asarray(np.searchsorted(self._network.edges @ [n, 1], tails * (n + 1) + 1))

    def _require_means(self, path: PeriodicPath) -> None:
        """The first two of the rows in the module's documentation."""
        first, mean = int(self._merged_of[path.begin]), int(self._mean_of[path.begin])
        num_periods = (path.end - path.begin) // path.period
        for place in range(path.period - 1):
            means = {mean + place: -num_periods, mean + place + 1: num_periods}
            self.programme.require(means, {first + place: -1.0})
        last = path.period - 1
        starts = {first + path.period: 1.0, first: -1.0}
        if last:
            starts |= {mean + last: -num_periods, mean: num_periods}
        self.programme.require(starts, {first + last: -1.0})

    def _closed_sums(self, options: Sequence[OptionSet]) -> list[Integers]:
        """The precedences between each two kinds that can be summed: at each place of a path for all periods alike."""
        (tails, heads), is_inside = self._network.edges.T, self._mean_of >= 0
        is_other = is_inside[tails] | is_inside[heads]
        for path, row in zip(self._paths, self._rows, strict=True):
            is_other[row] = False
            # Into the path and out of it along its own rank.
            is_other[(heads == tails + 1) & ((heads == path.begin) | (heads == path.end))] = False
        kinds = {kind: number for number, kind in enumerate(dict.fromkeys(options))}
        kind_of = np.array([kinds[kind] for kind in options])
        groups = defaultdict(list)
        for edge in np.flatnonzero(is_other).tolist():
            groups[kind_of[tails[edge]], kind_of[heads[edge]]].append(edge)
        sums = map(np.array, groups.values())
        # those that wait for nothing in the merged network all start with its first event: they cannot be late
        starts_late = is_inside | np.isin(self._merged_of, self._merged.edges[:, 1])
        return [
            summed
            for summed in sums
            if all(self._is_even(ends[summed]) for ends in (tails, heads)) and starts_late[heads[summed]].all()
        ]

    def _is_even(self, nodes: Integers) -> bool:
        """Whether activities at one place of a path occur equally often."""
        count = np.bincount(nodes, minlength=self._network.num_nodes)
        at_place = np.bincount(self._mean_of[nodes] + 1, minlength=self._mean_of.max() + 2)[self._mean_of + 1]
        return bool((count * self._periods == at_place)[self._mean_of >= 0].all())

    def _require_sum(self, summed: Integers) -> None:
        """The last of the rows in the module's documentation."""
        starts: dict[int, float] = defaultdict(float)
        durations: dict[int, float] = defaultdict(float)
        for tail, head in self._network.edges[summed].tolist():
            for sign, node in ((1.0, head), (-1.0, tail)):
                mean = int(self._mean_of[node])
                starts[mean if mean >= 0 else int(self._merged_of[node])] += sign
            durations[int(self._merged_of[tail])] -= 1.0 / float(self._periods[tail])
        self.programme.require(starts, durations, float(self._network.delays[summed].sum()))
