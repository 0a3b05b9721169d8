r"""Flows through an activity network that are conserved by construction.

A flow has a value y_i at each sink and an amount along each precedence; what flows into an activity flows out of it.
The duals of a linear programme are a flow up to the solver's tolerances only. So nothing is taken from them but how
much leaves at the sinks and the *shares* by which what flows through an activity comes from those before it; then the
flow is pushed from the sinks to the sources, level by level::

    phi_i = y_i + sum over the activities j that wait for i of share_ij phi_j           the shares into each j sum to 1

With shares that are normalised exactly, all of phi_j flows into j, whatever rounding has made of it. What flows out of
i is what the sum above would be without rounding. As no term is negative, phi_i differs from it by d + 4 roundings at
the most, d being the number of precedences into an activity plus that out of one, wherever they are most.

Example:
    A solver says that 6 J/s leave at activity 2, that 2.001 of them come from activity 0 and 4.001 from activity 1, and
    that 3.9 come from 0 to 1. So a third of the 6 comes from 0 (2.001 / 6.002) and the rest from 1, all of it from 0.

    >>> import numpy as np
    >>> from lightning_pfo.planner.network.dag import make_network
    >>> network = make_network(3, [(0, 1), (0, 2), (1, 2)])
    >>> flows = conserved_flows(network, np.array([[3.9, 2.001, 4.001]]), np.array([[6.0]]))
    >>> flows.through.round(4)
    array([[6.    , 3.9997, 6.    ]])
    >>> flows.along(network, 0).round(4)
    array([3.9997, 2.0003, 3.9997])
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lightning_pfo.planner.network.arrays import Floats
from lightning_pfo.planner.network.dag import ActivityNetwork

UNIT = 2.0**-53
"""Unit of rounding: an operation on floating-point numbers is off by this part of its result at the most."""


@dataclass(frozen=True, eq=False)
class Flows:
    """Some flows through one network.

    Attributes:
        through: Flow through each activity in J/s, shape (flows, n).
        shares: Share of it that comes along each precedence, aligned with `network.edges`, shape (flows, edges).
        values: What leaves at all sinks in J/s, rounded, shape (flows,).
    """

    through: Floats
    shares: Floats
    values: Floats

    def along(self, network: ActivityNetwork, number: int) -> Floats:
        """Flow along each precedence in J/s, of one of the flows."""
        return np.asarray(self.shares[number] * self.through[number, network.edges[:, 1]])


def conserved_flows(network: ActivityNetwork, edge_hints: Floats, sink_hints: Floats) -> Flows:
    """The flows that come nearest to those hinted at: see above. Where nothing hints at shares, they are equal.

    Args:
        network: The precedences.
        edge_hints: Flow along each precedence, about, shape (flows, edges); what is negative counts as 0.
        sink_hints: What leaves at each of `network.sinks`, shape (flows, sinks), likewise.
    """
    n, heads = network.num_nodes, network.edges[:, 1]
    edge_hints, sink_hints = np.maximum(edge_hints, 0.0), np.maximum(sink_hints, 0.0)
    into = np.array([np.bincount(heads, hints, minlength=n) for hints in edge_hints]).reshape(-1, n)
    waited_for = np.bincount(heads, minlength=n)
    known = into > np.finfo(float).tiny  # the reciprocal of less may overflow
    shares = np.where(
        known[:, heads], edge_hints / np.where(known, into, 1.0)[:, heads], 1.0 / np.maximum(waited_for, 1)[heads]
    )
    order = network.levels_from_the_end
    by_tail = np.argsort(order.position_of[network.edges[:, 0]], kind="stable")
    shares_by_tail = shares.T[by_tail]
    through = np.zeros((n, len(edge_hints)))
    through[order.position_of[list(network.sinks)]] = sink_hints.T
    end = 0
    for level in order.levels[1:]:
        first, end = end, end + len(level.neighbours)
        flowing = shares_by_tail[first:end] * through[level.neighbours]
        through[level.positions] = np.add.reduceat(flowing, level.begins, axis=0)
    return Flows(np.ascontiguousarray(through[order.position_of].T), shares, sink_hints.sum(axis=1))


def largest_number_of_terms(network: ActivityNetwork) -> int:
    """Most precedences into an activity plus most out of one; at least the number that `phi_i` above depends on."""
    ends = [np.bincount(network.edges[:, side], minlength=1).max() for side in (0, 1)] if len(network.edges) else [0, 0]
    return int(sum(ends))
