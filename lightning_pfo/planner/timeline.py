"""What a choice of clocks costs: the timeline of one iteration under a profile's own times and energies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_pfo.core.frequency_plan import FrequencyPlan
from lightning_pfo.core.pipeline_schedule import PipelineSchedule
from lightning_pfo.planner.instruction_dag import schedule_dag
from lightning_pfo.planner.profile import Profile


@dataclass(frozen=True)
class Timeline:
    """One iteration, every instruction started as early as possible.

    Attributes:
        schedule: The order; the sequences below are aligned with `schedule.instructions`.
        clocks_mhz: Clock of each instruction.
        starts_s: Start of each instruction.
        durations_s: Duration of each instruction.
        energies_j: Energy of each instruction.
        critical_path: Numbers of the instructions of one longest path, first to last.
        iteration_time_s: End of the last instruction.
        iteration_energy_j: Energy of all instructions and of all waiting.
        p2p_blocking_powers_w: Power of each rank while it waits.
    """

    schedule: PipelineSchedule
    clocks_mhz: tuple[int, ...]
    starts_s: tuple[float, ...]
    durations_s: tuple[float, ...]
    energies_j: tuple[float, ...]
    critical_path: tuple[int, ...]
    iteration_time_s: float
    iteration_energy_j: float
    p2p_blocking_powers_w: tuple[float, ...]


def simulate(
    profile: Profile,
    schedule: PipelineSchedule,
    clocks_mhz: Sequence[Sequence[int]],
    p2p_blocking_powers_w: Sequence[float],
) -> Timeline:
    """Lay out one iteration.

    Args:
        profile: Times and energies.
        schedule: Order of instructions.
        clocks_mhz: Clock of each instruction, one row per rank, aligned with `schedule.orders`.
        p2p_blocking_powers_w: Power of each rank's GPUs while they wait.

    Raises:
        ProfileError: If the profile lacks an instruction or a clock.
    """
    dag = schedule_dag(schedule)
    clocks = [clock for row in clocks_mhz for clock in row]
    measured = [
        profile.of(inst.stage, inst.type).at(clock) for inst, clock in zip(schedule.instructions, clocks, strict=True)
    ]
    durations, energies = zip(*measured, strict=True)
    finish = dag.finish_times(durations)
    iteration_time = max(finish)
    waiting, first = 0.0, 0
    for order, power in zip(schedule.orders, p2p_blocking_powers_w, strict=True):
        waiting += power * (iteration_time - sum(durations[first : first + len(order)]))
        first += len(order)
    return Timeline(
        schedule=schedule,
        clocks_mhz=tuple(clocks),
        starts_s=tuple(end - duration for end, duration in zip(finish, durations, strict=True)),
        durations_s=durations,
        energies_j=energies,
        critical_path=tuple(dag.critical_path(durations)),
        iteration_time_s=iteration_time,
        iteration_energy_j=sum(energies) + waiting,
        p2p_blocking_powers_w=tuple(p2p_blocking_powers_w),
    )


def simulate_plan(profile: Profile, plan: FrequencyPlan, p2p_blocking_powers_w: Sequence[float]) -> Timeline:
    """Lay out one iteration of a plan; see `simulate`."""
    return simulate(profile, plan.schedule, plan.clocks_mhz, p2p_blocking_powers_w)
