import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_pfo.core.errors import PlanError
from lightning_pfo.core.schedules.registry import make_schedule
from lightning_pfo.planner.network.assignments import OptionTable
from lightning_pfo.planner.network.dag import make_network
from lightning_pfo.planner.network.options import make_option_set
from lightning_pfo.planner.pipeline.problem import schedule_network
from lightning_pfo.planner.relaxation.linear_programme import RelaxedTradeoff
from lightning_pfo.planner.search.beam import order_of_time, search_beam
from lightning_pfo.planner.search.guide import Guide
from lightning_pfo.planner.search.pool import proven_points
from lightning_pfo.planner.search.solver import trace_tradeoff
from lightning_pfo.planner.search.splice import recombine, splice
from tests.planner.problems import problems


def chosen_times(options, choice):
    return [opts.times[k] for opts, k in zip(options, choice, strict=True)]


def total_cost(options, choice):
    return sum(opts.costs[k] for opts, k in zip(options, choice, strict=True))


def all_choices(dag, options):
    for choice in itertools.product(*(range(len(opts.times)) for opts in options)):
        yield dag.longest_path(chosen_times(options, choice)), total_cost(options, choice)


@settings(deadline=None, max_examples=60)
@given(problems(6, most=3, least_cost=1), st.floats(0, 20), st.floats(0, 1))
def test_against_all_choices_of_small_problems(problem, rate, fraction):
    dag, options = problem
    every = [(time, cost + rate * time) for time, cost in all_choices(dag, options)]
    fastest, slowest = min(every)[0], max(every)[0]
    deadline = fastest + fraction * (slowest - fastest)
    points = trace_tradeoff(dag, options, rate=rate, num_points=5, deadlines=[deadline])
    assert points[0].time == pytest.approx(fastest)
    for point in points:
        durations = chosen_times(options, point.assignment)
        assert point.time == dag.longest_path(durations)
        assert point.cost == pytest.approx(total_cost(options, point.assignment) + rate * point.time)
        best = min(cost for time, cost in every if time <= point.time * (1 + 1e-9))
        assert point.bound <= best + 1e-4
        assert best <= point.cost + 1e-9
    for fast, slow in itertools.pairwise(points):
        assert fast.time <= slow.time
        assert fast.cost > slow.cost
    assert min(point.time for point in points) <= deadline * (1 + 1e-9)


def test_a_chain_is_solved_exactly():
    # A knapsack: of five equal steps in a row, each may be slow (2 s, 1 J) or fast (1 s, 3 J).
    dag = make_network(5, itertools.pairwise(range(5)))
    options = [make_option_set([1, 2], [3, 1], [2, 1])] * 5
    points = trace_tradeoff(dag, options, num_points=6)
    assert [(point.time, point.cost) for point in points] == [(t, 15 - 2 * (t - 5)) for t in range(5, 11)]
    assert all(point.bound == pytest.approx(point.cost) for point in points)


def test_a_deadline_nobody_can_meet_is_an_error():
    dag = make_network(1, [])
    with pytest.raises(PlanError, match=r"must not be shorter than 1\.000000 s"):
        trace_tradeoff(dag, [make_option_set([1, 2], [3, 1], [2, 1])], deadlines=[0.5])


@pytest.fixture(scope="module")
def pipeline():
    schedule = make_schedule("1f1b", 3, 8)
    kinds = {
        (stage, kind): make_option_set(
            [work * (1 + 0.13 * k) for k in range(5)], [20 * work / (1 + 0.3 * k) for k in range(5)], range(5, 0, -1)
        )
        for stage, speed in enumerate((1.0, 1.3, 1.1))
        for kind, work in (("F", speed), ("B", 2 * speed))
    }
    return schedule_network(schedule), [kinds[inst.stage, inst.type.value] for inst in schedule.instructions]


def test_beam_search_loses_little_and_its_deadline_holds(pipeline):
    dag, options = pipeline
    table, relaxed_problem = OptionTable(dag, options), RelaxedTradeoff(dag, options)
    fastest = dag.longest_path([opts.times[0] for opts in options])
    relaxed = [relaxed_problem.solve(fastest * factor) for factor in (1.02, 1.05, 1.1)]
    guides = [Guide(r.time, r.time, 0.2, 0.3, 0.3) for r in relaxed]
    guides += [Guide(r.time, r.time, 0.2, 0.3, 0.3, deadline=r.time) for r in relaxed]
    choices = search_beam(table, relaxed, guides, order_of_time(table, relaxed[1]), width=20, options_per_node=4)
    assert choices.shape == (dag.num_nodes, len(guides))
    for solution, guide, choice in zip(relaxed * 2, guides, choices.T, strict=True):
        time = dag.longest_path(chosen_times(options, choice))
        assert time <= guide.deadline * (1 + 1e-9)
        assert time == pytest.approx(guide.time, rel=0.03)
        loss = total_cost(options, choice) - solution.tangent_at(time)
        assert 0 <= loss + 1e-6 < 0.03 * solution.cost


def test_splicing_joins_choices_on_either_side_of_the_time(pipeline):
    dag, options = pipeline
    ends = np.array([[0] * dag.num_nodes, [len(opts.times) - 1 for opts in options]]).T
    times = np.array([dag.longest_path(chosen_times(options, choice)) for choice in ends.T])
    costs = np.array([total_cost(options, choice) for choice in ends.T])
    targets = times[0] + np.array([0.1, 0.5, 0.9]) * (times[1] - times[0])
    joined, target = splice(ends, times, costs, targets, dag.order, pairs_per_target=4)
    assert target.tolist() == [0, 1, 2, 0, 1, 2]
    assert joined.shape == (dag.num_nodes, 6)  # the one pair there is, both ways
    for column, choice in enumerate(joined.T):
        slow_share = [0.1, 0.5, 0.9][column % 3]
        assert np.mean(choice == ends[:, 1]) == pytest.approx(slow_share, abs=1 / dag.num_nodes)
        in_order = choice[list(dag.order)] == ends[:, 1]
        assert np.count_nonzero(np.diff(in_order)) == 1
    assert splice(ends, times, costs, times[1:] * 2, dag.order, pairs_per_target=4)[0].shape == (dag.num_nodes, 0)


def test_recombining_joins_every_two_both_ways_at_every_seam():
    joined = recombine(np.array([[0, 1, 2]] * 4), [3, 2, 1, 0], num_seams=1)
    # Nodes 3 and 2 come first.
    assert joined[[3, 1]].T.tolist() == [[0, 1], [0, 2], [1, 0], [1, 2], [2, 0], [2, 1]]
    assert (joined[3] == joined[2]).all()
    assert (joined[1] == joined[0]).all()
    assert recombine(np.array([[0]] * 4), [3, 2, 1, 0], num_seams=5).shape == (4, 0)


@given(problems(6, most=3, least_cost=1), st.floats(0, 1))
def test_spending_slack_keeps_the_deadline_and_makes_no_node_faster(problem, fraction):
    dag, options = problem
    table = OptionTable(dag, options)
    fast = np.array([[0, len(opts.times) // 2] for opts in options])
    longest = np.array([dag.longest_path(chosen_times(options, choice)) for choice in fast.T])
    assert table.longest_paths(fast).tolist() == longest.tolist()
    assert table.total_costs(fast) == pytest.approx([total_cost(options, choice) for choice in fast.T])
    deadlines = longest * (1 + fraction)
    spent, times = table.spend_slack(fast, deadlines)
    assert times.tolist() == [dag.longest_path(chosen_times(options, choice)) for choice in spent.T]
    assert (times <= deadlines * (1 + 1e-9)).all()
    assert (spent >= fast).all()
    again, _ = table.spend_slack(spent, deadlines)
    # What is left over does not suffice for the next slower option of any single node.
    slower = np.minimum(again + 1, [[len(opts.times) - 1] for opts in options])
    for column, deadline in enumerate(deadlines):
        for node in range(dag.num_nodes):
            tried = again[:, column].copy()
            tried[node] = slower[node, column]
            if tried[node] != again[node, column]:
                assert dag.longest_path(chosen_times(options, tried)) > deadline


def test_spent_slack_saves(pipeline):
    dag, options = pipeline
    table = OptionTable(dag, options)
    fast = np.zeros((dag.num_nodes, 1), dtype=int)
    spent, _ = table.spend_slack(fast, table.longest_paths(fast))
    assert table.total_costs(spent) < table.total_costs(fast)


def test_progress_is_reported_up_to_the_end(pipeline):
    dag, options = pipeline
    reports = []
    trace_tradeoff(dag, options, num_points=6, on_progress=lambda *report: reports.append(report))
    assert [report for report in reports if report[0] == "relaxing"]
    assert {activity for activity, done, total in reports if done == total} == {activity for activity, *_ in reports}
    assert all(1 <= done <= total for _, done, total in reports)


def test_as_many_points_as_wanted_where_there_are_so_many(pipeline):
    dag, options = pipeline
    for num_points in (12, 50):
        points = trace_tradeoff(dag, options, num_points=num_points)
        assert len(points) == num_points
        for fast, slow in itertools.pairwise(points):
            assert fast.time < slow.time
            assert fast.cost > slow.cost
    chain = make_network(3, [(0, 1), (1, 2)])
    assert len(trace_tradeoff(chain, [make_option_set([1, 2], [3, 1], [2, 1])] * 3, num_points=50)) == 4


def test_a_bound_above_a_cost_is_said_and_not_claimed(caplog):
    class Wrong:
        def at(self, times):
            return np.full(len(times), 5.0)

    too_cheap, right = proven_points(Wrong(), np.array([1.0, 2.0]), np.array([4.0, 5.0]), np.array([[0, 1], [1, 0]]))
    assert too_cheap.bound == -math.inf
    assert caplog.text.count("error of the planner's") == 1
    assert right.bound == 5.0
    assert (too_cheap.assignment, right.assignment) == ((0, 1), (1, 0))


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 10**6), st.floats(-12, -7))
def test_a_time_to_keep_to_is_kept_where_options_are_hardly_apart(seed, exponent):
    # The whole frontier is about as wide as the tolerance for equal times, which must not be allowed twice.
    random, apart = np.random.default_rng(seed), 10.0**exponent
    schedule = make_schedule("gpipe", 2, 5)
    kinds = {
        (stage, kind): make_option_set(
            random.uniform(0.001, 0.003) * (1 + apart * np.cumsum(random.random(5))),
            10 - np.cumsum(random.random(5)),
            range(5, 0, -1),
        )
        for stage in (0, 1)
        for kind in "FB"
    }
    dag = schedule_network(schedule)
    options = [kinds[inst.stage, inst.type.value] for inst in schedule.instructions]
    fastest = dag.longest_path([opts.times[0] for opts in options])
    points = trace_tradeoff(dag, options, rate=100.0, num_points=8, times=[fastest])
    assert points[0].time <= fastest * (1 + 1e-9)
