"""One job as a state machine: ranks register, get a plan, report on it, and get the next one.

::

    rank 0   register ......... plan 1 | report .......... plan 2 | ...      (Zeus's routes: each waits for all ranks)
    rank 1        register .... plan 1 |    report ....... plan 2 | ...
                           ^ all are here            ^ all have reported

Barriers are sets of rank numbers, so that a repeated or stray request counts once or not at all. A rank that asks again
gets the same answer. Clients that know versions ask at each step (`poll`) and wait for nobody: they are told up to
which step nothing will change, and a new plan begins after all such promises, so that all ranks of a pipeline change at
the same iteration. No rank begins a step that it was not promised, and a step that was promised may have begun: so
that is the earliest there is for ranks that do not wait for each other::

    rank 0   step 7: nothing changes up to 8              step 8: plan 2 from step 9 on
    rank 1       step 7: nothing changes up to 8              step 8: plan 2 from step 9 on
                                            ^ plan 2 is chosen
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from lightning_pfo.core.wording import counted, listed
from lightning_pfo.server.jobs.answers import ConflictError, NotYet, UnknownError
from lightning_pfo.server.jobs.messages import JobInfo, PlanRows, RankInfo, Report, VersionedPlan
from lightning_pfo.server.jobs.plan_sequence import PlanSequence
from lightning_pfo.server.jobs.wire import check_runs

Event = dict[str, Any]
"""What has changed in a job, as JSON: `kind` and what belongs to it."""

_UNHEARD = "not heard of since the server was started"
_MOST_MEASURED = 200
"""Rounds whose measurements are kept; a scan has one for each clock."""


@dataclass
class Contact:
    """What is known of a rank that asks for plans by version; not kept beyond the server's own life.

    Attributes:
        step: The step at which it asked last.
        promised_step: Up to this step it was promised that nothing changes.
        version: The version it has.
        seen_s: When it asked last.
    """

    step: int
    promised_step: int
    version: int
    seen_s: float


class Job:
    """One job: what happened so far, and what it answers.

    Methods that change it return the events that do so, and change nothing; `apply` does. A method that raises has
    changed nothing either.

    Attributes:
        job_id: Its name.
        info: What rank 0 has told.
        ranks: Those that have registered, by number.
        plans: What ranks follow, now and next.
        round: How often all ranks have reported.
        measured: What they have reported, round by round: `version`, `label`, `purpose` and `trial` of the plan, the
            first of its `clocks_mhz` at each place, and the means of `ranks`.
        failure: Why there is no plan; empty while all is well.
        select: Which plan of the frontier was asked for; empty for what the server was started with.
        straggler_s: Iteration time of a replica that all others wait for; 0 if there is none.
        askers: Ranks that have asked for plans by version.
        contacts: When they did last, since this server was started.
        seen_s: When anybody of it was heard of last.
    """

    def __init__(self, job_id: str, info: JobInfo, *, now_s: float = 0.0) -> None:
        self.job_id, self.info = job_id, info
        self.ranks: dict[int, RankInfo] = {}
        self.plans = PlanSequence()
        self.round = 0
        self.measured: list[dict[str, Any]] = []
        self.failure = ""
        self.select = ""
        self.straggler_s = 0.0
        self.askers: set[int] = set()
        self.contacts: dict[int, Contact] = {}
        self.seen_s = now_s
        self.reported: dict[int, str] = {}
        self._reported_before: dict[int, str] = {}
        self._means: dict[int, dict[str, Any]] = {}

    @property
    def plan(self) -> VersionedPlan | None:
        """The latest plan; None before all have registered."""
        return self.plans.latest

    @property
    def unheard(self) -> set[int]:
        """Ranks that ask by version and have not since the server was started: nobody knows what they were promised."""
        return self.askers - self.contacts.keys()

    @property
    def missing(self) -> set[int]:
        """Ranks that have not registered."""
        return set(range(self.info.world_size)) - self.ranks.keys()

    @property
    def common_clocks_mhz(self) -> tuple[int, ...]:
        """Clocks that the GPUs of all registered ranks support, highest first."""
        common = set.intersection(*(set(info.clocks_mhz) for info in self.ranks.values()))
        return tuple(sorted(common, reverse=True))

    # What ranks ask.

    def register(self, info: RankInfo) -> list[Event]:
        """A rank says where it is; saying it again changes nothing.

        Raises:
            ConflictError: If the job has no such rank, or another one is there.
        """
        job = self.info
        if info.rank >= job.world_size:
            raise ConflictError(
                f"A rank of this job is between 0 and {job.world_size - 1}; got rank {info.rank}. Register it with the "
                "job it belongs to."
            )
        limits = {"dp_rank": job.dp_degree, "pp_rank": job.pp_degree, "tp_rank": job.tp_degree}
        for name, degree in limits.items():
            if getattr(info, name) >= degree:
                raise ConflictError(
                    f"{name} is between 0 and {degree - 1} in this job; rank {info.rank} has {getattr(info, name)}."
                )
        known = self.ranks.get(info.rank)
        if known == info:
            return []
        if known is not None:
            raise ConflictError(
                f"Rank {info.rank} has registered with other values. A job that is started again is a new job: have "
                "rank 0 register it."
            )
        taken = next((other for other in self.ranks.values() if other.place == info.place), None)
        if taken is not None:
            raise ConflictError(
                f"Each rank has a place of its own; rank {taken.rank} has registered dp_rank={info.dp_rank}, "
                f"pp_rank={info.pp_rank}, tp_rank={info.tp_rank} already, and rank {info.rank} says the same."
            )
        if self.plan is not None:
            self._check_runs(self.plan, info)
        return [{"kind": "rank", **asdict(info)}]

    def fetch(self, rank: int) -> VersionedPlan:
        """The plan of the round that a rank is in; the same however often it asks.

        Raises:
            UnknownError: If the job has no such rank.
            ConflictError: If there will be no plan.
            NotYet: If it depends on others.
        """
        self._check_rank(rank)
        if self.failure:
            raise ConflictError(self.failure)
        if self.missing:
            raise NotYet(self.missing, "not registered")
        if self.plan is None:
            raise NotYet((), "the plan is being made")
        if rank in self.reported:
            waiting_for = self.ranks.keys() - self.reported.keys()
            if waiting_for:
                raise NotYet(waiting_for, "not reported")
            raise NotYet(self.unheard, _UNHEARD) if self.unheard else NotYet((), "the next plan is being made")
        return self.plan

    def report(self, report: Report) -> list[Event]:
        """A rank says what it has measured in this round; saying it again changes nothing.

        Raises:
            UnknownError: If the job has no such rank.
            NotYet: If the rank is not registered, or there is no plan yet to report on.
            ConflictError: If the rank has reported something else already, or on a plan that is not there.
        """
        self._check_rank(report.rank)
        if report.rank not in self.ranks:
            raise ConflictError(f"A rank registers before it reports; rank {report.rank} has not.")
        if self.plan is None:
            raise ConflictError(
                "Measurements are of a plan, and this job has none yet: "
                + (self.failure or f"{counted(len(self.missing), 'rank')} ({listed(sorted(self.missing))}) missing.")
            )
        version = self.plan.version if report.version is None else report.version
        if version > self.plan.version:
            raise ConflictError(f"The latest plan of this job has version {self.plan.version}; got version {version}.")
        if version < self.plan.version or report.digest in (
            self.reported.get(report.rank),
            self._reported_before.get(report.rank),
        ):
            return []  # a late or repeated report of what is over
        if report.rank in self.reported:
            raise ConflictError(
                f"Rank {report.rank} has reported on this round with other values. It fetches the next plan before it "
                "reports again."
            )
        event = {"kind": "report", "rank": report.rank, "digest": report.digest, "means": report.means()}
        if self.reported.keys() | {report.rank} == self.ranks.keys():
            return [event, {"kind": "round"}]
        return [event]

    def poll(
        self, rank: int, step: int, version: int, ahead: int, now_s: float
    ) -> tuple[VersionedPlan | None, list[Event]]:
        """A rank that knows versions says at which step it is; `contacts` then knows what it is promised.

        Returns:
            The plan that it follows next, if it does not know it, and what has changed.

        Raises:
            UnknownError: If the job has no such rank, or it has not registered.
        """
        self._check_rank(rank)
        if rank not in self.ranks:
            raise UnknownError(f"A rank registers before it asks for plans; rank {rank} has not.")
        plan, over_at = self.plans.next_for(version, step)
        promised_step = step + ahead if over_at is None else min(step + ahead, over_at - 1)
        if rank in self.contacts:
            promised_step = max(promised_step, self.contacts[rank].promised_step)
        self.contacts[rank] = Contact(step, promised_step, version, now_s)
        if not self.unheard:
            self.plans.forget_before(min(contact.step for contact in self.contacts.values()))
        return plan, [] if rank in self.askers else [{"kind": "asker", "rank": rank}]

    # What the server decides.

    def adopt(self, rows: PlanRows) -> list[Event]:
        """Make a plan the latest one, from the first step on up to which nobody was promised that nothing changes.

        Raises:
            ConflictError: If ranks that ask by version have not been heard of since the server was started, so that
                nobody knows what they were promised; or if the plan is not for this job.
        """
        if self.unheard and self.plan is not None:
            raise ConflictError(
                f"Plans change when all ranks have been heard of since the server was started; not yet "
                f"{counted(len(self.unheard), 'rank')} ({listed(sorted(self.unheard))}). Try again in some seconds."
            )
        is_by_rank = self._is_by_rank(len(rows.rows))
        promised_step = max((contact.promised_step for contact in self.contacts.values()), default=-1)
        plan = VersionedPlan(
            **{name: getattr(rows, name) for name in PlanRows.__dataclass_fields__},
            version=1 if self.plan is None else self.plan.version + 1,
            from_step=0 if self.plan is None else promised_step + 1,
            is_by_rank=is_by_rank,
        )
        for info in self.ranks.values():
            self._check_runs(plan, info)
        return [{"kind": "plan", **asdict(plan)}]

    def _is_by_rank(self, num_rows: int) -> bool:
        job = self.info
        if num_rows == job.pp_degree:
            return False
        if num_rows == job.world_size:
            return True
        raise ConflictError(
            f"A plan has a row for each place in the pipeline or for each rank; this one has {num_rows}, the job "
            f"pp_degree={job.pp_degree} and world_size={job.world_size}. Serve a plan for {job.pp_degree} stages."
        )

    def _check_runs(self, plan: VersionedPlan, info: RankInfo) -> None:
        row = plan.row_of(info)
        lacking = sorted({clock_mhz for _, clock_mhz in row} - set(info.clocks_mhz) - {0})
        if info.clocks_mhz and lacking:
            raise ConflictError(
                f"A plan uses clocks its GPU supports; that of rank {info.rank} does not support {listed(lacking)} MHz "
                f"(it supports {len(info.clocks_mhz)} clocks from {min(info.clocks_mhz)} to {max(info.clocks_mhz)} "
                "MHz). Profile and plan on the GPU model you train on."
            )
        if info.pipe_schedule:
            check_runs(row, info.pipe_schedule)

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < self.info.world_size:
            raise UnknownError(f"The ranks of this job are 0 to {self.info.world_size - 1}; there is no rank {rank}.")

    # What has happened.

    def apply(self, event: Mapping[str, Any]) -> None:
        """Change as an event says; events come from the methods above, or from the store."""
        rest = {key: value for key, value in event.items() if key != "kind"}
        _APPLY[event["kind"]](self, rest)

    def _apply_rank(self, event: Event) -> None:
        lists = {name: tuple(event[name]) for name in ("clocks_mhz", "pipe_schedule")}
        self.ranks[event["rank"]] = RankInfo(**{**event, **lists})

    def _apply_plan(self, event: Event) -> None:
        rows = tuple(tuple((str(name), int(mhz)) for name, mhz in row) for row in event["rows"])
        self.plans.add(VersionedPlan(**{**event, "rows": rows}))
        self._begin_round()

    def _apply_report(self, event: Event) -> None:
        self.reported[event["rank"]] = event["digest"]
        self._means[event["rank"]] = event["means"]

    def _apply_round(self, event: Event) -> None:
        assert self.plan is not None  # reports are of a plan
        self.round += 1
        entry = {name: getattr(self.plan, name) for name in ("version", "label", "purpose", "trial")}
        clocks_mhz = [row[0][1] for row in self.plan.rows]
        self.measured.append({**entry, "clocks_mhz": clocks_mhz, "ranks": self._means})
        del self.measured[:-_MOST_MEASURED]

    def _apply_next(self, event: Event) -> None:
        self._begin_round()

    def _begin_round(self) -> None:
        self._reported_before = {**self._reported_before, **self.reported}
        self.reported, self._means = {}, {}

    def _apply_failure(self, event: Event) -> None:
        self.failure = event["text"]

    def _apply_choice(self, event: Event) -> None:
        self.select, self.straggler_s = event["select"], event["straggler_s"]

    def _apply_asker(self, event: Event) -> None:
        self.askers.add(event["rank"])


_APPLY: dict[str, Callable[[Job, Event], None]] = {
    "rank": Job._apply_rank,
    "plan": Job._apply_plan,
    "report": Job._apply_report,
    "round": Job._apply_round,
    "next": Job._apply_next,
    "failure": Job._apply_failure,
    "choice": Job._apply_choice,
    "asker": Job._apply_asker,
}


def without_plan(job: Job) -> bool:
    """Whether a job waits for its first plan, and nothing else."""
    return job.plan is None and not job.failure and not job.missing


def round_is_over(job: Job) -> bool:
    """Whether all ranks have reported, and a plan can follow."""
    has_reported = job.plan is not None and job.reported.keys() == job.ranks.keys()
    return has_reported and not job.failure and not job.unheard
