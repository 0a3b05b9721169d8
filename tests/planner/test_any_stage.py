"""Several stages on a rank, split backwards, stages of different GPU types, stages of several GPUs."""

import pytest

from lightning_pfo.core.instruction import Instruction, InstructionType
from lightning_pfo.core.schedules.registry import make_schedule
from lightning_pfo.planner import InstructionProfile, Profile, plan_frontier, read_profile, write_profile
from lightning_pfo.planner.profile.blocking_power import BlockingPower

F, B = InstructionType.FORWARD, InstructionType.BACKWARD
I, W = InstructionType.INPUT_GRADIENT, InstructionType.WEIGHT_GRADIENT  # noqa: E741 (the field's letters)

A100 = {"clocks": tuple(range(1410, 800, -75)), "static": 90, "dynamic": 310}
A40 = {"clocks": tuple(range(1740, 1000, -90)), "static": 110, "dynamic": 190}


def mixed_profile():
    """Stages 0 and 2 on one type of GPU, stages 1 and 3 on another, with rows for all kinds of instructions."""
    instructions = {}
    for stage, seconds in enumerate((0.030, 0.034, 0.028, 0.038)):
        gpu = (A100, A40)[stage % 2]
        clocks = gpu["clocks"]
        for kind, factor in ((F, 1.0), (B, 1.9), (I, 1.1), (W, 0.8)):
            times = tuple(factor * seconds * (0.75 * clocks[0] / clock + 0.25) for clock in clocks)
            powers = [gpu["static"] + gpu["dynamic"] * (clock / clocks[0]) ** 2.6 for clock in clocks]
            waiting = tuple(gpu["static"] * (0.5 + 0.4 * clock / clocks[0]) for clock in clocks)
            energies = tuple(p * t for p, t in zip(powers, times, strict=True))
            instructions[stage, kind] = InstructionProfile(clocks, times, energies, waiting)
    return Profile(instructions)


def play(schedule, profile, plan, power_of):
    """Time and energy: ranks go on whenever they can; every wait is integrated at the clock that it passes at."""
    last = schedule.num_stages - 1
    finished, position = {}, [0] * schedule.num_ranks
    busy_until, energy = [0.0] * schedule.num_ranks, 0.0
    waits = {(wait.rank, wait.position): wait for wait in plan.wait_clocks}
    present = set(schedule.instructions)

    def needs(inst):
        if inst.type is F:
            return [Instruction(inst.stage - 1, F, inst.microbatch)] if inst.stage else []
        if inst.type is W:
            return [Instruction(inst.stage, I, inst.microbatch)]
        if inst.stage == last:
            return [Instruction(last, F, inst.microbatch)]
        return [one for k in (B, I) if (one := Instruction(inst.stage + 1, k, inst.microbatch)) in present]

    def waiting(rank, begin, end, clock):
        wait = waits.get((rank, position[rank]))
        if wait is None:
            return power_of(rank, clock) * (end - begin)
        hold = end - begin if position[rank] == len(schedule.orders[rank]) else wait.hold_s
        return power_of(rank, wait.clock_mhz) * hold + power_of(rank, clock) * (end - begin - hold)

    moved = True
    while moved:
        moved = False
        for rank, order in enumerate(schedule.orders):
            while position[rank] < len(order) and all(need in finished for need in needs(order[position[rank]])):
                inst, clock = order[position[rank]], plan.clocks_mhz[rank][position[rank]]
                start = max([busy_until[rank], *(finished[need] for need in needs(inst))])
                energy += waiting(rank, busy_until[rank], start, clock)
                measured = profile.instructions[inst.stage, inst.type]
                row = measured.clocks_mhz.index(clock)
                busy_until[rank] = finished[inst] = start + measured.times_s[row]
                energy += measured.energies_j[row]
                position[rank] += 1
                moved = True
    end = max(busy_until)
    return end, energy + sum(waiting(rank, busy, end, plan.clocks_mhz[rank][0]) for rank, busy in enumerate(busy_until))


@pytest.mark.parametrize("name", ["1f1b", "gpipe", "interleaved_1f1b", "looped_bfs", "interleaved_zero_bubble", "zbv",
                                  "dualpipev"])  # fmt: skip
def test_every_plan_costs_what_an_independent_simulation_says(name):
    profile = mixed_profile()
    frontier = plan_frontier(profile, schedule=name, num_microbatches=8, num_plans=4)
    schedule = frontier.schedule

    def power_of(rank, clock):
        curves = []
        for stage in schedule.stages_of(rank):
            measured = profile.instructions[stage, F]
            curves.append(BlockingPower(measured.clocks_mhz, measured.p2p_blocking_powers_w))
        return sum(curve.at(clock) for curve in curves) / len(curves)

    for plan in (frontier.baseline, *frontier.plans):
        time, energy = play(schedule, profile, plan, power_of)
        assert plan.iteration_time_s == pytest.approx(time, rel=1e-9)
        assert plan.iteration_energy_j == pytest.approx(energy, rel=1e-6)
        assert plan.lower_bound_j <= plan.iteration_energy_j * (1 + 1e-9)
        for inst, clock in plan.clock_of().items():  # each stage keeps to the clocks of its own GPU
            assert clock in profile.instructions[inst.stage, inst.type].clocks_mhz
    assert frontier.least_energy.gap < 0.05


def test_a_stage_of_several_gpus_is_as_slow_as_its_slowest_and_all_of_them_count(make_profile, tmp_path):
    """Data-parallel 2 x tensor-parallel 2, with the rank columns of Merak's offline profiles."""
    rows, slowest = [], {}
    for stage, seconds in enumerate((0.02, 0.03)):
        for kind, factor in (("forward", 1.0), ("backward", 2.0)):
            for clock in (1400, 1200, 1000):
                base = factor * seconds * 1400 / clock
                times = [base * (1 + 0.01 * rank * (clock - 900) / 100) for rank in range(4)]
                energies = [300 * (clock / 1400) ** 1.5 * time for time in times]
                slowest[stage, kind, clock] = (max(times), sum(energies))
                rows += [
                    {"rank": 4 * stage + rank, "dp_rank": rank // 2, "pp_rank": stage, "tp_rank": rank % 2,
                     "stage": stage, "instruction": kind, "frequency": clock, "time": time, "energy": energy}
                    for rank, (time, energy) in enumerate(zip(times, energies, strict=True))
                ]  # fmt: skip
    write_profile(tmp_path / "profile.csv", rows)
    profile = read_profile(tmp_path / "profile.csv")
    assert profile.gpus_per_stage == 4
    for (stage, kind, clock), expected in slowest.items():
        assert profile.of(stage, InstructionType.from_profile_name(kind)).at(clock) == pytest.approx(expected)
    frontier = plan_frontier(profile, num_microbatches=4, num_plans=3, p2p_blocking_power_w=80)
    assert frontier.p2p_blocking_powers_w == (320, 320)
    schedule = make_schedule("1f1b", 2, 4)
    for plan in frontier.plans:
        time, energy = play(schedule, profile, plan, lambda rank, clock: 320)
        assert (plan.iteration_time_s, plan.iteration_energy_j) == pytest.approx((time, energy), rel=1e-9)


def test_columns_of_other_systems_are_let_pass(tmp_path):
    """Kareus writes how it partitions, the Perseus artifact a row for loading, in any order of columns."""
    path = tmp_path / "profile.csv"
    path.write_text(
        "energy,attention_config,time,frequency,instruction,stage,recompute_attention\n"
        "20,0-4-8-16,0.05,1410,forward,0,False\n17,0-4-8-16,0.06,1200,Forward,0,\n1,,0.01,1410,load,0,\n"
        "40,0-4-8-16,0.1,1410,backward,0,True\n34,0-4-8-16,0.12,1200,backward,0,True\n"
    )
    assert read_profile(path).of(0, F).times_s == (0.05, 0.06)
