"""Perseus's plans: against all durations there are, and against lowtime's own."""

import bisect
import csv
import itertools
from pathlib import Path

import numpy as np
import pytest

from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.core.schedules.registry import one_f_one_b
from lightning_pfo.planner import plan_frontier, read_profile
from lightning_pfo.planner.pipeline.problem import Problem
from lightning_pfo.planner.policies.exponential import fit_exponential
from lightning_pfo.planner.policies.perseus import Perseus
from lightning_pfo.planner.profile.blocking_power import BlockingPower, resolve_blocking

A100 = "gpt3-175b_a100-sxm_bf16.csv"


def units_of(times, unit_s):
    return [int(time_s / unit_s + 1e-9) for time_s in times]


def test_no_durations_in_whole_units_cost_less_on_the_curves(make_profile):
    """Two stages, two microbatches: eight instructions of four kinds, and every choice of their durations."""
    profile = make_profile([0.0302, 0.0411], clocks=(1400, 1250, 1100))
    schedule, unit_s = one_f_one_b(2, 2), 0.01
    problem = Problem(profile, schedule, tuple(BlockingPower((), (70.0,)) for _ in schedule.orders))
    rows = Perseus(unit_s=unit_s).rows(problem, 50)

    menus, clocks = [], []
    for options in problem.options:
        units = units_of(options.times, unit_s)
        kept = [k for k, count in enumerate(units) if count not in units[:k]]
        curve = fit_exponential([options.times[k] for k in kept], [options.costs[k] for k in kept])
        durations = np.arange(units[0], units[-1] + 1)
        menus.append(list(zip(durations.tolist(), curve.at(durations * unit_s).tolist(), strict=True)))
        clocks.append({units[k]: options.knobs[k] for k in kept})
    every = np.array(list(itertools.product(*(range(len(menu)) for menu in menus))))
    durations = np.stack([np.array([d for d, _ in menu])[every[:, i]] for i, menu in enumerate(menus)])
    costs = sum(np.array([c for _, c in menu])[every[:, i]] for i, menu in enumerate(menus))
    finish = np.zeros_like(durations)
    for node in problem.network.order:
        starts = [finish[before] for before, _ in problem.network.incoming[node]]
        finish[node] = (np.max(starts, axis=0) if starts else 0) + durations[node]
    times = finish.max(axis=0)

    least = {int(time): costs[times <= time].min() for time in np.unique(times)}
    # Of the durations of least cost at each time, the clocks.
    allowed = {
        time: {
            tuple(
                clock[max(count for count in clock if count <= duration)]
                for clock, duration in zip(clocks, chosen, strict=True)
            )
            for chosen in durations[:, (times <= time) & (costs <= cost + 1e-9)].T.tolist()
        }
        for time, cost in least.items()
    }
    assert len(rows) > 5
    found = [tuple(clock for row in some for clock in row) for some in rows]
    assert all(any(one in those for those in allowed.values()) for one in found)
    assert found[-1] in allowed[min(allowed)]  # the fastest comes last


def test_on_a_measured_profile_plans_are_those_of_lowtime(measured):
    """Times and energies of lowtime 0.3.0's plans, computed from the profile."""
    profile = read_profile(measured(A100))
    schedule = one_f_one_b(8, 12)
    problem = Problem(profile, schedule, resolve_blocking(profile, schedule, 85))
    plans = sorted(Perseus().plans(problem, 60), key=lambda plan: plan.iteration_time_s)
    with Path(measured("lowtime_gpt3-175b_a100-sxm_8x12.csv")).open(newline="") as lines:
        known = [(float(row["iteration_time_s"]), float(row["iteration_energy_j"])) for row in csv.DictReader(lines)]
    fastest_s, fastest_j = min(known)
    assert plans[0].iteration_time_s == pytest.approx(fastest_s, abs=1e-6)
    assert plans[0].iteration_energy_j == pytest.approx(fastest_j, abs=1e-3)
    times = [plan.iteration_time_s for plan in plans]
    energies = [plan.iteration_energy_j for plan in plans]
    within = [(time_s, energy_j) for time_s, energy_j in known if time_s < times[-1]]
    assert len(within) > 15
    for time_s, energy_j in within:
        after = bisect.bisect_right(times, time_s + 1e-6)
        near = np.interp(time_s, times[max(after - 1, 0) : after + 1], energies[max(after - 1, 0) : after + 1])
        assert energy_j == pytest.approx(near, rel=0.002)


def test_the_own_choice_is_the_fastest(profile):
    frontier = plan_frontier(profile, num_microbatches=4, policy="perseus", num_plans=6)
    assert frontier.own_choice is frontier.fastest
    assert frontier.policy == "perseus"
    # Times are rounded down, so it is a little slower than the fastest there is, and a little faster than two units.
    top_s = frontier.baseline.iteration_time_s
    assert top_s * (1 - 1e-9) <= frontier.fastest.iteration_time_s <= 1.03 * top_s


def test_options_may_be_those_of_least_energy_instead_of_least_effective_energy(profile):
    """Waiting draws more than the static power here: effective energy falls to the lowest clock, energy does not."""
    schedule = one_f_one_b(4, 4)
    problem = Problem(profile, schedule, tuple(BlockingPower((), (120.0,)) for _ in schedule.orders))
    lowest = {
        keeps_raw: min(min(row) for rows in Perseus(keeps_raw=keeps_raw).rows(problem, 4) for row in rows)
        for keeps_raw in (False, True)
    }
    measured = profile.of(0, schedule.instructions[0].type)
    valley = min(zip(measured.energies_j, measured.clocks_mhz, strict=True))[1]
    assert lowest == {False: min(measured.clocks_mhz), True: valley}
    assert valley > min(measured.clocks_mhz)


def test_a_unit_is_a_time():
    with pytest.raises(ConfigurationError, match=r"unit_s is a positive number of seconds .*; got -1"):
        Perseus(unit_s=-1)
