"""Iteration times and energies of many plans at once, where clocks change at once.

The same as `timeline`, level by level of the network instead of instruction by instruction: checking 50 plans takes
hardly longer than one.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lightning_pfo.core.frequency_plan import FrequencyPlan
from lightning_pfo.core.instruction import InstructionType
from lightning_pfo.core.schedules.schedule import PipelineSchedule
from lightning_pfo.planner.network.arrays import Floats, Integers
from lightning_pfo.planner.network.assignments import finish_times
from lightning_pfo.planner.pipeline.problem import pipeline_network
from lightning_pfo.planner.profile.blocking_power import BlockingPower
from lightning_pfo.planner.profile.profile import Profile


def predict_plans(
    profile: Profile, schedule: PipelineSchedule, blocking: Sequence[BlockingPower], plans: Sequence[FrequencyPlan]
) -> tuple[Floats, Floats]:
    """Longest path and total energy of plans of one schedule.

    Args:
        profile: Times and energies.
        schedule: Order of instructions.
        blocking: Blocking power of each rank.
        plans: Plans of this schedule.

    Returns:
        Iteration times in seconds and iteration energies in joules, shape (plans,) each.

    Raises:
        ProfileError: If the profile lacks an instruction or a clock.
    """
    clocks = np.array([[clock for row in plan.clocks_mhz for clock in row] for plan in plans], dtype=np.int64).T
    durations, energies = _measured(profile, schedule, clocks)
    finish = finish_times(pipeline_network(profile, schedule), durations)
    times = finish.max(axis=0)
    totals = energies.sum(axis=0)
    wait_clocks = [(wait.rank, column, wait) for column, plan in enumerate(plans) for wait in plan.wait_clocks]
    for rank, order in enumerate(schedule.orders):
        span = schedule.span(rank)
        begins = np.vstack([np.zeros_like(times), finish[span]])
        waits = np.maximum(np.vstack([finish[span] - durations[span], times]) - begins, 0.0)
        # The clock of the next instruction is asked for as soon as one ends; after the last, that of the first.
        powers = _powers(blocking[rank], np.vstack([clocks[span], clocks[span.start]]))
        totals += (waits * powers).sum(axis=0)
        for _, column, wait in (entry for entry in wait_clocks if entry[0] == rank):
            length = waits[wait.position, column]
            held = length if wait.position == len(order) else min(wait.hold_s, length)
            totals[column] += held * (blocking[rank].at(wait.clock_mhz) - powers[wait.position, column])
    return times, totals


def _measured(profile: Profile, schedule: PipelineSchedule, clocks: Integers) -> tuple[Floats, Floats]:
    """Time and energy of each instruction, shaped as `clocks`."""
    durations, energies = np.empty(clocks.shape), np.empty(clocks.shape)
    nodes_of: dict[tuple[int, InstructionType], list[int]] = {}
    for node, inst in enumerate(schedule.instructions):
        nodes_of.setdefault((inst.stage, inst.type), []).append(node)
    for (stage, kind), nodes in nodes_of.items():
        measured = profile.of(stage, kind)
        known = np.array(measured.clocks_mhz[::-1])  # ascending
        wanted = clocks[nodes]
        places = np.minimum(np.searchsorted(known, wanted), len(known) - 1)
        if (known[places] != wanted).any():
            measured.at(int(wanted[known[places] != wanted][0]))  # says so
        durations[nodes] = np.array(measured.times_s[::-1])[places]
        energies[nodes] = np.array(measured.energies_j[::-1])[places]
    return durations, energies


def _powers(power: BlockingPower, clocks: Integers) -> Floats:
    """Power at each clock, shaped as `clocks`."""
    distinct, places = np.unique(clocks, return_inverse=True)
    return np.array([power.at(int(clock)) for clock in distinct])[places].reshape(clocks.shape)
