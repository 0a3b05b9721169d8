"""What a beam has to remember of a partial assignment: the lags of ends and events that something still waits for.

A *lag* is by how much later than in the relaxation a node ends or an event is. Once all nodes that an event waits for
have their options, the event has a lag and the ends of these nodes are forgotten; once all nodes that start at an event
have theirs, the event is. So a few rows of one array will do, however long the network is: in 1F1B two or three for
each rank. Which row holds what depends on the order of the nodes only, so all steps are planned before the search.

Example:
    "dig" (node 0) and "order" (1) both come before "pour" (2). Event 0, at which digging and ordering start, waits for
    nothing and has row 0; event 1 waits for nodes 0 and 1: waits number 0 and 1.

    >>> from lightning_pfo.planner.network.dag import make_network
    >>> network = make_network(3, [(0, 2), (1, 2)])
    >>> network.events, network.waits.tolist()
    (((), (0, 1)), [[1, 0], [1, 1]])
    >>> steps, num_rows = plan_steps(network, [0, 1, 2])

    When "dig" has its option, nothing is known of event 1 yet: the lag of its end is put into row 1, and stays open.

    >>> steps[0]
    Step(node=0, start=0, arrivals=[], closed=[], opened=[1], stays_open=True)

    "order" starts at row 0 as well. With its end event 1 is known: the later of this end and that in row 1, of wait 0.
    Nothing needs rows 0 and 1 any longer, so row 1 is used again, for event 1.

    >>> steps[1]  # doctest: +ELLIPSIS
    Step(node=1, start=0, arrivals=[Arrival(event=1, wait=1, others=[(1, 0)])], closed=[0, 1], opened=[1], ...)

    "pour" starts at event 1, in row 1. Nothing waits for its end, which stays open: it decides how late all is.

    >>> steps[2], num_rows
    (Step(node=2, start=1, arrivals=[], closed=[1], opened=[1], stays_open=True), 2)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from lightning_pfo.planner.network.dag import ActivityNetwork


class Arrival(NamedTuple):
    """A node was the last that an event waited for.

    Attributes:
        event: The event.
        wait: Number of the wait in `dag.waits`.
        others: Row and number of each other wait for the event.
    """

    event: int
    wait: int
    others: list[tuple[int, int]]


class Step(NamedTuple):
    """What the end of a node has to do with the rows.

    Attributes:
        node: The node.
        start: Row of the event at which it starts.
        arrivals: The events it was the last to be waited for.
        closed: Rows nothing needs any longer.
        opened: Rows for these events; and one for its end, where that stays open.
        stays_open: Whether something still waits for its end, or nothing ever does.
    """

    node: int
    start: int
    arrivals: list[Arrival]
    closed: list[int]
    opened: list[int]
    stays_open: bool


def plan_steps(dag: ActivityNetwork, order: Sequence[int]) -> tuple[list[Step], int]:
    """Plan the steps of a search.

    Args:
        dag: The precedences.
        order: All nodes, predecessors first.

    Returns:
        The steps, and how many rows they need; the first rows are those of the events that wait for nothing, ascending.
    """
    row_of_event = {event: row for row, event in enumerate(dag.sources)}
    row_of_end: dict[int, int] = {}
    free: list[int] = []
    num_rows = len(row_of_event)
    first_wait = np.searchsorted(dag.waits[:, 0], np.arange(len(dag.events))).tolist()
    unknown = [len(nodes) for nodes in dag.events]
    waiting_for_end = [len(events) for events in dag.ends_of]
    to_start = np.bincount(dag.start_of, minlength=len(dag.events)).tolist()
    steps = []
    for node in order:
        event = dag.start_of[node]
        start, closed, arrivals, opened = row_of_event[event], [], [], []
        to_start[event] -= 1
        if not to_start[event]:
            closed.append(row_of_event.pop(event))
        for event in dag.ends_of[node]:
            unknown[event] -= 1
            if unknown[event]:
                continue
            own, others = -1, []
            for wait, before in enumerate(dag.events[event], first_wait[event]):
                waiting_for_end[before] -= 1
                if before == node:
                    own = wait
                    continue
                others.append((row_of_end[before], wait))
                if not waiting_for_end[before]:
                    closed.append(row_of_end.pop(before))
            arrivals.append(Arrival(event, own, others))
        stays_open = waiting_for_end[node] > 0 or not dag.ends_of[node]
        free += closed
        for _ in range(len(arrivals) + stays_open):
            if not free:
                free.append(num_rows)
                num_rows += 1
            opened.append(free.pop())
        for arrival, row in zip(arrivals, opened, strict=False):
            row_of_event[arrival.event] = row
        if stays_open:
            row_of_end[node] = opened[-1]
        steps.append(Step(node, start, arrivals, closed, opened, stays_open))
    return steps, num_rows
