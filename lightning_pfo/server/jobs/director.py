"""Who decides on plans: one that was made before, or a frontier to choose from. `online` scans first."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Protocol

from lightning_pfo.core.errors import PlanError
from lightning_pfo.core.frequency_plan import FrequencyPlan, saving_percent
from lightning_pfo.planner.frontier.data import Frontier
from lightning_pfo.planner.frontier.select import select_plan
from lightning_pfo.planner.frontier.zeus_files import read_zeus_rows
from lightning_pfo.server.jobs.answers import ConflictError
from lightning_pfo.server.jobs.job import Job
from lightning_pfo.server.jobs.messages import JobInfo, PlanRow, PlanRows

Work = Callable[[], PlanRows]
"""Makes a plan, which takes a while."""


class Director(Protocol):
    """Decides which plan a job has."""

    @property
    def name(self) -> str:
        """Part of the names of jobs."""

    def check_job(self, info: JobInfo) -> None:
        """Check that there can be plans for a job.

        Raises:
            ConflictError: If not.
        """

    def decide(self, job: Job) -> PlanRows | Work | None:
        """The plan that follows when all ranks are there, or have all reported; None keeps the one there is."""

    def choose(self, job: Job, select: str, straggler_s: float) -> PlanRows:
        """The plan of an operating point, beside a straggler if there is one.

        Args:
            job: For whom.
            select: A selection as of `select_plan`; empty for the usual one.
            straggler_s: Iteration time of the replica that all others wait for; 0 if there is none.

        Raises:
            ConflictError: If there is no such plan.
        """


class FrontierDirector:
    """Plans of a frontier that was made before.

    Args:
        frontier: Where to choose from.
        select: The usual choice.
    """

    name = "Frontier"

    def __init__(self, frontier: Frontier, select: str) -> None:
        self._frontier, self._select = frontier, select
        chosen_rows(frontier, select)  # what cannot be selected is told before there is a job

    def check_job(self, info: JobInfo) -> None:
        """See `Director`."""
        check_places(info, self._frontier.schedule.num_ranks)

    def decide(self, job: Job) -> PlanRows | Work | None:
        """See `Director`."""
        return chosen_rows(self._frontier, self._select) if job.plan is None else None

    def choose(self, job: Job, select: str, straggler_s: float) -> PlanRows:
        """See `Director`."""
        return chosen_beside(self._frontier, select or self._select, straggler_s)


class SolutionDirector:
    """The one plan of a Zeus or Perseus plan file.

    Args:
        path: The file: a row per stage, or per rank.
    """

    name = "PointSolution"

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._rows = PlanRows(read_zeus_rows(path), os.path.basename(path))  # noqa: PTH119 (of what was given, as given)

    def check_job(self, info: JobInfo) -> None:
        """See `Director`."""
        num_rows = len(self._rows.rows)
        if num_rows != info.world_size:
            check_places(info, num_rows)

    def decide(self, job: Job) -> PlanRows | Work | None:
        """See `Director`."""
        return self._rows if job.plan is None else None

    def choose(self, job: Job, select: str, straggler_s: float) -> PlanRows:
        """See `Director`."""
        raise ConflictError("This server has one plan file and nothing to choose from. Start it with frontier=DIR.")


def check_places(info: JobInfo, num_rows: int) -> None:
    """Check that a job's pipeline has as many ranks as a plan.

    Raises:
        ConflictError: If not.
    """
    if info.pp_degree != num_rows:
        raise ConflictError(
            f"The plans of this server are for a pipeline of {num_rows} ranks; the job has pp_degree={info.pp_degree}. "
            f"Plan for {info.pp_degree} stages, and serve that."
        )


def chosen_beside(frontier: Frontier, select: str, straggler_s: float) -> PlanRows:
    """The selected plan, or the cheapest one that is not slower than a straggler.

    Raises:
        ConflictError: If there is no such plan.
    """
    usual = _selected(frontier, select)
    if straggler_s <= usual.iteration_time_s:  # nobody waits
        return rows_of(frontier, usual, select)
    slower = f"T'={straggler_s:.9g}s"
    return rows_of(frontier, _selected(frontier, slower), f"{select}, {slower}")


def chosen_rows(frontier: Frontier, select: str) -> PlanRows:
    """The selected plan.

    Raises:
        ConflictError: If there is no such plan.
    """
    return rows_of(frontier, _selected(frontier, select), select)


def _selected(frontier: Frontier, select: str) -> FrequencyPlan:
    try:
        return select_plan(frontier, select)
    except PlanError as error:
        raise ConflictError(str(error)) from error


def rows_of(frontier: Frontier, plan: FrequencyPlan, label: str) -> PlanRows:
    """A plan of a frontier as clients get it. Clocks of waits have no place there."""
    rows: tuple[PlanRow, ...] = tuple(
        tuple((inst.type.profile_name, mhz) for inst, mhz in zip(order, clocks, strict=True))
        for order, clocks in zip(plan.schedule.orders, plan.clocks_mhz, strict=True)
    )
    saving = saving_percent(plan.iteration_energy_j, frontier.baseline.iteration_energy_j)
    return PlanRows(rows, label, "plan", plan.iteration_time_s, plan.iteration_energy_j, saving)
