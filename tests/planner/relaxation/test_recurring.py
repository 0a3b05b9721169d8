import doctest

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_pfo.core.instruction import InstructionType
from lightning_pfo.core.schedules.registry import make_schedule
from lightning_pfo.planner.network.assignments import OptionTable
from lightning_pfo.planner.network.dag import make_network
from lightning_pfo.planner.network.periodic_path import PeriodicPath
from lightning_pfo.planner.pipeline.problem import schedule_network
from lightning_pfo.planner.pipeline.steady_state import steady_middles
from lightning_pfo.planner.relaxation import recurring
from lightning_pfo.planner.relaxation.aggregated import MergedTradeoff
from lightning_pfo.planner.relaxation.bound import LowerBound
from lightning_pfo.planner.relaxation.linear_programme import RelaxedTradeoff
from tests.planner.problems import assignments_of, option_sets
from tests.planner.relaxation.test_aggregated import unequal_stages


def delayed(schedule, delay):
    kinds = {
        (inst.stage, inst.type) for inst in schedule.instructions if inst.type is not InstructionType.WEIGHT_GRADIENT
    }
    return schedule_network(schedule, tuple((kind, delay * (1 + 0.1 * kind[0])) for kind in sorted(kinds, key=str)))


@pytest.mark.parametrize("pieces", [1, 6])
@pytest.mark.parametrize("name", ["1f1b", "gpipe", "interleaved_1f1b", "zbv", "looped_bfs"])
def test_nothing_is_lost_of_delays_and_the_flow_is_conserved(name, pieces):
    schedule = make_schedule(name, 4, 80)
    network, options = delayed(schedule, 0.1), unequal_stages(schedule)
    merged = MergedTradeoff(network, options, steady_middles(schedule, margin=16, pieces=pieces))
    exact, bound = RelaxedTradeoff(network, options), LowerBound(OptionTable(network, options))
    slowest, fastest = exact.solve_with_rate(12.0).time, network.longest_path([opts.times[0] for opts in options])
    assert merged.solve_with_rate(12.0).time == pytest.approx(slowest, rel=0.02)
    tails, heads = network.edges.T
    starting = [not before for before in network.incoming]
    for time in np.linspace(slowest, 1.01 * fastest, 3):
        solution, reference = merged.solve(time), exact.solve(time)
        assert reference.cost * (1 - 3e-4) < solution.cost <= reference.cost * (1 + 1e-9)
        outflow = np.bincount(tails, solution.edge_flow, network.num_nodes)
        outflow[list(network.sinks)] += solution.sink_flow
        inflow = np.bincount(heads, solution.edge_flow, network.num_nodes)
        assert np.where(starting, outflow, inflow) == pytest.approx(outflow, abs=1e-6 * outflow.max())
        bound.add(solution)
        assert bound.at(time) == pytest.approx(solution.cost, rel=1e-9)


def test_without_the_sums_what_ranks_wait_for_each_other_would_be_missing(monkeypatch):
    schedule = make_schedule("1f1b", 4, 80)
    network, options = delayed(schedule, 0.1), unequal_stages(schedule)
    paths = steady_middles(schedule, margin=16)
    time = 1.1 * network.longest_path([opts.times[0] for opts in options])
    with_sums = MergedTradeoff(network, options, paths).solve(time).cost
    monkeypatch.setattr(recurring.RecurringPrecedences, "_closed_sums", lambda self, options: [])
    assert MergedTradeoff(network, options, paths).solve(time).cost < 0.99 * with_sums


@settings(max_examples=60)
@given(
    st.lists(option_sets(most=2), min_size=4, max_size=4),
    st.sets(st.tuples(st.integers(0, 9), st.integers(0, 9))),
    st.sampled_from([0.0, 0.3, 2.0]),
    st.booleans(),
    st.floats(0, 1),
)
def test_no_choice_of_two_ranks_that_recur_beats_the_bound(kinds, some, delay, recurs, fraction):
    # Two ranks of five, the middle three of each merged, in any way that they may wait for each other.
    along = {(i, i + 1) for i in (0, 1, 2, 3, 5, 6, 7, 8)}
    if recurs:
        across = {(i, i + 6): delay for i in range(4)} | {(i + 5, i + 1): delay + 0.1 for i in range(4)}
    else:
        across = {(a, b): delay + 0.1 for a, b in some if (b % 5, b) > (a % 5, a)}
    network = make_network(10, along | set(across), across)
    options = [kinds[0]] + [kinds[1]] * 3 + [kinds[0]] + [kinds[2]] + [kinds[3]] * 3 + [kinds[2]]
    table = OptionTable(network, options)
    times, costs = assignments_of(table)
    merged = MergedTradeoff(network, options, [PeriodicPath(1, 4, 1), PeriodicPath(6, 9, 1)])
    bound = LowerBound(table)
    for share in (0.0, fraction, 1.0):
        time = times.min() + share * (times.max() - times.min())
        solution = merged.solve(time)
        assert solution.cost <= costs[times <= time * (1 + 1e-9)].min() + 1e-5
        bound.add(solution)
    assert (bound.at(times) <= costs).all()


def test_the_example_in_the_documentation():
    assert doctest.testmod(recurring).failed == 0
