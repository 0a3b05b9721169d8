"""Plans that only pay beside a straggler, against every assignment of clocks there is."""

import itertools
import json
from dataclasses import replace

import pytest

from lightning_pfo.core.errors import PlanError
from lightning_pfo.core.frequency_plan import FrequencyPlan
from lightning_pfo.planner import load_frontier, plan_frontier, save_frontier, select_plan, thin_frontier
from lightning_pfo.planner.pipeline.predictions import predict_plans

SMALL = {"num_microbatches": 2, "num_plans": 8}
CLOCKS = (1400, 1100, 900)


def every_plan(frontier):
    """Times (s) and energies (J) of all assignments of clocks."""
    schedule, sizes = frontier.schedule, [len(order) for order in frontier.schedule.orders]
    plans = [
        FrequencyPlan(schedule, schedule.by_rank(list(clocks)), 0.0, 0.0)
        for clocks in itertools.product(CLOCKS, repeat=sum(sizes))
    ]
    return predict_plans(frontier.profile, schedule, frontier.blocking, plans)


@pytest.fixture(scope="module")
def small(make_profile):
    # The clocks of least energy, waits included, are not the lowest; those of least effective energy are.
    profile = make_profile([0.020, 0.024], clocks=CLOCKS, knee=1000, static_w=120.0)
    return plan_frontier(profile, num_straggler_plans=8, **SMALL)


def test_beside_any_straggler_no_assignment_of_clocks_needs_less(small):
    times_s, energies_j = every_plan(small)
    waiting_w = sum(small.p2p_blocking_powers_w)
    slower = small.straggler_plans
    assert slower
    assert slower[0].iteration_time_s > small.least_energy.iteration_time_s
    assert slower[0].iteration_energy_j > small.least_energy.iteration_energy_j
    for plan in (small.least_energy, *slower):
        proven_j = plan.beside_straggler_bound_j or plan.lower_bound_j
        until_s = plan.iteration_time_s
        in_time = times_s <= until_s * (1 + 1e-9)
        beside_j = energies_j[in_time] + waiting_w * (until_s - times_s[in_time])
        assert plan.iteration_energy_j == pytest.approx(beside_j.min(), rel=1e-9)  # the least possible
        assert plan.lower_bound_j <= energies_j[in_time].min()  # of the iteration itself, as of all plans
        assert proven_j <= beside_j.min()  # and the bound is proven
        assert plan.gap == pytest.approx(plan.iteration_energy_j / proven_j - 1)
        assert plan.gap < 0.02
        assert select_plan(small, f"T'={until_s + 1e-6!r}s") is plan
    assert slower[-1].iteration_time_s == pytest.approx(times_s[(energies_j - waiting_w * times_s).argmin()])


def test_without_a_straggler_nothing_changes(small):
    usual = plan_frontier(small.profile, **SMALL)
    assert usual.plans == small.plans
    assert usual.straggler_plans == ()
    assert select_plan(small, "1000s") is select_plan(small, "least_energy") is small.least_energy
    assert select_plan(usual, "T'=1000s") is usual.least_energy
    assert thin_frontier(small, every=3).straggler_plans == small.straggler_plans


def test_they_are_asked_for_by_a_selection(small):
    select = f"straggler = {small.straggler_plans[0].iteration_time_s + 1e-4}s"
    asked = plan_frontier(small.profile, select=select, **SMALL)
    assert asked.plans == small.plans
    beside_j = [one.beside_straggler_j(select_plan(one, select), 1.0) for one in (asked, small)]
    assert asked.straggler_plans
    assert beside_j[0] <= beside_j[1]  # there is a plan for the very time


def test_files_keep_them_and_refuse_wrong_ones(small, tmp_path):
    save_frontier(small, tmp_path)
    assert load_frontier(tmp_path) == small
    path = tmp_path / "frontier.json"
    text = json.loads(path.read_text())
    for name, factor in (("iteration_energy_j", 2), ("lower_bound_j", 2), ("beside_straggler_bound_j", 2)):
        wrong = json.loads(path.read_text())
        wrong["straggler_plans"][0][name] *= factor
        (tmp_path / "wrong.json").write_text(json.dumps(wrong))
        with pytest.raises(PlanError, match="is malformed"):
            load_frontier(tmp_path / "wrong.json")
    older = json.loads(path.read_text())  # one bound, which was that beside a straggler
    for record in older["straggler_plans"]:
        record["lower_bound_j"] = record.pop("beside_straggler_bound_j")
    (tmp_path / "older.json").write_text(json.dumps(older))
    read = load_frontier(tmp_path / "older.json")
    assert [plan.gap for plan in read.straggler_plans] == [plan.gap for plan in small.straggler_plans]
    assert {plan.lower_bound_j for plan in read.straggler_plans} == {0.0}  # not known
    text["straggler_plans"].reverse()
    path.write_text(json.dumps(text))
    with pytest.raises(PlanError, match="straggler plans must be listed from the fastest"):
        load_frontier(path)


def test_a_wrong_energy_is_told_by_number(small):
    from lightning_pfo.planner.frontier.check import check_predictions

    first, *others = small.straggler_plans
    wrong = replace(first, iteration_energy_j=first.iteration_energy_j + 1)
    with pytest.raises(PlanError, match="J for straggler plan 0, not"):
        check_predictions(replace(small, straggler_plans=(wrong, *others)))


@pytest.mark.parametrize(
    "how",
    [
        {"switch_latency_s": 0.004},
        {"least_dwell_s": 0.03},
        {"change_cost_j": 0.5},
        {"p2p_blocking_power_w": {1400: 90, 900: 60}},
        {"policy": "perseus"},
    ],
    ids=lambda how: next(iter(how)),
)
def test_under_limits_with_wait_clocks_and_of_perseus_each_is_cheaper_beside_a_straggler(make_profile, tmp_path, how):
    profile = make_profile([0.020, 0.024], clocks=tuple(range(1400, 690, -100)), knee=800, static_w=150.0)
    frontier = plan_frontier(profile, num_microbatches=3, num_plans=6, num_straggler_plans=6, **how)
    plans = (frontier.least_energy, *frontier.straggler_plans)
    assert len(plans) > 1
    for fast, slow in itertools.pairwise(plans):
        assert fast.iteration_time_s < slow.iteration_time_s
        assert slow.iteration_energy_j < frontier.beside_straggler_j(fast, slow.iteration_time_s)
        assert 0 < slow.lower_bound_j <= slow.iteration_energy_j
        assert slow.lower_bound_j <= frontier.least_energy.iteration_energy_j  # which is faster
        assert slow.lower_bound_j < slow.beside_straggler_bound_j <= slow.iteration_energy_j
    save_frontier(frontier, tmp_path)
    assert load_frontier(tmp_path) == frontier  # which plays each plan again


def test_deadlines_beyond_the_least_energy_are_planned_for(small):
    until_s = (small.straggler_plans[1].iteration_time_s + small.straggler_plans[2].iteration_time_s) / 2
    times_s, energies_j = every_plan(small)
    in_time = times_s <= until_s
    least_j = (energies_j - sum(small.p2p_blocking_powers_w) * times_s)[in_time].min()
    asked = plan_frontier(small.profile, num_straggler_plans=2, deadlines_s=[until_s], **SMALL)
    chosen = select_plan(asked, f"T'={until_s!r}s")
    assert asked.beside_straggler_j(chosen, 0.0) == pytest.approx(least_j)
