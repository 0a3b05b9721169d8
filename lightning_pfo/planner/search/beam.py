r"""Choices that lose little against the relaxation, for many times at once.

For any choice of options and its earliest schedule, let phi_i be the dual flow through node i, f_e that along
precedence e. Weak duality holds term by term: the choice costs more than the tangent of the relaxation by exactly ::

    sum_i [c_i + phi_i t_i - min over options (c_i + phi_i t_i)]     an option off the supporting line
    + sum_e f_e slack_e                                              a valuable wait

Options are chosen node by node in the order in which nodes end. What an option loses is known at once, what a wait
loses as soon as all nodes that must have ended at that moment (an *event*) have their options, often long before the
nodes that start there get theirs. So partial choices are compared by all that is certain to be lost. For every time
that is wanted (a `Guide`) the best are kept; the guides are searched side by side, as the rows of one array, so that a
step of all of them costs little more than a step of one.

What threatens at the next events is estimated from how far open ends and starts lag behind the relaxation: a part of it
is counted as if they all met now, at the latest of them. That latest lag also says whether the choice as a whole is
late or early. A guide may ask for another time than its relaxation's own; then the schedule of the relaxation is
stretched, which keeps its tight precedences tight.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from lightning_pfo.planner.network.arrays import Floats, Integers
from lightning_pfo.planner.network.assignments import TOLERANCE, Assignments, OptionTable
from lightning_pfo.planner.relaxation.linear_programme import RelaxedSolution
from lightning_pfo.planner.search.beam_memory import plan_steps
from lightning_pfo.planner.search.guide import Guide, take_guidance

_NOWHERE = -1e30
"""Lag in rows that nothing needs."""

_OFF_TIME = 0.01
"""What missing the time aimed at counts in the end, in units of the expected loss at a meeting."""

_PER_CORNER, _STEEPEST = 4, -1e100
"""Menus are made for so many flows per corner of a hull; infinite slopes count as finite ones."""


def search_beam(
    table: OptionTable,
    solutions: Sequence[RelaxedSolution],
    guides: Sequence[Guide],
    order: Sequence[int],
    width: int,
    options_per_node: int,
    num_best: int = 1,
) -> Assignments:
    """Choose an option for every node, once or more for each guide.

    Args:
        table: The options.
        solutions: Solutions of the relaxation, in any order; for times in between their mixtures are taken.
        guides: What to search for; those with a deadline last.
        order: All nodes in order of time, predecessors first.
        width: Number of partial choices kept for each guide.
        options_per_node: Number of options tried at each node: those off the supporting line by least.
        num_best: Number of choices returned for each guide.

    Returns:
        Indices into the options, shape (n, num_best x guides), the best for each guide first; fewer where there are not
        so many choices.
    """
    dag, num_guides = table.dag, len(guides)
    relaxed = take_guidance(table, solutions, guides)
    meeting = np.array([guide.meeting for guide in guides])
    # In units of the expected loss per second of lag, so that lags need no factor.
    unit = 1.0 / np.maximum(meeting * relaxed.worth, 1e-9 * max(relaxed.worth.max(), 1.0))
    unlimited = sum(guide.deadline == math.inf for guide in guides)
    menu = _menus(table, relaxed.flow, options_per_node)
    # With a deadline the fastest option must be among them.
    lacking = (menu != 0).all(axis=1)
    lacking[:, :unlimited] = False
    menu[:, -1][lacking] = 0
    options_per_node = menu.shape[1]
    kind = table.kind_of[:, None, None]
    times = table.times[kind, menu]
    times[~np.isfinite(times)] = 0.0
    flow, wait_flow = ((1 - meeting) * unit * part for part in (relaxed.flow, relaxed.wait_flow))
    has_flow, slack = wait_flow.any(axis=1).tolist(), relaxed.moments[dag.waits[:, 0]] - relaxed.ends[dag.waits[:, 1]]
    # All below has the shape (options, choices, guides) or is broadcast to it; infinite where there is no option.
    values = (table.costs[kind, menu] * unit + flow[:, None] * times)[:, :, None]
    limits = _latest_lags(table, guides[unlimited:], relaxed.ends[:, unlimited:])
    lags = (times + (relaxed.moments[list(dag.start_of)] - relaxed.ends)[:, None])[:, :, None]
    late = np.array([1 + guide.haste for guide in guides])
    early = np.array([1 - guide.patience for guide in guides])
    is_biased = bool(np.any(late != early))
    steps, num_rows = plan_steps(dag, order)
    open_lags = np.full((num_rows, 1, num_guides), _NOWHERE)
    open_lags[: len(dag.sources), 0] = -relaxed.moments[list(dag.sources)]

    # The candidates are the partial choices extended by each option, and are numbered in the order of their array.
    value, guide_of = np.zeros((1, num_guides)), np.arange(num_guides)
    parent_of = menu_of = np.empty(0, dtype=np.int64)
    trail = []
    for step in steps:
        lag = open_lags[step.start] + lags[step.node]
        candidates = value + values[step.node]
        if unlimited < num_guides:
            candidates[..., unlimited:][lag[..., unlimited:] > limits[step.node]] = np.inf
        opened = []
        for arrival in step.arrivals:
            own_lag = begin = lag - slack[arrival.wait]
            other_lags = [(wait, open_lags[row] - slack[wait]) for row, wait in arrival.others]
            for _, other_lag in other_lags:
                begin = np.maximum(begin, other_lag)
            if other_lags and has_flow[arrival.wait]:
                candidates += wait_flow[arrival.wait] * (begin - own_lag)
            for wait, other_lag in other_lags:
                if has_flow[wait]:
                    candidates += wait_flow[wait] * (begin - other_lag)
            opened.append(begin)
        if step.stays_open:
            opened.append(lag)
        for row in step.closed:
            open_lags[row] = _NOWHERE
        num_candidates = len(value) * options_per_node
        if num_candidates > width:
            latest = np.maximum.reduce(open_lags)
            for late_or_early in opened:
                latest = np.maximum(latest, late_or_early)
            if is_biased:
                latest = np.maximum(late * latest, early * latest)
            score = (candidates + latest).reshape(num_candidates, num_guides)
            kept = score.argpartition(width - 1, axis=0)[:width] * num_guides + guide_of
        else:
            kept = np.arange(num_candidates * num_guides).reshape(num_candidates, num_guides)
        if len(parent_of) != candidates.size:
            parent_of = np.tile(np.arange(value.size), options_per_node)
            menu_of = (np.arange(options_per_node)[:, None] * num_guides + np.tile(guide_of, len(value))).ravel()
        parents = parent_of[kept]
        open_lags = open_lags.reshape(num_rows, -1).take(parents, axis=1)
        for row, lag in zip(step.opened, opened, strict=True):
            open_lags[row] = lag.ravel()[kept]
        trail.append((parents.ravel(), kept.ravel(), menu_of))
        value = candidates.ravel()[kept]

    lag = open_lags.max(axis=0)
    best = (value + lag + _OFF_TIME * np.abs(lag)).argsort(axis=0)[:num_best]
    column = (best * num_guides + guide_of).ravel()
    choices = np.empty((dag.num_nodes, len(column)), dtype=np.int64)
    for node, (parents, kept, in_menu) in zip(reversed(order), reversed(trail), strict=True):
        choices[node] = menu[node].ravel()[in_menu[kept[column]]]
        column = parents[column]
    if np.isfinite(value[best[-1], guide_of]).all():
        return choices
    # Where no option keeps to a deadline, or there are fewer choices, one that does not exist may have been taken.
    return np.asarray(np.minimum(choices, np.isfinite(table.times).sum(axis=1)[table.kind_of, None] - 1))


def _menus(table: OptionTable, flow: Floats, options_per_node: int) -> Integers:
    """The options of about the least cost plus flow times time, shape (n, options_per_node at most, guides).

    Not for each flow but for some: those along the edges of the hull, where solutions of the relaxation lie, and a few
    in between, on the corners.
    """
    size = min(options_per_node, table.times.shape[1])
    menus, menu_of, num_menus = [], np.empty(flow.shape, dtype=np.int64), 0
    for kind, opts in enumerate(table.kinds):
        slopes = np.maximum(opts.hull_line[2], _STEEPEST)
        edges = np.concatenate([[0.0], -slopes[::-1], -2 * slopes[:1]])
        flows = np.interp(np.arange((len(edges) - 1) * _PER_CORNER + 1) / _PER_CORNER, np.arange(len(edges)), edges)
        # Padding costs infinitely much, whatever the flow.
        times = np.where(np.isfinite(table.times[kind]), table.times[kind], 0.0)
        nodes = table.kind_of == kind
        menu_of[nodes] = num_menus + np.searchsorted((flows[1:] + flows[:-1]) / 2, flow[nodes])
        menus.append(np.argpartition(table.costs[kind] + flows[:, None] * times, size - 1, axis=1)[:, :size])
        num_menus += len(flows)
    return np.ascontiguousarray(np.concatenate(menus)[menu_of].transpose(0, 2, 1))


def _latest_lags(table: OptionTable, guides: Sequence[Guide], ends: Floats) -> Floats:
    """The lag at which even the fastest options just keep to the deadline, a column per guide."""
    fastest = table.times[table.kind_of, 0]
    to_the_end = -np.array(table.dag.latest_starts(fastest.tolist(), 0.0)) - fastest
    deadlines = np.array([guide.deadline for guide in guides]) * (1 + TOLERANCE / 2)
    return np.asarray(deadlines - to_the_end[:, None] - ends)


def order_of_time(table: OptionTable, relaxed: RelaxedSolution) -> list[int]:
    """All nodes by their end in a relaxation, predecessors first."""
    dag = table.dag
    position = np.empty(dag.num_nodes, dtype=np.int64)
    position[list(dag.order)] = np.arange(dag.num_nodes)
    order: list[int] = np.lexsort((position, np.array(dag.finish_times(relaxed.durations.tolist())))).tolist()
    return order
