r"""Proven lower bounds on the cost of every choice, as a function of its time.

Any flow from the sources to the sinks of the DAG, of value v, proves a bound: with phi_i the flow through node i, every
choice whose longest path is T costs at least ::

    sum_i min over options (c_i + phi_i t_i) - v T

(weak duality: v T is at least the length of the paths the flow takes, weighted by the flow along them). The duals of
the relaxation are the best such flow at their own T. The bound is concave in the flow, and a mixture of two flows is a
flow: between two neighbouring solutions the mixtures of theirs are nearly as good as a solution there, for the price of
an evaluation.

Where that is not enough, what rounding loses at the least is added, which takes much longer to find (`diamonds`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise

import numpy as np

from lightning_pfo.planner.network.arrays import Floats
from lightning_pfo.planner.network.assignments import OptionTable
from lightning_pfo.planner.relaxation.linear_programme import RelaxedSolution
from lightning_pfo.planner.relaxation.reconvergence import Diamonds

_SHARES = np.linspace(0.0, 1.0, 8, endpoint=False)[1:]
"""Shares of the slower of two neighbouring flows in their mixtures."""


class LowerBound:
    """The highest of all bounds proven so far.

    Args:
        table: The options.
        rate: Cost of a second of the longest path in J/s, to be added to the bounds.
    """

    def __init__(self, table: OptionTable, rate: float) -> None:
        self._table, self._rate = table, rate
        self._at_zero, self._slopes, self._losses = np.zeros(0), np.zeros(0), np.zeros(0)
        self._mixtures: list[tuple[RelaxedSolution, RelaxedSolution, float]] = []
        self._is_sharp: set[int] = set()

    def add(self, solution: RelaxedSolution) -> None:
        """Take in the tangent of a relaxation."""
        self._add(np.array([solution.bound_at(0.0)]), np.array([-solution.slope]))
        self._mixtures.append((solution, solution, 0.0))

    def add_mixtures(self, solutions: Sequence[RelaxedSolution]) -> None:
        """Take in mixtures of the flows of neighbouring solutions; they are in order of time."""
        flows = np.array([solution.flow for solution in solutions])
        values = np.array([solution.sink_flow.sum() for solution in solutions])
        share = _SHARES[:, None]
        mixed = share[:, None] * flows[:-1] + (1 - share[:, None]) * flows[1:]
        self._add(least_costs(self._table, mixed).ravel(), (share * values[:-1] + (1 - share) * values[1:]).ravel())
        self._mixtures += [(slow, fast, share) for share in _SHARES.tolist() for slow, fast in pairwise(solutions)]

    def sharpen(self, times: Floats) -> None:
        """Add what rounding loses at the least to the bounds that are the highest at some times in seconds."""
        highest = (np.multiply.outer(times, self._slopes) + self._at_zero).argmax(axis=-1)
        for k in sorted(set(highest.tolist()) - self._is_sharp):
            slow, fast, share = self._mixtures[k]
            flow, edge_flow = (
                share * ours + (1 - share) * theirs
                for ours, theirs in ((slow.flow, fast.flow), (slow.edge_flow, fast.edge_flow))
            )
            self._losses[k] = self._diamonds.least_loss(flow, edge_flow)
            self._is_sharp.add(k)

    @cached_property
    def _diamonds(self) -> Diamonds:
        return Diamonds(self._table)

    def at(self, times: Floats | float) -> Floats:
        """No choice that takes `times` seconds costs less, in joules; the rate is included."""
        times = np.asarray(times, dtype=np.float64)
        bounds = np.multiply.outer(times, self._slopes) + (self._at_zero + self._losses)
        return np.asarray(bounds.max(axis=-1))

    def gaps(self, times: Floats, costs: Floats) -> Floats:
        """How far costs are above the bound, relative to it."""
        bounds = self.at(times)
        with np.errstate(over="ignore"):  # a bound of zero is infinitely far away
            return np.asarray((costs - bounds) / np.maximum(np.abs(bounds), np.finfo(float).tiny))

    def _add(self, at_zero: Floats, flow_values: Floats) -> None:
        self._at_zero = np.concatenate([self._at_zero, at_zero])
        self._slopes = np.concatenate([self._slopes, self._rate - flow_values])
        self._losses = np.concatenate([self._losses, np.zeros(len(at_zero))])


def least_costs(table: OptionTable, flows: Floats) -> Floats:
    """Sum over the nodes of the least cost of an option plus flow times its time; the last axis are the nodes."""
    total = np.zeros(flows.shape[:-1])
    for kind, opts in enumerate(table.kinds):
        times, costs, slopes = opts.hull_line
        flow = flows[..., table.kind_of == kind]
        passed = np.searchsorted(slopes, -flow)  # as many corners as edges that fall more steeply than the flow
        total += (costs[passed] + flow * times[passed]).sum(axis=-1)
    return total
