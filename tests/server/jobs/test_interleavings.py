"""Ranks, retries, crashes and operators in any order: nobody waits for what cannot happen, or gets another's plan."""

import contextlib
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from lightning_pfo.server.jobs.answers import ConflictError, GoneError, NotYet, UnknownError
from lightning_pfo.server.jobs.messages import JobInfo, PlanRows, RankInfo, Report
from lightning_pfo.server.jobs.registry import JobLimits, JobRegistry
from lightning_pfo.server.jobs.store import JobStore

pytestmark = pytest.mark.slow

NUM_SCANS, IDLE_S, AHEAD = 2, 1000.0, 3
LATE = 5
"""Rounds after which nothing new is planned, beside those that are asked for."""


def clock_of(pp_rank, number):
    """Says whose plan it is, and the how manieth."""
    return 1000 + 10 * number + pp_rank


class KilledError(Exception):
    """The server is not there any more."""


class ScanningDirector:
    """Three plans in three rounds, and others when asked."""

    name = "Test"

    def check_job(self, info):
        pass

    def decide(self, job):
        number = 0 if job.plan is None else int(job.plan.label) + 1
        return self.rows(job, number) if number <= NUM_SCANS else None

    def choose(self, job, select, straggler_s):
        return self.rows(job, int(select))

    def rows(self, job, number):
        names = "forward", "backward"
        rows = tuple(tuple((name, clock_of(pp, number)) for name in names) for pp in range(job.info.pp_degree))
        return PlanRows(rows, str(number), "plan")


class Model:
    """What a job must be like, told without the code under test."""

    def __init__(self, pp, dp):
        self.pp, self.dp, self.world = pp, dp, pp * dp
        self.registered, self.reported, self.numbers = set(), set(), []
        self.promised, self.asked, self.heard, self.seen = {}, set(), set(), {}
        self.is_over, self.last_report, self.heard_s = False, {}, 0.0

    def pp_rank(self, rank):
        return rank % self.pp

    def info(self, rank, clocks=(1410, 1005)):
        return RankInfo(rank, rank // self.pp, self.pp_rank(rank), 0, clocks and ())

    @property
    def number(self):
        return self.numbers[-1] if self.numbers else None

    def go_on(self):
        """What follows when all have reported, and nobody's promises are forgotten."""
        if self.reported == set(range(self.world)) and self.asked <= self.heard:
            self.reported = set()
            if self.number < NUM_SCANS:
                self.numbers.append(self.number + 1)


class Server(RuleBasedStateMachine):
    @initialize()
    def start(self):
        self.folder = Path(tempfile.mkdtemp())
        self.now_s, self.models, self.count = 0.0, {}, 0
        self.begin()

    def begin(self):
        self.store = JobStore(self.folder / "state.sqlite")
        limits = JobLimits(idle_s=IDLE_S, silence_s=IDLE_S)
        self.registry = JobRegistry(ScanningDirector(), self.store, limits, now=lambda: self.now_s)

    def teardown(self):
        """From any state all living jobs get on, if only their ranks do what they are missed for."""
        for job_id, model in self.models.items():
            if model.is_over:
                continue
            for _ in range(3 * model.world + 2):
                waiting = self.missing(job_id, model)
                if not waiting:
                    break
                for rank in waiting:
                    if rank not in model.registered:
                        self.registry.register_rank(job_id, model.info(rank))
                        model.registered.add(rank)
                    elif rank in model.asked - model.heard:
                        self.registry.poll(job_id, rank, 0, 0, AHEAD)
                        model.heard.add(rank)
                    else:
                        self.registry.report(job_id, Report(rank, (float(self.count),), ()))
                        self.count += 1
            assert not self.missing(job_id, model)
        self.registry.close()
        shutil.rmtree(self.folder)

    def missing(self, job_id, model):
        found = set()
        for rank in range(model.world):
            try:
                self.registry.fetch(job_id, rank)
            except NotYet as missing:
                found |= set(missing.missing) or {"the server"}  # which makes plans at once here
        return found

    jobs = st.integers(0, 1)
    ranks = st.sampled_from([0, 0, 0, 1, 1, 2, 3, 4])

    def job(self, which):
        job_id = list(self.models)[which % len(self.models)]
        model = self.models[job_id]
        return job_id, model

    @precondition(lambda self: len(self.models) < 2)
    @rule(pp=st.integers(1, 2), dp=st.integers(1, 2), repeats=st.integers(1, 2))
    def register_job(self, pp, dp, repeats):
        info = JobInfo(pp, dp, 1, pp * dp, "same/metadata", f"request {len(self.models)}")
        names = {self.registry.register_job(info) for _ in range(repeats)}
        (job_id,) = names
        assert job_id not in self.models
        assert "/" not in job_id
        self.models[job_id] = Model(pp, dp)
        self.models[job_id].heard_s = self.now_s

    @precondition(lambda self: self.models)
    @rule(which=jobs, rank=ranks, lies=st.booleans())
    def register_rank(self, which, rank, lies):
        job_id, model = self.job(which)
        info = RankInfo(rank, 0, 0, 0, (1,)) if lies else model.info(rank)
        expected = None
        if model.is_over:
            expected = GoneError
        elif rank >= model.world or (lies and (rank in model.registered or self.place_is_taken(model))):
            expected = ConflictError
        elif lies:
            return  # a rank that is first with wrong values cannot be told from one that is right
        self.expect(expected, lambda: self.registry.register_rank(job_id, info))
        if expected is None:
            model.registered.add(rank)
            for stranger in set(range(model.world)) - model.registered:
                is_here, is_there = replace(info, rank=stranger), replace(model.info(stranger), rank=rank)
                for claim in (is_here, is_there):
                    self.expect(ConflictError, lambda claim=claim: self.registry.register_rank(job_id, claim))
            if model.registered == set(range(model.world)) and model.number is None:
                model.numbers.append(0)
        self.touch(model)

    @staticmethod
    def place_is_taken(model):
        return 0 in model.registered

    @precondition(lambda self: self.models)
    @rule(which=jobs)
    def all_register(self, which):
        for rank in range(self.job(which)[1].world):
            self.register_rank(which, rank, lies=False)

    @precondition(lambda self: self.models)
    @rule(which=jobs)
    def all_report(self, which):
        for rank in range(self.job(which)[1].world):
            if rank not in self.job(which)[1].reported:
                self.report(which, rank, repeats=1, is_old=False)

    @precondition(lambda self: self.models)
    @rule(which=jobs, steps=st.integers(0, 3))
    def all_poll(self, which, steps):
        for rank in range(self.job(which)[1].world):
            self.poll(which, rank, steps + rank)

    @precondition(lambda self: self.models)
    @rule(which=jobs)
    def all_fetch(self, which):
        for rank in range(self.job(which)[1].world):
            self.fetch(which, rank)

    @precondition(lambda self: self.models)
    @rule(which=jobs, rank=ranks)
    def fetch(self, which, rank):
        job_id, model = self.job(which)
        everybody = set(range(model.world))
        try:
            info, plan = self.registry.fetch(job_id, rank)
        except GoneError:
            assert model.is_over
        except UnknownError:
            assert rank >= model.world
        except NotYet as waiting:
            missing = set(waiting.missing)
            unregistered = everybody - model.registered
            assert unregistered or rank in model.reported
            assert missing == (unregistered or everybody - model.reported or model.asked - model.heard)
        else:
            assert not model.is_over
            assert info.rank == rank
            assert rank not in model.reported
            assert model.registered == everybody
            assert {mhz for _, mhz in plan.row_of(info)} == {clock_of(model.pp_rank(rank), model.number)}
        self.touch(model)

    @precondition(lambda self: self.models)
    @rule(
        which=jobs, rank=ranks, repeats=st.integers(1, 2), is_old=st.booleans(), told=st.sampled_from([None, 0, -1, 1])
    )
    def report(self, which, rank, repeats, is_old, told=None):
        """Reports arrive twice, and late, and of other versions."""
        job_id, model = self.job(which)
        report = model.last_report.get(rank) if is_old else None
        if report is None:
            version = None if told is None else len(model.numbers) + told
            report, is_old = Report(rank, (float(self.count),), (), version=version), False
            self.count += 1
        is_late = not is_old and told == -1
        expected = None
        if model.is_over:
            expected = GoneError
        elif rank >= model.world:
            expected = UnknownError
        elif model.number is None or (not is_old and (told == 1 or (rank in model.reported and not is_late))):
            expected = ConflictError
        for _ in range(repeats):
            self.expect(expected, lambda: self.registry.report(job_id, report))
        if expected is None:
            unknown = Report(rank, (float(self.count),), (), version=1_000)
            self.expect(ConflictError, lambda: self.registry.report(job_id, unknown))
        if expected is None and not is_old and not is_late:
            model.reported.add(rank)
            model.last_report[rank] = report
            model.go_on()
        self.touch(model)

    @precondition(lambda self: self.models)
    @rule(which=jobs, rank=ranks, steps=st.integers(-2, 3))
    def poll(self, which, rank, steps):
        """Some questions arrive after later ones."""
        job_id, model = self.job(which)
        step = max(0, model.promised.get(rank, AHEAD) - AHEAD + steps)
        expected = GoneError if model.is_over else UnknownError if rank not in model.registered else None
        if expected is not None:
            self.expect(expected, lambda: self.registry.poll(job_id, rank, step, 0, AHEAD))
        else:
            known = model.seen.get(rank, 0)
            held = 0 if rank in model.heard else model.promised.get(rank, 0) - step  # as a new server is told
            info, plan, unchanged_until = self.registry.poll(job_id, rank, step, known, max(AHEAD, held))
            if plan is None:
                assert known == len(model.numbers)
                assert unchanged_until >= step + AHEAD
            else:
                number = model.numbers[plan.version - 1]
                assert {mhz for _, mhz in plan.row_of(info)} == {clock_of(model.pp_rank(rank), number)}
                assert plan.version > known
                if plan.version > 1:
                    assert plan.from_step > model.promised.get(rank, -1)
                model.seen[rank] = plan.version
            assert unchanged_until >= max(step, model.promised.get(rank, -1))
            model.promised[rank] = unchanged_until
            model.asked.add(rank)
            model.heard.add(rank)
            model.go_on()
        self.touch(model)

    @precondition(lambda self: self.models)
    @rule(which=jobs, number=st.integers(3, LATE))
    def operate(self, which, number):
        job_id, model = self.job(which)
        expected = GoneError if model.is_over else None
        if not model.is_over and (model.number is None or (model.number != number and not model.asked <= model.heard)):
            expected = ConflictError
        plan = self.expect(expected, lambda: self.registry.operate(job_id, select=str(number)))
        if plan is not None and model.number != number:
            assert plan.from_step > max(model.promised.values(), default=-1)
            model.numbers.append(number)
            model.reported = set()
        self.touch(model)

    @rule(then_report=st.booleans())
    def crash(self, then_report):
        """Whatever was answered is kept: the store is read by a new server."""
        self.store.close()
        self.begin()
        for model in self.models.values():
            model.heard = set()
            self.touch(model)  # the new server hears of nobody before it has begun
        for which in range(len(self.models) * then_report):
            self.all_report(which)
            self.all_fetch(which)

    @precondition(lambda self: self.models)
    @rule(which=jobs, rank=ranks)
    def die_in_the_midst(self, which, rank):
        """The last rank's report is kept, what follows from it is not."""
        job_id, model = self.job(which)
        if model.is_over or model.number is None or rank >= model.world or rank in model.reported:
            return
        for other in set(range(model.world)) - model.reported - {rank}:
            self.report(which, other, repeats=1, is_old=False)
        append, calls = self.store.append, []

        def append_once(*arguments):
            calls.append(arguments)
            if len(calls) > 1:
                raise KilledError
            append(*arguments)

        self.store.append = append_once
        model.last_report[rank] = Report(rank, (float(self.count),), ())
        self.count += 1
        with contextlib.suppress(KilledError):
            self.registry.report(job_id, model.last_report[rank])
        model.reported.add(rank)
        self.crash(then_report=False)
        model.go_on()

    @rule(passed_s=st.sampled_from([IDLE_S / 3] * 9 + [IDLE_S + 1]))
    def silence(self, passed_s):
        self.now_s += passed_s
        over = set(self.registry.sweep())
        for job_id, model in self.models.items():
            if not model.is_over:
                assert (job_id in over) == (self.now_s - model.heard_s > IDLE_S)
                model.is_over = job_id in over

    @precondition(lambda self: self.models)
    @rule(which=jobs, chance=st.integers(0, 9))
    def delete(self, which, chance):
        job_id, model = self.job(which)
        if chance:
            return
        self.expect(GoneError if model.is_over else None, lambda: self.registry.delete(job_id))
        model.is_over = True

    def touch(self, model):
        model.heard_s = self.now_s

    def expect(self, error, call):
        if error is None:
            return call()
        try:
            call()
        except error:
            return None
        raise AssertionError(f"{error.__name__} was expected")

    @invariant()
    def unknown_jobs_are_unknown(self):
        if hasattr(self, "registry"):
            self.expect(UnknownError, lambda: self.registry.fetch("no+such+job", 0))


Server.TestCase.settings = settings(max_examples=150, stateful_step_count=50)
test_server = Server.TestCase
