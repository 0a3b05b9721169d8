"""Which lags a search node by node has to remember: those of ends and events that something still waits for.

Rows of one array hold them, and are used again as soon as nothing needs them. Which ones depends on the order of the
nodes only, so all steps are known before the search begins.
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
