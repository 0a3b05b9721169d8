import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_pfo.core.frequency_plan import FrequencyPlan, WaitClock
from lightning_pfo.core.schedules.registry import make_schedule
from lightning_pfo.planner import plan_frontier
from lightning_pfo.planner.limits.wait_clocks import choose_wait_clocks, play_with_wait_clocks
from lightning_pfo.planner.pipeline.timeline import Simulator
from lightning_pfo.planner.profile.blocking_power import BlockingPower
from tests.planner.problems import with_transfers
from tests.planner.ticks import play_in_ticks

POWERS = {1400: 95.0, 1100: 80.0, 800: 60.0}


def power_at(clock):
    return BlockingPower((1400, 1100, 800), (95.0, 80.0, 60.0)).at(clock)


@pytest.fixture(scope="module")
def waiting(make_profile):
    return plan_frontier(make_profile([0.03, 0.05, 0.04]), num_microbatches=4, num_plans=8, p2p_blocking_power_w=POWERS)


def test_long_waits_get_the_clock_of_least_power(waiting):
    for plan in waiting.plans:
        assert plan.wait_clocks
        assert {wait.clock_mhz for wait in plan.wait_clocks} == {800}
        assert all(wait.hold_s > 0.02 for wait in plan.wait_clocks)
        assert [(w.rank, w.position) for w in plan.wait_clocks][-1] == (2, 8)  # until the end of the iteration
        assert plan.num_clock_changes > replace(plan, wait_clocks=()).num_clock_changes


def test_time_and_energy_are_those_of_a_pipeline_played_in_ticks(waiting):
    for plan in (waiting.baseline, *waiting.plans[:: len(waiting.plans) - 1]):
        time, energy = play_in_ticks(waiting.profile, plan, power_at, 0.0)
        assert plan.iteration_time_s == pytest.approx(time, rel=2e-3)
        assert plan.iteration_energy_j == pytest.approx(energy, rel=2e-3)
        timeline = waiting.timeline(plan)
        assert timeline.iteration_energy_j == pytest.approx(plan.iteration_energy_j, rel=1e-12)


def test_who_waits_for_a_message_on_its_way_waits_at_a_clock_of_its_own(make_profile):
    profile = with_transfers(make_profile([0.03, 0.05, 0.04]), lambda stage, kind: 0.03)
    frontier = plan_frontier(profile, num_microbatches=4, num_plans=4, p2p_blocking_power_w=POWERS)
    for plan in (frontier.fastest, frontier.least_energy):
        time, energy = play_in_ticks(profile, plan, power_at, 0.0)
        assert plan.iteration_time_s == pytest.approx(time, rel=2e-3)
        assert plan.iteration_energy_j == pytest.approx(energy, rel=2e-3)
    first = frontier.timeline(frontier.fastest)
    assert first.waits_of(1)[0][1] == pytest.approx(first.durations_s[0] + 0.03)  # not the forward alone
    assert any(wait.rank == 1 and wait.position == 0 for wait in frontier.fastest.wait_clocks)


@settings(max_examples=25)
@given(st.data())
def test_clocks_of_waits_never_make_an_iteration_longer_or_dearer(make_profile, data):
    clocks = (1400, 1100, 800)
    seconds = st.sampled_from([0.011, 0.03, 0.06])
    profile = make_profile(data.draw(st.lists(seconds, min_size=3, max_size=3)), clocks=clocks)
    schedule = make_schedule(data.draw(st.sampled_from(["1f1b", "gpipe"])), 3, 4)
    powers = data.draw(st.lists(st.floats(40, 95), min_size=3, max_size=3))
    latency_s = data.draw(st.sampled_from([0.0, 0.004, 0.03]))
    simulator = Simulator(profile, schedule, [BlockingPower(clocks, tuple(powers))] * 3, latency_s)
    chosen = [data.draw(st.sampled_from(clocks)) for _ in schedule.instructions]
    without = simulator.play(schedule.by_rank(chosen))
    timeline = play_with_wait_clocks(simulator, schedule.by_rank(chosen))
    assert timeline.iteration_time_s == without.iteration_time_s
    assert timeline.iteration_energy_j <= without.iteration_energy_j
    waits = choose_wait_clocks(without, simulator.blocking, switch_latency=simulator.latency)
    assert timeline.wait_clocks == waits  # and never were they left out


def test_they_save_energy_and_no_time(waiting):
    for plan in waiting.plans:
        plain = waiting.timeline(replace(plan, wait_clocks=()))
        assert plain.iteration_time_s == plan.iteration_time_s
        assert plain.iteration_energy_j > plan.iteration_energy_j + 0.5
    for fast, slow in itertools.pairwise(waiting.plans):
        assert fast.iteration_energy_j > slow.iteration_energy_j


def test_no_choice_of_clocks_and_waits_is_below_the_bound(make_profile):
    profile = make_profile([0.03, 0.05], clocks=(1400, 800))
    schedule = make_schedule("1f1b", 2, 2)
    frontier = plan_frontier(profile, schedule=schedule, num_plans=4, p2p_blocking_power_w=POWERS)
    checked = 0
    for clocks in itertools.product((1400, 800), repeat=8):
        rows = (clocks[:4], clocks[4:])
        waits = tuple(WaitClock(rank, k, 800, 9.9) for rank in (0, 1) for k in range(5))
        # held until its instruction begins: no wait can cost less
        timeline = frontier.timeline(FrequencyPlan(schedule, rows, 1, 1, wait_clocks=waits))
        for plan in frontier.plans:
            if timeline.iteration_time_s <= plan.iteration_time_s * (1 + 1e-12):
                checked += 1
                assert timeline.iteration_energy_j >= plan.lower_bound_j * (1 - 1e-9)
    assert checked > 100
    assert all(plan.gap < 0.03 for plan in frontier.plans)


def test_a_power_that_hardly_depends_on_the_clock_is_left_alone(make_profile):
    frontier = plan_frontier(make_profile([0.03, 0.05]), num_microbatches=4, p2p_blocking_power_w={1400: 80, 800: 79})
    assert not any(plan.wait_clocks for plan in frontier.plans)
