import doctest
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_pfo.core.instruction import InstructionType
from lightning_pfo.core.schedules.registry import make_schedule
from lightning_pfo.planner.network.assignments import OptionTable
from lightning_pfo.planner.network.dag import make_network
from lightning_pfo.planner.network.options import make_option_set
from lightning_pfo.planner.network.periodic_path import PeriodicPath
from lightning_pfo.planner.pipeline.problem import schedule_network
from lightning_pfo.planner.pipeline.steady_state import steady_middles
from lightning_pfo.planner.relaxation import aggregated
from lightning_pfo.planner.relaxation.aggregated import MergedTradeoff
from lightning_pfo.planner.relaxation.bound import LowerBound
from lightning_pfo.planner.relaxation.linear_programme import RelaxedTradeoff
from lightning_pfo.planner.search.solver import trace_tradeoff
from tests.planner.problems import delay_sets, edge_sets, options_of

SHARE = {"F": 1.0, "B": 2.0, "I": 1.1, "W": 0.9}


def unequal_stages(schedule):
    """Options of each instruction, every stage of its own size: the shorter, the dearer."""
    kinds = {
        (stage, kind): make_option_set(
            [SHARE[kind.value] * (1 + 0.13 * (7 * stage % 5)) * (1 + 0.1 * k) for k in range(7)],
            [SHARE[kind.value] * (1 + 0.1 * (3 * stage % 4)) * 30 / (1 + 0.1 * k) ** 2 for k in range(7)],
            range(7, 0, -1),
        )
        for stage in range(schedule.num_stages)
        for kind in InstructionType
    }
    return [kinds[inst.stage, inst.type] for inst in schedule.instructions]


@pytest.mark.parametrize("name", ["1f1b", "gpipe", "interleaved_1f1b", "zbv", "looped_bfs"])
def test_the_bound_is_just_below_the_exact_one_and_the_timetable_is_one(name):
    schedule = make_schedule(name, 4, 80)
    dag, options = schedule_network(schedule), unequal_stages(schedule)
    runs = steady_middles(schedule, margin=16, pieces=6)
    exact, merged = RelaxedTradeoff(dag, options), MergedTradeoff(dag, options, runs)
    slowest, fastest = exact.solve_with_rate(12.0).time, dag.longest_path([opts.times[0] for opts in options])
    assert merged.solve_with_rate(12.0).time == pytest.approx(slowest, rel=0.02)
    tails, heads = dag.edges.T
    for time in np.linspace(slowest, fastest * 1.01, 4):
        solution, reference = merged.with_timetable(merged.solve(time)), exact.solve(time)
        assert reference.cost * (1 - 2e-4) < solution.cost <= reference.cost * (1 + 1e-9)
        assert solution.slope <= 0

        outflow, inflow = np.zeros((2, dag.num_nodes))
        np.add.at(outflow, tails, solution.edge_flow)
        np.add.at(outflow, list(dag.sinks), solution.sink_flow)
        np.add.at(inflow, heads, solution.edge_flow)
        assert outflow == pytest.approx(solution.flow)
        starting = [not before for before in dag.incoming]
        assert np.where(starting, outflow, inflow) == pytest.approx(outflow, abs=1e-5 * outflow.max())
        assert outflow[starting].sum() == pytest.approx(-solution.slope)

        assert np.all(solution.starts[tails] + solution.durations[tails] <= solution.starts[heads] + 0.01)
        assert dag.longest_path(solution.durations.tolist()) <= time * 1.001
        cost = sum(
            float(np.interp(duration, *zip(*opts.hull_points, strict=True)))
            for opts, duration in zip(options, solution.durations, strict=True)
        )
        assert cost == pytest.approx(reference.cost, rel=1e-3)


def test_plans_found_with_a_merged_relaxation_have_bounds_just_below_the_exact_ones(monkeypatch):
    monkeypatch.setattr(LowerBound, "sharpen", lambda self, times: None)  # it proves more than any relaxation does
    schedule = make_schedule("1f1b", 4, 40)
    dag, options = schedule_network(schedule), unequal_stages(schedule)
    runs = steady_middles(schedule, margin=8)
    assert sum(run.end - run.begin for run in runs) > dag.num_nodes / 2
    exact = RelaxedTradeoff(dag, options)
    for point in trace_tradeoff(dag, options, rate=12.0, num_points=5, periodic=runs):
        bound = exact.solve(point.time).cost + 12.0 * point.time
        assert bound * (1 - 5e-4) < point.bound <= bound * (1 + 1e-9)


NODES = 6


@settings(deadline=None, max_examples=50)
@given(
    edge_sets(NODES),
    options_of(NODES, most=3),
    st.sampled_from(
        [
            PeriodicPath(1, 5, 2),
            PeriodicPath(0, 3, 1),
            PeriodicPath(2, 5, 3),
            PeriodicPath(0, 6, 2),
            PeriodicPath(0, 6, 3),
            PeriodicPath(3, 5, 1),
        ]
    ),
    st.floats(0, 1),
    st.one_of(st.just({}), delay_sets(NODES)),
)
def test_no_choice_beats_the_bound_whatever_is_merged(edges, options, run, fraction, delays):
    # Precedences need not be periodic for the bound to hold, nor delays: a run is any path of recurring options.
    dag = make_network(NODES, edges | set(itertools.pairwise(range(run.begin, run.end))), delays)
    for node in range(run.begin, run.end):
        options[node] = options[run.begin + (node - run.begin) % run.period]
    merged = MergedTradeoff(dag, options, [run])
    fastest = dag.longest_path([opts.times[0] for opts in options])
    slowest = dag.longest_path([opts.times[-1] for opts in options])
    solution = merged.solve(fastest + fraction * (slowest - fastest))
    bound = LowerBound(OptionTable(dag, options))
    bound.add(solution)
    for choice in itertools.product(*(range(len(opts.times)) for opts in options)):
        time = dag.longest_path([opts.times[k] for opts, k in zip(options, choice, strict=True)])
        cost = sum(opts.costs[k] for opts, k in zip(options, choice, strict=True))
        assert bound.at(time) <= cost


@pytest.mark.parametrize("name", ["1f1b", "gpipe", "interleaved_1f1b"])
def test_a_timetable_keeps_to_delays_and_costs_little_more_than_the_optimum(name):
    schedule = make_schedule(name, 4, 80)
    transfers = tuple(
        ((stage, kind), 0.05 + 0.01 * stage)
        for stage in range(schedule.num_stages)
        for kind in (InstructionType.FORWARD, InstructionType.BACKWARD)
    )
    network, options = schedule_network(schedule, transfers), unequal_stages(schedule)
    merged = MergedTradeoff(network, options, steady_middles(schedule, margin=16, pieces=6))
    fastest = network.longest_path([opts.times[0] for opts in options])
    exact, (tails, heads) = RelaxedTradeoff(network, options), network.edges.T
    for time in (1.1 * fastest, 1.3 * fastest):
        below = merged.solve(time)
        timetable, optimum = merged.with_timetable(below), exact.solve(time)
        assert below.cost <= optimum.cost * (1 + 1e-9)
        ends = timetable.starts[tails] + timetable.durations[tails]
        assert np.all(ends + network.delays <= timetable.starts[heads] + 0.01)
        assert network.longest_path(timetable.durations.tolist()) <= time * 1.001
        cost = sum(
            float(np.interp(duration, *zip(*opts.hull_points, strict=True)))
            for opts, duration in zip(options, timetable.durations, strict=True)
        )
        assert cost == pytest.approx(optimum.cost, rel=2e-3)


def test_a_timetable_does_not_depend_on_those_asked_for_before():
    schedule = make_schedule("1f1b", 4, 80)
    network, options = schedule_network(schedule), unequal_stages(schedule)
    paths = steady_middles(schedule, margin=16, pieces=6)
    fastest = network.longest_path([opts.times[0] for opts in options])
    used, fresh = (MergedTradeoff(network, options, paths) for _ in range(2))
    below = used.solve(1.2 * fastest)
    for factor in (1.5, 1.01, 1.1):
        used.with_timetable(used.solve(factor * fastest))
    again, first = used.with_timetable(below), fresh.with_timetable(below)
    assert again.durations.tolist() == first.durations.tolist()
    assert again.starts.tolist() == first.starts.tolist()


def test_the_example_in_the_documentation():
    assert doctest.testmod(aggregated).failed == 0
