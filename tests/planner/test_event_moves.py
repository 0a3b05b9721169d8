import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_pfo.planner.event_moves import EventMoves
from lightning_pfo.planner.hull import make_option_set
from lightning_pfo.planner.instruction_dag import make_dag
from lightning_pfo.planner.rounding import chosen_times, total_cost

NODES = 7
option_sets = st.lists(st.tuples(st.integers(1, 40), st.integers(-30, 60)), min_size=1, max_size=5).map(
    lambda points: make_option_set([t / 10 for t, _ in points], [c for _, c in points], range(len(points)))
)


@settings(deadline=None, max_examples=100)
@given(
    st.sets(st.sampled_from(list(itertools.combinations(range(NODES), 2)))),
    st.lists(option_sets, min_size=NODES, max_size=NODES),
    st.randoms(use_true_random=False),
    st.floats(1, 1.5),
)
def test_choices_never_get_dearer_and_keep_to_the_deadline(edges, options, random, room):
    dag = make_dag(NODES, edges)
    choice = [random.randrange(len(opts.times)) for opts in options]
    deadline = room * dag.longest_path(chosen_times(options, choice))
    moves = EventMoves(dag, options)
    cost = total_cost(options, choice)
    for _ in range(3):
        choice = moves.improve(choice, deadline, 1)
        assert all(0 <= k < len(opts.times) for opts, k in zip(options, choice, strict=True))
        assert dag.longest_path(chosen_times(options, choice)) <= deadline * (1 + 1e-9)
        assert total_cost(options, choice) <= cost + 1e-9
        cost = total_cost(options, choice)


def test_time_goes_to_where_it_is_worth_most():
    # Node 0, then 1 and 2 side by side, then 3. Slowing 1 and 2 down saves 2 x 5 J; slowing 0 or 3 down saves 6 J.
    dag = make_dag(4, [(0, 1), (0, 2), (1, 3), (2, 3)])
    inner = make_option_set([1, 2], [9, 4], [2, 1])
    outer = make_option_set([1, 2], [9, 3], [2, 1])
    options = [outer, inner, inner, outer]
    assert EventMoves(dag, options).improve([1, 0, 0, 0], 4.0, 2) == [0, 1, 1, 0]
    assert EventMoves(dag, options).improve([1, 0, 0, 0], 5.0, 2) in ([1, 1, 1, 0], [0, 1, 1, 1])
