"""A frequency plan: a clock for every instruction of a pipeline schedule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

from lightning_pfo.core.errors import PlanError, PlanMismatchError
from lightning_pfo.core.instruction import Instruction
from lightning_pfo.core.pipeline_schedule import PipelineSchedule


@dataclass(frozen=True)
class FrequencyPlan:
    """A clock for each instruction of a schedule, with what it is predicted to cost.

    Attributes:
        schedule: The order the clocks belong to.
        clocks_mhz: Locked graphics clocks, one row per rank, aligned with `schedule.orders`.
        iteration_time_s: Predicted iteration time: the longest path through the instruction DAG.
        iteration_energy_j: Predicted energy of all stages during that time, waiting included.
        lower_bound_j: No plan of this schedule and profile that is as fast can use less; 0 where not known.
    """

    schedule: PipelineSchedule
    clocks_mhz: tuple[tuple[int, ...], ...]
    iteration_time_s: float
    iteration_energy_j: float
    lower_bound_j: float = 0.0

    def __post_init__(self) -> None:
        expected = [len(order) for order in self.schedule.orders]
        received = [len(row) for row in self.clocks_mhz]
        if expected != received:
            raise PlanError(f"A plan has one clock per instruction: {expected} by rank; got {received}.")

    @property
    def gap(self) -> float:
        """Relative distance to the lower bound: (energy - bound) / bound."""
        return (self.iteration_energy_j - self.lower_bound_j) / self.lower_bound_j if self.lower_bound_j else 0.0

    def clock_of(self) -> dict[Instruction, int]:
        """Map every instruction to its clock in MHz."""
        return {
            inst: mhz
            for order, row in zip(self.schedule.orders, self.clocks_mhz, strict=True)
            for inst, mhz in zip(order, row, strict=True)
        }

    def check_fits(self, schedule: PipelineSchedule) -> None:
        """Check that this plan was made for `schedule`.

        Raises:
            PlanMismatchError: If stages, microbatches or the order differ.
        """
        mine = self.schedule
        sizes = [(s.num_stages, s.num_microbatches, s.num_ranks) for s in (mine, schedule)]
        if sizes[0] != sizes[1]:
            raise PlanMismatchError(
                f"The plan was made for {mine.num_stages} stages x {mine.num_microbatches} microbatches on "
                f"{mine.num_ranks} ranks, but the pipeline runs {schedule.num_stages} x {schedule.num_microbatches} on "
                f"{schedule.num_ranks}. Plan again with num_microbatches={schedule.num_microbatches} and a profile of "
                f"{schedule.num_stages} stages."
            )
        for planned, executed in zip(mine.orders, schedule.orders, strict=True):
            for a, b in zip_longest(planned, executed):
                if a != b:
                    raise PlanMismatchError(
                        f"The plan follows schedule {mine.name!r} and expects {a or 'nothing more'} where the "
                        f"pipeline ({schedule.name!r}) runs {b or 'nothing more'}. Plan again with "
                        f"schedule={schedule.name}.\n{schedule.grid(*filter(None, [b]))}"
                    )


def uniform_plan(schedule: PipelineSchedule, clocks_mhz: Sequence[int]) -> FrequencyPlan:
    """The plan that gives all instructions of a rank the same clock; its time and energy are not predicted (nan).

    Args:
        schedule: The order the plan is for.
        clocks_mhz: One clock per rank.
    """
    rows = tuple(tuple(mhz for _ in order) for mhz, order in zip(clocks_mhz, schedule.orders, strict=True))
    return FrequencyPlan(schedule, rows, float("nan"), float("nan"))
