import itertools

import pytest

from lightning_pfo.core.frequency_plan import FrequencyPlan
from lightning_pfo.core.instruction import InstructionType
from lightning_pfo.core.schedules.registry import make_schedule
from lightning_pfo.planner import InstructionProfile, Profile, plan_frontier, simulate
from lightning_pfo.planner.limits.fewest_changes import equal_clocks, share_clocks

F, B = InstructionType.FORWARD, InstructionType.BACKWARD
SCHEDULE = make_schedule("gpipe", 2, 3)


def by_rank(clocks):
    half = len(clocks) // 2
    return tuple(clocks[:half]), tuple(clocks[half:])


def tied_profile():
    """Above 1200 MHz a power cap makes all clocks alike, for the backwards; 1100 MHz is dearer and slower."""
    clocks = (1400, 1300, 1200, 1100)
    forward = InstructionProfile(clocks, (1.0, 1.1, 1.2, 1.5), (90.0, 80.0, 71.0, 200.0))
    backward = InstructionProfile(clocks, (2.0, 2.0, 2.0, 2.5), (150.0, 150.0, 150.0, 400.0))
    return Profile({(stage, kind): p for stage in range(2) for kind, p in ((F, forward), (B, backward))})


def test_of_equal_plans_the_one_with_the_fewest_changes_is_chosen():
    profile, schedule = tied_profile(), make_schedule("1f1b", 2, 3)
    frontier = plan_frontier(profile, schedule=schedule, p2p_blocking_power_w=10.0, num_plans=8)
    for plan in frontier.plans:
        timeline = simulate(profile, schedule, plan.clocks_mhz, frontier.blocking)
        assert timeline.iteration_time_s == pytest.approx(plan.iteration_time_s, rel=1e-12)
        assert timeline.iteration_energy_j == pytest.approx(plan.iteration_energy_j, rel=1e-12)
        # Brute force: backwards at any clock that is equal.
        free = [i for i, inst in enumerate(schedule.instructions) if inst.type is B]
        clocks = [clock for row in plan.clocks_mhz for clock in row]
        fewest = min(
            FrequencyPlan(schedule, by_rank(tried), 1.0, 1.0).num_clock_changes
            for menu in itertools.product((1400, 1300, 1200), repeat=len(free))
            for tried in [[menu[free.index(i)] if i in free else clock for i, clock in enumerate(clocks)]]
        )
        assert plan.num_clock_changes == fewest


def test_clocks_stay_as_they_are_without_equal_ones(make_profile):
    profile = make_profile([0.02, 0.03])
    assert equal_clocks(profile) == {}
    assert share_clocks(SCHEDULE, {}, ((1400, 1300), (1200,))) == ((1400, 1300), (1200,))
