import numpy as np
import pytest

from lightning_pfo.core.errors import PlanError
from lightning_pfo.core.schedules.registry import make_schedule
from lightning_pfo.planner import plan as frontier_module
from lightning_pfo.planner import plan_frontier, simulate
from lightning_pfo.planner.network.assignments import OptionTable
from lightning_pfo.planner.pipeline.problem import schedule_network
from lightning_pfo.planner.pipeline.steady_state import steady_middles
from lightning_pfo.planner.relaxation.aggregated import MergedTradeoff
from lightning_pfo.planner.search.long_solver import _granted
from tests.planner.problems import with_transfers
from tests.planner.relaxation.test_aggregated import unequal_stages


@pytest.mark.parametrize("transfer_s", [None, 0.003])
@pytest.mark.parametrize("name", ["1f1b", "gpipe", "interleaved_1f1b"])
def test_long_pipelines_get_plans_with_bounds(name, transfer_s, make_profile, monkeypatch):
    profile = with_transfers(make_profile([0.020, 0.024, 0.021, 0.028]), lambda stage, kind: transfer_s)
    schedule = make_schedule(name, 4 if name != "interleaved_1f1b" else 2, 64)
    plain = plan_frontier(profile, schedule=schedule, num_plans=4)
    monkeypatch.setattr(frontier_module, "LONG_PIPELINE", 0)
    reported = []
    deadline = 0.5 * (plain.fastest.iteration_time_s + plain.least_energy.iteration_time_s)
    frontier = plan_frontier(
        profile, schedule=schedule, num_plans=4, deadlines_s=[deadline], on_progress=lambda *what: reported.append(what)
    )
    finished = {activity for activity, done, total in reported if done == total}
    assert reported
    assert finished == {activity for activity, _, _ in reported}
    times = [plan.iteration_time_s for plan in frontier.plans]
    energies = [plan.iteration_energy_j for plan in frontier.plans]
    assert times == sorted(times)
    assert energies == sorted(energies, reverse=True)
    assert times[0] == pytest.approx(plain.fastest.iteration_time_s)
    assert any(deadline * 0.99 < time <= deadline * (1 + 1e-9) for time in times)
    for plan in frontier.plans:
        timeline = simulate(profile, schedule, plan.clocks_mhz, frontier.blocking)
        assert plan.iteration_time_s == pytest.approx(timeline.iteration_time_s, rel=1e-12)
        assert plan.iteration_energy_j == pytest.approx(timeline.iteration_energy_j, rel=1e-12)
        assert plan.lower_bound_j <= plan.iteration_energy_j
        assert plan.gap < 0.01
        # The bound holds for plans found in another way, too.
        for other in plain.plans:
            if other.iteration_time_s <= plan.iteration_time_s:
                assert plan.lower_bound_j <= other.iteration_energy_j * (1 + 1e-12)


def test_a_deadline_that_no_plan_meets_is_an_error(make_profile, monkeypatch):
    monkeypatch.setattr(frontier_module, "LONG_PIPELINE", 0)
    with pytest.raises(PlanError, match="No plan is as fast"):
        plan_frontier(make_profile([0.02, 0.03]), num_microbatches=70, num_plans=2, deadlines_s=[0.1])


def test_where_no_uniform_steady_state_is_fast_enough_what_it_grants_is_taken_as_far_as_time_allows():
    schedule = make_schedule("1f1b", 4, 80)
    options = unequal_stages(schedule)
    kinds = {(inst.stage, inst.type) for inst in schedule.instructions}
    network = schedule_network(schedule, tuple((kind, 0.2) for kind in sorted(kinds, key=str)))
    table = OptionTable(network, options)
    merged = MergedTradeoff(network, options, steady_middles(schedule, margin=16, pieces=6))
    fastest = network.longest_path([opts.times[0] for opts in options])
    relaxed = merged.with_timetable(merged.solve(fastest))
    assert network.longest_path(relaxed.durations.tolist()) > fastest * 1.0005  # the timetable of a longer time
    granted = _granted(table, relaxed)
    assert table.longest_paths(granted)[0] <= fastest * (1 + 1e-9)
    greedy, _ = table.spend_slack(np.zeros_like(granted), np.array([fastest]))
    cost = float(table.total_costs(granted)[0])
    assert relaxed.cost <= cost < relaxed.cost + 0.5 * (float(table.total_costs(greedy)[0]) - relaxed.cost)
