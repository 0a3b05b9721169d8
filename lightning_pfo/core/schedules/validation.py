"""Everything a schedule is checked for before it is used."""

from __future__ import annotations

from lightning_pfo.core.schedules.in_flight import check_in_flight
from lightning_pfo.core.schedules.p2p import check_transfers
from lightning_pfo.core.schedules.registry import make_schedule
from lightning_pfo.core.schedules.schedule import PipelineSchedule


def make_checked_schedule(
    name: str,
    num_ranks: int,
    num_microbatches: int,
    stages_per_rank: int | None = None,
    max_in_flight: int | None = None,
) -> PipelineSchedule:
    """Build a schedule by name (see `make_schedule`) and check all that a training needs of it.

    Its instructions are complete and can be executed in this order, its transfers cannot hang, and no rank keeps more
    activations than allowed.

    Args:
        name: Name or file.
        num_ranks: Number of ranks.
        num_microbatches: Number of microbatches per iteration.
        stages_per_rank: Number of stages each rank runs; None is what is usual.
        max_in_flight: Largest number of activations (of one microbatch on one stage) that a rank may keep; None is any.

    Raises:
        ConfigurationError: If the schedule fails a check; the grid is drawn with the cell in brackets.
    """
    schedule = make_schedule(name, num_ranks, num_microbatches, stages_per_rank)
    check_transfers(schedule)
    if max_in_flight is not None:
        check_in_flight(schedule, max_in_flight)
    return schedule
