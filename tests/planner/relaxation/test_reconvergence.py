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
from lightning_pfo.planner.relaxation import reconvergence as diamonds
from lightning_pfo.planner.relaxation.aggregated import MergedTradeoff
from lightning_pfo.planner.relaxation.bound import LowerBound, least_costs
from lightning_pfo.planner.relaxation.linear_programme import RelaxedTradeoff
from lightning_pfo.planner.relaxation.reconvergence import Diamonds
from tests.planner.problems import edge_sets, options_of

NODES = 7


def times_and_costs_of_all_choices(table):
    choices = np.array(list(itertools.product(*(range(len(table.kinds[kind].times)) for kind in table.kind_of)))).T
    return table.longest_paths(choices), table.total_costs(choices)


@pytest.mark.parametrize("named", [1, 2, 8])
def test_no_choice_loses_less(named, monkeypatch):
    monkeypatch.setattr(diamonds, "_OPTIONS", named)

    @settings(deadline=None, max_examples=40)
    @given(
        edge_sets(NODES, min_size=6),
        options_of(NODES, least_cost=1),
        st.floats(0, 1),
    )
    def holds(edges, options, fraction):
        table = OptionTable(make_network(NODES, edges), options)
        times, costs = times_and_costs_of_all_choices(table)
        relaxed = RelaxedTradeoff(table.dag, options).solve(times.min() + fraction * (times.max() - times.min()))
        proven = least_costs(table, relaxed.flow) - relaxed.sink_flow.sum() * times
        least = Diamonds(table).least_loss(relaxed.flow, relaxed.edge_flow)
        assert 0 <= least <= (costs - proven).min() + 1e-6

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
    assert Diamonds(table).least_loss(relaxed.flow, relaxed.edge_flow) == pytest.approx(2)
    bound = LowerBound(table, rate=0.0)
    bound.add(relaxed)
    assert bound.at(10.5) == pytest.approx(4)
    bound.sharpen(np.array([10.5]))
    times, costs = times_and_costs_of_all_choices(table)
    for time in (10.0, 11.0):
        assert bound.at(time) == pytest.approx(costs[times <= time].min())


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
    found = Diamonds(OptionTable(dag, options))
    at_once = found.least_loss(relaxed.flow, relaxed.edge_flow)
    monkeypatch.setattr(Diamonds, "_sorts", lambda self, flow, waits: (np.arange(len(flow) + 1), np.arange(len(waits))))
    assert at_once == pytest.approx(found.least_loss(relaxed.flow, relaxed.edge_flow), rel=1e-9)
    assert at_once > 0.1
