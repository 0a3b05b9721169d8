import itertools

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_pfo.core.errors import PlanError
from lightning_pfo.planner.network.dag import make_network
from lightning_pfo.planner.network.options import make_option_set
from lightning_pfo.planner.relaxation.linear_programme import RelaxedTradeoff
from tests.planner.problems import problems


def all_choices(dag, options):
    """(time, cost) of every choice: brute force."""
    graph = nx.DiGraph()
    for (before, after), delay in zip(dag.edges.tolist(), dag.delays.tolist(), strict=True):
        graph.add_edge(("end", before), ("begin", after), weight=delay)
    for choice in itertools.product(*(range(len(opts.times)) for opts in options)):
        times = [opts.times[k] for opts, k in zip(options, choice, strict=True)]
        graph.add_edges_from((("begin", i), ("end", i), {"weight": time}) for i, time in enumerate(times))
        yield nx.dag_longest_path_length(graph), sum(opts.costs[k] for opts, k in zip(options, choice, strict=True))


@settings(deadline=None, max_examples=60)
@given(problems(5), st.floats(0, 1))
def test_no_choice_is_below_a_tangent_by_more_than_the_tolerance(problem, fraction):
    dag, options = problem
    fastest = dag.longest_path([opts.times[0] for opts in options])
    slowest = dag.longest_path([opts.times[-1] for opts in options])
    target = fastest + fraction * (slowest - fastest)
    solution = RelaxedTradeoff(dag, options).solve(target)
    for time, cost in all_choices(dag, options):
        assert solution.tangent_at(time) <= cost + 1e-5
    assert solution.cost - 1e-5 <= min(c for time, c in all_choices(dag, options) if time <= target * (1 + 1e-8))


@settings(deadline=None, max_examples=40)
@given(problems(5))
def test_solutions_are_feasible_and_convex_in_the_time(problem):
    dag, options = problem
    fastest = dag.longest_path([opts.times[0] for opts in options])
    slowest = dag.longest_path([opts.times[-1] for opts in options])
    relaxed = RelaxedTradeoff(dag, options)
    solutions = [relaxed.solve(time) for time in np.linspace(slowest, fastest, 5)]
    for solution in solutions:
        assert dag.longest_path(solution.durations) <= solution.time + 1e-6
        assert solution.slope <= 0
        for other in solutions:
            assert solution.tangent_at(other.time) <= other.cost + 1e-5
    assert solutions[0].cost == pytest.approx(sum(opts.costs[-1] for opts in options))


def test_a_chain_of_two_has_the_cost_worked_out_by_hand():
    # Two nodes in a row; node 0 saves 4 J in its second second, node 1 saves 1 J. Three seconds: node 0 takes both.
    dag = make_network(2, [(0, 1)])
    options = [make_option_set([1, 2], [10, 6], [2, 1]), make_option_set([1, 2], [5, 4], [2, 1])]
    relaxed = RelaxedTradeoff(dag, options)
    assert relaxed.solve(3.0).cost == pytest.approx(6 + 5)
    assert relaxed.solve(3.5).cost == pytest.approx(6 + 4.5)
    assert relaxed.solve(2.5).slope == pytest.approx(-4)
    assert relaxed.solve(2.5).durations == pytest.approx([1.5, 1.0])
    assert relaxed.solve_with_rate(2.0).time == pytest.approx(3.0)
    assert relaxed.solve_with_rate(0.5).time == pytest.approx(4.0)
    assert relaxed.solve_with_rate(9.0).time == pytest.approx(2.0)


def test_the_flow_of_the_duals_is_conserved_and_worth_the_slope():
    # Node 1 and 2 in parallel between 0 and 3: what flows through them is what a second of the whole is worth.
    dag = make_network(4, [(0, 1), (0, 2), (1, 3), (2, 3)])
    options = [make_option_set([1, 2, 3], [9, 5, 3], [3, 2, 1])] * 4
    solution = RelaxedTradeoff(dag, options).solve(5.0)
    assert solution.flow[0] == pytest.approx(-solution.slope)
    assert solution.flow[1] + solution.flow[2] == pytest.approx(-solution.slope)


def test_a_delay_takes_time_from_the_options():
    # The chain of above with half a second in between: the same costs half a second later.
    dag = make_network(2, [(0, 1)], {(0, 1): 0.5})
    relaxed = RelaxedTradeoff(dag, [make_option_set([1, 2], [10, 6], [2, 1]), make_option_set([1, 2], [5, 4], [2, 1])])
    assert relaxed.solve(3.5).cost == pytest.approx(6 + 5)
    assert relaxed.solve(4.0).cost == pytest.approx(6 + 4.5)
    assert relaxed.solve(3.0).durations == pytest.approx([1.5, 1.0])
    assert relaxed.solve(3.0).starts == pytest.approx([0.0, 2.0])
    with pytest.raises(PlanError, match=r"No plan takes 2\.4 s"):
        relaxed.solve(2.4)


def test_faster_than_the_fastest_options_is_an_error():
    dag = make_network(2, [(0, 1)])
    relaxed = RelaxedTradeoff(dag, [make_option_set([1, 2], [10, 6], [2, 1])] * 2)
    with pytest.raises(PlanError, match=r"No plan takes 1\.9 s"):
        relaxed.solve(1.9)


def test_of_many_options_the_relaxation_takes_some_and_is_hardly_dearer():
    times = np.linspace(1.0, 2.0, 200)
    relaxed = RelaxedTradeoff(make_network(1, []), [make_option_set(times, 1 / times, range(200, 0, -1))])
    for time in (1.0, 1.234, 1.777, 2.0):
        assert 1 / time - 1e-6 <= relaxed.solve(time).cost <= 1 / time + 2e-4
