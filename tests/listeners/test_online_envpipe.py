"""EnvPipe's reconfiguration from measured waits, on iterations that the planner's simulation plays."""

import math
from itertools import chain

import pytest

from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.core.frequency_plan import uniform_plan
from lightning_pfo.core.instruction import InstructionType
from lightning_pfo.core.schedules.registry import make_schedule
from lightning_pfo.listeners import OnlineEnvPipe
from lightning_pfo.planner import InstructionProfile, Profile, plan_frontier, simulate

F, B = InstructionType.FORWARD, InstructionType.BACKWARD
CLOCKS = tuple(range(1400, 790, -50))


def make_profile(work):
    lines = {}
    for stage, seconds in enumerate(work):
        for kind, length in ((F, 1.0), (B, 2.0)):
            times = tuple(length * seconds * 1400 / clock for clock in CLOCKS)
            lines[stage, kind] = InstructionProfile(
                CLOCKS, times, tuple(t * c for t, c in zip(times, CLOCKS, strict=True))
            )
    return Profile(lines)


class FakeJob:
    """All ranks of a pipeline: what they tell each other is what the simulation says."""

    rank, place = 0, (0, 0)

    def __init__(self, profile, online, transfer_s=0.0, late=0):
        self.profile, self.online, self.transfer_s, self.late = profile, online, transfer_s, late
        self.told, self.times_s = [], []
        online.attach(self, None, None, CLOCKS)

    def add_listener(self, listener):
        pass

    def all_gather(self, value, *, everywhere=False):
        num_ranks = self.online.plan.schedule.num_ranks
        if not everywhere:
            return [value] * num_ranks
        known = self.told[: len(self.told) - self.late]
        return [(rank, (0, 0), (len(known) - 1, known[-1][rank]) if known else None) for rank in range(num_ranks)]

    def run(self, most=300):
        for iteration in range(most):
            plan = self.online(iteration)
            if self.online.finished:
                return
            timeline = simulate(self.profile, plan.schedule, plan.clocks_mhz, [70.0] * plan.schedule.num_ranks)
            self.times_s.append(timeline.iteration_time_s)
            spans = [plan.schedule.span(rank) for rank in range(plan.schedule.num_ranks)]
            moments = [
                list(
                    chain(
                        *((s, s + d) for s, d in zip(timeline.starts_s[here], timeline.durations_s[here], strict=True))
                    )
                )
                for here in spans
            ]
            self.told.append(moments)


@pytest.mark.parametrize("reconfig", ["greedy", "balanced"])
@pytest.mark.parametrize("late", [0, 1])  # on CUDA the last iteration is not known yet
def test_clocks_rise_until_the_last_stage_is_not_waited_for(reconfig, late):
    profile = make_profile([0.020, 0.024, 0.021, 0.028])
    settings = {"num_microbatches": 8, "p2p_blocking_power_w": 70}
    begin = plan_frontier(profile, policy="envpipe_envelope_default", **settings)
    offline = plan_frontier(profile, policy=f"envpipe_envelope_{reconfig}", **settings).own_choice
    online = OnlineEnvPipe(begin.own_choice, reconfig=reconfig, threshold_scale=1e-3)
    job = FakeJob(profile, online, late=late)
    job.run()
    assert online.finished
    assert job.times_s[0] == pytest.approx(begin.own_choice.iteration_time_s)
    assert job.times_s[-1] == pytest.approx(offline.iteration_time_s, rel=1e-3)
    assert all(after <= before * (1 + 1e-9) for before, after in zip(job.times_s, job.times_s[1:], strict=False))
    assert len(job.times_s) >= online.num_changes + 11
    # Clocks only rise, and once it has ended nothing is exchanged any more.
    pairs = zip(chain(*begin.own_choice.clocks_mhz), chain(*online.plan.clocks_mhz), strict=True)
    assert all(before <= after <= 1400 for before, after in pairs)
    job.all_gather = None
    assert online(1000) is online.plan
    assert math.isnan(online.plan.iteration_time_s) == (online.num_changes > 0)


def test_waits_shorter_than_the_threshold_are_taken_for_transfers():
    """So the path stays on the first stage, all of which goes to the top, whoever it waits for."""
    profile = make_profile([0.020, 0.028])
    plan = uniform_plan(make_schedule("1f1b", 2, 4), [1000, 1000])
    online = OnlineEnvPipe(plan, top_mhz=1400, threshold_scale=1e6)
    online._threshold_s = 1e6
    FakeJob(profile, online).run()
    assert {*online.plan.clocks_mhz[0]} == {1400}
    assert {*online.plan.clocks_mhz[1]} == {1000}


def test_iterations_that_tell_nothing_change_nothing():
    """Such as the first one of an emulated GPU, which counts work and takes no time."""
    plan = uniform_plan(make_schedule("1f1b", 2, 2), [1000, 1000])
    online = OnlineEnvPipe(plan, top_mhz=1400)
    job = FakeJob(None, online)
    job.told = [[[0.0] * 8, [0.0] * 8]]
    assert online(0) is plan
    job.told = [[[0.0, 1.0], [0.0, 1.0]]] * 3
    assert online(2) is plan
    assert not online.finished


def test_words_are_checked():
    plan = uniform_plan(make_schedule("1f1b", 2, 2), [1000, 1000])
    with pytest.raises(ConfigurationError, match=r"is greedy or balanced; got 'default'"):
        OnlineEnvPipe(plan, reconfig="default")
    with pytest.raises(ConfigurationError, match="threshold_scale is above 0; got 0"):
        OnlineEnvPipe(plan, threshold_scale=0)
