"""From durations of the relaxation to real options that are no slower.

The relaxation runs an instruction "between" two clocks; a plan must take one of them. Two passes over the DAG:

1. forwards: each instruction takes the slowest option that ends by the latest end the relaxation grants it. It
   starts when its predecessors really end, which is never later than in the relaxation, so what rounding leaves over
   on one instruction is passed on to the next instead of being lost;
2. backwards from the deadline: each instruction takes the slowest option that fits between its earliest start and
   the latest start of its successors, so slack that remains is spent.

Pareto-optimal options are the cheaper the slower they are. The first pass is done twice: with all options, and with
those on the hull only. Options above the hull waste energy that options on it, alternating, do not; but where slack
cannot be passed on (paths of unequal length meet), they are better than nothing. The cheaper result is kept.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

import numpy as np

from lightning_pfo.planner.hull import OptionSet
from lightning_pfo.planner.instruction_dag import InstructionDag
from lightning_pfo.planner.linear_programme import RelaxedSolution

_TOLERANCE = 1e-9
"""Relative to the iteration time: what counts as equal times, above the solver's noise and below any clock step."""


def round_to_options(dag: InstructionDag, options: Sequence[OptionSet], relaxed: RelaxedSolution) -> list[int]:
    """Choose an option for every node such that the longest path does not exceed `relaxed.time`.

    Returns:
        Index into `options[node].times` for each node.
    """
    latest_ends = np.full(dag.num_nodes, relaxed.time)
    np.minimum.at(latest_ends, dag.edges[:, 0], relaxed.starts[dag.edges[:, 1]])
    ends = (latest_ends + _TOLERANCE * relaxed.time).tolist()
    on_hull = [opts.hull for opts in options]
    hull_choice = _fill_forwards(dag, [opts.hull_times for opts in options], ends)
    candidates = [
        _fill_forwards(dag, [opts.times for opts in options], ends),
        [hull[k] for hull, k in zip(on_hull, hull_choice, strict=True)],
    ]
    filled = [spend_slack(dag, options, choice, relaxed.time) for choice in candidates]
    return min(filled, key=lambda choice: total_cost(options, choice))


def spend_slack(dag: InstructionDag, options: Sequence[OptionSet], choice: Sequence[int], deadline: float) -> list[int]:
    """Slow nodes down into the slack before their successors, last nodes first, keeping to `deadline` seconds."""
    times = [opts.times for opts in options]
    durations = chosen_times(options, choice)
    finish = dag.finish_times(durations)
    slowed, latest = list(choice), [0.0] * dag.num_nodes
    after_of, tolerance = dag.successors, _TOLERANCE * deadline
    for node in reversed(dag.order):
        end = deadline
        for after in after_of[node]:
            if latest[after] < end:
                end = latest[after]
        room = end - (finish[node] - durations[node]) + tolerance
        if room > durations[node]:
            slowed[node] = max(bisect_right(times[node], room) - 1, slowed[node])
        latest[node] = end - times[node][slowed[node]]
    return slowed


def chosen_times(options: Sequence[OptionSet], choice: Sequence[int]) -> list[float]:
    """Duration of each node in seconds."""
    return [opts.times[k] for opts, k in zip(options, choice, strict=True)]


def total_cost(options: Sequence[OptionSet], choice: Sequence[int]) -> float:
    """Sum of the costs of all nodes in joules."""
    return sum([opts.costs[k] for opts, k in zip(options, choice, strict=True)])


def _fill_forwards(dag: InstructionDag, times: Sequence[Sequence[float]], latest_ends: Sequence[float]) -> list[int]:
    """Slowest of the given times of each node that ends by its latest end; the fastest where none does."""
    choice, finish = [0] * dag.num_nodes, [0.0] * dag.num_nodes
    before_of = dag.predecessors
    for node in dag.order:
        start = 0.0
        for before in before_of[node]:
            if finish[before] > start:
                start = finish[before]
        slowest = bisect_right(times[node], latest_ends[node] - start) - 1
        if slowest > 0:
            choice[node] = slowest
        finish[node] = start + times[node][choice[node]]
    return choice
