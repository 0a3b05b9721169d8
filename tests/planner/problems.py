"""Random problems for hypothesis: small DAGs and options for their nodes; and profiles whose transfers take time."""

import itertools
from dataclasses import replace

import numpy as np
from hypothesis import strategies as st

from lightning_pfo.planner.network.dag import make_network
from lightning_pfo.planner.network.options import make_option_set


def option_sets(most=4, least_time=5, least_cost=-30):
    """Up to so many options of 0.1 s ticks and whole joules, of which those that are Pareto-optimal are kept."""
    points = st.lists(st.tuples(st.integers(least_time, 40), st.integers(least_cost, 60)), min_size=1, max_size=most)
    return points.map(lambda p: make_option_set([t / 10 for t, _ in p], [c for _, c in p], range(1, len(p) + 1)))


def options_of(num_nodes, **kinds):
    """An option set for each node; see `option_sets`."""
    return st.lists(option_sets(**kinds), min_size=num_nodes, max_size=num_nodes)


def edge_sets(num_nodes, min_size=0):
    """Precedences from smaller to larger numbers."""
    return st.sets(st.sampled_from(list(itertools.combinations(range(num_nodes), 2))), min_size=min_size)


def delay_sets(num_nodes):
    """Delays in 0.1 s of some pairs of nodes; those that are no precedence mean nothing."""
    pairs = st.sampled_from(list(itertools.combinations(range(num_nodes), 2)))
    return st.dictionaries(pairs, st.integers(0, 30).map(lambda ticks: ticks / 10))


def networks(num_nodes, min_size=0):
    """Random DAGs, some with delays."""
    return st.builds(
        lambda edges, delays: make_network(num_nodes, edges, delays),
        edge_sets(num_nodes, min_size),
        st.one_of(st.just({}), delay_sets(num_nodes)),
    )


def problems(num_nodes, **kinds):
    """A DAG and the options of its nodes."""
    return st.tuples(networks(num_nodes), options_of(num_nodes, **kinds))


def assignments_of(table):
    """Times and costs of all assignments: brute force."""
    every = np.array(list(itertools.product(*(range(len(table.kinds[kind].times)) for kind in table.kind_of)))).T
    return table.longest_paths(every), table.total_costs(every)


def least_costs(table, flows):
    """Sum over the activities of the least cost of an option plus flow times its time; the last axis are activities."""
    menus = [list(zip(opts.times, opts.costs, strict=True)) for opts in table.kinds]
    return np.array(
        [
            sum(
                min(cost + phi * time for time, cost in menus[kind])
                for kind, phi in zip(table.kind_of, flow, strict=True)
            )
            for flow in flows
        ]
    )


def with_transfers(profile, transfer_s):
    """The profile with a time for each transfer: of a number of seconds, or a function of stage and kind."""
    time_of = transfer_s if callable(transfer_s) else lambda stage, kind: transfer_s
    return replace(
        profile,
        instructions={key: replace(line, transfer_s=time_of(*key)) for key, line in profile.instructions.items()},
    )
