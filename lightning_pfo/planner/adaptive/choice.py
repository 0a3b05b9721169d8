"""Which clocks to measure next, and when to stop: where the energy of the plan is most uncertain.

::

    measured at few clocks -> curves at all (`curves`) -> plan -> expected energy of the plan
                                 | each energy as low as it may well be
                                 v
                              plan -> its hoped-for energy       the difference is what measuring more can gain at most

A clock is worth measuring where the hopeful plan uses it and its energy is uncertain, or where that tells about those
that it uses. When less can be gained in the rest of the training than measuring costs, the plan is as good as made.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from lightning_pfo.core.frequency_plan import FrequencyPlan
from lightning_pfo.core.instruction import InstructionType
from lightning_pfo.core.schedules.schedule import PipelineSchedule
from lightning_pfo.planner.adaptive.curves import Array, Curve, fit_curve
from lightning_pfo.planner.frontier.data import Frontier
from lightning_pfo.planner.frontier.select import select_plan
from lightning_pfo.planner.plan import plan_frontier
from lightning_pfo.planner.profile.profile import InstructionProfile, Profile
from lightning_pfo.planner.settings import PlanSettings

Kind = tuple[int, InstructionType]

BRACKET = (1.0, 0.87, 0.74, 0.6)
"""The first clocks, as shares of the top clock: above the valley, near it, below it."""

_BELOW = 0.9  # of the lowest measured clock: how far below it is worth looking
_HOPE = 1.0  # standard errors
_LEAST_HOPED = 0.05  # of what is expected: no energy is negative, however little is known
_HOPEFUL_PLANS = 8  # near the wanted time, few do
_NEGLIGIBLE = 0.001
"""Of the energy: less is not worth measuring for, however long the training is."""

_LONG = 1000
"""Iterations, where nobody knows how many are to come."""


@dataclass(frozen=True)
class Choice:
    """What follows from what was measured.

    Attributes:
        profile: Times and energies at all clocks between the lowest and the highest that were measured.
        frontier: The plans.
        plan: The one that was asked for.
        gain_j: What measuring more may save in an iteration, at most.
        next_mhz: Clocks to measure next, the most useful first: one for each rank in each.
        curves: What the profile was made from.
    """

    profile: Profile
    frontier: Frontier
    plan: FrequencyPlan
    gain_j: float
    next_mhz: tuple[tuple[int, ...], ...]
    curves: Mapping[Kind, Curve]


def no_slowdown(frontier: Frontier) -> FrequencyPlan:
    """The least energy at the top clocks' iteration time."""
    return select_plan(frontier, "no_slowdown")


def bracket(clocks_mhz: Sequence[int]) -> tuple[int, ...]:
    """The clocks to begin with.

    Args:
        clocks_mhz: Those that may be measured, the highest first.
    """
    wanted = [share * clocks_mhz[0] for share in BRACKET]
    return tuple(dict.fromkeys(min(clocks_mhz, key=lambda mhz: abs(mhz - want)) for want in wanted))


def choose(
    measured: Profile,
    schedule: PipelineSchedule,
    clocks_mhz: Sequence[int],
    *,
    select: Callable[[Frontier], FrequencyPlan] = no_slowdown,
    settings: PlanSettings | None = None,
    held_mhz: Mapping[Kind, float] | None = None,
    num_next: int = 2,
) -> Choice:
    """Plan with what is known, and say what to measure next.

    Args:
        measured: What was measured, each instruction at three clocks or more.
        schedule: What is executed.
        clocks_mhz: The clocks that may be measured, the highest first.
        select: Which plan of the frontier is wanted.
        settings: How to plan.
        held_mhz: Where power caps held the GPU at its top clock; see `fit_curve`.
        num_next: How many clocks each rank measures next.

    Raises:
        PfoError: If no plan can be made.
    """
    settings = settings or PlanSettings()
    lowest = min(one.clocks_mhz[-1] for one in measured.instructions.values())
    asked = tuple(mhz for mhz in clocks_mhz if mhz >= _BELOW * lowest)
    curves = {
        kind: fit_curve(one, asked, None if held_mhz is None else held_mhz.get(kind))
        for kind, one in measured.instructions.items()
    }
    profile = fitted_profile(measured, curves, lowest)
    frontier = plan_frontier(profile, settings, schedule=schedule)
    plan = select(frontier)

    at_once = replace(settings, switch_latency_s=0.0, least_dwell_s=0.0, change_cost_j=0.0)
    quick = replace(at_once, num_plans=_HOPEFUL_PLANS, num_straggler_plans=0)
    deadlines_s = [frontier.baseline.iteration_time_s, plan.iteration_time_s]
    likely, hopeful = (
        select_plan(
            plan_frontier(one, replace(quick, deadlines_s=deadlines_s), schedule=schedule),
            f"{plan.iteration_time_s * (1 + 1e-9)}s",
        )
        for one in (profile, fitted_profile(measured, curves, asked[-1], hope=_HOPE))
    )
    gain_j = max(0.0, likely.iteration_energy_j - hopeful.iteration_energy_j)
    return Choice(profile, frontier, plan, gain_j, _most_useful(schedule, hopeful, measured, curves, num_next), curves)


def is_worth_more(choice: Choice, iterations_left: int | None, iterations_each: float = 1.0) -> bool:
    """Whether measuring once more can save more than it costs: the saving of the plan while it is not applied.

    Args:
        choice: What is known.
        iterations_left: How long the training is; None where nobody knows.
        iterations_each: Iterations that a clock takes.
    """
    planned_j = choice.plan.iteration_energy_j
    if choice.gain_j < _NEGLIGIBLE * planned_j:
        return False
    cost_j = (iterations_each * len(choice.next_mhz) + 1) * max(
        choice.frontier.baseline.iteration_energy_j - planned_j, 0.0
    )
    return choice.gain_j * (_LONG if iterations_left is None else iterations_left) > cost_j


def fitted_profile(measured: Profile, curves: Mapping[Kind, Curve], lowest_mhz: int, hope: float = 0.0) -> Profile:
    """The profile that the curves tell.

    Args:
        measured: Where powers of waiting, transfers and names come from.
        curves: Times and energies.
        lowest_mhz: Clocks below are left out.
        hope: Each energy is so many standard errors lower than expected.
    """
    instructions = {}
    for kind, curve in curves.items():
        count = sum(mhz >= lowest_mhz for mhz in curve.clocks_mhz)
        clocks = curve.clocks_mhz[:count]
        known = measured.instructions[kind]
        energies = curve.energies_j * np.maximum(1 - hope * curve.errors, _LEAST_HOPED)
        instructions[kind] = InstructionProfile(
            clocks,
            tuple(map(float, curve.times_s[:count])),
            tuple(map(float, energies[:count])),
            tuple(map(float, _powers_of_waiting(known, clocks))),
            transfer_s=known.transfer_s,
        )
    return replace(measured, instructions=instructions)


def _powers_of_waiting(known: InstructionProfile, clocks_mhz: Sequence[int]) -> Array:
    """On lines between the measured clocks; none where none was measured."""
    if not known.p2p_blocking_powers_w:
        return np.array([])
    return np.interp(clocks_mhz, known.clocks_mhz[::-1], known.p2p_blocking_powers_w[::-1])


def _most_useful(
    schedule: PipelineSchedule, plan: FrequencyPlan, measured: Profile, curves: Mapping[Kind, Curve], count: int
) -> tuple[tuple[int, ...], ...]:
    """For each rank the clocks that make the energy of its part of the plan most certain, greedily."""
    of_ranks = []
    for order, row in zip(schedule.orders, plan.clocks_mhz, strict=True):
        used: dict[Kind, Counter[int]] = {}
        for instruction, mhz in zip(order, row, strict=True):
            used.setdefault((instruction.stage, instruction.type), Counter())[mhz] += 1
        mine = {kind: curves[kind] for kind in used}
        known = {mhz for kind in used for mhz in measured.instructions[kind].clocks_mhz}
        picked: list[int] = []
        for _ in range(count):
            worth = sum(_worth(curve, used[kind]) for kind, curve in mine.items())
            clocks = next(iter(mine.values())).clocks_mhz
            ranked = [clocks[index] for index in np.argsort(-np.asarray(worth), kind="stable")]
            picked.append(next((mhz for mhz in ranked if mhz not in known and mhz not in picked), ranked[0]))
            mine = {kind: curve.with_measured(picked[-1]) for kind, curve in mine.items()}
        of_ranks.append(picked)
    return tuple(zip(*of_ranks, strict=True))


def _worth(curve: Curve, used: Counter[int]) -> Array:
    """By how much (J) measuring at each clock is expected to shrink the error of what a plan uses of this kind."""
    variances = np.diag(curve.covariance)
    total = np.zeros(len(curve.clocks_mhz))
    for mhz, times in used.items():
        index = curve.clocks_mhz.index(mhz)
        left = np.maximum(variances[index] - curve.covariance[index] ** 2 / (variances + curve.noise**2), 0.0)
        total += times * curve.energies_j[index] * (np.sqrt(max(variances[index], 0.0)) - np.sqrt(left))
    return total
