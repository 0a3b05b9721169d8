from dataclasses import replace

import pytest

from lightning_pfo.core.schedules.registry import one_f_one_b
from lightning_pfo.planner import plan_frontier, select_plan, simulate
from lightning_pfo.planner.pipeline.problem import Problem
from lightning_pfo.planner.plan import POLICIES, predict
from lightning_pfo.planner.profile.blocking_power import BlockingPower


@pytest.fixture
def problem(profile):
    schedule = one_f_one_b(profile.num_stages, 6)
    return Problem(profile, schedule, tuple(BlockingPower((), (70.0,)) for _ in schedule.orders))


@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_gives_every_instruction_a_measured_clock(name, problem):
    rows = POLICIES[name](problem)
    assert list(map(len, rows)) == list(map(len, problem.schedule.orders))
    for order, row in zip(problem.schedule.orders, rows, strict=True):
        assert all(clock in problem.profile.of(i.stage, i.type).clocks_mhz for i, clock in zip(order, row, strict=True))


@pytest.mark.parametrize("name", POLICIES)
def test_what_is_predicted_is_what_the_simulation_says(name, problem):
    plan = predict(problem, POLICIES[name])
    timeline = simulate(problem.profile, problem.schedule, plan.clocks_mhz, [70.0] * problem.schedule.num_ranks)
    assert plan.iteration_time_s == timeline.iteration_time_s
    assert plan.iteration_energy_j == timeline.iteration_energy_j


def test_the_planners_own_policy_saves_energy_and_keeps_to_the_deadline(problem):
    top, own = (predict(problem, POLICIES[name]) for name in ("top_clocks", "least_energy"))
    assert own.iteration_time_s <= top.iteration_time_s * (1 + 1e-9)
    assert own.iteration_energy_j < top.iteration_energy_j
    later_s = 1.05 * top.iteration_time_s
    slower = predict(problem, POLICIES["least_energy"], later_s)
    assert slower.iteration_time_s <= later_s * (1 + 1e-9)
    assert slower.iteration_energy_j < own.iteration_energy_j


def test_the_baseline_of_a_frontier_is_the_top_clocks(problem):
    frontier = plan_frontier(problem.profile, schedule=problem.schedule, p2p_blocking_power_w=70, num_plans=5)
    assert replace(frontier.baseline, lower_bound_j=0.0) == predict(problem, POLICIES["top_clocks"])
    assert select_plan(frontier, "no_slowdown").iteration_energy_j < frontier.baseline.iteration_energy_j
