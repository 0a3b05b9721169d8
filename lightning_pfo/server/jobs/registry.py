"""Many jobs: their names, what follows when all ranks have spoken, and when they are over.

Nothing waits here, and one call is made at a time. Plans that take long to make are `due`: somebody else makes them,
and hands them to `planned`.
"""

from __future__ import annotations

import logging
import re
import secrets
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime

from lightning_pfo.core.errors import PfoError
from lightning_pfo.core.wording import counted, shortened
from lightning_pfo.server.jobs.answers import ConflictError, GoneError, UnavailableError, UnknownError
from lightning_pfo.server.jobs.director import Director, Work
from lightning_pfo.server.jobs.dump import Dump
from lightning_pfo.server.jobs.job import Event, Job, round_is_over, without_plan
from lightning_pfo.server.jobs.messages import JobInfo, PlanRows, RankInfo, Report, VersionedPlan
from lightning_pfo.server.jobs.store import JobStore

logger = logging.getLogger(__name__)

_MOST_METADATA = 64
_AWAITED = {"plan", "failure", "next"}
"""Events after which somebody who waits may get an answer."""


@dataclass(frozen=True)
class JobLimits:
    """How many jobs there are, and for how long.

    Attributes:
        most_jobs: Jobs at a time.
        most_ranks: Ranks of all jobs together.
        idle_s: A job of which nothing was heard for so long is over; Zeus's clients speak when they start only.
        silence_s: The same for jobs all of whose ranks have asked at each step, as ours do.
    """

    most_jobs: int = 1_000
    most_ranks: int = 100_000
    idle_s: float = 604_800.0
    silence_s: float = 3_600.0


class JobRegistry:
    """All jobs of a server.

    Args:
        director: Decides on plans.
        store: Keeps what happens; jobs that it has go on.
        limits: How many jobs, and for how long.
        now: Seconds since some fixed moment.
        dump: Writes files as Zeus does; None writes none.

    Attributes:
        due: Plans that are to be made, by job.
        jobs: The jobs by name.
    """

    def __init__(
        self,
        director: Director,
        store: JobStore,
        limits: JobLimits | None = None,
        *,
        now: Callable[[], float],
        dump: Dump | None = None,
    ) -> None:
        self.jobs: dict[str, Job] = {}
        self.due: dict[str, Work] = {}
        self._director, self._store, self._limits = director, store, limits or JobLimits()
        self._now, self._dump = now, dump
        self._changed: Callable[[str], object] = lambda job_id: None
        self._by_request: dict[str, str] = {}
        for job_id, event in store.events():
            if event["kind"] == "job":
                self._admit(job_id, JobInfo(**event["info"]))
            else:
                self.jobs[job_id].apply(event)
        for job in self.jobs.values():
            self._go_on(job)  # where the server was killed in between

    def on_change(self, changed: Callable[[str], object]) -> None:
        """Call this with the name of a job whenever somebody who waits for it should look again."""
        self._changed = changed

    # What clients ask.

    def register_job(self, info: JobInfo) -> str:
        """A new job; returns its name. Repeated with the same `request_id` it is the same job.

        Raises:
            ConflictError: If there are no plans for such a job.
            UnavailableError: If there are too many jobs.
        """
        if info.request_id in self._by_request:
            return self._by_request[info.request_id]
        self._director.check_job(info)
        num_ranks = info.world_size + sum(job.info.world_size for job in self.jobs.values())
        if len(self.jobs) >= self._limits.most_jobs or num_ranks > self._limits.most_ranks:
            raise UnavailableError(
                f"This server has at most {self._limits.most_jobs:,} jobs and {self._limits.most_ranks:,} ranks at a "
                f"time; it has {counted(len(self.jobs), 'job')}, and this one would make {num_ranks:,} ranks. Delete "
                "jobs that are over."
            )
        words = [
            datetime.now().strftime("%Y-%m-%d-%H-%M-%S"),
            f"dp{info.dp_degree}",
            f"pp{info.pp_degree}",
            f"tp{info.tp_degree}",
            self._director.name,
            # Clients put the name into URLs as it is.
            *([re.sub(r"[^A-Za-z0-9._-]", "_", info.metadata)[:_MOST_METADATA]] if info.metadata else []),
            secrets.token_hex(4),  # two jobs of one second
        ]
        job_id = "+".join(words)
        self._store.append(job_id, [{"kind": "job", "info": asdict(info)}])
        self._admit(job_id, info)
        return job_id

    def register_rank(self, job_id: str, info: RankInfo) -> None:
        """A rank of a job is there.

        Raises:
            Refusal: If there is no such job, or it has no such rank.
        """
        job = self.job(job_id)
        self._record(job, job.register(info))

    def fetch(self, job_id: str, rank: int) -> tuple[RankInfo, VersionedPlan]:
        """The plan of the round a rank is in.

        Raises:
            Refusal: If there is none and will be none.
            NotYet: If others have to do something before.
        """
        job = self.job(job_id)
        plan = job.fetch(rank)
        return job.ranks[rank], plan

    def report(self, job_id: str, report: Report) -> None:
        """A rank has measured its plan.

        Raises:
            Refusal: If it cannot have.
        """
        job = self.job(job_id)
        events = job.report(report)
        if events and self._dump is not None:
            self._dump.keep(job, report)
        self._record(job, events)

    def poll(
        self, job_id: str, rank: int, step: int, version: int, ahead: int
    ) -> tuple[RankInfo, VersionedPlan | None, int]:
        """A rank says at which step it is; returns the plan it follows next and up to which step nothing else changes.

        The plan is None if it is known already.

        Raises:
            Refusal: If there is no such job or rank.
        """
        job = self.job(job_id)
        plan, events = job.poll(rank, step, version, ahead, self._now())
        promised_step = job.contacts[rank].promised_step
        self._record(job, events)
        self._go_on(job)  # after a restart: this may be the last rank that was to be heard of
        return job.ranks[rank], plan, promised_step

    # What operators ask.

    def operate(self, job_id: str, *, select: str | None = None, straggler_s: float | None = None) -> VersionedPlan:
        """Choose another plan of the frontier, or tell of a straggler; returns the plan, with its first step.

        Args:
            job_id: The job.
            select: A selection as of `select_plan`; None keeps the one that was made.
            straggler_s: Iteration time of the slowest replica, 0 if there is none any more; None keeps it.

        Raises:
            Refusal: If there is no such job or plan.
        """
        job = self.job(job_id)
        if job.plan is None or job.plan.purpose == "scan":
            raise ConflictError("Plans are chosen when there is a frontier; this job has none yet.")
        select = job.select if select is None else select
        straggler_s = job.straggler_s if straggler_s is None else straggler_s
        events: list[Event] = [{"kind": "choice", "select": select, "straggler_s": straggler_s}]
        rows = self._director.choose(job, select, straggler_s)
        if (rows.rows, rows.label) != (job.plan.rows, job.plan.label):
            events += job.adopt(rows)
        self._record(job, events)
        assert job.plan is not None
        return job.plan

    def delete(self, job_id: str, reason: str = "it was deleted") -> None:
        """End a job; whoever waits for it is told.

        Raises:
            Refusal: If there is no such job.
        """
        job = self.job(job_id, is_sign_of_life=False)
        self._store.forget(job_id, reason)
        del self.jobs[job_id]
        self.due.pop(job_id, None)
        self._by_request.pop(job.info.request_id, None)
        self._changed(job_id)

    def sweep(self) -> list[str]:
        """End jobs of which nothing is heard any more; returns their names."""
        now_s, over = self._now(), []
        for job_id, job in [*self.jobs.items()]:
            asks = bool(job.askers) and job.askers == job.ranks.keys()
            limit_s = min(self._limits.idle_s, self._limits.silence_s) if asks else self._limits.idle_s
            if now_s - job.seen_s > limit_s:
                self.delete(job_id, f"nothing was heard of it for {limit_s:.0f} s")
                over.append(job_id)
        return over

    # What goes on inside.

    def job(self, job_id: str, *, is_sign_of_life: bool = True) -> Job:
        """A job by name.

        Raises:
            UnknownError: If there was never such a job.
            GoneError: If it is over.
        """
        job = self.jobs.get(job_id)
        if job is None:
            reason = self._store.why_gone(job_id)
            if reason is not None:
                raise GoneError(f"This job is over: {reason}. Register it anew.")
            raise UnknownError(f"There is no job {shortened(job_id)}. Register it first; POST /register_job names it.")
        if is_sign_of_life:
            job.seen_s = self._now()
        return job

    @property
    def scheduler(self) -> str:
        """How plans come about, as it is part of the names of jobs."""
        return self._director.name

    def seconds_since(self, job: Job) -> float:
        """Time since anything was heard of a job."""
        return max(0.0, self._now() - job.seen_s)

    def close(self) -> None:
        """Let another server have the state."""
        self._store.close()

    def planned(self, job_id: str, made: PlanRows | PfoError) -> None:
        """A plan that was due is made, or cannot be made."""
        job = self.jobs.get(job_id)
        if job is not None and self.due.pop(job_id, None) is not None:
            self._take(job, made)

    def _admit(self, job_id: str, info: JobInfo) -> None:
        self.jobs[job_id] = Job(job_id, info, now_s=self._now())
        if info.request_id:
            self._by_request[info.request_id] = job_id

    def _record(self, job: Job, events: Sequence[Event]) -> None:
        if not events:
            return
        self._store.append(job.job_id, events)
        for event in events:
            job.apply(event)
            if self._dump is not None:
                self._dump.note(job, event)
        self._go_on(job)
        if any(event["kind"] in _AWAITED for event in events):
            self._changed(job.job_id)

    def _go_on(self, job: Job) -> None:
        """Decide what follows if all ranks are there, or have reported."""
        if job.job_id in self.due or not (without_plan(job) or round_is_over(job)):
            return
        try:
            decision = self._director.decide(job)
        except PfoError as error:
            self._take(job, error)
            return
        if decision is None:
            self._record(job, [{"kind": "next"}])
        elif isinstance(decision, PlanRows):
            self._take(job, decision)
        else:
            self.due[job.job_id] = decision

    def _take(self, job: Job, made: PlanRows | PfoError) -> None:
        if isinstance(made, PlanRows):
            try:
                self._record(job, job.adopt(made))
                return
            except ConflictError as error:
                made = error
        logger.warning("Job %s: %s", job.job_id, made)
        if job.plan is None:
            self._record(job, [{"kind": "failure", "text": str(made)}])
        else:  # it has a plan, which stays
            self._record(job, [{"kind": "next"}])
