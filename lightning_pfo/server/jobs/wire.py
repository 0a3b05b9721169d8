"""Plans in the two forms that clients read."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from lightning_pfo.core.wording import shortened
from lightning_pfo.server.jobs.answers import ConflictError
from lightning_pfo.server.jobs.messages import PlanRow, RankInfo

_PLANNED = ("forward", "backward")
"""What the Perseus artifact plans; everything else a rank does passes at the clock before it."""
_PURE_BACKWARD = "pure_backward"


def schedule_answer(info: RankInfo, row: PlanRow) -> dict[str, Any]:
    """The answer to a rank that asks for its plan, in the form its client reads."""
    if info.pipe_schedule:
        return {"rank": info.rank, "power_states": power_states(row, info.pipe_schedule)}
    return {"rank": info.rank, "frequencies": [[name, clock_mhz] for name, clock_mhz in row]}


def power_states(row: PlanRow, pipe_schedule: Sequence[str]) -> list[int]:
    """A clock for each entry of a pipe schedule; what is before the first planned one has its clock already.

    Raises:
        ConflictError: If the rank does not run what the plan is for.
    """
    check_runs(row, pipe_schedule)
    clocks_mhz = iter(clock_mhz for _, clock_mhz in row)
    present_mhz, states = row[0][1], []
    for name in pipe_schedule:
        if _planned_name(name) is not None:
            present_mhz = next(clocks_mhz)
        states.append(present_mhz)
    return states


def check_runs(row: PlanRow, pipe_schedule: Iterable[str]) -> None:
    """Check that the planned instructions of a pipe schedule are those of a plan.

    Raises:
        ConflictError: If they are not.
    """
    executed = [name for name in map(_planned_name, pipe_schedule) if name is not None]
    planned = [name for name, _ in row]
    if executed != planned:
        raise ConflictError(
            f"A plan has a clock for each forward and backward in their order; it has {len(planned)} "
            f"({shortened(planned)}), the pipe_schedule of this rank {len(executed)} ({shortened(executed)}). Serve a "
            "plan for this number of microbatches and this schedule."
        )


def _planned_name(name: str) -> str | None:
    if name in _PLANNED:
        return name
    return "backward" if name == _PURE_BACKWARD else None
