import doctest
from fractions import Fraction

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from lightning_pfo.planner.network.dag import make_network
from lightning_pfo.planner.relaxation import flow as module
from lightning_pfo.planner.relaxation.flow import UNIT, conserved_flows, largest_number_of_terms
from tests.planner.problems import edge_sets

NODES = 7

amounts = st.one_of(st.sampled_from([-1.0, 0.0, 1e-320, 1e-12, 1e300]), st.floats(0, 50))


@given(edge_sets(NODES), st.lists(amounts, min_size=60, max_size=60))
def test_whatever_is_hinted_at_what_flows_into_an_activity_flows_out(pairs, hints):
    network = make_network(NODES, pairs)
    edge_hints = np.array(hints[: len(network.edges)])
    sink_hints = np.minimum(np.array(hints[-len(network.sinks) :]), 1e9)
    flows = conserved_flows(network, edge_hints[None], sink_hints[None])
    through, shares = flows.through[0], flows.shares[0]
    assert (through >= 0).all()
    assert (shares >= 0).all()
    allowed = Fraction((largest_number_of_terms(network) + 4) * UNIT)
    tails, heads = network.edges.T.tolist()
    for node in range(NODES):
        leaving = [
            Fraction(max(hint, 0.0)) for sink, hint in zip(network.sinks, sink_hints, strict=True) if sink == node
        ]
        # Exactly normalised shares of what flows through each activity that waits for it.
        for tail, head, share in zip(tails, heads, shares, strict=True):
            if tail == node:
                into = sum(Fraction(float(s)) for h, s in zip(heads, shares, strict=True) if h == head)
                leaving.append(Fraction(float(share)) / into * Fraction(float(through[head])))
        assert abs(Fraction(float(through[node])) - sum(leaving)) <= allowed * sum(leaving) + Fraction(1e-300)


def test_the_example_in_the_documentation():
    assert doctest.testmod(module).failed == 0
