"""Plans for a job that nobody has profiled: a scan while it trains, then a frontier, then its plan, which is held.

::

    round    1     2     3    ...   8      9             10 ...
    plan     1410  1380  1350 ...  1200    no_slowdown   no_slowdown   (uniform clocks, then the frontier's plan)
    reports     |     |     |        |  ^ five rises        | the first round under the plan verifies it

Each round measures one clock on all ranks, from the highest down, until the energy of every instruction has risen
`patience` times in a row, or the clocks are over. Time that a rank does not compute is waiting, and what it uses then
is the blocking power. Where no plan can be made (clients report no energies, say) the job is told the top clocks.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from lightning_pfo.core.energy_valley import EnergyValley
from lightning_pfo.core.errors import PfoError
from lightning_pfo.core.schedules.registry import make_schedule
from lightning_pfo.core.schedules.schedule import PipelineSchedule
from lightning_pfo.core.wording import counted
from lightning_pfo.planner.frontier.data import Frontier
from lightning_pfo.planner.frontier.frontier_files import JSON_NAME, load_frontier, save_frontier
from lightning_pfo.planner.plan import plan_frontier
from lightning_pfo.planner.profile.profile_csv import write_profile
from lightning_pfo.planner.settings import PlanSettings
from lightning_pfo.server.jobs.answers import ConflictError
from lightning_pfo.server.jobs.director import Work, chosen_beside, chosen_rows
from lightning_pfo.server.jobs.job import Job
from lightning_pfo.server.jobs.messages import JobInfo, PlanRows

logger = logging.getLogger(__name__)

_PATIENCE = 5
_LEAST_WAITING = 0.01
"""Where a rank waits for less than this share of an iteration, what it uses meanwhile is not told by a difference."""


class OnlineDirector:
    """Scans, plans and holds.

    Args:
        folder: Where each job gets a folder with its profile and its frontier.
        schedule: Name of the schedule of all jobs, with a stage on each rank.
        num_microbatches: Microbatches of each iteration.
        settings: How to plan.
        select: Which plan of the frontier.
        clock_step_mhz: Measured clocks are so far apart at least.
        plan: Plans a profile; another one in tests.
    """

    name = "InstructionProfiler"

    def __init__(
        self,
        folder: Path,
        *,
        schedule: str,
        num_microbatches: int,
        settings: PlanSettings,
        select: str,
        clock_step_mhz: int = 30,
        plan: Callable[..., Frontier] = plan_frontier,
    ) -> None:
        self._folder, self._select, self._step_mhz = folder, select, clock_step_mhz
        self._plan = partial(plan, settings=settings, num_microbatches=num_microbatches, schedule=schedule)
        self._schedule_of = partial(make_schedule, schedule, num_microbatches=num_microbatches)
        self._frontiers: dict[str, Frontier] = {}

    def check_job(self, info: JobInfo) -> None:
        """See `Director`."""
        self._schedule(info)

    def _schedule(self, info: JobInfo) -> PipelineSchedule:
        try:
            schedule = self._schedule_of(num_ranks=info.pp_degree)
        except PfoError as error:
            raise ConflictError(str(error)) from error
        if schedule.num_stages != info.pp_degree:
            raise ConflictError(
                f"Scans are for schedules with one stage on each rank; {schedule.name!r} has {schedule.num_stages} "
                f"stages on {info.pp_degree} ranks. Use schedule=1f1b, or profile and plan before and serve the "
                "frontier."
            )
        return schedule

    def decide(self, job: Job) -> PlanRows | Work | None:
        """See `Director`."""
        clocks_mhz = clocks_to_scan(job.common_clocks_mhz, self._step_mhz)
        if not clocks_mhz:
            raise ConflictError("A scan measures clocks that the GPUs of all ranks support; these have none in common.")
        if job.plan is not None and job.plan.purpose != "scan":
            return None
        rounds = [entry for entry in job.measured if entry["purpose"] == "scan"]
        problem = _what_is_missing(rounds[-1], job, self._schedule(job.info)) if rounds else ""
        if problem:
            return self._top_clocks(job, clocks_mhz[0], problem)
        measured_mhz = {entry["clock_mhz"] for entry in rounds}
        further_mhz = [clock for clock in clocks_mhz if clock not in measured_mhz]
        if further_mhz and not all_past_their_valley(rounds):
            return self._uniform(job, further_mhz[0], f"{further_mhz[0]} MHz", "scan")
        return partial(self._make_plan, job, clocks_mhz[0])

    def choose(self, job: Job, select: str, straggler_s: float) -> PlanRows:
        """See `Director`."""
        if job.job_id not in self._frontiers:
            try:
                self._frontiers[job.job_id] = load_frontier(self._folder / job.job_id / JSON_NAME)
            except PfoError as error:
                raise ConflictError(f"This job has no frontier to choose from: {error}") from error
        return chosen_beside(self._frontiers[job.job_id], select or self._select, straggler_s)

    def _make_plan(self, job: Job, top_mhz: int) -> PlanRows:
        rounds = [entry for entry in job.measured if entry["purpose"] == "scan"]
        folder = self._folder / job.job_id
        try:
            write_profile(folder / "profile.csv", profile_rows(rounds, job))
            frontier = self._plan(folder / "profile.csv")
            save_frontier(frontier, folder)
            self._frontiers[job.job_id] = frontier
            return chosen_rows(frontier, self._select)
        except PfoError as error:
            return self._top_clocks(job, top_mhz, str(error))

    def _top_clocks(self, job: Job, top_mhz: int, reason: str) -> PlanRows:
        logger.warning("Job %s gets the top clocks: %s", job.job_id, reason)
        return self._uniform(job, top_mhz, f"top clocks, as there is no plan: {reason}", "plan")

    def _uniform(self, job: Job, clock_mhz: int, label: str, purpose: str) -> PlanRows:
        orders = self._schedule(job.info).orders
        return PlanRows(
            tuple(tuple((inst.type.profile_name, clock_mhz) for inst in order) for order in orders), label, purpose
        )


def clocks_to_scan(supported_mhz: Sequence[int], step_mhz: int) -> list[int]:
    """Clocks from the highest down, each at least a step below the one before."""
    chosen: list[int] = []
    for clock in sorted(supported_mhz, reverse=True):
        if clock > 0 and (not chosen or chosen[-1] - clock >= step_mhz):
            chosen.append(clock)
    return chosen


def all_past_their_valley(rounds: Sequence[dict[str, Any]]) -> bool:
    """Whether the energy of every instruction of every rank has risen so often in a row that it will not fall again."""
    valleys: dict[tuple[int, str], EnergyValley] = {}
    passed: set[tuple[int, str]] = set()
    for rank, name, (_, energy_j) in _measurements(sorted(rounds, key=lambda entry: -entry["clock_mhz"])):
        valley = valleys.setdefault((rank, name), EnergyValley(_PATIENCE))
        valley.add(energy_j)
        if valley.passed:  # a later fall is noise
            passed.add((rank, name))
    return bool(valleys) and passed == valleys.keys()


def profile_rows(rounds: Sequence[dict[str, Any]], job: Job) -> list[dict[str, Any]]:
    """The lines of a profile: what each rank has measured at each clock, the last time it did."""
    latest = {entry["clock_mhz"]: entry for entry in rounds}
    waiting_w = {
        (mhz, rank): _waiting_power_w(means) for mhz, one in latest.items() for rank, means in one["ranks"].items()
    }
    known_w = [power_w for power_w in waiting_w.values() if power_w is not None]
    usual_w = math.fsum(known_w) / len(known_w) if known_w else 0.0
    rows = []
    for clock_mhz, entry in sorted(latest.items(), reverse=True):
        for rank, name, (time_s, energy_j) in _measurements([entry]):
            info, power_w = job.ranks[rank], waiting_w[clock_mhz, rank]
            rows.append(
                {
                    "rank": rank,
                    "dp_rank": info.dp_rank,
                    "pp_rank": info.pp_rank,
                    "tp_rank": info.tp_rank,
                    "stage": info.pp_rank,
                    "instruction": name,
                    "frequency": clock_mhz,
                    "time": time_s,
                    "energy": energy_j,
                    "samples": entry["ranks"][rank]["counts"][name],
                    "p2p_blocking_power_w": usual_w if power_w is None else power_w,
                }
            )
    return sorted(rows, key=lambda row: (row["stage"], row["rank"], row["instruction"] != "forward", -row["frequency"]))


def _waiting_power_w(means: dict[str, Any]) -> float | None:
    """Power while a rank waits: what an iteration takes and uses beyond its instructions; None where that is little."""
    time_s, energy_j = means["iteration"]
    if time_s is None or energy_j is None or not means["iterations"]:
        return None
    waited_s, waited_j = time_s, energy_j
    for name, (each_s, each_j) in means["instructions"].items():
        number = means["counts"][name] / means["iterations"]
        waited_s -= number * each_s
        waited_j -= number * each_j
    return max(waited_j, 0.0) / waited_s if waited_s > _LEAST_WAITING * time_s else None


def _measurements(rounds: Sequence[dict[str, Any]]) -> Iterator[tuple[int, str, list[float]]]:
    for entry in rounds:
        for rank, means in entry["ranks"].items():
            for name in ("forward", "backward"):
                yield int(rank), name, means["instructions"][name]


def _what_is_missing(entry: dict[str, Any], job: Job, schedule: PipelineSchedule) -> str:
    """Why a round of reports is no measurement of a clock; empty if it is one."""
    for rank, means in sorted(entry["ranks"].items()):
        for name in ("forward", "backward"):
            time_s, energy_j = means["instructions"].get(name, (None, None))
            if not time_s or energy_j is None:
                return f"rank {rank} reports no time_breakdown and energy_breakdown of {name!r}."
            expected = schedule.num_microbatches * means["iterations"]
            if means["counts"][name] != expected:
                return (
                    f"rank {rank} reports {counted(means['counts'][name], name)} in "
                    f"{counted(means['iterations'], 'iteration')}, but num_microbatches={schedule.num_microbatches}."
                )
    return ""
