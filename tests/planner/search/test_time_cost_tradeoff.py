import doctest
import itertools
import warnings

import networkx as nx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import lightning_pfo.planner.search.time_cost_tradeoff as module
from lightning_pfo.core.errors import ConfigurationError, PlanError
from lightning_pfo.planner import solve_time_cost_tradeoff

menus = st.lists(st.tuples(st.floats(0, 9), st.floats(-9, 9), st.text(max_size=3)), min_size=1, max_size=3)
pairs = st.sampled_from(list(itertools.combinations("abcde", 2)))
graphs = st.tuples(
    st.dictionaries(pairs, st.one_of(st.none(), st.floats(0, 9))),
    st.fixed_dictionaries({node: menus for node in "abcde"}),
)


def build(delays, options):
    """A graph with an edge for each key of `delays`; None is an edge that says nothing of a delay."""
    graph = nx.DiGraph()
    graph.add_nodes_from((node, {"options": menu}) for node, menu in options.items())
    graph.add_edges_from((*edge, {} if delay is None else {"delay": delay}) for edge, delay in delays.items())
    return graph


def longest_path_of(graph):
    """The length of the longest path as a function of the nodes' times."""
    order = [(node, list(graph.in_edges(node, data="delay", default=0.0))) for node in nx.topological_sort(graph)]

    def length(times):
        finish = {}
        for node, incoming in order:
            finish[node] = times[node] + max([finish[before] + delay for before, _, delay in incoming], default=0.0)
        return max(finish.values())

    return length


@settings(deadline=None, max_examples=60)
@given(graphs)
def test_knobs_of_every_point_give_its_time_and_nothing_beats_its_bound(problem):
    graph = build(*problem)
    menus_of, longest_path = dict(graph.nodes(data="options")), longest_path_of(graph)
    every = []
    for picks in itertools.product(*menus_of.values()):
        times = {node: pick[0] for node, pick in zip(menus_of, picks, strict=True)}
        every.append((longest_path(times), sum(pick[1] for pick in picks)))
    deadline = max(time for time, _ in every)
    points = solve_time_cost_tradeoff(graph, num_points=4, deadlines=[0.6 * deadline + 0.4 * min(every)[0]])
    assert points[-1].cost == pytest.approx(min(cost for _, cost in every), abs=1e-9)
    for point in points:
        # so few choices are all looked at
        best = min(cost for time, cost in every if time <= point.time * (1 + 1e-9))
        assert point.cost == pytest.approx(best, abs=1e-9)
        assert set(point.knobs) == set(graph)
        matching = {node: [(t, c) for t, c, knob in menus_of[node] if knob == point.knobs[node]] for node in graph}
        reachable = [
            (longest_path({n: t for n, (t, _) in zip(matching, picks, strict=True)}), sum(c for _, c in picks))
            for picks in itertools.product(*matching.values())
        ]
        assert any(
            point.time == pytest.approx(time) and point.cost == pytest.approx(cost, abs=1e-9)
            for time, cost in reachable
        )
        assert point.lower_bound <= best + 1e-5
    assert points[0].time == pytest.approx(min(time for time, _ in every), abs=1e-7)


def test_the_frontier_reaches_the_least_total_cost_though_the_relaxation_ends_sooner():
    # half of each option of a would cost least, at 1; no choice does
    graph = build({}, {"a": [(0, 16, "fast"), (2, 12, "slow")], "b": [(1, 10, "only")]})
    points = solve_time_cost_tradeoff(graph, rate=2.5, deadlines=[1.5, 2.1])
    assert [(point.time, point.cost) for point in points] == [(1, 28.5), (2, 27)]
    assert points[-1].lower_bound == pytest.approx(26.5)


def test_a_bound_of_zero_is_no_division_by_zero():
    graph = build({}, {"a": [(0, 100, "fast"), (2, -100, "slow")], "b": [(1, 0, "only")]})
    with warnings.catch_warnings(action="error"):
        points = solve_time_cost_tradeoff(graph)
    assert [(point.time, point.cost) for point in points] == [(1, 100), (2, -100)]
    assert points[0].lower_bound == pytest.approx(0, abs=1e-9)


def test_of_doubled_edges_the_longest_delay_counts_and_its_name_is_yours():
    graph = nx.MultiDiGraph()
    graph.add_nodes_from("ab", options=[(1, 5, "x")])
    graph.add_edges_from([("a", "b", {"lag": 2.0}), ("a", "b", {"lag": 3}), ("a", "b", {"lag": 1.0})])
    assert [point.time for point in solve_time_cost_tradeoff(graph, delay="lag")] == [5.0]
    assert [point.time for point in solve_time_cost_tradeoff(graph)] == [2.0]


@pytest.mark.parametrize("delay", [-1.0, float("nan"), float("inf"), "1", True, 1e101])
def test_delays_that_are_no_times_are_errors(delay):
    graph = build({("a", "b"): delay}, {"a": [(1, 5, "x")], "b": [(1, 5, "x")]})
    with pytest.raises(ConfigurationError, match=r"A delay is a number between 0 and 1e\+100; edge 'a' -> 'b' has"):
        solve_time_cost_tradeoff(graph)


def test_the_example_in_the_documentation():
    assert doctest.testmod(module).failed == 0


def test_doubled_edges_and_numbers_of_any_size_are_fine():
    for unit in (1e-15, 1e-12, 1.0, 1e12):
        graph = nx.MultiDiGraph([("a", "b"), ("a", "b")])
        for node in graph:
            graph.nodes[node]["options"] = [(unit, 5 / unit, "x"), (2 * unit, 3 / unit, "y")]
        points = solve_time_cost_tradeoff(graph)
        assert [(point.time / unit, point.cost * unit) for point in points] == [
            (pytest.approx(time), pytest.approx(cost)) for time, cost in ((2, 10), (3, 8), (4, 6))
        ]


@pytest.mark.parametrize("unit", [1.0, 1e-15, 1e-18])
def test_tiny_times_lose_no_options(unit):
    # A chain of 16, where each may be slow or fast: too many choices to be looked at one by one.
    menus = {node: [(unit, 5, "fast"), (2 * unit, 3, "slow")] for node in range(16)}
    points = solve_time_cost_tradeoff(build(dict.fromkeys(itertools.pairwise(range(16))), menus), num_points=20)
    assert [point.cost for point in points] == list(range(80, 46, -2))


def test_bad_problems_are_errors():
    good = {"a": [(1, 2, "x"), (2, 1, "y")], "b": [(1, 2, "x")]}
    with pytest.raises(ConfigurationError, match=r"cycle; got (a -> b -> a|b -> a -> b)\."):
        solve_time_cost_tradeoff(build(dict.fromkeys([("a", "b"), ("b", "a")]), good))
    with pytest.raises(ConfigurationError, match="cycle; got b -> b"):
        solve_time_cost_tradeoff(build({("b", "b"): None}, good))
    with pytest.raises(ConfigurationError, match="must be directed"):
        solve_time_cost_tradeoff(build({("a", "b"): None}, good).to_undirected())
    for rate in (-1.0, float("nan"), 1e300):
        with pytest.raises(ConfigurationError, match="rate"):
            solve_time_cost_tradeoff(build({("a", "b"): None}, good), rate=rate)
    with pytest.raises(ConfigurationError, match="at least one node"):
        solve_time_cost_tradeoff(nx.DiGraph())
    for menu in (
        None,
        [],
        [(1, 2)],
        [(-1, 2, "x")],
        [(1, float("nan"), "x")],
        [(1, 1e200, "x")],
        iter(good["a"]),
        7,
        "abc",
    ):
        with pytest.raises(ConfigurationError, match="Node 'b' needs an attribute 'options'"):
            solve_time_cost_tradeoff(build({("a", "b"): None}, {**good, "b": menu}))
    with pytest.raises(PlanError, match="must not be shorter than 2"):
        solve_time_cost_tradeoff(build({("a", "b"): None}, good), deadlines=[1.5])
