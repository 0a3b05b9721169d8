import doctest
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_pfo.core.schedules.registry import make_schedule
from lightning_pfo.planner.network.assignments import OptionTable
from lightning_pfo.planner.network.dag import make_network
from lightning_pfo.planner.network.options import make_option_set
from lightning_pfo.planner.pipeline.problem import schedule_network
from lightning_pfo.planner.pipeline.steady_state import steady_middles
from lightning_pfo.planner.relaxation import reconvergence
from lightning_pfo.planner.relaxation.aggregated import MergedTradeoff
from lightning_pfo.planner.relaxation.bound import LowerBound
from lightning_pfo.planner.relaxation.flow import conserved_flows
from lightning_pfo.planner.relaxation.linear_programme import RelaxedTradeoff
from lightning_pfo.planner.relaxation.reconvergence import Diamonds
from tests.planner.problems import assignments_of, least_costs, networks, options_of

NODES = 7


def diamonds_of(table):
    return Diamonds(table.dag, table.kind_of, table.times, table.costs, table.dag.wait_delays)


def conserved(table, relaxed):
    """Flow through each activity and along each precedence, and its value."""
    flows = conserved_flows(table.dag, relaxed.edge_flow[None], relaxed.sink_flow[None])
    return flows.through[0], flows.along(table.dag, 0), flows.values[0]


@pytest.mark.parametrize("named", [1, 2, 8])
def test_no_choice_loses_less(named, monkeypatch):
    monkeypatch.setattr(reconvergence, "_OPTIONS", named)

    @settings(deadline=None, max_examples=40)
    @given(
        networks(NODES, min_size=6),
        options_of(NODES, least_cost=1),
        st.floats(0, 1),
    )
    def holds(network, options, fraction):
        table = OptionTable(network, options)
        times, costs = assignments_of(table)
        relaxed = RelaxedTradeoff(table.dag, options).solve(times.min() + fraction * (times.max() - times.min()))
        through, along, value = conserved(table, relaxed)
        delayed = float(along @ network.delays)
        proven = least_costs(table, through[None])[0] + delayed - value * times
        least = diamonds_of(table).least_loss(through, along)
        assert 0 <= least <= (costs - proven).min() + 1e-12 * np.abs(costs).max()

    holds()


def test_what_two_neighbours_lose_is_found_exactly():
    # From the end of node 0 to the start of node 5 it is 4 + (4 or 6) s on one side, 2 + (5 or 7) s on the other.
    dag = make_network(6, [(0, 1), (0, 3), (1, 2), (3, 4), (2, 5), (4, 5)])
    a_second = make_option_set([1], [0], [1])
    slower = {t: make_option_set([t, t + 2], [4, 0], [2, 1]) for t in (4, 5)}
    fixed = {t: make_option_set([t], [0], [1]) for t in (2, 4)}
    table = OptionTable(dag, [a_second, fixed[4], slower[4], fixed[2], slower[5], a_second])
    relaxed = RelaxedTradeoff(dag, [table.kinds[kind] for kind in table.kind_of]).solve(10.5)
    # The relaxation mixes options on both sides, to 3 and 1 J; in fact, a side worth 2 J/s waits for a second.
    assert relaxed.cost == pytest.approx(4)
    assert diamonds_of(table).least_loss(*conserved(table, relaxed)[:2]) == pytest.approx(2)
    bound = LowerBound(table, rate=0.0)
    bound.add(relaxed)
    assert bound.at(10.5) == pytest.approx(4)
    bound.sharpen(np.array([10.5]))
    times, costs = assignments_of(table)
    for time in (10.0, 11.0):
        assert bound.at(time) == pytest.approx(costs[times <= time].min())


@pytest.mark.parametrize(
    "delays",
    [{(1, 2): 0.5, (3, 4): 0.5}, {(1, 2): 0.25, (4, 5): 1.0}, {(2, 5): 1.0}, {(3, 4): 0.75, (2, 5): 0.5}],
)
def test_delays_on_either_side_are_part_of_what_neighbours_lose(delays):
    # As above, but with delays: equal ones on both sides change nothing, others what fits together.
    pairs = [(0, 1), (0, 3), (1, 2), (3, 4), (2, 5), (4, 5)]
    fixed = {t: make_option_set([t], [0], [1]) for t in (1, 2, 4)}
    options = [fixed[1], fixed[4], make_option_set([4, 6], [4, 0], [2, 1])]
    options += [fixed[2], make_option_set([5, 7], [4, 0], [2, 1]), fixed[1]]
    table = OptionTable(make_network(6, pairs, delays), options)
    times, costs = assignments_of(table)
    for share in (0.25, 0.5, 0.75):
        relaxed = RelaxedTradeoff(table.dag, options).solve(times.min() + share * np.ptp(times))
        through, along, value = conserved(table, relaxed)
        proven = least_costs(table, through[None])[0] + along @ table.dag.delays - value * times
        # The network is one diamond between two fixed activities, so what it loses is all that is lost.
        assert diamonds_of(table).least_loss(through, along) == pytest.approx((costs - proven).min(), abs=1e-9)


def test_handling_alike_diamonds_once_changes_nothing(monkeypatch):
    schedule = make_schedule("1f1b", 3, 30)
    kinds = {
        (stage, kind): make_option_set(
            [work * (1 + 0.11 * k) for k in range(6)], [20 * work / (1 + 0.3 * k) for k in range(6)], range(6, 0, -1)
        )
        for stage, speed in enumerate((1.0, 1.07, 1.03))
        for kind, work in (("F", speed), ("B", 2 * speed))
    }
    dag, options = schedule_network(schedule), [kinds[inst.stage, inst.type.value] for inst in schedule.instructions]
    merged = MergedTradeoff(dag, options, steady_middles(schedule, margin=4))
    relaxed = merged.solve(1.1 * dag.longest_path([opts.times[0] for opts in options]))
    table = OptionTable(dag, options)
    found, (through, along, _) = diamonds_of(table), conserved(table, relaxed)
    # Equal flows may have become unequal by a rounding, which makes them of different sorts.
    through, along = np.round(through, 9), np.round(along, 9)
    at_once = found.least_loss(through, along)
    monkeypatch.setattr(Diamonds, "_alike", lambda self, flow, waits: (np.arange(len(flow) + 1), np.arange(len(waits))))
    assert at_once == pytest.approx(found.least_loss(through, along), rel=1e-9)
    assert at_once > 0.1


@pytest.mark.parametrize(("width", "depth"), [(112, 1), (112, 3), (60, 6)])
def test_the_number_of_diamonds_is_bounded_in_wide_networks(width, depth):
    # All of a layer wait for all before: width^4 diamonds between any three layers, 13 million for 60.
    pairs = [
        (layer * width + i, (layer + 1) * width + j)
        for layer in range(depth - 1)
        for i, j in itertools.product(range(width), repeat=2)
    ]
    network = make_network(width * depth, pairs)
    options = [make_option_set([1, 1.3, 2], [9, 6, 3], [3, 2, 1])] * network.num_nodes
    table = OptionTable(network, options)
    assert len(diamonds_of(table)) <= 8 * len(network.events)


def test_what_is_shared_too_much_is_taken_off(monkeypatch):
    # Messages only make the bound better or worse, never false: here they overshoot.
    table = OptionTable(
        make_network(6, [(0, 1), (0, 3), (1, 2), (3, 4), (2, 5), (4, 5), (1, 4)]),
        [make_option_set([t, 1.3 * t, 2 * t], [9 * t, 6 * t, t], [3, 2, 1]) for t in (1, 4, 5, 2, 7, 1)],
    )
    relaxed = RelaxedTradeoff(table.dag, [table.kinds[kind] for kind in table.kind_of]).solve(18.0)
    through, along, value = conserved(table, relaxed)
    times, costs = assignments_of(table)
    proven = least_costs(table, through[None])[0] - value * times
    monkeypatch.setattr(reconvergence, "_STEP", 3.0)
    assert 0 <= diamonds_of(table).least_loss(through, along) <= (costs - proven).min() + 1e-9


def test_the_example_in_the_documentation():
    assert doctest.testmod(reconvergence).failed == 0
