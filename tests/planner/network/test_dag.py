import itertools

import networkx as nx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.core.schedules.registry import make_schedule
from lightning_pfo.planner.network.dag import make_network
from lightning_pfo.planner.pipeline.problem import schedule_network

durations = st.lists(st.floats(0.1, 9.0), min_size=7, max_size=7)
edges = st.sets(st.sampled_from(list(itertools.combinations(range(7), 2))))


def networkx_longest_path(pairs, weights):
    graph = nx.DiGraph()
    graph.add_nodes_from(range(len(weights)))
    graph.add_edges_from((a, b, {"weight": weights[a]}) for a, b in pairs)
    graph.add_edges_from((node, "end", {"weight": weights[node]}) for node in range(len(weights)))
    return nx.dag_longest_path_length(graph)


@given(edges, durations, st.permutations(range(7)))
def test_longest_path_equals_that_of_networkx(pairs, weights, names):
    renamed = {(names[a], names[b]) for a, b in pairs}
    dag = make_network(7, renamed)
    assert dag.longest_path(weights) == pytest.approx(networkx_longest_path(renamed, weights))
    path = dag.critical_path(weights)
    assert sum(weights[node] for node in path) == pytest.approx(dag.longest_path(weights))
    assert set(itertools.pairwise(path)) <= renamed


@given(edges, durations)
def test_latest_starts_leave_no_slack_on_a_critical_path(pairs, weights):
    dag = make_network(7, pairs)
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


@given(edges)
def test_nodes_that_wait_for_the_same_start_at_one_event(pairs):
    dag = make_network(7, pairs)
    assert len(set(dag.events)) == len(dag.events)
    for node in range(7):
        assert set(dag.events[dag.start_of[node]]) == {a for a, b in pairs if b == node}
        assert set(dag.ends_of[node]) == {dag.start_of[b] for a, b in pairs if a == node}


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
