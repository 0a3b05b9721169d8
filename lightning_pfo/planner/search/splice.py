"""Between good assignments: the first part of the iteration from one, the rest from another.

In the steady state of a long pipeline the relaxation runs every instruction of a kind for the same, mixed duration.
Options cannot be mixed, and alternating them instruction by instruction loses slack wherever neighbours differ. Two
assignments whose steady states are uniform lose it only once, at the seam between them; joined at the right moment,
they come close to the straight line between them, which is where the relaxation lies as well.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lightning_pfo.planner.network.arrays import Floats, Integers
from lightning_pfo.planner.network.assignments import Assignments

_NEIGHBOURS = 8
"""Choices looked at on either side of a time."""


def splice(
    assignments: Assignments, times: Floats, costs: Floats, targets: Floats, order: Sequence[int], pairs_per_target: int
) -> tuple[Assignments, Integers]:
    """Join pairs of assignments such that the result takes about as long as wanted.

    For each target those pairs are joined, one on either side of it, whose connecting line is lowest there; each pair
    both ways, the faster one first and the slower one first.

    Args:
        assignments: What to join, shape (n, assignments).
        times: Longest path of each assignment in seconds, strictly increasing.
        costs: Total cost of each assignment in joules.
        targets: Times wanted, in seconds.
        order: All nodes in order of time.
        pairs_per_target: Number of pairs joined for each target.

    Returns:
        What was joined, at most 2 x pairs_per_target for each target and none where no pair encloses it, shape
        (n, joined); and the number of the target it was joined for, shape (joined,).
    """
    offsets = np.arange(_NEIGHBOURS)
    first_slower = np.searchsorted(times, targets, side="right")[:, None]
    faster, slower = first_slower - 1 - offsets, first_slower + offsets
    target, fast, slow = np.nonzero((faster >= 0)[:, :, None] & (slower < len(times))[:, None, :])
    fast, slow = faster[target, fast], slower[target, slow]
    share = (targets[target] - times[fast]) / (times[slow] - times[fast])
    height = (1 - share) * costs[fast] + share * costs[slow]
    best = np.lexsort((height, target))
    rank = np.arange(len(best)) - np.searchsorted(target[best], target[best])
    best = best[rank < pairs_per_target]
    fast, slow, share, target = fast[best], slow[best], share[best], target[best]

    begins, rests = np.concatenate([fast, slow]), np.concatenate([slow, fast])
    return _joined(assignments, begins, rests, np.concatenate([1 - share, share]), order), np.tile(target, 2)


def recombine(assignments: Assignments, order: Sequence[int], num_seams: int) -> Assignments:
    """Join every two assignments that take about as long, both ways, at seams that are equally far apart.

    Where a time must be kept to, several assignments do, each at the least cost in other parts of the network.

    Args:
        assignments: What to join, shape (n, assignments).
        order: All nodes in order of time.
        num_seams: Number of seams tried for each pair.

    Returns:
        What was joined, shape (n, assignments x (assignments - 1) x num_seams).
    """
    begins, rests = np.nonzero(~np.eye(assignments.shape[1], dtype=bool))
    seams = np.arange(1, num_seams + 1) / (num_seams + 1)
    return _joined(
        assignments, np.repeat(begins, num_seams), np.repeat(rests, num_seams), np.tile(seams, len(begins)), order
    )


def _joined(
    assignments: Assignments, begins: Integers, rests: Integers, seams: Floats, order: Sequence[int]
) -> Assignments:
    """Some assignments up to their seams, shares of the order of all nodes, and others from there on."""
    position = np.empty(len(order))
    position[list(order)] = np.arange(len(order)) / len(order)
    return np.where(position[:, None] < seams, assignments[:, begins], assignments[:, rests])
