"""The time-cost tradeoff of very long networks that repeat themselves, in a time that hardly grows with the length.

At each time the aggregated relaxation gives a lower bound and a timetable (`aggregated`). It is rounded to options and
improved event by event (`moves`). There is no search beyond that, so gaps are somewhat larger than those of `solver`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lightning_pfo.core.progress import Progress
from lightning_pfo.planner.network.arrays import Integers
from lightning_pfo.planner.network.assignments import TOLERANCE, Assignments, OptionTable
from lightning_pfo.planner.network.dag import ActivityNetwork
from lightning_pfo.planner.network.options import OptionSet, pareto_front
from lightning_pfo.planner.network.periodic_path import PeriodicPath
from lightning_pfo.planner.relaxation.aggregated import MergedTradeoff
from lightning_pfo.planner.relaxation.bound import LowerBound
from lightning_pfo.planner.relaxation.linear_programme import RelaxedSolution
from lightning_pfo.planner.search.effort import Effort, find_effort
from lightning_pfo.planner.search.moves import EventMoves
from lightning_pfo.planner.search.pool import TradeoffPoint, proven_points
from lightning_pfo.planner.search.solver import fastest_time

LONG_PIPELINE = 4000
"""Instructions from which a pipeline is planned by this module, if its schedule has a steady state."""

LONG_MARGIN, LONG_PIECES = 16, 6
"""Microbatches at either end of a steady state that are not merged, and how many runs the rest is cut into."""


def trace_long_tradeoff(
    dag: ActivityNetwork,
    options: Sequence[OptionSet],
    *,
    periodic: Sequence[PeriodicPath],
    rate: float = 0.0,
    num_points: int = 50,
    times: Sequence[float] = (),
    deadlines: Sequence[float] = (),
    effort: str | Effort = "default",
    begin: float = 0.0,
    bound: LowerBound | None = None,
    on_progress: Progress | None = None,
) -> list[TradeoffPoint]:
    """Find assignments from the fastest to the one of least cost, none dominated, fast to slow.

    All times are kept to.

    Args:
        dag: The precedences.
        options: Options of each node; nodes of one kind should share one object.
        periodic: Where the network repeats itself, see `steady_middles`.
        rate: Cost of a second of the longest path in J/s, at least 0.
        num_points: Number of times, equally spaced, at which assignments are wanted.
        times: Further times in seconds; brought into the range of the frontier.
        deadlines: The same, but one shorter than the fastest assignment is an error.
        effort: How hard to search: `fast`, `default` or `best`.
        begin: Where the frontier begins, as in `trace_tradeoff`.
        bound: Where proofs are collected, likewise.
        on_progress: Called with what is being done, how much of it is done, and how much there is.

    Raises:
        PlanError: If a deadline cannot be met.
        ConfigurationError: If the effort is unknown.
    """
    effort = find_effort(effort)
    fastest = max(fastest_time(dag, options, deadlines), begin)
    bound = bound or LowerBound(OptionTable(dag, options), rate)
    table, programme = bound.table, MergedTradeoff(dag, options, periodic)
    moves = EventMoves(table)
    least = programme.solve_with_rate(rate)
    bound.add(least)  # what is proven about all that is slower
    slowest = max(least.time, fastest)
    wanted = {min(max(time, fastest), slowest) for time in (*times, *deadlines)}
    targets = sorted({*wanted, *np.linspace(fastest, slowest, num_points).tolist()}, reverse=True)
    found: list[tuple[float, float, Integers]] = []
    for done, target in enumerate(targets, 1):
        relaxed = programme.with_timetable(programme.solve(target))
        bound.add(relaxed)
        starts = [_rounded(table, relaxed)]
        if target == fastest:  # where there may be no uniform steady state to round
            starts.append(np.zeros((dag.num_nodes, 1), dtype=np.int64))
        if dag.delays.any() and table.longest_paths(starts[0])[0] > target * (1 + TOLERANCE):
            starts.append(_granted(table, relaxed))
        for assignment in starts:
            for sweeps in effort.long_sweeps:
                moved = moves.improve(assignment, np.array([target]), sweeps)
                assignment, longest = table.spend_slack(moved, np.array([target]))
            time = float(longest[0])
            found.append((time, float(table.total_costs(assignment)[0]) + rate * time, assignment[:, 0]))
        if on_progress is not None:
            on_progress("relaxing and rounding", done, len(targets))
    bound.sharpen(np.array(targets))
    front = pareto_front([time for time, _, _ in found], [cost for _, cost, _ in found]).tolist()
    times_of, costs, assignments = (np.array(column) for column in zip(*map(found.__getitem__, front), strict=True))
    return proven_points(bound, times_of, costs, assignments.T)


def _granted(table: OptionTable, relaxed: RelaxedSolution) -> Assignments:
    """Options no slower than the relaxation grants, as long as the time can be kept to; shape (n, 1).

    With delays a uniform steady state is often slower than others, so that the timetable is that of a longer time.
    """
    fastest = np.zeros((table.dag.num_nodes, 1), dtype=np.int64)
    latest_ends = table.latest_ends(table.durations(fastest), np.array([relaxed.time * (1 + TOLERANCE / 2)]))
    granted = relaxed.durations[:, None] * (1 + TOLERANCE)
    filled, longest = table.fill(fastest, latest_ends, longest=granted)
    return table.spend_slack(filled, np.maximum(longest, relaxed.time))[0]


def _rounded(table: OptionTable, relaxed: RelaxedSolution) -> Assignments:
    """Options no slower than the relaxation grants, what one leaves over passed on to the next; shape (n, 1).

    Every node may end when the first of its successors starts in the relaxation, less the delay in between.
    """
    latest_ends = np.full(table.dag.num_nodes, relaxed.time)
    np.minimum.at(latest_ends, table.dag.edges[:, 0], relaxed.starts[table.dag.edges[:, 1]] - table.dag.delays)
    latest_ends = latest_ends[:, None] + TOLERANCE * relaxed.time
    fastest = np.zeros((table.dag.num_nodes, 1), dtype=np.int64)
    filled = []
    for on_hull in (False, True):
        assignment, longest = table.fill(fastest, latest_ends, on_hull=on_hull)
        filled.append(table.spend_slack(assignment, np.maximum(longest, relaxed.time))[0])
    return min(filled, key=lambda assignment: float(table.total_costs(assignment)[0]))
