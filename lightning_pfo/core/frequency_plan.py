"""A frequency plan: a clock for every instruction of a pipeline schedule."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, zip_longest

from lightning_pfo.core.errors import PlanError, PlanMismatchError
from lightning_pfo.core.instruction import Instruction
from lightning_pfo.core.schedules.schedule import PipelineSchedule
from lightning_pfo.core.wording import counted, pipeline_size


@dataclass(frozen=True, slots=True)
class WaitClock:
    """A clock of its own for one long wait: while a rank is blocked, a low clock draws less.

    Attributes:
        rank: The rank that waits.
        position: Number of the instruction of that rank it waits for; the number of its instructions for the wait from
            the last one until the end of the iteration.
        clock_mhz: Clock from the begin of the wait.
        hold_s: After this time the clock of the instruction is asked for, so that it has landed when the wait is over;
            at the end of an iteration nothing follows, and the clock is held until then.
    """

    rank: int
    position: int
    clock_mhz: int
    hold_s: float


@dataclass(frozen=True)
class FrequencyPlan:
    """A clock for each instruction of a schedule, with what it is predicted to cost.

    Attributes:
        schedule: The order the clocks belong to.
        clocks_mhz: Locked graphics clocks, one row per rank, aligned with `schedule.orders`.
        iteration_time_s: Predicted iteration time: the longest path through the instruction DAG.
        iteration_energy_j: Predicted energy of all stages during that time, waiting included.
        lower_bound_j: No plan of this schedule and profile that is as fast can use less, or, where the plan is for a
            deadline that was asked for, that keeps to it; 0 where not known.
        wait_clocks: Clocks of long waits, by rank and position. All other waits pass at the clock of the instruction
            that they precede.
        switching_cost_j: Energy that limits on clock changes cost, compared with a plan of the same time without them.
        beside_straggler_bound_j: Of a plan that pays beside a straggler only: none that is as fast can use less until
            its iteration time is over, with waiting until then. 0 for others, whose `lower_bound_j` says it.
    """

    schedule: PipelineSchedule
    clocks_mhz: tuple[tuple[int, ...], ...]
    iteration_time_s: float
    iteration_energy_j: float
    lower_bound_j: float = 0.0
    wait_clocks: tuple[WaitClock, ...] = ()
    switching_cost_j: float = 0.0
    beside_straggler_bound_j: float = 0.0

    def __post_init__(self) -> None:
        expected = [len(order) for order in self.schedule.orders]
        received = [len(row) for row in self.clocks_mhz]
        if expected != received:
            raise PlanError(f"A plan has one clock per instruction: {expected} by rank; got {received}.")
        places = [(wait.rank, wait.position) for wait in self.wait_clocks]
        if places != sorted(set(places)) or not all(
            0 <= rank < len(expected) and 0 <= position <= expected[rank] for rank, position in places
        ):
            raise PlanError(
                f"A wait has at most one clock; they are listed by rank and position (0 to {expected}); got {places}."
            )
        if not all(0 <= wait.hold_s < math.inf for wait in self.wait_clocks):
            raise PlanError(f"A wait's clock is held for a finite time, at least 0 s; got {self.wait_clocks}.")

    @property
    def gap(self) -> float:
        """Relative distance to what is proven: (energy - bound) / bound."""
        bound_j = self.beside_straggler_bound_j or self.lower_bound_j
        return (self.iteration_energy_j - bound_j) / bound_j if bound_j else 0.0

    @property
    def num_clock_changes(self) -> int:
        """How often clocks change in an iteration, all ranks together; back to the first clock at its end included."""
        waiting = {(wait.rank, wait.position): wait.clock_mhz for wait in self.wait_clocks}
        changes = 0
        for rank, row in enumerate(self.clocks_mhz):
            clocks = [row[0]]  # requested when the iteration before ended
            for position, clock in enumerate((*row, row[0])):
                clocks += [waiting[rank, position], clock] if (rank, position) in waiting else [clock]
            changes += sum(a != b for a, b in pairwise(clocks))
        return changes

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
                f"The plan was made for {pipeline_size(mine.num_stages, mine.num_microbatches)} on "
                f"{counted(mine.num_ranks, 'rank')}, "
                f"but the pipeline runs {schedule.num_stages} x {schedule.num_microbatches} on {schedule.num_ranks}. "
                f"Plan again with num_microbatches={schedule.num_microbatches} and a profile of "
                f"{counted(schedule.num_stages, 'stage')}."
            )
        for planned, executed in zip(mine.orders, schedule.orders, strict=True):
            for a, b in zip_longest(planned, executed):
                if a != b:
                    raise PlanMismatchError(
                        f"The plan follows schedule {mine.name!r} and expects {a or 'nothing more'} where the "
                        f"pipeline ({schedule.name!r}) runs {b or 'nothing more'}. Plan again with "
                        f"schedule={schedule.name}.\n{schedule.grid(*filter(None, [b]))}"
                    )


def saving_percent(energy_j: float, baseline_j: float) -> float:
    """How much less than a baseline an energy is, in percent; 0 where that is 0."""
    return 100 * (1 - energy_j / baseline_j) if baseline_j else 0.0


def uniform_plan(schedule: PipelineSchedule, clocks_mhz: Sequence[int]) -> FrequencyPlan:
    """The plan that gives all instructions of a rank the same clock; its time and energy are not predicted (nan).

    Args:
        schedule: The order the plan is for.
        clocks_mhz: One clock per rank.
    """
    rows = tuple(tuple(mhz for _ in order) for mhz, order in zip(clocks_mhz, schedule.orders, strict=True))
    return FrequencyPlan(schedule, rows, float("nan"), float("nan"))
