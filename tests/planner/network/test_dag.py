import itertools

import networkx as nx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.core.schedules.registry import make_schedule
from lightning_pfo.planner.network.assignments import OptionTable, finish_times
from lightning_pfo.planner.network.dag import make_network
from lightning_pfo.planner.network.options import make_option_set
from lightning_pfo.planner.pipeline.problem import schedule_network
from tests.planner.problems import delay_sets

durations = st.lists(st.floats(0.1, 9.0), min_size=7, max_size=7)
edges = st.sets(st.sampled_from(list(itertools.combinations(range(7), 2))))


delays = st.one_of(st.just({}), delay_sets(7))


def networkx_longest_path(pairs, weights, delays):
    graph = nx.DiGraph()
    graph.add_nodes_from(range(len(weights)))
    graph.add_edges_from((a, b, {"weight": weights[a] + delays.get((a, b), 0.0)}) for a, b in pairs)
    graph.add_edges_from((node, "end", {"weight": weights[node]}) for node in range(len(weights)))
    return nx.dag_longest_path_length(graph)


@given(edges, durations, st.permutations(range(7)), delays)
def test_longest_path_equals_that_of_networkx(pairs, weights, names, delays):
    renamed = {(names[a], names[b]) for a, b in pairs}
    renamed_delays = {(names[a], names[b]): delay for (a, b), delay in delays.items()}
    dag = make_network(7, renamed, renamed_delays)
    assert dag.longest_path(weights) == pytest.approx(networkx_longest_path(renamed, weights, renamed_delays))
    path = dag.critical_path(weights)
    waited = sum(renamed_delays.get(edge, 0.0) for edge in itertools.pairwise(path))
    assert sum(weights[node] for node in path) + waited == pytest.approx(dag.longest_path(weights))
    assert set(itertools.pairwise(path)) <= renamed


@given(edges, durations, delays)
def test_ends_and_starts_are_the_longest_paths_to_and_from_each_node(pairs, weights, delays):
    dag = make_network(7, pairs, delays)
    finish = dag.finish_times(weights)
    latest = dag.latest_starts(weights, 100.0)
    for node in range(7):
        before = [*nx.ancestors(nx.DiGraph([*pairs, (node, node)]), node), node]
        after = [*nx.descendants(nx.DiGraph([*pairs, (node, node)]), node), node]
        for nodes, length in ((before, finish[node]), (after, 100.0 - latest[node])):
            number = {name: place for place, name in enumerate(nodes)}
            inside = {(number[a], number[b]) for a, b in pairs if {a, b} <= set(nodes)}
            own = {(number[a], number[b]): d for (a, b), d in delays.items() if {a, b} <= set(nodes)}
            assert length == pytest.approx(networkx_longest_path(inside, [weights[name] for name in nodes], own))


@given(edges, durations, delays, st.integers(0, 9))
def test_passes_over_many_durations_at_once_equal_those_over_one(pairs, weights, delays, seed):
    dag = make_network(7, pairs, delays)
    columns = np.array(weights)[:, None] * np.random.default_rng(seed).uniform(0.5, 2.0, (7, 3))
    found = finish_times(dag, columns)
    one = make_option_set([1.0], [0.0], [1])
    latest = OptionTable(dag, [one] * 7).latest_ends(columns, np.full(3, 50.0)) - columns
    for column in range(3):
        durations_s = columns[:, column].tolist()
        assert found[:, column] == pytest.approx(dag.finish_times(durations_s), rel=1e-12)
        assert latest[:, column] == pytest.approx(dag.latest_starts(durations_s, 50.0), rel=1e-12)


@given(edges, durations, delays)
def test_latest_starts_leave_no_slack_on_a_critical_path(pairs, weights, delays):
    dag = make_network(7, pairs, delays)
    finish = dag.finish_times(weights)
    latest = dag.latest_starts(weights, max(finish))
    slack = [start - (end - weight) for start, end, weight in zip(latest, finish, weights, strict=True)]
    assert min(slack) == pytest.approx(0, abs=1e-9)
    assert all(slack[node] == pytest.approx(0, abs=1e-9) for node in dag.critical_path(weights))


def test_a_cycle_is_an_error():
    with pytest.raises(ConfigurationError, match="cycle"):
        make_network(3, [(0, 1), (1, 2), (2, 1)])


def test_a_schedule_has_a_node_per_instruction_and_an_edge_per_dependency():
    schedule = make_schedule("1f1b", 3, 5)
    dag = schedule_network(schedule)
    named = {(schedule.instructions[a], schedule.instructions[b]) for a, b in dag.edges.tolist()}
    assert dag.num_nodes == 2 * 3 * 5
    assert named == set(schedule.dependencies())


@given(edges, delays)
def test_nodes_that_wait_equally_long_for_the_same_start_at_one_event(pairs, delays):
    dag = make_network(7, pairs, delays)
    assert len(set(dag.awaited)) == len(dag.awaited)
    for node in range(7):
        waits = {(a, delays.get((a, b), 0.0)) for a, b in pairs if b == node}
        assert set(dag.awaited[dag.start_of[node]]) == waits
        assert set(dag.events[dag.start_of[node]]) == {a for a, _ in waits}
        assert set(dag.ends_of[node]) == {dag.start_of[b] for a, b in pairs if a == node}
    for (before, after), wait in zip(dag.edges.tolist(), dag.wait_of_edge.tolist(), strict=True):
        assert dag.waits[wait].tolist() == [dag.start_of[after], before]
        assert dag.wait_delays[wait] == delays.get((before, after), 0.0)


def layers(width, depth):
    """Each activity of a layer waits for all of the one before."""
    return [
        (layer * width + i, (layer + 1) * width + j)
        for layer in range(depth - 1)
        for i, j in itertools.product(range(width), repeat=2)
    ]


WIDE = {
    "star": (401, [(i, 200) if i < 200 else (200, i) for i in range(401) if i != 200]),
    "layers": (180, layers(60, 3)),
    "parallel": (500, []),
}


def without_delays(neighbours):
    return [[node for node, _ in row] for row in neighbours]


@pytest.mark.parametrize("name", WIDE)
def test_levels_of_wide_networks_are_no_larger_than_the_networks(name):
    num_nodes, pairs = WIDE[name]
    network = make_network(num_nodes, pairs)
    for levels, neighbours_of in (
        (network.levels, without_delays(network.incoming)),
        (network.levels_from_the_end, without_delays(network.outgoing)),
    ):
        sizes = [level.neighbours.size + sum(len(places) for places, _ in level.columns) for level in levels.levels]
        assert sum(sizes) <= 5 * len(pairs)
        values = np.random.default_rng(0).random((num_nodes, 2))
        for level in levels.levels[1:]:
            nodes = levels.nodes[level.positions]
            expected = [values[list(neighbours_of[node])].max(axis=0) for node in nodes]
            assert level.reduce(np.maximum, values[levels.nodes]).tolist() == np.array(expected).tolist()


@given(st.sets(st.sampled_from(list(itertools.combinations(range(9), 2)))), st.integers(0, 99))
def test_levels_tell_the_largest_and_least_of_all_neighbours(pairs, seed):
    network, values = make_network(9, pairs), np.random.default_rng(seed).random(9)
    levels = network.levels
    for level in levels.levels[1:]:
        before = [values[without_delays(network.incoming)[node]] for node in levels.nodes[level.positions]]
        assert level.reduce(np.maximum, values[levels.nodes]).tolist() == [some.max() for some in before]
        assert level.reduce(np.minimum, values[levels.nodes]).tolist() == [some.min() for some in before]
