import doctest
import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lightning_pfo.core.schedules.registry import make_schedule
from lightning_pfo.planner.network.assignments import OptionTable
from lightning_pfo.planner.network.dag import make_network
from lightning_pfo.planner.network.options import make_option_set
from lightning_pfo.planner.network.periodic_path import PeriodicPath
from lightning_pfo.planner.pipeline.problem import schedule_network
from lightning_pfo.planner.relaxation import bound as module
from lightning_pfo.planner.relaxation.aggregated import MergedTradeoff
from lightning_pfo.planner.relaxation.bound import LowerBound
from lightning_pfo.planner.relaxation.linear_programme import RelaxedTradeoff
from lightning_pfo.planner.search.solver import trace_tradeoff
from tests.planner.problems import assignments_of, edge_sets

NODES = 5

steps = st.one_of(
    st.sampled_from([0.0, 1e-15, 1e-12, 1e-9, 2e-7, 1e-6, 3e-6, 1e-3]),  # nearly or exactly equal times
    st.floats(1e-7, 2.0),
)
falls = st.one_of(st.floats(5.0, 50.0), st.sampled_from([1e-12, 1e-6, 1e3, 1e9]))


@st.composite
def menus(draw, most=3):
    """Options whose times are close, up to equal, and whose costs are far apart."""
    time = draw(st.one_of(st.sampled_from([0.0, 1e-15, 1e-9]), st.floats(0.01, 3.0)))
    cost = draw(st.floats(-100.0, 1000.0))
    times, costs = [time], [cost]
    for step, fall in draw(st.lists(st.tuples(steps, falls), max_size=most - 1)):
        times.append(times[-1] + step)
        costs.append(costs[-1] - fall)
    return make_option_set(times, costs, range(len(times)))


delays = st.one_of(
    st.just({}),
    st.dictionaries(
        st.sampled_from(list(itertools.combinations(range(NODES), 2))),
        st.one_of(st.floats(0.0, 3.0), st.sampled_from([1e-15, 1e-9, 1e3])),
    ),
)
option_lists = st.lists(menus(), min_size=NODES, max_size=NODES)
problems = st.tuples(edge_sets(NODES), option_lists, delays)


def two_nearly_equal(step, fall):
    """A chain of two activities, one of which is slower by `step` and cheaper by `fall`; the other trades evenly."""
    options = [
        make_option_set([1.0, 1.0 + step], [50.0 + fall, 50.0], [2, 1]),
        make_option_set([1.0, 1.5, 2.0], [30.0, 24.0, 20.0], [3, 2, 1]),
        *[make_option_set([0.0], [0.0], [1])] * 3,
    ]
    return {(0, 1)}, options, {}


def highest_excess(bound, times, costs, rate):
    """By how much the bound is above the cheapest assignment that is as fast, wherever it is most; not to be > 0.

    Also where every second until that time costs something besides, however fast the assignment is.
    """
    totals = costs + rate * times
    order = np.lexsort((totals, times))
    until, least = times[order], np.minimum.accumulate(totals[order])
    return max((bound.at(until, paid) - (least + paid * until)).max() for paid in (0.0, 70.0))


@settings(deadline=None, max_examples=150)
@given(problems, st.floats(0, 1), st.sampled_from([0.0, 3.0, 40.0, 1e6]))
@example(two_nearly_equal(1e-6, 5.0), 0.3, 0.0)
@example(two_nearly_equal(2e-7, 50.0), 0.3, 0.0)
@example(two_nearly_equal(1e-15, 50.0), 0.0, 3.0)
def test_no_assignment_beats_the_bound(problem, fraction, rate):
    edges, options, delays = problem
    table = OptionTable(make_network(NODES, edges, delays), options)
    times, costs = assignments_of(table)
    programme, bound = RelaxedTradeoff(table.dag, options), LowerBound(table, rate)
    bound.add(programme.solve_with_rate(rate))
    for share in (0.0, fraction, 1.0):
        bound.add(programme.solve(times.min() + share * (times.max() - times.min())))
    bound.add_mixtures()
    assert highest_excess(bound, times, costs, rate) <= 0
    bound.sharpen(times)
    assert highest_excess(bound, times, costs, rate) <= 0
    assert bound.at(1e9) <= (costs + rate * times).min()  # slower than anything that was solved


def test_nearly_equal_clocks_in_a_pipeline_make_no_false_bound():
    # Options 0.1 to 10 us and 5 to 50 J apart are worth so much per second that a solver's tolerances are, too: taking
    # its optima for bounds put some of these 3 % above an assignment.
    random, schedule = np.random.default_rng(1), make_schedule("1f1b", 2, 2)
    for _ in range(20):
        step, fall = 10 ** random.uniform(-7, -5), random.uniform(5, 50)
        kinds = {}
        for stage, kind in itertools.product(range(2), "FB"):
            time, cost = random.uniform(0.01, 0.1), random.uniform(2, 10)
            if random.random() < 0.4:
                line = [time, time + step, time * 1.3], [cost * 1.5 + fall, cost * 1.5, cost]
            else:
                line = [time, time * 1.1, time * 1.3], [cost * 1.5, cost * 1.2, cost]
            kinds[stage, kind] = make_option_set(*line, [3, 2, 1])
        options = [kinds[inst.stage, inst.type.value] for inst in schedule.instructions]
        table = OptionTable(schedule_network(schedule), options)
        times, costs = assignments_of(table)
        programme, bound = RelaxedTradeoff(table.dag, options), LowerBound(table)
        bound.add(*(programme.solve(time) for time in np.linspace(times.max(), times.min(), 9)))
        assert highest_excess(bound, times, costs, 0.0) <= 0


@settings(deadline=None, max_examples=50)
@given(problems, st.lists(st.floats(-1.0, 30.0), min_size=40, max_size=40))
def test_no_assignment_beats_what_any_hints_prove(problem, hints):
    # The solver is not trusted: whatever it says, what is made of it is a flow, so its bound holds.
    edges, options, delays = problem
    table = OptionTable(make_network(NODES, edges, delays), options)
    times, costs = assignments_of(table)
    solution = RelaxedTradeoff(table.dag, options).solve(float(times.max()))
    some, sinks = np.array(hints[: len(table.dag.edges)]), np.array(hints[-len(table.dag.sinks) :])
    bound = LowerBound(table)
    bound.add(replace(solution, edge_flow=some, sink_flow=sinks))
    assert highest_excess(bound, times, costs, 0.0) <= 0


AT_ONCE = [make_option_set([0.0], [0.0], [0])] * NODES


@settings(deadline=None, max_examples=50)
@given(edge_sets(NODES), option_lists, delays, st.integers(1, 2), st.floats(0, 1))
@example({(2, 4), (0, 4)}, AT_ONCE, {(2, 4): 1.0}, 2, 0.0)  # the last waits for nothing but what is merged
def test_no_assignment_beats_the_bound_of_an_aggregated_programme(edges, options, delays, period, fraction):
    path = PeriodicPath(0, 4, period)
    along = set(itertools.pairwise(range(path.end)))
    delays = {edge: delay for edge, delay in delays.items() if edge not in along}  # one rank's own order has none
    network = make_network(NODES, edges | along, delays)
    options = [options[i % period] if i < path.end else options[i] for i in range(NODES)]
    table = OptionTable(network, options)
    times, costs = assignments_of(table)
    programme, bound = MergedTradeoff(network, options, [path]), LowerBound(table, 3.0)
    bound.add(programme.solve_with_rate(3.0))
    for share in (fraction, 1.0):
        bound.add(programme.solve(times.min() + share * (times.max() - times.min())))
    bound.add_mixtures()
    bound.sharpen(times)
    assert highest_excess(bound, times, costs, 3.0) <= 0


@settings(deadline=None, max_examples=50)
@given(problems, st.sampled_from([0.0, 3.0]))
def test_no_point_of_a_frontier_is_below_its_bound_or_another_assignment(problem, rate):
    edges, options, delays = problem
    table = OptionTable(make_network(NODES, edges, delays), options)
    times, costs = assignments_of(table)
    for point in trace_tradeoff(table.dag, options, rate=rate, num_points=4):
        assert point.bound <= (costs + rate * times)[times <= point.time].min()


def test_the_bound_is_as_good_as_the_relaxation():
    # Two in a row; 1 J/s between 3 s and 4 s, 4 J/s between 2 s and 3 s.
    network = make_network(2, [(0, 1)])
    options = [make_option_set([1, 2], [10, 6], [2, 1]), make_option_set([1, 2], [5, 4], [2, 1])]
    programme, bound = RelaxedTradeoff(network, options), LowerBound(OptionTable(network, options), 2.0)
    bound.add(programme.solve_with_rate(2.0), programme.solve(2.5), programme.solve(3.5))
    assert bound.at(np.array([2.0, 2.5, 3.0, 3.5, 1e6])) == pytest.approx([15 + 4, 13 + 5, 17, 17, 17], rel=1e-12)
    assert bound.gaps(np.array([3.0]), np.array([17.0])) == pytest.approx([0], abs=1e-12)
    assert bound.gaps(np.array([3.0]), np.array([17.0])) > 0


def test_what_flows_is_worth_something_while_it_is_delayed():
    # The same with half a second in between: everything is half a second later.
    network = make_network(2, [(0, 1)], {(0, 1): 0.5})
    options = [make_option_set([1, 2], [10, 6], [2, 1]), make_option_set([1, 2], [5, 4], [2, 1])]
    programme, bound = RelaxedTradeoff(network, options), LowerBound(OptionTable(network, options))
    bound.add(programme.solve(3.0), programme.solve(4.0))
    assert bound.at(np.array([2.5, 3.0, 3.5, 4.0])) == pytest.approx([15, 13, 11, 10.5], rel=1e-12)


def test_no_flow_at_all_proves_the_least_costs_in_the_least_time():
    network = make_network(2, [(0, 1)])
    options = [make_option_set([1, 2], [10, 6], [2, 1])] * 2
    assert LowerBound(OptionTable(network, options), 2.0).at(1e6) == pytest.approx(12 + 2 * 2.0)


def test_a_rate_beyond_all_others_is_no_trouble():
    network = make_network(2, [(0, 1)])
    options = [make_option_set([1, 2], [0, -1e-12], [2, 1])] * 2
    programme, bound = RelaxedTradeoff(network, options), LowerBound(OptionTable(network, options), 3e9)
    bound.add(programme.solve_with_rate(3e9))
    assert bound.at(5.0) == pytest.approx(6e9)


def test_the_example_in_the_documentation():
    assert doctest.testmod(module).failed == 0
