r"""Proven lower bounds on the cost of every assignment, as a function of its time.

**The proof.** Let phi_i be a flow through the activities (`flow`), of value v. In any assignment whose longest path is
T, let activity i start at S_i >= 0; it takes t_i and costs c_i. What flows along a precedence e, f_e, waits for the end
of its tail and then for its delay d_e, and what leaves at a sink ends by T; so the flow, weighted by the times on its
way, is at most v T::

    sum_i phi_i t_i + sum_e f_e d_e <= v T

    sum_i c_i >= sum_i min over options (c + phi_i t) + sum_e f_e d_e - v T

The right-hand side is a line in T, whatever the flow: weak duality. `_lines` evaluates it, and is the only place that
does, for every kind of flow: of a solution of the relaxation, aggregated or not, mixed, or none. The minimum is over
all options, not over what the relaxation has made of them. A line that falls holds for everything as fast as T; one
that rises (with the rate) is worth there what it is at the fastest time of all.

**Rounding.** Nothing is trusted to be exact. With u = 2^-53 and n activities:

1. A sum of m terms, in any order, is off by (m - 1) u sum |terms| at the most (Higham 2002, section 4.2). The cost of
   an assignment may be summed activity by activity; or as its energy, instruction by instruction and wait by wait,
   where each wait is a difference of two moments that are sums themselves, some with a few terms for each change of
   clocks. That is fewer than 4 n roundings on the way to any number, 16 n over all such sums together, and only costs
   may be negative. A longest path is a sum of 2 n durations and delays at the most. So with eps = 16 (n + 8) u the
   proof is carried out for *lowered* options c - eps |c|, t (1 - eps), and delays and a rate lowered likewise, and
   holds for costs, energies and times as they are computed from the ones given.
2. The flow is conserved but for d + 4 roundings in each phi_i (`flow`). What phi_i has too much is worth at most its
   T x phi_i, once where it flows through and once where it starts; so v is raised by 4 (d + 4) u sum_i phi_i.
3. A mixture of two flows is one, but for 3 roundings in each term; v is raised by eps v, which is more.
4. The sum of the minima is lowered by 2 n u sum |minima|, that of m delays, none negative, each times its share of a
   phi_j, by 2 (m + d + 8) u of itself, and both numbers of a line by 4 u of themselves: more than what evaluating them
   may add.

At 8 x 12 all of this is less than 1e-12 of the energy. No bound is ever clipped to a cost: one above it is an error.

**Between and beyond.** The duals of the relaxation are the best flow at their own T. The bound is concave in the flow:
between two neighbouring solutions mixtures of theirs are nearly as good as a solution there, for the price of an
evaluation. Where that is not enough, what rounding to options loses at the least is added, which takes much longer to
find (`reconvergence`).

Example:
    Two activities in a row, of 1 s or 2 s, the first for 10 J or 6 J, the second for 5 J or 4 J. Between 3 s and 4 s
    the relaxation sells time at 1 J/s, which flows through both. The least of cost + 1 J/s x time is 6 + 2 for the
    first and 5 + 1 = 4 + 2 for the second, together 14 J; less 1 J/s x 3 s, nothing that takes 3 s costs less than
    11 J. The assignment (2 s, 1 s) costs just that.

    >>> from lightning_pfo.planner.network.assignments import OptionTable
    >>> from lightning_pfo.planner.network.dag import make_network
    >>> from lightning_pfo.planner.network.options import make_option_set
    >>> from lightning_pfo.planner.relaxation.linear_programme import RelaxedTradeoff
    >>> network = make_network(2, [(0, 1)])
    >>> options = [make_option_set([1, 2], [10, 6], [2, 1]), make_option_set([1, 2], [5, 4], [2, 1])]
    >>> bound = LowerBound(OptionTable(network, options))
    >>> bound.add(RelaxedTradeoff(network, options).solve(3.5))
    >>> bound.at(3.0).round(9).item(), bool(bound.at(3.0) <= 11.0)
    (11.0, True)

References:
    N. J. Higham, Accuracy and Stability of Numerical Algorithms, 2nd edition, SIAM 2002.
"""

from __future__ import annotations

from functools import cached_property
from itertools import pairwise

import numpy as np

from lightning_pfo.planner.network.arrays import Floats
from lightning_pfo.planner.network.assignments import OptionTable
from lightning_pfo.planner.relaxation.flow import UNIT, conserved_flows, largest_number_of_terms
from lightning_pfo.planner.relaxation.linear_programme import RelaxedSolution
from lightning_pfo.planner.relaxation.reconvergence import Diamonds

_SHARES = np.linspace(0.0, 1.0, 8, endpoint=False)[1:]
"""Shares of the slower of two neighbouring flows in their mixtures."""

_VALUES_AT_ONCE = 4_000_000
"""Options times flows evaluated in one go: what memory is used."""

_SAME_VALUE = 1e-6
"""A flow whose value differs from the rate by no more, relatively, is meant to have it: see `LowerBound.add`."""

_TINY = float(np.finfo(float).tiny)


class LowerBound:
    """The highest of all bounds proven so far.

    Args:
        table: The options.
        rate: Cost of a second of the longest path in J/s, at least 0, to be added to the bounds.

    Attributes:
        table: The options.
        solutions: What was taken in.
    """

    def __init__(self, table: OptionTable, rate: float = 0.0) -> None:
        self.table, n = table, table.dag.num_nodes
        self._eps = 16 * (n + 8) * UNIT
        self._rate = rate * (1 - self._eps)
        self._times = np.where(np.isfinite(table.times), table.times, 0.0) * (1 - self._eps)
        # Of the two, the lower one; infinity stays.
        self._costs = np.minimum(table.costs * (1 - self._eps), table.costs * (1 + self._eps))
        self._delayed = np.flatnonzero(table.dag.delays)
        self._delays = table.dag.delays[self._delayed] * (1 - self._eps)
        self._fastest = table.dag.longest_path(self._times[table.kind_of, 0].tolist()) * (1 - self._eps)
        self._members = [np.flatnonzero(table.kind_of == kind) for kind in range(len(table.kinds))]
        most_terms = largest_number_of_terms(table.dag)
        self._defect = 4 * (most_terms + 4) * UNIT
        self._sure_of_delays = 1 - 2 * (len(self._delayed) + most_terms + 8) * UNIT
        self.solutions: list[RelaxedSolution] = []
        self._pending: list[RelaxedSolution] = []
        self._solved_times = np.zeros(0)
        # No flow at all proves something too, for all times.
        self._through, self._shares = np.zeros((1, n)), np.zeros((1, len(table.dag.edges)))
        self._values, self._delay_costs = np.zeros((2, 1))
        # Each line is that of a mixture of two of the flows.
        self._mixtures: list[tuple[int, int, float]] = [(0, 0, 1.0)]
        self._at_zero, self._slopes = self._lines(self._through, self._values, self._delay_costs)
        self._losses = np.zeros(1)
        self._is_sharp: set[int] = {0}

    def add(self, *solutions: RelaxedSolution) -> None:
        """Take in what the flows of some solutions prove.

        A flow that is meant to have the rate for its value (`solve_with_rate`) is scaled to just below it, so that its
        bound does not fall: it holds for all times, without end.
        """
        self.solutions += solutions
        self._pending += solutions

    def add_mixtures(self) -> None:
        """Take in mixtures of the flows of solutions that are neighbours in time."""
        self._prove_pending()
        order = (np.argsort(-self._solved_times, kind="stable") + 1).tolist()
        pairs = [(slow, fast, share) for share in _SHARES.tolist() for slow, fast in pairwise(order)]
        if pairs:
            slow, fast, share = (np.array(column) for column in zip(*pairs, strict=True))
            flows = self._through, self._values, self._delay_costs
            self._prove(pairs, *(_mixed(some, slow, fast, share) for some in flows))

    def sharpen(self, times: Floats) -> None:
        """Add what rounding to options loses at the least to the bounds that are the highest at some times (s)."""
        self._prove_pending()
        highest = self._lines_at(times, self._at_zero).argmax(axis=-1)
        heads = self.table.dag.edges[:, 1]
        for k in sorted(set(highest.tolist()) - self._is_sharp):
            slow, fast, share = self._mixtures[k]
            along = self._shares * self._through[:, heads]
            through, along = (share * some[slow] + (1 - share) * some[fast] for some in (self._through, along))
            self._losses[k] = self._diamonds.least_loss(through, along * (1 - self._eps))
            self._is_sharp.add(k)

    def at(self, times: Floats | float, paid: float = 0.0) -> Floats:
        """No assignment that takes at most `times` seconds costs less, in joules; the rate is included.

        Args:
            times: In seconds.
            paid: What every second until then costs besides, however soon an assignment ends, in J/s.
        """
        self._prove_pending()
        bounds = np.asarray(self._lines_at(times, _lowered(self._at_zero + self._losses)).max(axis=-1))
        if not paid:
            return bounds
        return _lowered(_lowered(bounds) + _lowered(paid * (1 - self._eps) * np.asarray(times)))

    def gaps(self, times: Floats, costs: Floats) -> Floats:
        """How far costs are above the bound, relative to it."""
        bounds = self.at(times)
        with np.errstate(over="ignore"):  # a bound of zero is infinitely far away
            return np.asarray((costs - bounds) / np.maximum(np.abs(bounds), _TINY))

    def _lines_at(self, times: Floats | float, at_zero: Floats) -> Floats:
        return np.asarray(np.multiply.outer(np.asarray(times, dtype=np.float64), self._slopes) + at_zero)

    @cached_property
    def _diamonds(self) -> Diamonds:
        delays = self.table.dag.wait_delays * (1 - self._eps)
        return Diamonds(self.table.dag, self.table.kind_of, self._times, self._costs, delays)

    def _prove_pending(self) -> None:
        if not self._pending:
            return
        solutions, self._pending = self._pending, []
        first = len(self._values)
        flows = conserved_flows(
            self.table.dag,
            np.array([solution.edge_flow for solution in solutions]),
            np.array([solution.sink_flow for solution in solutions]),
        )
        through, values = flows.through, flows.values
        is_rate = np.abs(values - self._rate) <= _SAME_VALUE * self._rate
        raised = self._raised(through, values)
        scale = np.where(is_rate, self._rate / np.where(is_rate, raised, 1.0) * (1 - 16 * UNIT), 1.0)
        through, values = scale[:, None] * through, scale * values
        delay_costs = self._costs_of_delays(through, flows.shares)
        self._through = np.concatenate([self._through, through])
        self._shares = np.concatenate([self._shares, flows.shares])
        self._values = np.concatenate([self._values, values])
        self._delay_costs = np.concatenate([self._delay_costs, delay_costs])
        self._solved_times = np.concatenate([self._solved_times, [solution.time for solution in solutions]])
        self._prove([(k, k, 1.0) for k in range(first, len(self._values))], through, values, delay_costs)

    def _prove(
        self, mixtures: list[tuple[int, int, float]], through: Floats, values: Floats, delay_costs: Floats
    ) -> None:
        at_zero, slopes = self._lines(through, values, delay_costs)
        self._mixtures += mixtures
        self._at_zero = np.concatenate([self._at_zero, at_zero])
        self._slopes = np.concatenate([self._slopes, slopes])
        self._losses = np.concatenate([self._losses, np.zeros(len(slopes))])

    def _raised(self, through: Floats, values: Floats) -> Floats:
        """The values of flows, rounded up by what they and their mixtures may lack."""
        return np.asarray((values + self._defect * through.sum(axis=1)) * (1 + self._eps) + _TINY)

    def _costs_of_delays(self, through: Floats, shares: Floats) -> Floats:
        """What flows cost while they are delayed, rounded down, in joules, shape (flows,)."""
        heads = self.table.dag.edges[self._delayed, 1]
        return np.asarray((shares[:, self._delayed] * through[:, heads]) @ self._delays * self._sure_of_delays)

    def _lines(self, through: Floats, values: Floats, delay_costs: Floats) -> tuple[Floats, Floats]:
        """What flows prove, the rate included: value at 0 s (J) and slope (J/s, never rising), shape (flows,) each.

        Args:
            through: Flow through each activity in J/s, shape (flows, n).
            values: What leaves at all sinks in J/s, shape (flows,).
            delay_costs: What they cost while they are delayed, in joules, shape (flows,).
        """
        at_zero, size = np.zeros((2, len(through)))
        for kind, members in enumerate(self._members):
            num_options = len(self.table.kinds[kind].times)
            times, costs = self._times[kind, :num_options, None, None], self._costs[kind, :num_options, None, None]
            at_once = max(_VALUES_AT_ONCE // (num_options * len(members)), 1)
            for first in range(0, len(through), at_once):
                some = slice(first, first + at_once)
                least = times * through[some, members]
                least += costs  # in place, as these are the largest arrays of all
                least = least.min(axis=0)
                at_zero[some] += least.sum(axis=1)
                size[some] += np.abs(least).sum(axis=1)
        at_zero += delay_costs - (2 * (through.shape[1] + 1) * UNIT * size + _TINY)
        slopes = _lowered(self._rate - self._raised(through, values))
        at_zero = _lowered(at_zero) + np.maximum(slopes, 0.0) * self._fastest
        return _lowered(at_zero), np.minimum(slopes, 0.0)


def _lowered(values: Floats) -> Floats:
    return np.asarray(values - 4 * UNIT * np.abs(values))


def _mixed(values: Floats, first: Floats, second: Floats, share: Floats) -> Floats:
    share = share.reshape(-1, *[1] * (values.ndim - 1))
    return np.asarray(share * values[first] + (1 - share) * values[second])
