"""EnvPipe's reconfiguration: clocks on the critical path rise until it keeps to the outer envelope.

The path is that of the instruction DAG. Every step raises a clock, and none falls, so it ends at the latest when all of
a path is at the top. A clock rises to the next one that was measured, at least a step higher, and never above the top.
"""

from __future__ import annotations

from collections.abc import Sequence

from lightning_pfo.core.envpipe import clocks_to_raise
from lightning_pfo.core.instruction import InstructionType
from lightning_pfo.planner.pipeline.problem import Problem
from lightning_pfo.planner.policies.envelope import critical_path, outer_envelope


def reconfigure(problem: Problem, clocks_mhz: Sequence[int], how: str, step_mhz: int) -> list[int]:
    """Raise clocks until the critical path is in the envelope, or at the top.

    Args:
        problem: The pipeline.
        clocks_mhz: Clock of each instruction, aligned with `schedule.instructions`.
        how: `greedy` or `balanced`.
        step_mhz: Step of the clocks.
    """
    network, instructions = problem.network, problem.schedule.instructions
    outer = outer_envelope(problem.schedule)
    ladders = [_ladder(problem, inst.stage, inst.type) for inst in instructions]
    clocks = list(clocks_mhz)
    durations = [ladder[clock] for ladder, clock in zip(ladders, clocks, strict=True)]
    tops = [max(ladder) for ladder in ladders]
    while True:
        path = critical_path(network, durations, outer)
        raised, steps = clocks_to_raise(path, clocks, tops, outer, how)
        if not raised:
            return clocks
        for node in raised:
            clocks[node] = _next(ladders[node], clocks[node] + steps * step_mhz)
            durations[node] = ladders[node][clocks[node]]


def _ladder(problem: Problem, stage: int, kind: InstructionType) -> dict[int, float]:
    """Time (s) of an instruction at each of its clocks (MHz) up to the stage's top clock, the lowest first."""
    measured, top = problem.profile.of(stage, kind), problem.profile.top_clock_mhz(stage)
    pairs = zip(measured.clocks_mhz, measured.times_s, strict=True)
    return {clock: time_s for clock, time_s in reversed(list(pairs)) if clock <= top}


def _next(ladder: dict[int, float], clock_mhz: int) -> int:
    return next((clock for clock in ladder if clock >= clock_mhz), max(ladder))
