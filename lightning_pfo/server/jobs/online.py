"""Plans for a job that nobody has profiled: clocks are measured while it trains, then it is planned, verified, held.

::

    round    1     2     3    ...   8      9    10    11   ...  20    21
    plan     1410  1380  1350 ...  1200   top  plan  plan  ...  plan  plan   (uniform clocks, windows in turn, the plan)
    reports     |     |     |        |  ^ five rises                | ^ verified

Each round measures clocks on all ranks. A scan measures the same one on all, from the highest down, until the energy
of every instruction has risen `patience` times in a row, or the clocks are over. The adaptive profiler (that of the
one-run optimizer) measures four, fits curves, plans, and measures where the plan is most uncertain, on each rank the
clock that tells most there, until more is not worth it. Where no plan can be made (clients report no energies, say)
the job is told the top clocks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from lightning_pfo.core.energy_valley import EnergyValley
from lightning_pfo.core.errors import PfoError
from lightning_pfo.core.schedules.registry import make_schedule
from lightning_pfo.core.schedules.schedule import PipelineSchedule
from lightning_pfo.planner.adaptive.choice import Choice, bracket, choose, is_worth_more
from lightning_pfo.planner.adaptive.windows import FEWEST_PAIRS
from lightning_pfo.planner.frontier.data import Frontier
from lightning_pfo.planner.frontier.frontier_files import JSON_NAME, load_frontier, save_frontier
from lightning_pfo.planner.frontier.select import select_plan
from lightning_pfo.planner.plan import plan_frontier
from lightning_pfo.planner.profile.profile import Profile
from lightning_pfo.planner.profile.profile_csv import read_profile, write_profile
from lightning_pfo.planner.settings import PlanSettings
from lightning_pfo.server.jobs.answers import ConflictError
from lightning_pfo.server.jobs.director import Work, chosen_beside
from lightning_pfo.server.jobs.job import Job
from lightning_pfo.server.jobs.measurements import Round, energies_of, profile_rows, what_is_missing
from lightning_pfo.server.jobs.messages import JobInfo, PlanRows
from lightning_pfo.server.jobs.verifying import Trial, Verifying

logger = logging.getLogger(__name__)

_PATIENCE = 5
_MOST_ROUNDS = 10
"""Of the adaptive profiler: the first four, and six more at most."""
_STEPS_BETWEEN = 4
"""Between two measurements: until all ranks have reported, have changed their clocks, and these have settled."""
SCAN = "scan"
"""The purpose of plans that are there to be measured."""


class OnlineDirector:
    """Measures, plans, verifies and holds.

    Args:
        folder: Where each job gets a folder with its profile and its frontier.
        schedule: Name of the schedule of all jobs, with a stage on each rank.
        num_microbatches: Microbatches of each iteration.
        settings: How to plan.
        select: Which plan of the frontier.
        clock_step_mhz: Measured clocks are so far apart at least.
        is_adaptive: Whether to measure what tells most rather than all clocks.
        verifying: How to try plans; six pairs of windows unless given.
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
        is_adaptive: bool = False,
        verifying: Verifying | None = None,
        plan: Callable[..., Frontier] = plan_frontier,
    ) -> None:
        self._folder, self._select, self._step_mhz = folder, select, clock_step_mhz
        self._is_adaptive, self._settings = is_adaptive, settings
        self._verifying = verifying or Verifying(FEWEST_PAIRS, 0.005)
        self._plan = partial(plan, settings=settings)
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
        if job.plan is not None and job.plan.trial is not None:
            return self._after_window(job, Trial(**job.plan.trial))
        if job.plan is not None and job.plan.purpose != SCAN:
            return None
        rounds = _scanned(job)
        problem = what_is_missing(rounds[-1], self._schedule(job.info)) if rounds else ""
        if problem:
            return self._top_clocks(job, clocks_mhz[0], problem)
        first_mhz = bracket(clocks_mhz) if self._is_adaptive else clocks_mhz
        measured_mhz = {clock for entry in rounds for clock in entry["clocks_mhz"]}
        further_mhz = [clock for clock in first_mhz if clock not in measured_mhz]
        if further_mhz and (self._is_adaptive or not all_past_their_valley(rounds)):
            return self._scan(job, further_mhz[:1] * job.info.pp_degree)
        return partial(self._measure_more_or_plan, job, clocks_mhz)

    def _after_window(self, job: Job, trial: Trial) -> PlanRows:
        rounds = [one for one in job.measured if one["trial"] is not None and one["trial"]["number"] == trial.number]
        return self._verifying.after(self._frontier_of(job), trial, self._select, rounds)

    def choose(self, job: Job, select: str, straggler_s: float) -> PlanRows:
        """See `Director`."""
        return chosen_beside(self._frontier_of(job), select or self._select, straggler_s)

    def _frontier_of(self, job: Job) -> Frontier:
        if job.job_id not in self._frontiers:
            try:
                self._frontiers[job.job_id] = load_frontier(self._folder / job.job_id / JSON_NAME)
            except PfoError as error:
                raise ConflictError(f"This job has no frontier to choose from: {error}") from error
        return self._frontiers[job.job_id]

    def _measure_more_or_plan(self, job: Job, clocks_mhz: Sequence[int]) -> PlanRows:
        rounds, folder = _scanned(job), self._folder / job.job_id
        try:
            write_profile(folder / "profile.csv", profile_rows(rounds, job.ranks))
            if self._is_adaptive:
                choice = self._choose(read_profile(folder / "profile.csv"), self._schedule(job.info), clocks_mhz)
                each = max(means["iterations"] for means in rounds[-1]["ranks"].values()) + _STEPS_BETWEEN
                if len(rounds) < _MOST_ROUNDS and is_worth_more(choice, None, each):
                    return self._scan(job, choice.next_mhz[0])
                frontier = choice.frontier
            else:
                frontier = self._plan(folder / "profile.csv", schedule=self._schedule(job.info))
            save_frontier(frontier, folder)
            self._frontiers[job.job_id] = frontier
            return self._verifying.begin(frontier, select_plan(frontier, self._select), self._select)
        except PfoError as error:
            return self._top_clocks(job, clocks_mhz[0], str(error))

    def _choose(self, measured: Profile, schedule: PipelineSchedule, clocks_mhz: Sequence[int]) -> Choice:
        return choose(
            measured,
            schedule,
            clocks_mhz,
            select=lambda frontier: select_plan(frontier, self._select),
            settings=self._settings,
            num_next=1,
        )

    def _top_clocks(self, job: Job, top_mhz: int, reason: str) -> PlanRows:
        logger.warning("Job %s gets the top clocks: %s", job.job_id, reason)
        return self._uniform(job, [top_mhz] * job.info.pp_degree, f"top clocks, as there is no plan: {reason}", "plan")

    def _scan(self, job: Job, clocks_mhz: Sequence[int]) -> PlanRows:
        label = " / ".join(map(str, dict.fromkeys(clocks_mhz)))
        return self._uniform(job, clocks_mhz, f"{label} MHz", SCAN)

    def _uniform(self, job: Job, clocks_mhz: Sequence[int], label: str, purpose: str) -> PlanRows:
        orders = zip(self._schedule(job.info).orders, clocks_mhz, strict=True)
        rows = tuple(tuple((inst.type.profile_name, clock_mhz) for inst in order) for order, clock_mhz in orders)
        return PlanRows(rows, label, purpose)


def _scanned(job: Job) -> list[Round]:
    return [entry for entry in job.measured if entry["purpose"] == SCAN]


def clocks_to_scan(supported_mhz: Sequence[int], step_mhz: int) -> list[int]:
    """Clocks from the highest down, each at least a step below the one before."""
    chosen: list[int] = []
    for clock in sorted(supported_mhz, reverse=True):
        if clock > 0 and (not chosen or chosen[-1] - clock >= step_mhz):
            chosen.append(clock)
    return chosen


def all_past_their_valley(rounds: Sequence[Round]) -> bool:
    """Whether the energy of every instruction of every rank has risen so often in a row that it will not fall again."""
    valleys: dict[tuple[int, str], EnergyValley] = {}
    passed: set[tuple[int, str]] = set()
    for key, energy_j in energies_of(sorted(rounds, key=lambda entry: -entry["clocks_mhz"][0])):
        valley = valleys.setdefault(key, EnergyValley(_PATIENCE))
        valley.add(energy_j)
        if valley.passed:  # a later fall is noise
            passed.add(key)
    return bool(valleys) and passed == valleys.keys()
