r"""A lower bound on what rounding loses, from small parts of the network that are solved over their discrete options.

For a flow, every assignment costs more than the line that the flow proves (`bound`) by at least ::

    sum_i off_i + sum_e f_e slack_e          off_i: how far the option of i is off its supporting line

The relaxation says no more than that this is not negative. But where two paths lead from one event to another, both
take the same time, waits and delays included, and sums of discrete times seldom agree. In 1F1B without delays such a
*diamond* lies between any two neighbouring stages in every period::

             .--- B of stage s ---o--- F of stage s ---.
    event  <                                             >  event
             `--- F of s + 1 -----o--- B of s + 1 -----'

What the four options and the waits of a diamond lose together at the least is found by trying them all. An activity is
part of several diamonds, so what it loses is shared out between them, option by option, and likewise what a wait loses;
then the sum over all diamonds is a bound (dual decomposition). Shares are equal to begin with and then made better by
passing messages: for each option of an activity, every diamond gets such a share that the least it loses with that
option is the mean over the activity's diamonds. The bound on the loss depends on the flow only, not on the time.

**Nothing rests on the messages.** In the end the shares of each option are added up over all diamonds of its activity,
in the whole network. Where they come to more than the option loses (rounding; two sorts of activity taken for one), the
worst of it is taken off; and for each diamond 32 roundings of the largest terms that occur in it are.

**Bounded work.** Of the activities that an event waits for the first 4 are looked at, and at most 8 diamonds that end
there: in all pipeline schedules no event waits for more than 2, or ends more than 2. Without these limits layers of
`width` activities, each waiting for all before it, would have width^4 of them. What is left out is not counted as lost.

Example:
    One path takes 4 s and then 4 s (4 J) or 6 s; the other takes 2 s and then 5 s (4 J) or 7 s. At 8.5 s the relaxation
    slows down the first by 0.5 s and the second by 1.5 s, which saves 1 J and 3 J of 8 J; a second of either is worth
    2 J. In fact (fast, fast) waits for 1 s on the second path and loses 2 J/s x 1 s, (fast, slow) as much on the first,
    (slow, fast) 2 J/s x 3 s and (slow, slow) 2 J/s x 1 s on the second. So 2 J are lost at the least.

    >>> from lightning_pfo.planner.network.assignments import OptionTable
    >>> from lightning_pfo.planner.network.dag import make_network
    >>> from lightning_pfo.planner.network.options import make_option_set
    >>> network = make_network(6, [(0, 1), (0, 3), (1, 2), (3, 4), (2, 5), (4, 5)])
    >>> menus = [[0], [4], [4, 6], [2], [5, 7], [0]]
    >>> table = OptionTable(network, [make_option_set(times, [4, 0][-len(times):], times) for times in menus])
    >>> through, along = np.array([4.0, 2, 2, 2, 2, 4]), np.full(6, 2.0)
    >>> diamonds = Diamonds(network, table.kind_of, table.times, table.costs, network.wait_delays)
    >>> round(diamonds.least_loss(through, along), 9)
    2.0

References:
    A. Globerson and T. Jaakkola, Fixing max-product: convergent message passing algorithms for MAP LP-relaxations,
    NIPS 2007.
    T. Werner, A linear programming approach to max-sum problem: a review, IEEE PAMI 29(7), 2007.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations, islice

import numpy as np

from lightning_pfo.planner.network.arrays import Floats, Integers
from lightning_pfo.planner.network.dag import ActivityNetwork
from lightning_pfo.planner.relaxation.flow import UNIT

_OPTIONS = 8
"""Options of an activity that are told apart, the nearest to the supporting line; the others are taken to fit."""

_PASSES, _STEP = 4, 0.5
"""How often messages are passed, and how far towards the mean."""

_IMPOSSIBLE, _MOST = 1e15, 1e12
"""Loss in joules of an option that does not exist, and the most that one is said to lose which does."""

_MOST_WAITS, _MOST_DIAMONDS = 4, 8
"""Activities that an event waits for which are looked at, and diamonds that end at it."""


@dataclass(frozen=True, eq=False)
class _Sorts:
    """What no message tells apart, handled once.

    Attributes:
        of_activity: Sort of each activity; the last is that of none.
        of_diamond: Sort of each diamond.
        activities: An activity of each sort.
        diamonds: A diamond of each sort.
        num_diamonds: Number of the diamonds of each sort.
    """

    of_activity: Integers
    of_diamond: Integers
    activities: Integers
    diamonds: Integers
    num_diamonds: Integers


class Diamonds:
    """The diamonds of a network whose paths have one or two activities each.

    Args:
        network: The precedences.
        kind_of: Kind of each activity, shape (n,).
        times: Times of the options of each kind in seconds, shape (kinds, most options).
        costs: Their costs in joules; infinite where there is no option.
        delays: Of `network.waits` in seconds.
    """

    def __init__(
        self, network: ActivityNetwork, kind_of: Integers, times: Floats, costs: Floats, delays: Floats
    ) -> None:
        self._kind_of, self._times, self._costs = kind_of, np.where(np.isfinite(costs), times, 0.0), costs
        self._num_links, self._link_of_edge = len(network.waits), network.wait_of_edge
        found = np.array(list(_diamonds(network)), dtype=np.int64).reshape(-1, 8)
        self._nodes, self._links = found[:, :4], found[:, 4:]
        # A path of a single activity names its wait twice.
        self._delays = np.where(self._nodes < network.num_nodes, delays[self._links], 0.0)
        self._diamonds_of_node = np.bincount(self._nodes.ravel(), minlength=network.num_nodes + 1)[:, None]
        self._diamonds_of_link = np.maximum(np.bincount(self._links.ravel(), minlength=self._num_links), 1)

    def __len__(self) -> int:
        return len(self._nodes)

    def least_loss(self, flow: Floats, edge_flow: Floats) -> float:
        """What every assignment costs more than the line that a flow proves, in joules, at least.

        Args:
            flow: Through each activity in J/s, shape (n,).
            edge_flow: Along each precedence in J/s, shape (edges,).
        """
        if not len(self):
            return 0.0
        through = np.bincount(self._link_of_edge, edge_flow, self._num_links) / self._diamonds_of_link
        waits = through[self._links].reshape(-1, 2, 2).min(axis=2)
        sorts = self._sorts(flow, waits)
        times, losses = self._nearest_options(flow, sorts.activities)
        nodes = sorts.of_activity[self._nodes[sorts.diamonds]]
        diamonds = _Sums(times[nodes] + self._delays[sorts.diamonds, :, None], waits[sorts.diamonds])
        shares, total = self._pass_messages(diamonds, losses, nodes, sorts)
        roundings = 32 * UNIT * float(diamonds.largest_terms(shares) @ sorts.num_diamonds)
        sure = total * (1 - 4 * len(self) * UNIT) - roundings - self._shared_too_much(shares, losses, sorts)
        return max(sure, 0.0)

    def _pass_messages(self, diamonds: _Sums, losses: Floats, nodes: Integers, sorts: _Sorts) -> tuple[Floats, float]:
        """The best shares found, for each sort of diamond, and the sum of what all diamonds lose with them."""
        num_diamonds = np.maximum(self._diamonds_of_node[sorts.activities], 1)
        # Where the activities that stand for theirs are in diamonds.
        stands = sorts.activities[sorts.of_activity] == np.arange(len(sorts.of_activity))
        diamond, place = np.nonzero(stands[self._nodes])
        node, diamond = sorts.of_activity[self._nodes[diamond, place]], sorts.of_diamond[diamond]
        shares = (losses / num_diamonds)[nodes]
        best, best_shares = -np.inf, shares
        sums = np.zeros(losses.shape)
        for number in range(_PASSES):
            least = diamonds.least_with_each(shares)
            total = float(least[:, 0].min(axis=1) @ sorts.num_diamonds)
            if total > best:
                best, best_shares = total, shares
            if number < _PASSES - 1:
                sums[:] = 0.0
                np.add.at(sums, node, least[diamond, place])
                shares = shares + _STEP * ((sums / num_diamonds)[nodes] - least)
        return best_shares, best

    def _shared_too_much(self, shares: Floats, losses: Floats, sorts: _Sorts) -> float:
        """The sum over all activities of the most by which shares of an option exceed what it loses, in joules."""
        nodes, size = self._nodes.ravel(), len(sorts.of_activity)
        of_diamond = shares[sorts.of_diamond].reshape(len(nodes), -1)
        worst = np.zeros(size)
        for option in range(losses.shape[1]):
            shared = np.bincount(nodes, of_diamond[:, option], minlength=size)
            terms = np.bincount(nodes, np.abs(of_diamond[:, option]), minlength=size)
            lost = losses[sorts.of_activity, option]
            excess = shared - lost + 2 * (self._diamonds_of_node[:, 0] + 2) * UNIT * (terms + lost)
            worst = np.maximum(worst, np.where(lost < _IMPOSSIBLE, excess, 0.0))
        return float(worst[self._diamonds_of_node[:, 0] > 0].sum()) * (1 + 4 * size * UNIT)

    def _sorts(self, flow: Floats, waits: Floats) -> _Sorts:
        """Sorts of activities, and of diamonds, that no message tells apart: in a steady state, there are few.

        Those are alike whose neighbours are alike, as far as messages are passed (Weisfeiler and Leman 1968).
        """
        node, diamond = self._alike(flow, waits)
        _, first, count = np.unique(diamond, return_index=True, return_counts=True)
        return _Sorts(node, diamond, np.unique(node, return_index=True)[1], first, count)

    def _alike(self, flow: Floats, waits: Floats) -> tuple[Integers, Integers]:
        """Numbers that are equal for activities, and for diamonds, that are alike."""
        node = _numbered(np.append(self._kind_of, -1), np.append(flow, 0.0))
        own = *waits.T, *(self._delays.T if self._delays.any() else ())
        for _ in range(_PASSES):
            diamond = _numbered(*node[self._nodes].T, *own)
            # What is around an activity is told by a sum of arbitrary numbers, one per place and sort of diamond.
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
        nothing = len(flow)
        kinds = np.append(self._kind_of, 0)[nodes]
        times = self._times[kinds]
        values = self._costs[kinds] + np.append(flow, 0.0)[nodes, None] * times
        nearest = np.argsort(values, axis=1)[:, : _OPTIONS + 1]
        shown = len(nodes), _OPTIONS + 1
        near_times, losses = np.zeros(shown), np.full(shown, _IMPOSSIBLE)
        near_times[:, : nearest.shape[1]] = np.take_along_axis(times, nearest, axis=1)
        values = np.take_along_axis(values, nearest, axis=1)
        lost = np.minimum(values - values[:, :1], _MOST)
        losses[:, : nearest.shape[1]] = np.where(np.isfinite(values), lost, _IMPOSSIBLE)
        near_times[nodes == nothing] = 0.0
        losses[nodes == nothing] = np.where(np.arange(_OPTIONS + 1), _IMPOSSIBLE, 0.0)
        return near_times[:, :-1], losses


def _diamonds(network: ActivityNetwork) -> Iterator[tuple[int, ...]]:
    """The four activities of each diamond, two to a path (n and it, where it is a single one), then its four waits."""
    events, waits = network.waits.T.tolist()
    link = {(node, event): number for number, (event, node) in enumerate(zip(events, waits, strict=True))}
    nothing = network.num_nodes
    for end, before in enumerate(network.events):
        paths_from: dict[int, list[tuple[int, int, int, int]]] = defaultdict(list)
        for last in before[:_MOST_WAITS]:
            middle = network.start_of[last]
            paths_from[middle].append((nothing, last, link[last, end], link[last, end]))
            for first in network.events[middle][:_MOST_WAITS]:
                paths_from[network.start_of[first]].append((first, last, link[first, middle], link[last, end]))
        pairs = (pair for beside in paths_from.values() for pair in combinations(beside, 2))
        yield from islice(((*a[:2], *b[:2], *a[2:], *b[2:]) for a, b in pairs if a[1] != b[1]), _MOST_DIAMONDS)


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
        times: Of the options of the four nodes, two to a path, and of the delays after them, shape
            (diamonds, 4, options).
        waits: What a second of waiting costs on either path in J/s, shape (diamonds, 2).
    """

    def __init__(self, times: Floats, waits: Floats) -> None:
        num = len(times)
        sums = (times[:, ::2, :, None] + times[:, 1::2, None, :]).reshape(num, 2, -1)
        size = sums.shape[2]
        rows = size * np.arange(2 * num).reshape(num, 2, 1)
        self._waits = waits[:, :, None]
        self._longest = times.max(axis=(1, 2), initial=0.0)
        # Indices are into flat arrays: several times as fast as along an axis.
        self._order = np.argsort(sums, axis=2) + rows
        self._back = np.empty_like(self._order)
        self._back.ravel()[self._order.ravel()] = np.arange(sums.size)
        self._sums = sums.ravel().take(self._order)
        # How many sums of the other path are not larger, counted for all diamonds in one line.
        span, row = float(sums.max()) + 1.0, np.arange(num)[:, None]
        line = self._sums + span * row[:, :, None]
        smaller = np.stack(
            [np.searchsorted(line[:, 1 - path].ravel(), line[:, path], side="right") - size * row for path in (0, 1)],
            axis=1,
        )
        # In rows that begin, or end, with an infinity, those of the other path.
        self._place = smaller + (size + 1) * np.array([1, 0])[:, None] + 2 * (size + 1) * row[:, :, None]

    def largest_terms(self, losses: Floats) -> Floats:
        """The sum of the largest terms that occur in `least_with_each` for each diamond, in joules."""
        sizes = np.abs(np.where(np.abs(losses) < _IMPOSSIBLE / 1e2, losses, 0.0)).max(axis=2).sum(axis=1)
        return np.asarray(sizes + 2 * self._waits.sum(axis=(1, 2)) * self._longest)

    def least_with_each(self, losses: Floats) -> Floats:
        """The least that a diamond can lose with each option of each of its nodes, shape as `losses`.

        Args:
            losses: Of each option, shape (diamonds, 4, options + 1); with the last, nothing waits.
        """
        num, _, size = losses.shape
        named = losses[:, :, :-1]
        pairs = (named[:, ::2, :, None] + named[:, 1::2, None, :]).reshape(num, 2, -1)
        pairs = pairs.ravel().take(self._order)
        # A shorter partner waits, or a longer one is waited for.
        own, other = self._waits * self._sums, self._waits[:, ::-1] * self._sums
        shorter, longer = np.full((2, num, 2, pairs.shape[2] + 1), np.inf)
        np.minimum.accumulate(pairs - own, axis=2, out=shorter[:, :, 1:])
        np.minimum.accumulate((pairs + other)[:, :, ::-1], axis=2, out=longer[:, :, -2::-1])
        best = np.minimum(shorter.ravel().take(self._place) + other, longer.ravel().take(self._place) - own)
        best = (pairs + best).ravel().take(self._back)
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
