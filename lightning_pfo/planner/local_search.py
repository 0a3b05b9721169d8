"""Pair moves: one node faster, others slower in the slack that this makes."""

from __future__ import annotations

import numpy as np

from lightning_pfo.planner.choices import TOLERANCE, Choices, ChoiceTable

_AT_ONCE = 300_000
"""Nodes times choices evaluated in one pass."""

_MOST_MOVES = 40


def polish(table: ChoiceTable, choice: Choices, deadline: float) -> Choices:
    """Make a choice cheaper within its deadline, one best move after the other, until none helps.

    A move takes one node one or two options faster and spends the slack that results.

    Args:
        table: The options.
        choice: Shape (n,); keeps to the deadline.
        deadline: Longest path allowed, in seconds.
    """
    cost = float(table.total_costs(choice[:, None])[0])
    num_nodes = len(choice)
    strides = -(-2 * num_nodes * num_nodes // _AT_ONCE)
    tried_in_vain = 0
    for move in range(_MOST_MOVES):
        nodes = np.tile(np.arange(move % strides, num_nodes, strides), 2)
        steps = np.repeat([1, 2], len(nodes) // 2)
        faster = np.repeat(choice[:, None], len(nodes), axis=1)
        columns = np.arange(len(nodes))
        faster[nodes, columns] = np.maximum(faster[nodes, columns] - steps, 0)
        faster, times = table.spend_slack(faster, np.full(len(nodes), deadline))
        costs = np.where(times <= deadline * (1 + TOLERANCE), table.total_costs(faster), np.inf)
        best = int(costs.argmin())
        tried_in_vain += 1
        if costs[best] < cost - TOLERANCE * abs(cost):
            choice, cost, tried_in_vain = faster[:, best], float(costs[best]), 0
        if tried_in_vain == strides:
            break
    return choice
