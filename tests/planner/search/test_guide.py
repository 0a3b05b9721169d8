import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_pfo.planner.network.assignments import OptionTable
from lightning_pfo.planner.relaxation.linear_programme import RelaxedTradeoff
from lightning_pfo.planner.search.guide import Guide, take_guidance
from tests.planner.problems import least_costs, problems


@settings(deadline=None, max_examples=60)
@given(problems(5), st.lists(st.floats(-0.1, 1.1), min_size=1, max_size=4), st.floats(0.98, 1.02))
def test_mixtures_are_schedules_flows_and_bounds(problem, fractions, stretch):
    dag, options = problem
    table, programme = OptionTable(dag, options), RelaxedTradeoff(dag, options)
    fastest = dag.longest_path([opts.times[0] for opts in options])
    slowest = dag.longest_path([opts.times[-1] for opts in options])
    solutions = [programme.solve(time) for time in np.linspace(slowest, fastest, 4)]
    wanted = [fastest + fraction * (slowest - fastest) for fraction in fractions]
    within = np.clip(wanted, fastest, slowest)
    guides = [Guide(time, clipped * stretch, 0.1, 0.0, 0.0) for time, clipped in zip(wanted, within, strict=True)]
    guided = take_guidance(table, solutions, guides)
    starts, lasting = guided.moments[list(dag.start_of)], np.array([opts.times[0] for opts in options])[:, None]
    assert np.all(guided.ends - starts >= lasting * min(stretch, 1) - 1e-5)
    events, nodes = dag.waits.T
    assert np.all(guided.moments[events] >= guided.ends[nodes] - 1e-5)
    assert guided.ends.max(axis=0) == pytest.approx(within * stretch, abs=1e-5)
    # What flows into an event flows on: so the least costs under the flow are a bound.
    into = np.array([guided.wait_flow[events == event].sum(axis=0) for event in range(len(dag.events))])
    out = np.array([guided.flow[np.array(dag.start_of) == event].sum(axis=0) for event in range(len(dag.events))])
    waiting = [event for event in range(len(dag.events)) if event not in dag.sources]
    assert into[waiting] == pytest.approx(out[waiting], abs=1e-4)
    for time, flow, worth in zip(within, guided.flow.T, guided.worth, strict=True):
        assert least_costs(table, flow[None])[0] - worth * time <= programme.solve(time).cost + 1e-4
