"""A general solver for the discrete time-cost tradeoff problem on a networkx DAG.

Every node is an activity with options, each a time, a cost and a knob (anything that says how to get them), and an edge
may have a delay: the time from the end of one activity until the other may start. An assignment takes one option per
node; its time is the longest path, delays included, and its cost the sum of the options' costs, plus a rate per unit of
time if one is given. The problem is NP-hard (De et al., Operations Research 45(2), 1997), so assignments come with a
proven lower bound. The pipeline planner is the case of instructions, effective energies and clocks.

Example:
    >>> import networkx as nx
    >>> graph = nx.DiGraph([("dig", "pour"), ("pour", "build"), ("order", "build")])
    >>> for node in graph:
    ...     graph.nodes[node]["options"] = [(1.0, 9.0, "two crews"), (2.0, 5.0, "one crew")]
    >>> graph.nodes["dig"]["options"] = [(1.0, 9.0, "two crews"), (2.0, 3.0, "one crew")]
    >>> for point in solve_time_cost_tradeoff(graph, num_points=4):
    ...     print(f"{point.time:.0f} days, {point.cost:.0f} (at least {point.lower_bound:.0f}): {point.knobs['dig']}")
    3 days, 32 (at least 32): two crews
    4 days, 26 (at least 26): one crew
    5 days, 22 (at least 22): one crew
    6 days, 18 (at least 18): one crew
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.core.ranges import NUM_PLANS, is_number
from lightning_pfo.core.wording import shortened
from lightning_pfo.planner.network.dag import make_network
from lightning_pfo.planner.network.options import OptionSet, make_option_set
from lightning_pfo.planner.search.solver import trace_tradeoff

if TYPE_CHECKING:
    import networkx as nx

_LARGEST = 1e100
"""Numbers whose squares may overflow are no times and costs."""


@dataclass(frozen=True)
class TimeCostPoint:
    """An assignment of options.

    Attributes:
        time: Longest path.
        cost: Cost of the options plus the rate times `time`.
        lower_bound: No assignment that takes at most `time` costs less.
        knobs: The knob of the option chosen for each node.
    """

    time: float
    cost: float
    lower_bound: float
    knobs: Mapping[Hashable, Any]


def solve_time_cost_tradeoff(
    graph: nx.DiGraph[Any],
    *,
    options: str = "options",
    delay: str = "delay",
    rate: float = 0.0,
    num_points: int = 50,
    deadlines: Sequence[float] = (),
) -> list[TimeCostPoint]:
    """Find assignments from the fastest to the one of least cost, none dominated, fast to slow.

    Args:
        graph: Activities; an edge means that its head starts after its tail has finished, and a delay.
        options: Node attribute with a non-empty sequence of (time, cost, knob); times are at least 0. Nodes that
            share one sequence object are recognised as of one kind.
        delay: Edge attribute with the delay, at least 0; an edge without it has none.
        rate: Cost of a unit of total time, at least 0.
        num_points: Number of times, equally spaced, near which assignments are wanted, at least 2.
        deadlines: Times for which the best assignment is wanted as well.

    Raises:
        ConfigurationError: If there is no node, the graph has a cycle or no directions, a node's options are missing or
            malformed, or an edge's delay is no time.
        PlanError: If a deadline cannot be met.
    """
    nodes = list(graph)
    if not nodes or not NUM_PLANS.allows(num_points) or not is_number(rate) or not 0 <= rate <= _LARGEST:
        raise ConfigurationError(
            f"The tradeoff needs at least one node, num_points >= 2 (at most {NUM_PLANS.most:,}) and a rate >= 0; got "
            f"{len(nodes)} nodes, num_points={shortened(num_points)} and rate={shortened(rate)}."
        )
    _check_precedences(graph)
    number = {node: i for i, node in enumerate(nodes)}
    delays = {(number[before], number[after]): value for (before, after), value in _delays(graph, delay).items()}
    dag = make_network(len(nodes), ((number[before], number[after]) for before, after in graph.edges()), delays)
    given: list[Any] = [graph.nodes[node].get(options) for node in nodes]
    kinds: dict[int, OptionSet] = {}
    for node, menu in zip(nodes, given, strict=True):
        if id(menu) not in kinds:
            kinds[id(menu)] = _option_set(node, menu, options)
    option_sets = [kinds[id(menu)] for menu in given]
    return [
        TimeCostPoint(
            point.time,
            point.cost,
            point.bound,
            {
                node: menu[opts.knobs[k]][2]
                for node, menu, opts, k in zip(nodes, given, option_sets, point.assignment, strict=True)
            },
        )
        for point in trace_tradeoff(dag, option_sets, rate=rate, num_points=num_points, deadlines=deadlines)
    ]


def _check_precedences(graph: nx.DiGraph[Any]) -> None:
    import networkx as nx  # slow to import, and the pipeline planner needs none of it

    if not graph.is_directed():
        raise ConfigurationError("An edge says what comes first, so the graph must be directed; use networkx.DiGraph.")
    if not nx.is_directed_acyclic_graph(graph):
        cycle = [str(before) for before, *_ in nx.find_cycle(graph)]
        raise ConfigurationError(
            f"Precedences must not form a cycle; got {' -> '.join([*cycle, cycle[0]])}. Remove one of these edges."
        )


def _delays(graph: nx.DiGraph[Any], attribute: str) -> dict[tuple[Hashable, Hashable], float]:
    """Delays of the edges that have one."""
    delays: dict[tuple[Hashable, Hashable], float] = {}
    value: Any
    for before, after, value in graph.edges.data(attribute):
        if value is not None and not (is_number(value) and 0 <= value <= _LARGEST):
            raise ConfigurationError(
                f"A delay is a number between 0 and {_LARGEST:g}; edge {before!r} -> {after!r} has "
                f"{attribute}={shortened(value)}."
            )
        if value:  # of doubled edges the longest counts
            delays[before, after] = max(float(value), delays.get((before, after), 0.0))
    return delays


def _option_set(node: Hashable, menu: Any, attribute: str) -> OptionSet:
    """Options of one node; the knob of an option is its position in the menu."""
    try:
        times = [float(time) for time, _, _ in menu]
        costs = [float(cost) for _, cost, _ in menu]
        are_small = all(abs(number) <= _LARGEST for number in (*times, *costs))  # nan is not
        usable = 0 < len(menu) == len(times) and are_small and min(times) >= 0
    except (TypeError, ValueError, OverflowError):
        usable = False
    if not usable:
        raise ConfigurationError(
            f"Node {node!r} needs an attribute {attribute!r}, a sequence of at least one (time, cost, knob), times at "
            f"least 0 and no number beyond {_LARGEST:g}; got {menu!r}."
        )
    return make_option_set(times, costs, range(len(times)))
