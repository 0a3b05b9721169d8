"""Plans for pipelines whose transfers take time, against brute force and against an example worked out by hand."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_pfo.core.instruction import InstructionType
from lightning_pfo.core.schedules.registry import load_schedule, make_schedule
from lightning_pfo.core.schedules.schedule import PipelineSchedule
from lightning_pfo.planner import InstructionProfile, Profile, plan_frontier, select_plan, simulate
from tests.planner.problems import with_transfers

F, B = InstructionType.FORWARD, InstructionType.BACKWARD
INPUT, WEIGHT = InstructionType.INPUT_GRADIENT, InstructionType.WEIGHT_GRADIENT
POWER_W = 60.0

ZERO_BUBBLE = """
0F0 0F1 0I0 0W0 0F2 0I1 0W1 0I2 0W2
1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2
"""


def random_profile(seed, schedule, num_clocks=2):
    """Other times, energies and transfers for each instruction; the longer, the less energy."""
    random = np.random.default_rng(seed)
    instructions = {}
    for stage, kind in sorted({(inst.stage, inst.type) for inst in schedule.instructions}, key=str):
        count = 1 if kind is WEIGHT else num_clocks
        times = np.cumsum(random.uniform(0.01, 0.05, count))
        energies = POWER_W * times + np.cumsum(random.uniform(1.0, 9.0, count))[::-1]
        transfer_s = random.choice([0.0, 0.004, 0.03, random.uniform(0.0, 0.1)])
        clocks = tuple(range(1000, 1000 - 100 * count, -100))
        line = InstructionProfile(clocks, tuple(times.tolist()), tuple(energies.tolist()), transfer_s=transfer_s)
        instructions[stage, kind] = line
    return Profile(instructions)


def lengths(schedule, profile, times_of):
    """Longest paths, by what has to be known: each instruction's time, the order of ranks, and who hands over what."""
    home = {inst: rank for rank, order in enumerate(schedule.orders) for inst in order}
    last, ends, queues = schedule.num_stages - 1, {}, [list(order) for order in schedule.orders]
    free = [0.0] * len(queues)

    def inputs(inst):
        same = [one for one in home if one.microbatch == inst.microbatch]
        backward = [one for one in same if one.type in (B, INPUT)]
        if inst.type is F:
            return [one for one in same if one.type is F and one.stage == inst.stage - 1]
        if inst.type is WEIGHT:
            return [one for one in backward if one.stage == inst.stage]
        if inst.stage == last:
            return [one for one in same if one.type is F and one.stage == last]
        return [one for one in backward if one.stage == inst.stage + 1]

    while any(queues):
        for rank, queue in enumerate(queues):
            while queue and all(one in ends for one in inputs(queue[0])):
                inst, start = queue.pop(0), free[rank]
                for one in inputs(inst):
                    own = profile.instructions[one.stage, one.type].transfer_s if home[one] != rank else 0.0
                    start = np.maximum(start, ends[one] + own)
                ends[inst] = free[rank] = start + times_of[inst]
    return np.maximum.reduce([np.broadcast_to(end, np.shape(free[0]) or (1,)) for end in free])


def every_plan(schedule, profile):
    """Time and energy of every choice of clocks: brute force."""
    menus = [range(len(profile.instructions[inst.stage, inst.type].times_s)) for inst in schedule.instructions]
    choices = np.array(np.meshgrid(*menus, indexing="ij", copy=False), dtype=np.int8).reshape(len(menus), -1)
    lines = [profile.instructions[inst.stage, inst.type] for inst in schedule.instructions]
    times_of = {
        inst: np.array(line.times_s)[row] for inst, line, row in zip(schedule.instructions, lines, choices, strict=True)
    }
    times = lengths(schedule, profile, times_of)
    energy = sum(np.array(line.energies_j)[row] for line, row in zip(lines, choices, strict=True))
    waiting = schedule.num_ranks * times - sum(times_of.values())
    return times, energy + POWER_W * waiting


def zero_bubble(tmp_path_factory):
    path = tmp_path_factory.mktemp("orders") / "zero_bubble.txt"
    path.write_text(ZERO_BUBBLE)
    return load_schedule(path)


SCHEDULES = {
    "gpipe 3x2": lambda _: make_schedule("gpipe", 3, 2),
    "1f1b 3x3": lambda _: make_schedule("1f1b", 3, 3),
    "1f1b 2x4": lambda _: make_schedule("1f1b", 2, 4),
    "gpipe 2x4": lambda _: make_schedule("gpipe", 2, 4),
    "interleaved 2x2": lambda _: make_schedule("interleaved_1f1b", 2, 2),
    "zbv 2x2": lambda _: make_schedule("zbv", 2, 2),
    "order file": zero_bubble,
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_no_choice_of_clocks_beats_a_bound_and_plans_are_what_they_say(name, tmp_path_factory):
    schedule = SCHEDULES[name](tmp_path_factory)
    for seed in range(2 if len(schedule.instructions) > 16 else 5):
        profile = random_profile(seed, schedule)
        times, energies = every_plan(schedule, profile)
        frontier = plan_frontier(profile, schedule=schedule, p2p_blocking_power_w=POWER_W, num_plans=9)
        assert frontier.fastest.iteration_time_s == pytest.approx(times.min(), rel=1e-9)
        for plan in (frontier.baseline, *frontier.plans):
            timeline = frontier.timeline(plan)
            durations = dict(zip(schedule.instructions, timeline.durations_s, strict=True))
            (length,) = lengths(schedule, profile, durations)
            assert plan.iteration_time_s == pytest.approx(length, rel=1e-9)
            assert timeline.iteration_time_s == pytest.approx(length, rel=1e-12)
            assert plan.iteration_energy_j == pytest.approx(timeline.iteration_energy_j, rel=1e-9)
            cheapest = energies[times <= plan.iteration_time_s * (1 + 1e-9)].min()
            assert plan.lower_bound_j <= cheapest * (1 + 1e-12)
            assert plan in (frontier.baseline,) or plan.iteration_energy_j <= 1.01 * cheapest


@settings(max_examples=15)
@given(st.integers(0, 10**6), st.sampled_from([("1f1b", 2, 3), ("1f1b", 2, 4), ("gpipe", 3, 2)]))
def test_every_bound_of_random_small_pipelines_is_one(seed, shape):
    schedule = make_schedule(*shape)
    profile = random_profile(seed, schedule)
    times, energies = every_plan(schedule, profile)
    for plan in plan_frontier(profile, schedule=schedule, p2p_blocking_power_w=POWER_W, num_plans=5).plans:
        assert plan.lower_bound_j <= energies[times <= plan.iteration_time_s * (1 + 1e-9)].min() * (1 + 1e-12)


def two_stages(transfers_s):
    """Forwards of 1 s for 100 J and backwards of 2 s for 200 J."""
    return Profile(
        {
            (stage, kind): InstructionProfile((1000,), (time_s,), (100 * time_s,), transfer_s=transfers_s.get(kind))
            for stage in range(2)
            for kind, time_s in ((F, 1.0), (B, 2.0))
        }
    )


def test_an_iteration_worked_out_by_hand():
    # rank 0  F0 0-1  F1 1-2                 B0 4.75-6.75          B1 7.75-9.75
    # rank 1          F0 1.5-2.5  B0 2.5-4.5  F1 4.5-5.5  B1 5.5-7.5
    schedule = PipelineSchedule("1f1b", 2, 2, make_schedule("1f1b", 2, 2).orders)
    profile = two_stages({F: 0.5, B: 0.25})
    timeline = simulate(profile, schedule, [[1000] * 4] * 2, [10.0, 20.0])
    assert timeline.starts_s == pytest.approx((0, 1, 4.75, 7.75, 1.5, 2.5, 4.5, 5.5))
    assert timeline.iteration_time_s == pytest.approx(9.75)
    assert timeline.waits_of(0) == [(0, 0), (1, 1), (2, 4.75), (6.75, 7.75), (9.75, 9.75)]
    assert timeline.waits_of(1) == [(0, 1.5), (2.5, 2.5), (4.5, 4.5), (5.5, 5.5), (7.5, 9.75)]
    # Both wait for 3.75 s.
    assert timeline.iteration_energy_j == pytest.approx(2 * 600 + 3.75 * (10 + 20))
    path = [schedule.instructions[node] for node in timeline.critical_path]
    assert list(map(str, path)) == ["0F0", "1F0", "1B0", "1F1", "1B1", "0B1"]


def test_what_stays_on_a_rank_takes_no_time():
    # Stage 0 and 3 on rank 0, 1 and 2 on rank 1: the handover from 1 to 2 is none between ranks.
    schedule = make_schedule("zbv", 2, 1)
    times = {F: 1.0, INPUT: 1.0, WEIGHT: 1.0}
    profile = Profile(
        {
            (stage, kind): InstructionProfile((1000,), (time_s,), (1.0,), transfer_s=10.0 * (stage + 1))
            for stage in range(4)
            for kind, time_s in times.items()
        }
    )
    timeline = simulate(profile, schedule, schedule.by_rank([1000] * 12), [1.0, 1.0])
    start = dict(zip(map(str, schedule.instructions), timeline.starts_s, strict=True))
    assert [start[name] for name in ("0F0", "1F0", "2F0", "3F0")] == [0.0, 11.0, 12.0, 43.0]
    assert start["3I0"] == 44.0
    assert start["2I0"] == 45.0 + 40.0
    assert start["0I0"] == start["1I0"] + 1.0 + 20.0


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "interleaved_1f1b"])
def test_transfers_of_no_time_change_nothing_at_all(profile, schedule):
    shape = {"schedule": schedule, "num_microbatches": 4, "num_plans": 8}
    without, zero = (plan_frontier(some, **shape) for some in (profile, with_transfers(profile, 0.0)))
    assert zero.plans == without.plans
    assert zero.baseline == without.baseline


def test_a_plan_made_without_transfers_misses_its_deadline_and_one_made_with_them_does_not(profile):
    real = with_transfers(profile, lambda stage, kind: 0.003 if kind is F else 0.005)
    shape = {"num_microbatches": 6, "num_plans": 8}
    deadline_s = plan_frontier(real, **shape).baseline.iteration_time_s
    chosen = {
        name: select_plan(plan_frontier(some, **shape, deadlines_s=[deadline_s]), f"{deadline_s}s")
        for name, some in (("without", profile), ("with", real))
    }
    taken = {
        name: simulate(real, plan.schedule, plan.clocks_mhz, [70.0] * 4).iteration_time_s
        for name, plan in chosen.items()
    }
    assert chosen["without"].iteration_time_s <= deadline_s
    assert taken["without"] > 1.02 * deadline_s
    assert taken["with"] == pytest.approx(chosen["with"].iteration_time_s, rel=1e-12)
    assert taken["with"] <= deadline_s * (1 + 1e-9)


def test_the_fastest_plan_is_slower_and_the_bound_higher_the_longer_transfers_take(profile):
    frontiers = [
        plan_frontier(with_transfers(profile, time_s), num_microbatches=6, num_plans=6) for time_s in (0.0, 0.002, 0.01)
    ]
    for short, long in itertools.pairwise(frontiers):
        assert short.fastest.iteration_time_s < long.fastest.iteration_time_s
        for plan in short.plans:
            # What keeps to a deadline with long transfers does so with short ones.
            within = [other for other in long.plans if other.iteration_time_s <= plan.iteration_time_s]
            assert all(plan.lower_bound_j <= other.iteration_energy_j for other in within)
