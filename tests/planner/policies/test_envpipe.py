"""EnvPipe's plans: the envelope, valleys, reconfiguration, early forwards, and what is published of them."""

import pytest

from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.core.instruction import InstructionType
from lightning_pfo.core.schedules.registry import make_schedule, one_f_one_b
from lightning_pfo.planner import InstructionProfile, Profile, plan_frontier, read_profile, simulate
from lightning_pfo.planner.network.dag import make_network
from lightning_pfo.planner.pipeline.problem import Problem
from lightning_pfo.planner.policies.early_forwards import early_forwards
from lightning_pfo.planner.policies.envelope import critical_path, outer_envelope
from lightning_pfo.planner.policies.envpipe import EnvPipe, stage_valleys
from lightning_pfo.planner.policies.reconfigure import reconfigure
from lightning_pfo.planner.profile.blocking_power import BlockingPower, resolve_blocking

F, B = InstructionType.FORWARD, InstructionType.BACKWARD
POWER_W = 70.0


def problem_of(profile, num_microbatches=8, schedule="1f1b"):
    order = make_schedule(schedule, profile.num_stages, num_microbatches)
    return Problem(profile, order, tuple(BlockingPower((), (POWER_W,)) for _ in order.orders))


def plan_of(problem, *words):
    (plan,) = EnvPipe(*words).plans(problem)
    return plan


def test_the_envelope_is_filling_the_last_stage_and_draining():
    schedule = one_f_one_b(3, 3)
    pairs = zip(schedule.instructions, outer_envelope(schedule), strict=True)
    outer = {str(inst) for inst, is_outer in pairs if is_outer}
    assert outer == {"0F0", "1F0", "2F0", "2F1", "2F2", "2B0", "2B1", "2B2", "1B2", "0B2"}


def test_of_equal_paths_the_one_in_the_envelope_is_taken():
    network = make_network(4, [(0, 1), (0, 2), (1, 3), (2, 3)])
    assert critical_path(network, [1.0, 2.0, 2.0, 1.0], [True, False, True, True]) == [3, 2, 0]
    assert critical_path(network, [1.0, 2.0, 2.0, 1.0], [True, True, False, True]) == [3, 1, 0]
    assert critical_path(network, [1.0, 2.1, 2.0, 1.0], [True, False, True, True]) == [3, 1, 0]


def test_valleys_are_of_the_energy_of_the_whole_gpu(profile):
    """Recomputed from simulations, all stages at one clock but the last."""
    problem = problem_of(profile)
    schedule, clocks = problem.schedule, profile.of(0, F).clocks_mhz
    energies = {}
    for clock in clocks:
        rows = [[clock if rank < 3 else clocks[0]] * len(order) for rank, order in enumerate(schedule.orders)]
        timeline = simulate(profile, schedule, rows, [POWER_W] * 4)
        for rank in range(4):
            here = schedule.span(rank)
            waiting_s = timeline.iteration_time_s - sum(timeline.durations_s[here])
            energies[clock, rank] = sum(timeline.energies_j[here]) + POWER_W * waiting_s
    expected = [min(clocks, key=lambda clock: energies[clock, rank]) for rank in range(3)]
    assert stage_valleys(problem, keeps_last=True) == [*expected, clocks[0]]
    assert len({*expected, clocks[0]}) > 1


@pytest.mark.parametrize("how", ["greedy", "balanced"])
def test_reconfiguration_raises_until_the_path_is_in_the_envelope_or_at_the_top(profile, how):
    problem = problem_of(profile)
    top = [profile.top_clock_mhz(0)] * len(problem.schedule.instructions)
    begun = EnvPipe("envelope", "1f1b", "default").rows(problem, 1)[0]
    flat = [clock for row in begun for clock in row]
    clocks = reconfigure(problem, flat, how, 30)
    assert all(before <= after <= most for before, after, most in zip(flat, clocks, top, strict=True))
    outer = outer_envelope(problem.schedule)
    pairs = zip(problem.schedule.instructions, clocks, strict=True)
    durations = [profile.of(inst.stage, inst.type).at(clock)[0] for inst, clock in pairs]
    path = critical_path(problem.network, durations, outer)
    assert all(outer[node] or clocks[node] == top[node] for node in path)
    assert all(clock == most for clock, most, is_outer in zip(clocks, top, outer, strict=True) if is_outer)
    # Where the last stage is the slowest, as here, that costs no time.
    slowest = plan_of(problem, "baseline").iteration_time_s
    assert problem.network.longest_path(durations) == pytest.approx(slowest)


def test_balanced_by_hand():
    """Stage 1 takes 3 s for each microbatch, always at the top; what stage 0 does in between may take as long.

    B0 and F2 take 2 s each at 700 MHz, so they rise to 800 MHz (1.6 s each), and then, 100 MHz more, to 1000 MHz; so do
    B1 and F3. F1 has the time of 1F0 and 1B0, and B2 that of 1F3 and 1B3: they may stay.
    """
    clocks = (1000, 830, 800, 700)
    light = InstructionProfile(clocks, (1.0, 1.4, 1.6, 2.0), (9.0, 6.0, 5.0, 4.0))
    heavy = InstructionProfile(clocks, (1.5, 1.7, 1.8, 2.0), (9.0, 8.0, 8.0, 8.0))
    problem = problem_of(Profile({(0, F): light, (0, B): light, (1, F): heavy, (1, B): heavy}), 4)
    begun = [1000 if outer else 700 for outer in outer_envelope(problem.schedule)]
    found = reconfigure(problem, begun, "balanced", 100)
    slow = {str(inst) for inst, clock in zip(problem.schedule.instructions, found, strict=True) if clock == 700}
    assert slow == {"0F1", "0B2"}
    assert sorted(set(found)) == [700, 1000]
    timeline = simulate(problem.profile, problem.schedule, problem.schedule.by_rank(found), [POWER_W] * 2)
    assert timeline.iteration_time_s == pytest.approx(1 + 4 * 3 + 1)


def test_types_and_reconfigurations_are_as_their_words_say(profile):
    problem = problem_of(profile)
    top = plan_of(problem, "baseline")
    assert {clock for row in top.clocks_mhz for clock in row} == {profile.top_clock_mhz(0)}
    uniform = plan_of(problem, "uniform", "1f1b", "default")
    assert [len(set(row)) for row in uniform.clocks_mhz] == [1, 1, 1, 1]
    assert list(uniform.clocks_mhz[0])[:1] == stage_valleys(problem, keeps_last=False)[:1]
    started = plan_of(problem, "envelope", "1f1b", "default")
    balanced = plan_of(problem, "envelope", "1f1b", "balanced")
    assert started.iteration_time_s > balanced.iteration_time_s * (1 + 1e-9)
    assert balanced.iteration_energy_j < top.iteration_energy_j


def test_early_forwards_are_as_many_as_fit_into_the_backwards_behind():
    """Backwards of 2 s at the top, forwards of 1 s: the order tables of four stages and eight microbatches."""
    line = InstructionProfile((1000, 800), (0.5, 1.0), (2.0, 1.5))
    back = InstructionProfile((1000, 800), (2.0, 3.0), (5.0, 4.0))
    profile = Profile({(stage, kind): row for stage in range(4) for kind, row in ((F, line), (B, back))})
    order = one_f_one_b(4, 8)
    assert early_forwards(profile, order, [800] * 4).name == "envpipe:4,4,2,0"
    assert early_forwards(profile, order, [800] * 4, max_in_flight=6).name == "envpipe:2,2,2,0"
    assert early_forwards(profile, order, [1000, 1000, 1000, 1000]).name == "envpipe:4,4,4,0"
    # Scheduling and memory are words of the policy; with all clocks at the top nothing runs early.
    policy = EnvPipe("uniform", "ours", "default", max_in_flight=6)
    assert policy.name == "envpipe_uniform_default_early_forwards"
    assert policy.problem_for(problem_of(profile)).schedule.name.startswith("envpipe:")
    assert EnvPipe("baseline", "ours").problem_for(problem_of(profile)).schedule.name == "1f1b"
    with pytest.raises(ConfigurationError, match=r"early forwards .* got schedule 'gpipe'\. Use 1f1b, or"):
        plan_frontier(profile, schedule="gpipe", num_microbatches=4, policy=policy, p2p_blocking_power_w=70)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"type": "envpipe"}, "type is one of baseline, uniform, envelope; got 'envpipe'"),
        ({"reconfig": "balance"}, "Did you mean balanced"),
        ({"scheduling": "our"}, "scheduling is one of 1f1b, ours; got 'our'. Did you mean ours"),
        ({"step_mhz": 0}, "step_mhz is a clock in whole MHz .* such as 30; got 0"),
        ({"max_in_flight": 0}, "max_in_flight is a whole number between 1 and"),
    ],
)
def test_words_that_are_not_its_own_are_refused(words, message):
    with pytest.raises(ConfigurationError, match=message):
        EnvPipe(**words)


@pytest.mark.parametrize(
    ("name", "power_w", "published"),
    [
        ("gpt3-175b_a100-sxm_bf16.csv", 83.64, {12: 14.1, 24: 13.4}),
        ("bloom-176b_a40_bf16.csv", 70.38, {12: 6.1, 24: 3.2}),
    ],
)
def test_savings_are_those_that_are_published(measured, name, power_w, published):
    """Perseus's authors' figures for EnvPipe as they implemented it: a valley for each instruction, steps of 15 MHz."""
    profile = read_profile(measured(name))
    for num_microbatches, percent in published.items():
        schedule = one_f_one_b(8, num_microbatches)
        problem = Problem(profile, schedule, resolve_blocking(profile, schedule, power_w))
        (plan,) = EnvPipe(step_mhz=15, one_clock=False).plans(problem)
        saved = 100 * (1 - plan.iteration_energy_j / plan_of(problem, "baseline").iteration_energy_j)
        assert saved == pytest.approx(percent, abs=0.3)
