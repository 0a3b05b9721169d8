"""How many microbatches' activations a schedule keeps alive, and a limit on it."""

from __future__ import annotations

from collections.abc import Iterator

from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.core.instruction import Instruction, InstructionType
from lightning_pfo.core.schedules.schedule import PipelineSchedule


def in_flight(order: tuple[Instruction, ...]) -> Iterator[int]:
    """Yield, after the start of each instruction of a rank, how many activations are alive.

    A forward makes one (of one microbatch on one stage), alive until the end of its full backward or, where the
    backward is split, of its weight gradient, which still needs the stage's inner activations.
    """
    alive = 0
    for inst in order:
        alive += inst.type is InstructionType.FORWARD
        yield alive
        alive -= inst.type in (InstructionType.BACKWARD, InstructionType.WEIGHT_GRADIENT)


def peak_in_flight(schedule: PipelineSchedule) -> tuple[int, ...]:
    """Peak number of (microbatch, stage) activations alive at once on each rank.

    With several stages per rank each counts by itself; a stage then is the smaller part of the model. 1F1B has
    `stages - stage`, GPipe all microbatches.
    """
    return tuple(max(in_flight(order), default=0) for order in schedule.orders)


def check_in_flight(schedule: PipelineSchedule, limit: int) -> None:
    """Check that no rank keeps more than `limit` activations (see `peak_in_flight`).

    Raises:
        ConfigurationError: If one does; the grid is drawn with the first forward that is too many in brackets.
    """
    for rank, order in enumerate(schedule.orders):
        for inst, alive in zip(order, in_flight(order), strict=True):
            if alive > limit:
                raise ConfigurationError(
                    f"At most {limit} microbatches may be in flight on a rank; {inst} is number {alive} on rank {rank} "
                    f"in schedule {schedule.name!r}, which needs {max(peak_in_flight(schedule))}. "
                    f"Allow that many, or use 1f1b, which needs {schedule.num_ranks} with one stage per rank."
                    f"\n{schedule.grid(inst)}"
                )
