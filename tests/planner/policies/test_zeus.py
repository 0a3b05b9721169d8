"""Zeus's policies on a case worked by hand."""

import pytest

from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.core.instruction import InstructionType
from lightning_pfo.core.schedules.registry import one_f_one_b
from lightning_pfo.planner import InstructionProfile, Profile
from lightning_pfo.planner.pipeline.problem import Problem
from lightning_pfo.planner.policies.knobs import states_of
from lightning_pfo.planner.policies.zeus import ZeusGlobal, ZeusPerStage
from lightning_pfo.planner.profile.blocking_power import BlockingPower

F, B = InstructionType.FORWARD, InstructionType.BACKWARD
CLOCKS = (1400, 1000, 700)


def line(seconds, powers_w):
    times = tuple(seconds * factor for factor in (1.0, 1.3, 1.8))
    return InstructionProfile(CLOCKS, times, tuple(t * p for t, p in zip(times, powers_w, strict=True)))


@pytest.fixture
def problem():
    """Stage 1 takes 1.3 times as long as stage 0; backwards draw 20 W more."""
    lines = {
        (stage, kind): line(seconds * length, [power + more for power in (300, 200, 150)])
        for stage, seconds in enumerate((0.1, 0.13))
        for kind, length, more in ((F, 1, 0), (B, 2, 20))
    }
    schedule = one_f_one_b(2, 2)
    return Problem(Profile(lines), schedule, tuple(BlockingPower((), (60.0,)) for _ in schedule.orders))


def test_globally_all_have_one_clock(problem):
    assert [set(row[0] + row[1]) for row in ZeusGlobal().rows(problem, 50)] == [{1400}, {1000}, {700}]


def test_under_a_power_limit_each_instruction_runs_as_fast_as_the_limit_lets_it(problem):
    forwards = [(state[0, F], state[0, B]) for state in states_of(problem, "power_limit")]
    # 325, 300, 200 and 150 W: a backward needs 20 W more than a forward. From 150 W on nothing changes.
    assert forwards == [(1400, 1400), (1400, 1000), (1000, 1000), (1000, 700), (700, 700)]


def test_per_stage_the_lighter_stage_is_slowed_until_its_forward_takes_as_long(problem):
    rows = ZeusPerStage().rows(problem, 50)
    # 0.13 s: stage 0 at 1000 MHz; 0.169 s: at 700 MHz (0.18 s is nearer than 0.13 s); 0.234 s: as slow as it can be.
    assert [(row[0][0], row[1][0]) for row in rows] == [(1000, 1400), (700, 1000), (700, 700)]


def test_the_choice_weighs_energy_and_time(problem):
    policies = {eta: ZeusGlobal(eta=eta) for eta in (0.0, 0.5, 1.0)}
    plans = policies[0.5].plans(problem)
    chosen = {eta: policy.choose(problem, plans) for eta, policy in policies.items()}
    assert chosen[0.0] is min(plans, key=lambda plan: plan.iteration_time_s)
    assert chosen[1.0] is min(plans, key=lambda plan: plan.iteration_energy_j)
    # 2 GPUs of 320 W at most.
    assert chosen[0.5] is min(plans, key=lambda plan: plan.iteration_energy_j + 640 * plan.iteration_time_s)


def test_knobs_and_weights_are_checked():
    with pytest.raises(ConfigurationError, match=r"one of frequency, power_limit; got 'frequenzy'\. Did you mean"):
        ZeusGlobal("frequenzy")
    with pytest.raises(ConfigurationError, match="eta is between 0 and 1; got 2"):
        ZeusPerStage(eta=2)
