import io
import itertools
import json
from dataclasses import replace
from functools import partial

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_pfo.core.errors import ConfigurationError, PlanError
from lightning_pfo.core.instruction import InstructionType
from lightning_pfo.planner import Profile, plan_frontier, read_profile, select_plan, simulate_plan
from lightning_pfo.planner.frontier.check import check_predictions
from lightning_pfo.planner.frontier.frontier_json import frontier_from, frontier_text
from lightning_pfo.planner.limits.rank_programme import RankProgramme
from lightning_pfo.planner.limits.switching import check_effort
from lightning_pfo.planner.profile.switch_latency import SwitchLatency
from tests.planner.problems import with_transfers
from tests.planner.ticks import play_in_ticks, ranks_in_ticks

F, B = InstructionType.FORWARD, InstructionType.BACKWARD

UNEQUAL_TOPS = pd.DataFrame(
    [
        (stage, kind, clock, time_s * 1410 / clock, time_s * 300 * (clock / 1410) ** 1.2)
        for stage in range(4)
        for kind, time_s in (("forward", 0.05), ("backward", 0.1))
        for clock in (1410, 1380, 1200, 1005)
        if (stage, clock) != (2, 1410)
    ],
    columns=["stage", "instruction", "frequency", "time", "energy"],
)
SHARED_RANKS = {
    "schedule": "interleaved_1f1b",
    "num_microbatches": 4,
    "stages_per_rank": 2,
    "p2p_blocking_power_w": 70,
}
"""Stages 0 and 2 share a rank, and only one of them has the top clock."""

EQUAL_CLOCKS = pd.read_csv(
    io.StringIO("""stage,instruction,frequency,time,energy
0,forward,1410,2,100
0,input_gradient,1170,1,1
0,input_gradient,1200,1,1
0,input_gradient,1410,2,1
0,weight_gradient,975,1,1
0,weight_gradient,1200,1,1
0,weight_gradient,1410,1,100
1,forward,1260,3,3
1,input_gradient,1260,3,100
1,input_gradient,1410,1,1
1,weight_gradient,1260,2,3
1,weight_gradient,1380,1,100
2,forward,1410,1,3
2,input_gradient,1290,1,1
2,input_gradient,1410,3,2
2,weight_gradient,1410,2,3
3,forward,990,1,1
3,forward,1260,3,2
3,input_gradient,1260,3,2
3,input_gradient,1410,1,3
3,weight_gradient,1050,3,1
3,weight_gradient,1260,2,1
3,weight_gradient,1320,1,1
""")
)
"""Clocks of one cost, of which plans have the one with the fewest changes."""

WORK = [0.03, 0.05, 0.04]
LATENCY_S, DWELL_S = 0.008, 0.12


def limited(make_profile, **options):
    return plan_frontier(make_profile(WORK), num_microbatches=5, num_plans=6, **options)


@pytest.fixture(scope="module")
def free(make_profile):
    return limited(make_profile)


def requests_of(timeline, rank):
    """When a rank's clock is asked for, what is asked for at the end of its last instruction left out."""
    last_s = timeline.waits_of(rank)[-1][0]
    return [(time, clock) for time, clock in timeline.requests[rank] if time < last_s]


@pytest.mark.parametrize("options", [{"switch_latency_s": LATENCY_S}, {"least_dwell_s": DWELL_S},
                                     {"switch_latency_s": LATENCY_S, "least_dwell_s": DWELL_S,
                                      "p2p_blocking_power_w": {1400: 90.0, 800: 60.0}}])  # fmt: skip
def test_plans_keep_to_the_limits_and_cost_what_a_pipeline_played_in_ticks_says(make_profile, free, options):
    frontier = limited(make_profile, **options)
    assert frontier.fastest.iteration_time_s <= frontier.baseline.iteration_time_s * (1 + 1e-9)
    assert len(frontier.plans) > 2
    for plan in frontier.plans:
        timeline = frontier.timeline(plan)
        assert (timeline.iteration_time_s, timeline.iteration_energy_j) == pytest.approx(
            (plan.iteration_time_s, plan.iteration_energy_j), rel=1e-12
        )
        assert plan.lower_bound_j <= plan.iteration_energy_j
        for rank in range(3):
            requests = requests_of(timeline, rank)
            assert requests[0][1] == plan.clocks_mhz[rank][0]
            for (before, _), (after, _) in itertools.pairwise(requests):
                assert after - before >= options.get("least_dwell_s", 0) - 1e-9
    for plan in (frontier.fastest, frontier.least_energy):
        time, energy = play_in_ticks(
            frontier.profile, plan, frontier.blocking[0].at, options.get("switch_latency_s", 0.0)
        )
        assert plan.iteration_time_s == pytest.approx(time, rel=2e-3)
        assert plan.iteration_energy_j == pytest.approx(energy, rel=2e-3)
    if "p2p_blocking_power_w" not in options:
        best = [min(p.iteration_energy_j for p in f.plans) for f in (free, frontier)]
        assert best[0] <= best[1] < 1.03 * best[0]
        assert all(plan.switching_cost_j > -0.003 * plan.iteration_energy_j for plan in frontier.plans)


@pytest.mark.parametrize("options", [
    {"switch_latency_s": LATENCY_S},
    {"least_dwell_s": DWELL_S, "p2p_blocking_power_w": {1400: 90.0, 800: 60.0}},
    {"switch_latency_s": LATENCY_S, "change_cost_j": 1.0},
])  # fmt: skip
def test_limited_plans_reckon_with_transfers(make_profile, options):
    profile = with_transfers(make_profile(WORK), lambda stage, kind: 0.004 + 0.003 * stage)
    frontier = plan_frontier(profile, num_microbatches=5, num_plans=4, **options)
    assert frontier.fastest.iteration_time_s <= frontier.baseline.iteration_time_s * (1 + 1e-9)
    select_plan(frontier, "no_slowdown")
    for plan in (frontier.fastest, frontier.least_energy):
        time, energy = play_in_ticks(profile, plan, frontier.blocking[0].at, options.get("switch_latency_s", 0.0))
        assert plan.iteration_time_s == pytest.approx(time, rel=2e-3)
        assert plan.iteration_energy_j == pytest.approx(energy, rel=2e-3)
        assert plan.lower_bound_j <= plan.iteration_energy_j


FALLING = [(1400, clock, 0.002) for clock in range(800, 1400, 100)]
LATENCIES = SwitchLatency(0.006, (*FALLING, (800, 1400, 0.02)))


def test_plans_reckon_with_the_latency_that_the_profile_has_measured_unless_told_otherwise(make_profile):
    profile = make_profile(WORK)
    measured = replace(profile, switch_latency=LATENCIES)
    plan = partial(plan_frontier, num_microbatches=5, num_plans=6, p2p_blocking_power_w={1400: 90.0, 800: 60.0})
    frontier = plan(read_profile(measured.to_frame()))
    assert frontier.switch_latency == LATENCIES
    assert plan(measured, switch_latency_s=0).plans == plan(profile).plans
    assert plan(measured, switch_latency_s=0.006).plans == plan(profile, switch_latency_s=0.006).plans
    select_plan(frontier, "no_slowdown")
    for one in (frontier.fastest, frontier.plans[2], frontier.least_energy):
        time, energy = play_in_ticks(profile, one, frontier.blocking[0].at, LATENCIES.of)
        assert one.iteration_time_s == pytest.approx(time, rel=2e-3)
        assert one.iteration_energy_j == pytest.approx(energy, rel=2e-3)
        assert one.lower_bound_j <= one.iteration_energy_j
    check_predictions(frontier_from(json.loads(frontier_text(frontier))))


@pytest.mark.parametrize("latency_s", [0.002, 0.02])
def test_late_clocks_cost_little_where_the_search_knows_of_them(make_profile, latency_s):
    """Between the unlimited frontier, which nothing beats, and its plans played with late clocks."""
    profile = make_profile(WORK, clocks=tuple(range(1400, 790, -30)))
    plan = partial(plan_frontier, profile, num_microbatches=5, num_plans=20, p2p_blocking_power_w=70.0)
    free, late = plan(), plan(switch_latency_s=latency_s)
    times_s, energies_j = ([getattr(one, f"iteration_{name}") for one in late.plans] for name in ("time_s", "energy_j"))
    losses, ignorant = [], []
    for one in free.plans[2:-2]:
        played = simulate_plan(profile, one, free.blocking, switch_latency_s=latency_s)
        found_j = np.interp(played.iteration_time_s, times_s, energies_j)
        losses.append(found_j / free_energy(free, played.iteration_time_s) - 1)
        ignorant.append(played.iteration_energy_j / free_energy(free, played.iteration_time_s) - 1)
    assert np.mean(losses) < (0.002 if latency_s < 0.01 else 0.012)
    assert np.mean(losses) < 0.9 * np.mean(ignorant)


def free_energy(frontier, time_s):
    times_s, energies_j = zip(*((one.iteration_time_s, one.iteration_energy_j) for one in frontier.plans), strict=True)
    return np.interp(time_s, times_s, energies_j)


POWERS_W = {1410: 90.0, 1200: 70.0, 600: 50.0}


@st.composite
def limited_pipelines(draw):
    name, stages_per_rank = draw(st.sampled_from([("1f1b", 1), ("gpipe", 1), ("interleaved_1f1b", 2), ("envpipe", 1)]))
    num_ranks = draw(st.integers(2, 4))
    seconds = st.sampled_from([0.011, 0.017, 0.0203, 0.03, 0.04, 0.06])
    return {
        "schedule": name,
        "num_microbatches": num_ranks * draw(st.integers(1, 2)),
        "work": draw(st.lists(seconds, min_size=num_ranks * stages_per_rank, max_size=num_ranks * stages_per_rank)),
        "p2p_blocking_power_w": draw(st.sampled_from([POWERS_W, POWERS_W, 70.0])),
        "switch_latency_s": draw(st.sampled_from([0.0, 0.01])),
        "least_dwell_s": draw(st.sampled_from([0.05, 0.15, 0.0])),
        "change_cost_j": draw(st.sampled_from([0.0, 2.0])),
    }


@settings(max_examples=10, deadline=None)
@given(limited_pipelines())
def test_within_any_limits_there_is_a_plan_without_slowdown_and_none_is_dominated(make_profile, options):
    profile = make_profile(options.pop("work"), clocks=tuple(range(1410, 590, -90)))
    frontier = plan_frontier(profile, num_plans=3, **options)
    select_plan(frontier, "no_slowdown")
    for fast, slow in itertools.pairwise(frontier.plans):
        assert fast.iteration_time_s < slow.iteration_time_s
        assert fast.iteration_energy_j > slow.iteration_energy_j
    latency_s = options["switch_latency_s"]
    for plan in {id(plan): plan for plan in (frontier.fastest, frontier.least_energy)}.values():
        time_s, ranks = ranks_in_ticks(profile, plan, frontier.blocking[0].at, latency_s)
        assert plan.iteration_time_s == pytest.approx(time_s, rel=4e-3)
        assert plan.iteration_energy_j == pytest.approx(sum(rank.energy for rank in ranks), rel=4e-3)
        for rank in ranks:
            for before, after in itertools.pairwise(rank.asked_within):
                assert after - before >= options["least_dwell_s"] - 1e-3


@pytest.mark.parametrize(
    "options",
    [
        {"switch_latency_s": 0.05},
        {"least_dwell_s": 0.01},
        {"least_dwell_s": 0.2},
        {"switch_latency_s": 0.05, "least_dwell_s": 1.0},
    ],
)
def test_the_top_clocks_of_stages_that_share_a_rank_are_a_plan_with_its_changes(options):
    frontier = plan_frontier(UNEQUAL_TOPS, num_plans=4, **SHARED_RANKS, **options)
    timeline = frontier.timeline(frontier.baseline)
    assert frontier.baseline.iteration_time_s == timeline.iteration_time_s
    assert frontier.baseline.iteration_energy_j == timeline.iteration_energy_j
    plan = select_plan(frontier, "no_slowdown")
    assert plan.iteration_time_s <= timeline.iteration_time_s * (1 + 1e-9)
    assert plan.iteration_energy_j <= timeline.iteration_energy_j * (1 + 1e-9)
    for rank in range(2):
        for (before, _), (after, _) in itertools.pairwise(requests_of(timeline, rank)):
            assert after - before >= options.get("least_dwell_s", 0) - 1e-9


def test_the_top_clocks_beside_other_policies_change_late_too():
    frontier = plan_frontier(UNEQUAL_TOPS, switch_latency_s=0.05, policy="perseus", num_plans=4, **SHARED_RANKS)
    assert frontier.baseline.iteration_time_s == frontier.timeline(frontier.baseline).iteration_time_s


def test_plans_to_start_from_may_have_clocks_that_no_limited_plan_needs():
    options = {"schedule": "zbv", "num_microbatches": 6, "p2p_blocking_power_w": 40}
    frontier = plan_frontier(EQUAL_CLOCKS, switch_latency_s=0.5, least_dwell_s=0.3, **options)
    check_predictions(frontier)
    assert select_plan(frontier, "no_slowdown").iteration_time_s <= frontier.baseline.iteration_time_s * (1 + 1e-9)


def test_the_first_wait_of_a_rank_may_have_a_clock_of_its_own(make_profile):
    options = {"p2p_blocking_power_w": POWERS_W, "least_dwell_s": 0.05}
    frontier = plan_frontier(make_profile([0.06] * 3), schedule="gpipe", num_microbatches=6, num_plans=3, **options)
    assert any(wait.position == 0 for plan in frontier.plans for wait in plan.wait_clocks)


def test_a_rank_without_a_clock_in_common_is_told_why_it_cannot_keep_a_dwell(make_profile):
    slow, fast = (make_profile([0.03, 0.03], clocks=clocks).instructions for clocks in ((1000, 900), (1400, 1300)))
    profile = Profile({key: (slow if key[0] == 0 else fast)[0, key[1]] for key in itertools.product(range(4), (F, B))})
    with pytest.raises(PlanError, match=r"least_dwell_s=9 .* at the same clocks"):
        plan_frontier(
            profile, schedule="interleaved_1f1b", num_microbatches=2, p2p_blocking_power_w=70, least_dwell_s=9
        )


def test_limits_that_would_take_hours_are_refused_before_anything_is_planned(make_profile):
    profile = make_profile([0.03] * 64)
    with pytest.raises(ConfigurationError, match=r"50 plans of 65536 instructions would take about 55\. Plan for 18 "):
        plan_frontier(profile, num_microbatches=512, least_dwell_s=0.01)
    check_effort(65536, 18)
    with pytest.raises(ConfigurationError):
        check_effort(65536, 19)


def test_a_dwell_makes_changes_fewer_and_says_what_that_costs(make_profile, free):
    frontier = limited(make_profile, least_dwell_s=DWELL_S)
    few, many = (sum(p.num_clock_changes for p in f.plans) / len(f.plans) for f in (frontier, free))
    assert few < 0.7 * many
    assert frontier.fastest.switching_cost_j > 0
    same_time = [p for p in free.plans if p.iteration_time_s <= frontier.fastest.iteration_time_s * (1 + 1e-9)]
    cost = frontier.fastest.iteration_energy_j - same_time[-1].iteration_energy_j
    assert frontier.fastest.switching_cost_j == pytest.approx(cost, abs=0.5)


def test_what_a_change_is_worth_is_saved_where_changes_cost_less(make_profile, free):
    worth_j = 1.0
    frontier = limited(make_profile, change_cost_j=worth_j)
    few, many = (sum(p.num_clock_changes for p in f.plans) / len(f.plans) for f in (frontier, free))
    assert few < 0.9 * many
    for plan in frontier.plans:
        assert frontier.timeline(plan).iteration_energy_j == pytest.approx(plan.iteration_energy_j, rel=1e-12)
        like = min(free.plans, key=lambda p: abs(p.iteration_time_s - plan.iteration_time_s))
        if like.iteration_time_s == pytest.approx(plan.iteration_time_s, rel=1e-4):
            saved = like.num_clock_changes - plan.num_clock_changes
            assert plan.iteration_energy_j - like.iteration_energy_j <= worth_j * saved + 0.1


def test_a_dwell_as_long_as_the_iteration_leaves_one_clock_per_rank(make_profile):
    frontier = limited(make_profile, least_dwell_s=100.0)
    for plan in frontier.plans:
        assert all(len(set(row)) == 1 for row in plan.clocks_mhz)
        assert plan.num_clock_changes == 0
    assert frontier.least_energy.iteration_energy_j < 0.9 * frontier.baseline.iteration_energy_j


@pytest.mark.parametrize(
    "options", [{"switch_latency_s": -0.1}, {"least_dwell_s": float("nan")}, {"change_cost_j": -1}]
)
def test_limits_are_times(profile, options):
    with pytest.raises(ConfigurationError, match=r"switch_latency_s=0\.01"):
        plan_frontier(profile, num_microbatches=4, **options)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("latency", "dwell"), [(0.0, 0.0), (0.3, 0.0), (0.0, 2.0)])
def test_the_rank_programme_finds_what_trying_everything_finds(seed, latency, dwell):
    draw = np.random.default_rng(seed)
    n, clocks = 5, (3, 2, 1)
    times = np.sort(draw.uniform(0.5, 1.5, (2, 3)))
    energies = -np.sort(-draw.uniform(1, 3, (2, 3)))
    programme = RankProgramme(
        clocks,
        tuple(draw.integers(0, 2, n)),
        times,
        energies,
        np.ones((2, 3), bool),
        np.full(3, 0.5),
        0.5,
        np.full((3, 3), latency),
        dwell,
    )
    release = np.cumsum(draw.uniform(0.2, 1.2, n)) - 0.2
    due = release + draw.uniform(1.2, 2.4, n)
    due[-1] = end = max(due[-1], 9.0)

    def cost(choice):
        finish, asked, energy, old = 0.0, 0.0, 0.0, choice[0]
        for position, new in enumerate(choice):
            kind = programme.kinds[position]
            start = max(finish, release[position])
            if new != old and finish - asked < dwell:
                return np.inf
            late = min(max(latency - (start - finish), 0.0) / times[kind, old], 1.0) if new != old else 0.0
            asked = finish if new != old else asked
            energy += 0.5 * (start - finish) + late * energies[kind, old] + (1 - late) * energies[kind, new]
            finish = start + late * times[kind, old] + (1 - late) * times[kind, new]
            old = new
            if finish > due[position]:
                return np.inf
        return energy + 0.5 * (end - finish)

    best = min(itertools.product(range(3), repeat=n), key=cost)
    found = programme.cheapest(release, due, end, change_cost=0.0, rate_w=1.0)
    if found is None:
        assert cost(best) == np.inf
    else:
        assert cost([clocks.index(clock) for clock in found]) == pytest.approx(cost(best), rel=2e-2)
