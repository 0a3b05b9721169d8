"""Between two good plans: the first part of the iteration from one, the rest from the other.

In the steady state of a long pipeline the relaxation runs every instruction of a kind for the same, mixed duration.
Options cannot be mixed, and alternating them instruction by instruction loses slack wherever neighbours differ. Two
plans whose steady states are uniform lose it only once, at the seam between them. So the plans at the corners of the
frontier found so far, joined at the right moment, come close to the straight line between them, which is where the
relaxation lies as well.
"""

from __future__ import annotations

from collections.abc import Sequence

from lightning_pfo.planner.hull import OptionSet
from lightning_pfo.planner.instruction_dag import InstructionDag
from lightning_pfo.planner.rounding import chosen_times, spend_slack, total_cost

_EQUAL_TIMES = 1e-9


def splice(
    dag: InstructionDag,
    options: Sequence[OptionSet],
    slow: Sequence[int],
    fast: Sequence[int],
    deadline: float,
    order: Sequence[int],
) -> list[int]:
    """Join a slow and a fast choice so that the longest path just keeps to the deadline.

    Both joints are tried: slow first and fast first.

    Args:
        dag: The precedences.
        options: Options of each node.
        slow: A choice that may exceed the deadline.
        fast: A choice that does not.
        deadline: Longest allowed path in seconds.
        order: All nodes in order of time.
    """
    joints = [_longest_joint(dag, options, slow, fast, deadline, nodes) for nodes in (order, order[::-1])]
    filled = [spend_slack(dag, options, choice, deadline) for choice in joints]
    return min(filled, key=lambda choice: total_cost(options, choice))


def _longest_joint(
    dag: InstructionDag,
    options: Sequence[OptionSet],
    slow: Sequence[int],
    fast: Sequence[int],
    deadline: float,
    order: Sequence[int],
) -> list[int]:
    """As many nodes of `order`, from its begin, as the deadline allows take the slow choice; found by bisection."""

    def joined(count: int) -> list[int]:
        choice = list(fast)
        for node in order[:count]:
            choice[node] = slow[node]
        return choice

    allowed, excluded = 0, len(order) + 1
    while excluded - allowed > 1:
        middle = (allowed + excluded) // 2
        if dag.longest_path(chosen_times(options, joined(middle))) <= deadline * (1 + _EQUAL_TIMES):
            allowed = middle
        else:
            excluded = middle
    return joined(allowed)
