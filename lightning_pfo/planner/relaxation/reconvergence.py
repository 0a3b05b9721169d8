r"""A lower bound on what rounding loses, from small parts of the DAG that are solved over their discrete options.

For a flow, every choice of options costs more than the bound that the flow proves by exactly (see `beam_search`) ::

    sum_i off_i + sum_e f_e slack_e          off_i: how far the option of i is off its supporting line

The relaxation says no more than that this is not negative. But where two paths lead from one event to another, both
take the same time, waits included, and sums of discrete times seldom agree. In 1F1B such a *diamond* lies between any
two neighbouring stages in every period::

             .--- B of stage s ---o--- F of stage s ---.
    event  <                                             >  event
             `--- F of s + 1 -----o--- B of s + 1 -----'

What the four options and the waits of a diamond lose together at the least is found by trying them all. A node is part
of several diamonds, so what it loses is shared out between them, option by option, and likewise what a wait loses; then
the sum over all diamonds is a bound (dual decomposition). Shares are equal to begin with and then made better by
passing messages: for each option of a node, every diamond gets such a share that the least it loses with that option is
the mean over the node's diamonds. The bound on the loss depends on the flow only, not on the time of the choice.

References:
    A. Globerson and T. Jaakkola, Fixing max-product: convergent message passing algorithms for MAP LP-relaxations,
    NIPS 2007.
    T. Werner, A linear programming approach to max-sum problem: a review, IEEE PAMI 29(7), 2007.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import combinations

import numpy as np

from lightning_pfo.planner.network.arrays import Floats, Integers
from lightning_pfo.planner.network.assignments import OptionTable

_OPTIONS = 12
"""Options of a node that are told apart, the nearest to the supporting line; the others are taken to fit exactly."""

_PASSES, _STEP = 5, 0.5
"""How often messages are passed, and how far towards the mean."""

_IMPOSSIBLE = 1e15
"""Loss in joules of an option that does not exist."""


class Diamonds:
    """The diamonds of a DAG whose paths have one or two nodes each.

    Args:
        table: The options.
    """

    def __init__(self, table: OptionTable) -> None:
        self._table, dag = table, table.dag
        links: dict[tuple[int, int], int] = {}
        self._link_of_edge = [links.setdefault((i, dag.start_of[j]), len(links)) for i, j in dag.edges.tolist()]
        nothing, paths = dag.num_nodes, []  # a node that takes no time and costs nothing, in paths of one
        for end, before in enumerate(dag.events):
            paths_from: dict[int, list[tuple[int, int, int, int]]] = defaultdict(list)
            for last in before:
                middle, link = dag.start_of[last], links[last, end]
                paths_from[middle].append((nothing, last, link, link))
                for first in dag.events[middle]:
                    paths_from[dag.start_of[first]].append((first, last, links[first, middle], link))
            for beside in paths_from.values():
                paths += [(*a[:2], *b[:2], *a[2:], *b[2:]) for a, b in combinations(beside, 2) if a[1] != b[1]]
        found = np.array(paths, dtype=np.int64).reshape(-1, 8)
        self._nodes, self._links = found[:, :4], found[:, 4:]
        self._diamonds_of_node = np.bincount(self._nodes.ravel(), minlength=nothing + 1)[:, None]
        self._diamonds_of_link = np.maximum(np.bincount(self._links.ravel(), minlength=len(links)), 1)

    def least_loss(self, flow: Floats, edge_flow: Floats) -> float:
        """What every choice costs more than the bound that a flow proves, in joules, at least.

        Args:
            flow: Through each node in J/s, shape (n,).
            edge_flow: Along each precedence in J/s, shape (edges,).
        """
        if not len(self._nodes):
            return 0.0
        through = np.bincount(self._link_of_edge, edge_flow) / self._diamonds_of_link
        waits = through[self._links].reshape(-1, 2, 2).min(axis=2)
        kind, alike = self._sorts(flow, waits)
        _, one_diamond, num_alike = np.unique(alike, return_index=True, return_counts=True)
        _, one_node = np.unique(kind, return_index=True)
        nodes = kind[self._nodes[one_diamond]]
        num_diamonds = np.maximum(self._diamonds_of_node[one_node], 1)
        # Where the nodes that stand for theirs are in diamonds.
        diamond, place = np.nonzero((one_node[kind] == np.arange(len(kind)))[self._nodes])
        node, diamond = kind[self._nodes[diamond, place]], alike[diamond]

        times, losses = self._nearest_options(flow, one_node)
        times, losses = times[nodes], (losses / num_diamonds)[nodes]
        diamonds = _Sums(times, waits[one_diamond])
        best, total = 0.0, np.zeros((len(one_node), losses.shape[2]))
        for _ in range(_PASSES):
            least = diamonds.least_with_each(losses)
            best = max(best, float(least[:, 0].min(axis=1) @ num_alike))
            total[:] = 0.0
            np.add.at(total, node, least[diamond, place])
            losses += _STEP * ((total / num_diamonds)[nodes] - least)
        return best

    def _sorts(self, flow: Floats, waits: Floats) -> tuple[Integers, Integers]:
        """Numbers that are equal for nodes, and for diamonds, that no message tells apart: in a steady state, most.

        Those are alike whose neighbours are alike, as far as messages are passed (Weisfeiler and Leman 1968).
        """
        node = _numbered(np.append(self._table.kind_of, -1), np.append(flow, 0.0))
        for _ in range(_PASSES):
            diamond = _numbered(*node[self._nodes].T, *waits.T)
            # What is around a node is told by a sum of arbitrary numbers, one for each place in each sort of diamond.
            arbitrary = np.random.default_rng(0).integers(2**62, size=(diamond.max() + 1, 4))
            around = np.zeros(len(node), dtype=np.int64)
            np.add.at(around, self._nodes, arbitrary[diamond])
            finer = _numbered(node, around)
            if finer.max() == node.max():
                break
            node = finer
        return node, diamond

    def _nearest_options(self, flow: Floats, nodes: Integers) -> tuple[Floats, Floats]:
        """Times of the options nearest to the supporting line, and how far off they are, shape (nodes, options).

        One more loss stands for all further options; the node after the last takes no time and loses nothing.
        """
        table, nothing = self._table, len(flow)
        kinds = np.append(table.kind_of, 0)[nodes]
        times = np.where(np.isfinite(table.times), table.times, 0.0)[kinds]
        values = table.costs[kinds] + np.append(flow, 0.0)[nodes, None] * times
        nearest = np.argsort(values, axis=1)[:, : _OPTIONS + 1]
        shown = len(nodes), _OPTIONS + 1
        near_times, losses = np.zeros(shown), np.full(shown, _IMPOSSIBLE)
        near_times[:, : nearest.shape[1]] = np.take_along_axis(times, nearest, axis=1)
        values = np.take_along_axis(values, nearest, axis=1)
        losses[:, : nearest.shape[1]] = np.minimum(values - values[:, :1], _IMPOSSIBLE)
        near_times[nodes == nothing] = 0.0
        losses[nodes == nothing] = np.where(np.arange(_OPTIONS + 1), _IMPOSSIBLE, 0.0)
        return near_times[:, :-1], losses


def _numbered(*columns: Floats | Integers) -> Integers:
    """A number for each row, equal where all columns are."""
    number = np.zeros(len(columns[0]), dtype=np.int64)
    for column in columns:
        values, place = np.unique(column, return_inverse=True)
        number = np.unique(number * len(values) + place, return_inverse=True)[1]
    return number


class _Sums:
    """The sums of times along the two paths of each diamond, in order, so that the best partner of each is found.

    Args:
        times: Of the options of the four nodes, two to a path, shape (diamonds, 4, options).
        waits: What a second of waiting costs on either path in J/s, shape (diamonds, 2).
    """

    def __init__(self, times: Floats, waits: Floats) -> None:
        num = len(times)
        sums = (times[:, ::2, :, None] + times[:, 1::2, None, :]).reshape(num, 2, -1)
        self._waits = waits[:, :, None]
        self._order = np.argsort(sums, axis=2)
        self._back = np.argsort(self._order, axis=2)
        self._sums = np.take_along_axis(sums, self._order, axis=2)
        # How many sums of the other path are not larger, counted for all diamonds in one line.
        span = float(sums.max()) + 1.0
        size, row = sums.shape[2], np.arange(num)[:, None]
        line = self._sums + span * row[:, :, None]
        first = size * row
        self._smaller = np.stack(
            [np.searchsorted(line[:, 1 - path].ravel(), line[:, path], side="right") - first for path in (0, 1)],
            axis=1,
        )

    def least_with_each(self, losses: Floats) -> Floats:
        """The least that a diamond can lose with each option of each of its nodes, shape as `losses`.

        Args:
            losses: Of each option, shape (diamonds, 4, options + 1); with the last, nothing waits.
        """
        num, _, size = losses.shape
        named = losses[:, :, :-1]
        pairs = (named[:, ::2, :, None] + named[:, 1::2, None, :]).reshape(num, 2, -1)
        pairs = np.take_along_axis(pairs, self._order, axis=2)
        # A shorter partner waits, or a longer one is waited for.
        never = np.full((num, 2, 1), np.inf)
        shorter = np.minimum.accumulate(pairs - self._waits * self._sums, axis=2)
        shorter = np.concatenate([never, shorter], axis=2)[:, ::-1]
        longer = np.minimum.accumulate((pairs + self._waits[:, ::-1] * self._sums)[:, :, ::-1], axis=2)[:, :, ::-1]
        longer = np.concatenate([longer, never], axis=2)[:, ::-1]
        shorter = np.take_along_axis(shorter, self._smaller, axis=2) + self._waits[:, ::-1] * self._sums
        longer = np.take_along_axis(longer, self._smaller, axis=2) - self._waits * self._sums
        best = np.take_along_axis(pairs + np.minimum(shorter, longer), self._back, axis=2)
        of_both = best.reshape(num, 2, size - 1, size - 1)
        least = np.empty(losses.shape)
        least[:, ::2, :-1], least[:, 1::2, :-1] = of_both.min(axis=3), of_both.min(axis=2)
        # Where one of the four takes its last option, only losses count.
        lowest = losses.min(axis=2)
        others = lowest.sum(axis=1, keepdims=True) - lowest
        extra = losses[:, :, -1] - lowest
        for node in range(4):
            least_extra = np.delete(extra, node, axis=1).min(axis=1)
            with_another = named[:, node] + (others[:, node] + least_extra)[:, None]
            least[:, node, :-1] = np.minimum(least[:, node, :-1], with_another)
        least[:, :, -1] = losses[:, :, -1] + others
        return least
