"""What the beam search is guided by: times wanted, and what the relaxation has to say about them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lightning_pfo.planner.network.arrays import Floats
from lightning_pfo.planner.network.assignments import OptionTable
from lightning_pfo.planner.relaxation.linear_programme import RelaxedSolution


@dataclass(frozen=True)
class Guide:
    """What to search for.

    Attributes:
        relaxed_time: Time in seconds of the relaxation whose flows value options and waits.
        time: Longest path to aim at, near that time, in seconds.
        meeting: Share of the lags at present that is expected to be lost.
        haste: What being late costs beyond its loss, in units of the expected loss at a meeting.
        patience: What being early costs beyond its loss, likewise.
        deadline: Longest path allowed in seconds; exceeded only where no option tried keeps to it.
    """

    relaxed_time: float
    time: float
    meeting: float
    haste: float
    patience: float
    deadline: float = math.inf


@dataclass(frozen=True, eq=False)
class Guidance:
    """The relaxation at the times of some guides, a column for each.

    Attributes:
        flow: Flow through each node in J/s, shape (n, guides).
        wait_flow: Flow through each of `dag.waits` in J/s, shape (waits, guides).
        worth: Flow through all sinks in J/s, shape (guides,).
        ends: When nodes end at the latest in seconds, stretched to the time aimed at, shape (n, guides).
        moments: When events are at the latest, likewise, shape (events, guides).
    """

    flow: Floats
    wait_flow: Floats
    worth: Floats
    ends: Floats
    moments: Floats


def take_guidance(table: OptionTable, solutions: Sequence[RelaxedSolution], guides: Sequence[Guide]) -> Guidance:
    """Mix the solutions next to the time of each guide.

    The mixture of two schedules, and of two flows, is one again, and nearly optimal in between.

    Args:
        table: The options.
        solutions: Solutions of the relaxation, in any order.
        guides: What to search for.
    """
    dag = table.dag
    solutions = sorted(solutions, key=lambda solution: solution.time)
    times = np.array([solution.time for solution in solutions])
    wanted = np.array([guide.relaxed_time for guide in guides])
    slower = np.minimum(np.searchsorted(times, wanted), len(times) - 1)
    faster = np.maximum(slower - 1, 0)
    span = times[slower] - times[faster]
    share = np.clip((wanted - times[faster]) / np.where(span > 0, span, np.inf), 0.0, 1.0)

    def mixed(values: Floats) -> Floats:
        return np.asarray((1 - share) * values[..., faster] + share * values[..., slower])

    durations = np.array([solution.durations for solution in solutions]).T
    ends = table.latest_ends(durations, times)
    by_event = np.argsort(dag.start_of, kind="stable")
    first = np.flatnonzero(np.diff(np.array(dag.start_of)[by_event], prepend=-1))
    moments = np.minimum.reduceat((ends - durations)[by_event], first, axis=0)
    wait_flow = np.array([np.bincount(dag.wait_of_edge, solution.edge_flow, len(dag.waits)) for solution in solutions])
    stretch = np.array([guide.time for guide in guides]) / np.maximum(mixed(times), np.finfo(float).tiny)
    return Guidance(
        flow=mixed(np.array([solution.flow for solution in solutions]).T),
        wait_flow=mixed(wait_flow.T.astype(np.float64)),
        worth=mixed(np.array([solution.sink_flow.sum() for solution in solutions])),
        ends=mixed(ends) * stretch,
        moments=mixed(moments) * stretch,
    )
