"""A pipeline as an activity network."""

from __future__ import annotations

from functools import lru_cache

from lightning_pfo.core.schedules.schedule import PipelineSchedule
from lightning_pfo.planner.network.dag import ActivityNetwork, make_network


@lru_cache(maxsize=4)
def schedule_network(schedule: PipelineSchedule) -> ActivityNetwork:
    """The DAG of a pipeline schedule; node i is `schedule.instructions[i]`.

    Raises:
        ConfigurationError: If the schedule cannot be executed.
    """
    schedule.validate()
    number = {instruction: i for i, instruction in enumerate(schedule.instructions)}
    return make_network(len(number), ((number[before], number[after]) for before, after in schedule.dependencies()))
