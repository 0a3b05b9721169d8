import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_pfo.planner.network.assignments import OptionTable
from lightning_pfo.planner.network.dag import make_network
from lightning_pfo.planner.network.options import make_option_set
from lightning_pfo.planner.search.moves import EventMoves
from tests.planner.problems import networks, options_of

NODES = 7


def chosen_times(options, choice):
    return [opts.times[k] for opts, k in zip(options, choice, strict=True)]


def total_cost(options, choice):
    return sum(opts.costs[k] for opts, k in zip(options, choice, strict=True))


@settings(deadline=None, max_examples=100)
@given(
    networks(NODES),
    options_of(NODES, most=5, least_time=1),
    st.randoms(use_true_random=False),
    st.floats(1, 1.5),
)
def test_choices_never_get_dearer_and_keep_to_the_deadline(dag, options, random, room):
    choice = [random.randrange(len(opts.times)) for opts in options]
    deadline = room * dag.longest_path(chosen_times(options, choice))
    moves = EventMoves(OptionTable(dag, options))
    cost = total_cost(options, choice)
    for _ in range(3):
        choice = moves.improve(np.array(choice)[:, None], np.array([deadline]), 1)[:, 0].tolist()
        assert all(0 <= k < len(opts.times) for opts, k in zip(options, choice, strict=True))
        assert dag.longest_path(chosen_times(options, choice)) <= deadline * (1 + 1e-9)
        assert total_cost(options, choice) <= cost + 1e-9
        cost = total_cost(options, choice)


def test_time_goes_to_where_it_is_worth_most():
    # Node 0, then 1 and 2 side by side, then 3. Slowing 1 and 2 down saves 2 x 5 J; slowing 0 or 3 down saves 6 J.
    dag = make_network(4, [(0, 1), (0, 2), (1, 3), (2, 3)])
    inner = make_option_set([1, 2], [9, 4], [2, 1])
    outer = make_option_set([1, 2], [9, 3], [2, 1])
    options = [outer, inner, inner, outer]
    moves, choice = EventMoves(OptionTable(dag, options)), np.array([[1], [0], [0], [0]])
    assert moves.improve(choice, np.array([4.0]), 2)[:, 0].tolist() == [0, 1, 1, 0]
    assert moves.improve(choice, np.array([5.0]), 2)[:, 0].tolist() in ([1, 1, 1, 0], [0, 1, 1, 1])


def test_what_a_delay_takes_is_given_to_nobody():
    # Of 5 s in a row of three, 1 s is a delay: one of the two who save 6 J may be slow, or the one who saves 5 J.
    inner, outer = make_option_set([1, 2], [9, 4], [2, 1]), make_option_set([1, 2], [9, 3], [2, 1])
    table = OptionTable(make_network(3, [(0, 1), (1, 2)], {(1, 2): 1.0}), [outer, inner, outer])
    moves = EventMoves(table)
    assert moves.improve(np.array([[0], [1], [0]]), np.array([5.0]), 2)[:, 0].tolist() in ([1, 0, 0], [0, 0, 1])
    assert moves.improve(np.array([[0], [1], [0]]), np.array([6.0]), 3)[:, 0].tolist() == [1, 0, 1]


def test_an_event_of_many_nodes_is_moved_beside_one_of_few():
    # Two nodes in a row, and beside them three side by side before one; events are batched with padding.
    dag = make_network(6, [(0, 1), (2, 5), (3, 5), (4, 5)])
    early, late = make_option_set([1, 2], [3, 2], [2, 1]), make_option_set([1, 2], [9, 1], [2, 1])
    options = [early, late, early, early, early, late]
    moved = EventMoves(OptionTable(dag, options)).improve(np.array([1, 0, 1, 1, 1, 0])[:, None], np.array([3.0]), 2)
    assert moved[:, 0].tolist() == [0, 1, 0, 0, 0, 1]
