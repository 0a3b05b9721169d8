"""Knobs that set a whole GPU: a locked clock, or a power limit, as the clocks that instructions then run at.

A state of a knob gives every kind of instruction of every stage a clock that was measured::

    frequency     a clock; an instruction that was not measured there takes the next lower one that was
    power limit   watts per GPU; an instruction runs at the highest clock at which it draws no more

A GPU at its lowest measured clock stays there, whatever is asked for.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TypeAlias

from lightning_pfo.core.instruction import InstructionType
from lightning_pfo.planner.pipeline.problem import Problem, Rows
from lightning_pfo.planner.profile.profile import InstructionProfile

KNOBS = ("frequency", "power_limit")
POWER_STEP_W = 25.0
"""Distance of the power limits that are tried, as Zeus does."""

State: TypeAlias = Mapping[tuple[int, InstructionType], int]
"""The clock in MHz of every kind of instruction, by stage."""


def states_of(problem: Problem, knob: str) -> list[State]:
    """The states of a knob, from the fastest: the stages' top clocks, then less and less; each once.

    Args:
        problem: The pipeline.
        knob: One of `KNOBS`.
    """
    kinds = _measured_kinds(problem)
    tops = {stage: problem.profile.top_clock_mhz(stage) for stage, _ in kinds}
    states: list[dict[tuple[int, InstructionType], int]] = [{kind: tops[kind[0]] for kind in kinds}]
    if knob == "frequency":
        for clock in sorted({clock for measured in kinds.values() for clock in measured.clocks_mhz}, reverse=True):
            states.append({kind: _at_most(kinds[kind], min(clock, tops[kind[0]])) for kind in kinds})
    else:
        gpus = problem.profile.gpus_per_stage
        most_w = math.ceil(largest_power_w(problem) / gpus / POWER_STEP_W) * POWER_STEP_W
        for number in range(int(most_w / POWER_STEP_W)):
            limit_w = (most_w - number * POWER_STEP_W) * gpus
            states.append({kind: _within(kinds[kind], limit_w, tops[kind[0]]) for kind in kinds})
    return [state for number, state in enumerate(states) if state not in states[:number]]


def largest_power_w(problem: Problem) -> float:
    """The most that the GPUs of a stage draw on average while they compute: what a power limit could not be above."""
    return max(
        energy_j / time_s
        for measured in _measured_kinds(problem).values()
        for time_s, energy_j in zip(measured.times_s, measured.energies_j, strict=True)
    )


def rows_of(problem: Problem, state: State) -> Rows:
    """The clocks of all instructions in a state."""
    return problem.schedule.by_rank([state[inst.stage, inst.type] for inst in problem.schedule.instructions])


def _measured_kinds(problem: Problem) -> dict[tuple[int, InstructionType], InstructionProfile]:
    kinds = dict.fromkeys((inst.stage, inst.type) for inst in problem.schedule.instructions)
    return {kind: problem.profile.of(*kind) for kind in kinds}


def _at_most(measured: InstructionProfile, clock_mhz: int) -> int:
    return next((clock for clock in measured.clocks_mhz if clock <= clock_mhz), measured.clocks_mhz[-1])


def _within(measured: InstructionProfile, limit_w: float, top_mhz: int) -> int:
    powers = zip(measured.clocks_mhz, measured.times_s, measured.energies_j, strict=True)
    fitting = (clock for clock, time_s, energy_j in powers if clock <= top_mhz and energy_j / time_s <= limit_w)
    return next(fitting, measured.clocks_mhz[-1])
