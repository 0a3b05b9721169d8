import doctest
import itertools

from hypothesis import given
from hypothesis import strategies as st

from lightning_pfo.planner.network.dag import make_network
from lightning_pfo.planner.search import beam_memory
from lightning_pfo.planner.search.beam_memory import plan_steps

edges = st.sets(st.sampled_from(list(itertools.combinations(range(8), 2))))


@given(edges, st.permutations(range(8)))
def test_rows_hold_what_later_steps_ask_for_and_nothing_else(pairs, names):
    dag = make_network(8, {(names[a], names[b]) for a, b in pairs})
    steps, num_rows = plan_steps(dag, dag.order)
    rows: list[object] = [("event", event) for event in dag.sources] + [None] * (num_rows - len(dag.sources))
    begun, ended = set(), set()
    for step in steps:
        assert rows[step.start] == ("event", dag.start_of[step.node])
        begun.add(step.node)
        ended.add(step.node)
        for arrival in step.arrivals:
            assert set(dag.events[arrival.event]) <= ended
            assert dag.waits[arrival.wait].tolist() == [arrival.event, step.node]
            for row, wait in arrival.others:
                event, before = dag.waits[wait].tolist()
                assert event == arrival.event
                assert rows[row] == ("end", before)
            assert {step.node, *(dag.waits[wait, 1] for _, wait in arrival.others)} == set(dag.events[arrival.event])
        for row in step.closed:
            rows[row] = None
        opened = [("event", arrival.event) for arrival in step.arrivals] + [("end", step.node)] * step.stays_open
        for row, what in zip(step.opened, opened, strict=True):
            assert rows[row] is None
            rows[row] = what
        waiting = {("event", event) for event, nodes in enumerate(dag.events) if set(nodes) <= ended}
        waiting -= {("event", e) for e in range(len(dag.events)) if all(n in begun for n in of_event(dag, e))}
        waiting |= {("end", node) for node in ended if not dag.ends_of[node] or not heard(dag, node, ended)}
        assert {what for what in rows if what} == waiting


def of_event(dag, event):
    return [node for node in range(dag.num_nodes) if dag.start_of[node] == event]


def heard(dag, node, ended):
    """Whether all events that wait for a node have begun."""
    return all(set(dag.events[event]) <= ended for event in dag.ends_of[node])


def test_the_worked_example():
    assert doctest.testmod(beam_memory).failed == 0
