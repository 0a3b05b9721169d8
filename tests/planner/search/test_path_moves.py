import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_pfo.planner.network.assignments import OptionTable
from lightning_pfo.planner.network.dag import make_network
from lightning_pfo.planner.network.options import make_option_set
from lightning_pfo.planner.search.path_moves import PathMoves
from tests.planner.problems import edge_sets, option_sets, options_of

NODES = 7


def chosen_times(options, choice):
    return [opts.times[k] for opts, k in zip(options, choice, strict=True)]


def total_cost(options, choice):
    return sum(opts.costs[k] for opts, k in zip(options, choice, strict=True))


@settings(deadline=None, max_examples=40)
@given(
    edge_sets(NODES),
    options_of(NODES, most=5, least_time=0),
    st.randoms(use_true_random=False),
    st.floats(1, 1.5),
)
def test_choices_never_get_dearer_and_keep_to_their_deadlines(edges, options, random, room):
    dag = make_network(NODES, edges)
    moves = PathMoves(OptionTable(dag, options))
    choices = np.array([[random.randrange(len(opts.times)) for opts in options] for _ in range(3)]).T
    deadlines = np.array([dag.longest_path(chosen_times(options, row)) for row in choices.T])
    deadlines *= [1, room, 1.2]
    for _ in range(3):
        moved = moves.improve(choices, deadlines)
        for before, after, deadline in zip(choices.T, moved.T, deadlines, strict=True):
            assert all(0 <= k < len(opts.times) for opts, k in zip(options, after, strict=True))
            assert dag.longest_path(chosen_times(options, after)) <= deadline * (1 + 1e-9)
            assert total_cost(options, after) <= total_cost(options, before) + 1e-9
        choices = moved


@settings(deadline=None, max_examples=50)
@given(option_sets(5, 0), option_sets(5, 0), st.randoms(use_true_random=False), st.floats(1, 1.5))
def test_of_two_nodes_in_a_row_the_best_of_all_choices_near_the_present_one_is_found(first, second, random, room):
    dag = make_network(2, [(0, 1)])
    options = [first, second]
    choice = [random.randrange(len(opts.times)) for opts in options]
    deadline = room * sum(chosen_times(options, choice))
    moved = PathMoves(OptionTable(dag, options)).improve(np.array(choice)[:, None], np.array([deadline]))
    near = [range(max(k - 2, 0), min(k + 3, len(opts.times))) for opts, k in zip(options, choice, strict=True)]
    best = min(
        total_cost(options, pair)
        for pair in itertools.product(*near)
        if sum(chosen_times(options, pair)) <= deadline * (1 + 1e-12)
    )
    assert total_cost(options, moved[:, 0]) <= best + 1e-9


def test_several_events_are_moved_at_once():
    # A chain. Node 0 saves 8 J in one second more; node 2 loses least by one second less. What is between them moves.
    dag = make_network(4, [(0, 1), (1, 2), (2, 3)])
    menus = [([1, 2], [9, 1]), ([2, 3], [9, 4]), ([2, 3], [5, 4]), ([1, 2], [3, 1])]
    table = OptionTable(dag, [make_option_set(times, costs, [0, 1]) for times, costs in menus])
    moved = PathMoves(table).improve(np.array([[0], [1], [1], [1]]), np.array([9.0]))
    assert moved[:, 0].tolist() == [1, 1, 0, 1]
