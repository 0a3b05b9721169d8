r"""The relaxation of a very long pipeline: the middle of each rank's steady state in a few activities.

Consecutive instructions of a rank are a path of the network, so only the sum of their durations matters at its ends.
A periodic path is a first period and its N - 1 recurrences. `MergedTradeoff` keeps one activity per instruction of the
period, with the hull of all N together (N times as long and as dear), and solves two linear programmes of that smaller
network:

*From below.* Precedences between inner activities of a path and other ranks are dropped. That can only lower the
optimum, so it remains a lower bound, whatever is merged. Its duals are a flow in the whole network too, the flow
through a merged activity being that through each of its instructions, with none on the dropped precedences. Where
precedences have delays, sums of the dropped ones are kept (`recurring`): otherwise what ranks wait for each other in
every period would be missing.

*From above.* All periods of a path are alike and follow each other at the same pace. Inner starts are then affine in
the number of the period, and a precedence between two paths is one more linear constraint; added are those found to be
violated, until none is. The optimum is a timetable of the whole network.

The two meet where steady states are really steady: in 1F1B with 16 microbatches at either end left as they are, they
differ by about a hundredth of a per cent.

Example:
    Four activities A1 .. A4 in a row, each of 1 s for 10 J or 2 s for 6 J, and B1 .. B4 in a row, of 1 s for 5 J or 2 s
    for 4.5 J. Each B waits for the A of its number, B1 also for something else that takes 1 s. Merged, A takes 4 s for
    40 J to 8 s for 24 J, B 4 s for 20 J to 8 s for 18 J. All shall be done after 8 s.

    *From below*, no B waits for any A: those are slow, for 24 J, and B takes the 7 s that are left, for 18.5 J. So
    nothing costs less than 42.5 J. *From above*, let each A take a seconds and each B b, the first from 8 - 4 b on.
    Found to be violated is the wait of B4 for A4: 4 a <= 8 - b, so a <= 2 - b / 4. A second of a saves 16 J, one of b
    2 J; so b = 1, a = 1.75 and B1 starts at 4 s: 28 + 20 = 48 J. Where not all periods must be alike, 46.5 J would do.

    >>> from lightning_pfo.planner.network.options import make_option_set
    >>> a, b = make_option_set([1, 2], [10, 6], [2, 1]), make_option_set([1, 2], [5, 4.5], [2, 1])
    >>> rows = [(0, 1), (1, 2), (2, 3), (4, 5), (5, 6), (6, 7), (7, 8)]
    >>> network = make_network(9, [*rows, (0, 5), (1, 6), (2, 7), (3, 8)])
    >>> options = [a] * 4 + [make_option_set([1], [0], [1])] + [b] * 4
    >>> merged = MergedTradeoff(network, options, [PeriodicPath(0, 4, 1), PeriodicPath(5, 9, 1)])
    >>> below = merged.solve(8.0)
    >>> round(below.cost, 6), round(RelaxedTradeoff(network, options).solve(8.0).cost, 6)
    (42.5, 46.5)
    >>> timetable = merged.with_timetable(below)
    >>> timetable.durations.round(6).tolist()
    [1.75, 1.75, 1.75, 1.75, 1.0, 1.0, 1.0, 1.0, 1.0]
    >>> timetable.starts.round(6).tolist()
    [0.0, 1.75, 3.5, 5.25, 0.0, 4.0, 5.0, 6.0, 7.0]
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from lightning_pfo.core.errors import PlanError
from lightning_pfo.planner.network.arrays import Floats
from lightning_pfo.planner.network.dag import ActivityNetwork, make_network
from lightning_pfo.planner.network.options import OptionSet
from lightning_pfo.planner.network.periodic_path import PeriodicPath
from lightning_pfo.planner.relaxation.linear_programme import RelaxedSolution, RelaxedTradeoff
from lightning_pfo.planner.relaxation.recurring import RecurringPrecedences

_VIOLATED = 1e-3
"""A precedence is violated if it is by this part of a typical duration."""

_MOST_ROUNDS = 12

_STRETCHES = (1.0, 1.001, 1.003, 1.01)
"""Where a time cannot be kept to with uniform steady states, these multiples of it are tried."""
_END = OptionSet((0.0,), (0.0,), (0,), (0,))


class MergedTradeoff:
    """The parametric linear programme of a network with merged paths; solved and asked like `RelaxedTradeoff`.

    Args:
        network: The precedences.
        options: Options of each activity; activities of one kind should share one object.
        paths: Disjoint paths of consecutively numbered activities without delays in between, in ascending order, whose
            options recur in every period.
    """

    def __init__(self, network: ActivityNetwork, options: Sequence[OptionSet], paths: Sequence[PeriodicPath]) -> None:
        self._network = network
        self._map = _Map(network, options, paths)
        self._recurring = self._map.recurring(network, options, paths) if network.delays.any() else None
        self._below = (
            RelaxedTradeoff(self._map.network, self._map.options)
            if self._recurring is None
            else self._recurring.programme
        )

    @property
    def iterations(self) -> int:
        """Iterations of the simplex method from below, so far."""
        return self._below.iterations

    def solve(self, time: float) -> RelaxedSolution:
        """Optimum from below for iteration time `time` in seconds; its durations are mostly somewhat too long for it.

        Raises:
            PlanError: If the time is shorter than the longest path of the fastest options.
        """
        return self._spread(self._below.solve(time))

    def solve_with_rate(self, rate: float) -> RelaxedSolution:
        """Optimum from below over all iteration times when every second costs `rate` joules more."""
        return self._spread(self._below.solve_with_rate(rate))

    def with_timetable(self, below: RelaxedSolution) -> RelaxedSolution:
        """The same with starts and durations of the optimum from above.

        Where no uniform steady state is as fast (near the fastest time), the timetable is that of a longer time,
        compressed: its durations do not fit it. Where none is found, it remains as it is.
        """
        # A programme for each timetable: constraints found for another one would bear on it.
        above = RelaxedTradeoff(self._map.network, self._map.options)
        for stretch in _STRETCHES:
            try:
                starts, durations = self._timetable(above, below.time * stretch)
            except PlanError:
                continue
            return replace(below, starts=starts / stretch, durations=durations)
        return below

    def _spread(self, merged: RelaxedSolution) -> RelaxedSolution:
        """From the merged network to the whole one."""
        network = self._network
        if self._recurring is None:
            edge_flow, sink_flow = self._map.spread_flow(network, merged)
        else:
            merged, further = self._recurring.unfold(merged)
            edge_flow, sink_flow = self._map.spread_flow(network, merged, further)
        flow = np.bincount(network.edges[:, 0], edge_flow, minlength=network.num_nodes).astype(np.float64)
        flow[list(network.sinks)] += sink_flow
        starts, durations = self._map.spread_times(merged)
        return replace(merged, starts=starts, durations=durations, edge_flow=edge_flow, sink_flow=sink_flow, flow=flow)

    def _timetable(self, above: RelaxedTradeoff, time: float) -> tuple[Floats, Floats]:
        """Starts and durations of all activities; adds what is found to be violated to the programme."""
        tails, heads = self._map.dropped.T
        for _ in range(_MOST_ROUNDS):
            starts, durations = self._map.spread_times(above.solve(time))
            late = starts[tails] + durations[tails] + self._map.dropped_delays - starts[heads]
            worst = np.lexsort((-late, self._map.family))
            worst = worst[np.diff(self._map.family[worst], prepend=-1) > 0]  # one of each family
            violated = worst[late[worst] > _VIOLATED * float(durations.mean())]
            if not len(violated):
                break
            for number in violated.tolist():
                ends = int(tails[number]), int(heads[number])
                above.require(*self._map.precedence(*ends), float(self._map.dropped_delays[number]))
        return starts, durations


class _Map:
    """Which merged activity stands for which activities of the whole network.

    Attributes:
        network: The merged network. A path has an activity per instruction of its period and then one, of no duration,
            for its end.
        options: Options of each merged activity.
        dropped: Precedences of the whole network that have no counterpart, shape (number, 2).
        dropped_delays: Their delays in seconds.
        family: A number for each of them: what recurs in every period of the same two paths is of one family.
    """

    def __init__(self, network: ActivityNetwork, options: Sequence[OptionSet], paths: Sequence[PeriodicPath]) -> None:
        n = network.num_nodes
        self._paths = paths
        self._path_of = np.full(n, -1)
        self._node_of, self._enter, self._leave = np.empty((3, n), dtype=np.int64)
        self._share = np.ones(n)
        self.options: list[OptionSet] = []
        chains: list[tuple[int, int]] = []
        explicit = 0
        for number, path in enumerate(paths):
            self._add_explicit(options, explicit, path.begin)
            explicit, inside, first = path.end, slice(path.begin, path.end), len(self.options)
            num_periods = (path.end - path.begin) // path.period
            recurring = options[path.begin : path.begin + path.period]
            repeated = {opts: _repeated(opts, num_periods) for opts in set(recurring)}
            self.options += [*(repeated[opts] for opts in recurring), _END]
            self._path_of[inside] = number
            self._node_of[inside] = first + np.arange(path.end - path.begin) % path.period
            self._enter[inside], self._leave[inside] = first, first + path.period
            self._share[inside] = 1 / num_periods
            chains += [(i, i + 1) for i in range(first, first + path.period)]
        self._add_explicit(options, explicit, n)

        tails, heads = network.edges.T
        chained = (self._path_of[tails] >= 0) & (self._path_of[tails] == self._path_of[heads]) & (heads == tails + 1)
        is_first, is_last = self._path_of < 0, self._path_of < 0
        is_first[[path.begin for path in paths]] = is_last[[path.end - 1 for path in paths]] = True
        kept = ~chained & is_last[tails] & is_first[heads]
        self.dropped, self.dropped_delays = (some[~chained & ~kept] for some in (network.edges, network.delays))
        self.family = self._families()
        pairs = np.stack([self._leave[tails[kept]], self._enter[heads[kept]]], axis=1)
        kept_edges = list(map(tuple, pairs.tolist()))
        delays = dict(zip(kept_edges, network.delays[kept].tolist(), strict=True)) if network.delays.any() else None
        self.network = make_network(len(self.options), [*kept_edges, *chains], delays)
        self._kept, self._chained = np.flatnonzero(kept), np.flatnonzero(chained)
        self._path_end_of_chained = self._leave[tails[chained]]
        keys = self.network.edges @ [self.network.num_nodes, 1]
        self._merged_edge = np.searchsorted(keys, pairs @ [self.network.num_nodes, 1])

    def _add_explicit(self, options: Sequence[OptionSet], begin: int, end: int) -> None:
        numbers = np.arange(len(self.options), len(self.options) + end - begin)
        self._node_of[begin:end] = self._enter[begin:end] = self._leave[begin:end] = numbers
        self.options += options[begin:end]

    def _families(self) -> npt.NDArray[np.int64]:
        place = np.arange(len(self._path_of))
        for path in self._paths:
            place[path.begin : path.end] = path.begin + (place[path.begin : path.end] - path.begin) % path.period
        return np.unique(place[self.dropped], axis=0, return_inverse=True)[1].ravel()

    def recurring(
        self, network: ActivityNetwork, options: Sequence[OptionSet], paths: Sequence[PeriodicPath]
    ) -> RecurringPrecedences:
        """The merged programme with sums of what is dropped."""
        return RecurringPrecedences(network, options, paths, self.network, self.options, self._node_of)

    def spread_flow(
        self, network: ActivityNetwork, merged: RelaxedSolution, further: Floats | None = None
    ) -> tuple[Floats, Floats]:
        """Flow along each edge and out of each sink of the whole network; `further` is that along and between paths."""
        if further is None:
            edge_flow = np.zeros(len(network.edges))
            edge_flow[self._chained] = merged.flow[self._path_end_of_chained]
        else:
            edge_flow = further
        edge_flow[self._kept] += merged.edge_flow[self._merged_edge]
        out_of = dict(zip(self.network.sinks, merged.sink_flow.tolist(), strict=True))
        return edge_flow, np.array([out_of[int(self._leave[sink])] for sink in network.sinks])

    def spread_times(self, merged: RelaxedSolution) -> tuple[Floats, Floats]:
        """Starts and durations of all activities of the whole network; in a path, periods of equal length."""
        durations = merged.durations[self._node_of] * self._share
        starts = merged.starts[self._node_of]
        for path in self._paths:
            inside = slice(path.begin, path.end)
            begin, end = merged.starts[self._enter[path.begin]], merged.starts[self._leave[path.begin]]
            periods = np.arange(path.end - path.begin) // path.period
            starts[inside] = begin + (periods * (end - begin) + starts[inside] - begin) * self._share[inside]
        return starts, durations

    def precedence(self, before: int, after: int) -> tuple[dict[int, float], dict[int, float]]:
        """Weights of merged starts and durations whose sum is what lies between an end and another activity's start."""
        starts: dict[int, float] = defaultdict(float)
        for sign, node in ((1.0, after), (-1.0, before)):
            for merged, weight in self._start_of(node):
                starts[merged] += sign * weight
        return starts, {int(self._node_of[before]): -float(self._share[before])}

    def _start_of(self, node: int) -> list[tuple[int, float]]:
        """Weights of merged starts whose sum is the start of an activity; see `spread_times`."""
        number, share = self._path_of[node], float(self._share[node])
        if number < 0:
            return [(int(self._node_of[node]), 1.0)]
        path = self._paths[number]
        periods = (node - path.begin) // path.period
        enter, leave = int(self._enter[node]), int(self._leave[node])
        return [(enter, 1 - (periods + 1) * share), (leave, periods * share), (int(self._node_of[node]), share)]


def _repeated(options: OptionSet, count: int) -> OptionSet:
    """The hull of `count` instructions of a kind together."""
    times, costs = zip(*options.hull_points, strict=True)
    corners = tuple(range(len(times)))
    return OptionSet(tuple(count * t for t in times), tuple(count * c for c in costs), corners, corners)
