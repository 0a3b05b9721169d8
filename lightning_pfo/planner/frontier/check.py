"""Whether plans take the times and energies that they say: a frontier against its own profile."""

from __future__ import annotations

import sys

from lightning_pfo.core.errors import PlanError
from lightning_pfo.planner.frontier.data import Frontier
from lightning_pfo.planner.pipeline.predictions import predict_plans
from lightning_pfo.planner.pipeline.timeline import Simulator

_EQUAL_TIMES = 1e-8
"""Relative; the planner takes times that are 1e-9 apart for equal, in several steps."""


def check_predictions(frontier: Frontier) -> None:
    """Check that every plan's iteration time and energy follow from its clocks and the profile.

    A time may be off by what the planner takes for equal, and rounding; an energy by what waiting for so long costs,
    and the rounding of a sum of all instructions.

    Raises:
        PlanError: If one does not.
        ProfileError: If a plan uses a clock that was not measured.
    """
    plans = (frontier.baseline, *frontier.plans, *frontier.straggler_plans)
    if frontier.switch_latency:
        simulator = Simulator(frontier.profile, frontier.schedule, frontier.blocking, frontier.switch_latency)
        timelines = [simulator.play(plan.clocks_mhz, plan.wait_clocks) for plan in plans]
        times_s = [timeline.iteration_time_s for timeline in timelines]
        energies_j = [timeline.iteration_energy_j for timeline in timelines]
    else:
        times, energies = predict_plans(frontier.profile, frontier.schedule, frontier.blocking, plans)
        times_s, energies_j = times.tolist(), energies.tolist()
    most_w = sum(max(power.powers_w) for power in frontier.blocking)
    rounding = 4 * len(frontier.schedule.instructions) * sys.float_info.epsilon
    for number, (plan, time_s, energy_j) in enumerate(zip(plans, times_s, energies_j, strict=True)):
        name = _name_of(frontier, number)
        off_s = (_EQUAL_TIMES + rounding) * time_s
        off_j = most_w * off_s + rounding * (energy_j + most_w * time_s)
        if abs(plan.iteration_time_s - time_s) > off_s:
            raise PlanError(
                f"Iteration times are the longest path with the profile's own times: {time_s!r} s for {name}, not "
                f"{plan.iteration_time_s!r} s."
            )
        if abs(plan.iteration_energy_j - energy_j) > off_j:
            raise PlanError(
                f"Iteration energies follow from the profile: {energy_j!r} J for {name}, not "
                f"{plan.iteration_energy_j!r} J."
            )


def _name_of(frontier: Frontier, number: int) -> str:
    """What a message calls the baseline (0), a plan, or a straggler plan, numbered in the order of the check."""
    if number > len(frontier.plans):
        return f"straggler plan {number - len(frontier.plans) - 1}"
    return f"plan {len(frontier.plans) - number}" if number else "the baseline"
