import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_pfo.core.frequency_plan import FrequencyPlan
from lightning_pfo.core.instruction import InstructionType
from lightning_pfo.core.schedules.registry import make_schedule
from lightning_pfo.planner import InstructionProfile, Profile, plan_frontier, simulate
from lightning_pfo.planner.limits.fewest_changes import equal_clocks, exchange_clocks, share_clocks
from lightning_pfo.planner.network.assignments import OptionTable
from lightning_pfo.planner.network.options import make_option_set
from lightning_pfo.planner.pipeline.problem import schedule_network

F, B = InstructionType.FORWARD, InstructionType.BACKWARD
SCHEDULE = make_schedule("gpipe", 2, 3)


def changes(rows):
    return sum(a != b for row in rows for a, b in zip(row, row[1:] + row[:1], strict=True))


def by_rank(clocks):
    half = len(clocks) // 2
    return tuple(clocks[:half]), tuple(clocks[half:])


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(0, 2), min_size=12, max_size=12), st.floats(1, 3))
def test_exchanges_keep_time_and_energy_and_never_add_changes(choice, work):
    dag = schedule_network(SCHEDULE)
    kinds = {
        (stage, kind): make_option_set([w, 1.2 * w, 1.5 * w], [9, 7, 6], [1400, 1200, 1000])
        for stage, kind, w in ((0, "F", 1.0), (0, "B", 2.0), (1, "F", work), (1, "B", 2 * work))
    }
    options = [kinds[inst.stage, inst.type.value] for inst in SCHEDULE.instructions]
    table, choices = OptionTable(dag, options), np.array([choice, [0] * 12]).T
    found = exchange_clocks(SCHEDULE, table, choices, table.longest_paths(choices)).T.tolist()
    assert found[1] == [0] * 12
    times = [dag.longest_path([o.times[k] for o, k in zip(options, c, strict=True)]) for c in (choice, found[0])]
    assert times[1] == pytest.approx(times[0], rel=1e-11)
    for kind in set(options):
        here = [i for i, opts in enumerate(options) if opts is kind]
        assert sorted(choice[i] for i in here) == sorted(found[0][i] for i in here)
    rows = [by_rank([o.knobs[k] for o, k in zip(options, c, strict=True)]) for c in (choice, found[0])]
    assert changes(rows[1]) <= changes(rows[0])


def test_exchanged_are_forwards_that_may_come_in_any_order():
    # Rank 1 is much slower: after its first forward it does not matter which of those of rank 0 takes longer.
    dag = schedule_network(SCHEDULE)
    forward, backward = make_option_set([1.0, 1.5], [9, 7], [1400, 1000]), make_option_set([2.0], [1], [1000])
    slow = make_option_set([20.0], [1], [1400])
    options = [slow if inst.stage else (forward if inst.type is F else backward) for inst in SCHEDULE.instructions]
    choice = tuple(int(str(inst) == "0F1") for inst in SCHEDULE.instructions)
    table, choices = OptionTable(dag, options), np.array([choice]).T
    (found,) = exchange_clocks(SCHEDULE, table, choices, table.longest_paths(choices)).T.tolist()
    clocks = [opts.knobs[k] for opts, k in zip(options, found, strict=True)]
    assert clocks[:6] == [1400, 1400, 1000, 1000, 1000, 1000]


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
