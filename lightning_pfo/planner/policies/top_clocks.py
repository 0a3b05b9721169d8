"""Every instruction at its stage's top clock: the baseline."""

from __future__ import annotations

from lightning_pfo.core.schedules.schedule import PipelineSchedule
from lightning_pfo.planner.profile.profile import Profile


def top_clocks(profile: Profile, schedule: PipelineSchedule) -> tuple[tuple[int, ...], ...]:
    """The highest clock in MHz that was measured for all instructions of a stage, for each instruction by rank.

    Raises:
        ProfileError: If the instructions of a stage have no clock in common.
    """
    top = [profile.top_clock_mhz(stage) for stage in range(schedule.num_stages)]
    return schedule.by_rank([top[inst.stage] for inst in schedule.instructions])
