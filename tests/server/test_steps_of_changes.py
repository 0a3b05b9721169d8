"""All ranks follow the same plan at the same step, and a new one as early as that is possible without waiting.

Our client's follower, without its thread, and our server's registry, without HTTP; hypothesis says what happens when.
"""

import json

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from lightning_pfo.client.plan_follower import PlanFollower
from lightning_pfo.client.server_link import Answer, ServerAwayError
from lightning_pfo.server.jobs.answers import ConflictError
from lightning_pfo.server.jobs.messages import JobInfo, PlanRows, RankInfo
from lightning_pfo.server.jobs.registry import JobRegistry
from lightning_pfo.server.jobs.store import IN_MEMORY, JobStore

NUM_RANKS = 3


class AskedDirector:
    """The plan that is asked for, by number."""

    name = "Test"

    def check_job(self, info):
        pass

    def decide(self, job):
        return self.choose(job, "0", 0.0) if job.plan is None else None

    def choose(self, job, select, straggler_s):
        return PlanRows(((("forward", 1000 + int(select)),),) * NUM_RANKS, select)


class Changes(RuleBasedStateMachine):
    @initialize(step_s=st.sampled_from([0.01, 1.0]))
    def start(self, step_s):
        self.step_s, self.number, self.version_at, self.is_lost = step_s, 0, {}, False
        self.now_s = 0.0
        self.store = JobStore(IN_MEMORY)
        self.begin_server()
        self.job_id = self.registry.register_job(JobInfo(NUM_RANKS, 1, 1, NUM_RANKS))
        for rank in range(NUM_RANKS):
            self.registry.register_rank(self.job_id, RankInfo(rank, 0, rank, 0, ()))
        self.followers = [PlanFollower(self, self.job_id, rank) for rank in range(NUM_RANKS)]
        self.steps = [-1] * NUM_RANKS
        for follower in self.followers:
            assert follower.wait_for_first(1.0)

    def begin_server(self):
        self.registry = JobRegistry(AskedDirector(), self.store, now=lambda: 0.0)
        self.promised_step = -1

    def get(self, path, query, timeout_s):
        """The link of all followers."""
        told = {name: query[name] for name in ("rank", "step", "version", "ahead")}
        info, plan, promised_step = self.registry.poll(self.job_id, **told)
        self.promised_step = max(self.promised_step, promised_step)
        if self.is_lost:
            raise ServerAwayError("the answer is lost")
        headers = {"unchanged-until-step": str(promised_step)}
        if plan is None:
            return Answer(204, headers, None)
        names = ("version", "from_step", "purpose", "label")
        told = {name: getattr(plan, name) for name in names} | {"frequencies": plan.row_of(info)}
        return Answer(200, headers, json.loads(json.dumps(told)))

    ranks = st.integers(0, NUM_RANKS - 1)

    @rule(rank=ranks)
    def begin_step(self, rank):
        follower = self.followers[rank]
        self.steps[rank] = step = self.steps[rank] + 1
        self.now_s += self.step_s
        follower._pace.begin(step, self.now_s)
        if step > follower._promised_step:
            self.ask(rank, is_lost=False)
        assert step <= follower._promised_step
        version = follower.plan_at(step).version
        assert self.version_at.setdefault(step, version) == version

    @rule(step_s=st.sampled_from([0.01, 1.0]))
    def all_begin_steps(self, step_s):
        self.step_s = step_s
        for rank in range(NUM_RANKS):
            self.begin_step(rank)

    @rule(rank=ranks, is_lost=st.booleans())
    def ask(self, rank, is_lost):
        self.is_lost = is_lost
        try:
            self.followers[rank]._ask()
        except ServerAwayError:
            assert is_lost
        self.is_lost = False

    @rule()
    def change(self):
        self.number += 1
        try:
            plan = self.registry.operate(self.job_id, select=str(self.number))
        except ConflictError:
            assert self.registry.jobs[self.job_id].unheard  # since the restart
            return
        assert plan.from_step > max(self.steps)  # no rank has begun it
        assert plan.from_step == self.promised_step + 1  # a step before may begin before its rank asks again

    @rule(all_ask=st.booleans())
    def restart_the_server(self, all_ask):
        self.begin_server()
        for rank in range(NUM_RANKS * all_ask):
            self.ask(rank, is_lost=False)

    @invariant()
    def few_plans_are_kept(self):
        if hasattr(self, "registry"):
            assert len(self.registry.jobs[self.job_id].plans._plans) <= self.number + 1


Changes.TestCase.settings = settings(max_examples=60, stateful_step_count=40)
test_changes = Changes.TestCase


def test_ranks_that_ask_before_between_and_after_two_changes_agree():
    """What few examples above happen to meet."""
    ranks = Changes()
    ranks.start(step_s=0.01)
    for _ in range(3):
        ranks.all_begin_steps(step_s=0.01)
    for changes in range(3):
        for rank in range(changes):
            ranks.begin_step(rank)
            ranks.ask(rank, is_lost=False)
        ranks.change()
    for _ in range(ranks.promised_step):
        ranks.all_begin_steps(step_s=0.01)


def test_a_server_that_was_started_anew_is_told_what_ranks_were_promised():
    ranks = Changes()
    ranks.start(step_s=0.01)
    for _ in range(3):
        ranks.all_begin_steps(step_s=0.01)
    for rank in range(NUM_RANKS):
        ranks.ask(rank, is_lost=False)
    promised_step = ranks.promised_step
    ranks.all_begin_steps(step_s=1.0)  # from now on ranks ask for single steps
    ranks.restart_the_server(all_ask=True)
    ranks.change()
    assert ranks.promised_step == promised_step
    for _ in range(promised_step):
        ranks.ask(0, is_lost=False)
        ranks.all_begin_steps(step_s=1.0)
