r"""Assignments that lose little against the relaxation, for many times at once.

For any assignment of options and its earliest schedule, let phi_i be the dual flow through node i, f_e that along
precedence e. Weak duality holds term by term: it costs more than the tangent of the relaxation by exactly ::

    sum_i [c_i + phi_i t_i - min over options (c_i + phi_i t_i)]     an option off the supporting line
    + sum_e f_e slack_e                                              a valuable wait

Options are chosen node by node in the order in which nodes end. What an option loses is known at once, what a wait
loses as soon as all nodes that must have ended at that moment (an *event*) have their options, often long before the
nodes that start there get theirs. So partial assignments are compared by all that is certain to be lost. For every time
that is wanted (a `Guide`) the best are kept; the guides are searched side by side, as the rows of one array, so that a
step of all of them costs little more than a step of one.

What threatens at the next events is estimated from how far open ends and starts lag behind the relaxation: a part of it
is counted as if they all met now, at the latest of them. That latest lag also says whether the assignment as a whole is
late or early. A guide may ask for another time than its relaxation's own; then the schedule of the relaxation is
stretched, which keeps its tight precedences tight.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lightning_pfo.planner.network.arrays import Floats, Integers
from lightning_pfo.planner.network.assignments import TOLERANCE, Assignments, OptionTable
from lightning_pfo.planner.relaxation.linear_programme import RelaxedSolution
from lightning_pfo.planner.search.beam_memory import Step, plan_steps
from lightning_pfo.planner.search.guide import Guide, take_guidance
from lightning_pfo.planner.search.late_settings import Lanes, LateSettings

_NOWHERE = -1e30
"""Lag in rows that nothing needs."""

_OFF_TIME = 0.01
"""What missing the time aimed at counts in the end, in units of the expected loss at a meeting."""

_PER_CORNER, _STEEPEST = 4, -1e100
"""Menus are made for so many flows per corner of a hull; infinite slopes count as finite ones."""


@dataclass(frozen=True, eq=False)
class _Terms:
    """What a beam adds up, prepared so that a step is a few sums of arrays.

    Losses are in units of the expected loss per second of lag, a unit for each guide, so that lags need no factor. The
    last axis of all but the lists are the guides; what is of nodes broadcasts to (options, assignments, guides).

    Attributes:
        menu: Options tried at each node, shape (n, options, guides).
        values: What they lose, infinite where there is none, shape (n, options, 1, guides).
        lags: What they add to the lag of the start, shape (n, options, 1, guides).
        slack: Of each of `dag.waits` in the relaxation, in seconds.
        wait_flow: What a second of each wait loses.
        has_flow: Whether it loses anything, for any guide.
        unlimited: Number of guides without a deadline, which come first.
        limits: Lag of each node's end at which the fastest options just keep to the deadline, for the other guides.
        biased: Guides for which being late or early costs something.
        late: What the latest lag costs if it is positive, in units of itself, shape (biased,).
        early: If it is negative.
        first_lags: Of the events that wait for nothing.
        unit: How many units a joule is, for each guide.
        flow: What a second of each node loses in these units, shape (n, guides).
        starts: When nodes start in the relaxation in seconds, shape (n, guides).
        ends: When they end, likewise.
    """

    menu: Integers
    values: Floats
    lags: Floats
    slack: Floats
    wait_flow: Floats
    has_flow: list[bool]
    unlimited: int
    limits: Floats
    biased: Integers
    late: Floats
    early: Floats
    first_lags: Floats
    unit: Floats
    flow: Floats
    starts: Floats
    ends: Floats


class _Beam:
    """The partial assignments that survive, side by side.

    Attributes:
        losses: Certain loss of each, shape (assignments, guides).
        open_lags: Lags that something still depends on, shape (rows, assignments, guides); see `beam_memory`.
        trail: For each step, what was extended by which entry of the menu.
        lanes: Where settings last on, what is before each node; see `late_settings`.
    """

    def __init__(self, terms: _Terms, num_rows: int, late: LateSettings | None) -> None:
        num_guides = terms.menu.shape[2]
        self.losses = np.zeros((1, num_guides))
        self.open_lags = np.full((num_rows, 1, num_guides), _NOWHERE)
        self.open_lags[: len(terms.first_lags), 0] = terms.first_lags
        self.trail: list[tuple[Integers, Integers]] = []
        self.lanes = Lanes(late, num_guides) if late is not None else None


def search_beam(
    table: OptionTable,
    solutions: Sequence[RelaxedSolution],
    guides: Sequence[Guide],
    order: Sequence[int],
    width: int,
    options_per_node: int,
    late: LateSettings | None = None,
) -> Assignments:
    """Choose an option for every node, once for each guide.

    Args:
        table: The options.
        solutions: Solutions of the relaxation, in any order; for times in between their mixtures are taken.
        guides: What to search for; those with a deadline last.
        order: All nodes in order of time, predecessors first.
        width: Number of partial assignments kept for each guide.
        options_per_node: Number of options tried at each node: those off the supporting line by least.
        late: How settings last on; None if they change at once.

    Returns:
        Indices into the options, shape (n, guides).
    """
    terms = _prepare(table, solutions, guides, options_per_node)
    steps, num_rows = plan_steps(table.dag, order)
    beam = _Beam(terms, num_rows, late)
    kind_of = table.kind_of.tolist()
    for step in steps:
        kind = kind_of[step.node]
        lag, losses = _candidates(beam, terms, step, kind)
        opened = _extend(beam, terms, step, lag, losses)
        parents, kept = _prune(beam, terms, step, losses, opened, width)
        if beam.lanes is not None:
            beam.lanes.keep(step.node, kind, terms.menu[step.node], terms.ends[step.node] + lag, parents, kept)
    return _trace_back(beam, terms, table, order)


def _prepare(
    table: OptionTable, solutions: Sequence[RelaxedSolution], guides: Sequence[Guide], options_per_node: int
) -> _Terms:
    dag, relaxed = table.dag, take_guidance(table, solutions, guides)
    meeting = np.array([guide.meeting for guide in guides])
    unit = 1.0 / np.maximum(meeting * relaxed.worth, 1e-9 * max(relaxed.worth.max(), 1.0))
    unlimited = sum(guide.deadline == math.inf for guide in guides)
    biased = [number for number, guide in enumerate(guides) if guide.haste or guide.patience]
    menu = _menus(table, relaxed.flow, options_per_node)
    # With a deadline the fastest option must be among them.
    lacking = (menu != 0).all(axis=1)
    lacking[:, :unlimited] = False
    menu[:, -1][lacking] = 0
    kind = table.kind_of[:, None, None]
    times = table.times[kind, menu]
    times[~np.isfinite(times)] = 0.0
    flow, wait_flow = ((1 - meeting) * unit * part for part in (relaxed.flow, relaxed.wait_flow))
    return _Terms(
        menu=menu,
        values=(table.costs[kind, menu] * unit + flow[:, None] * times)[:, :, None],
        lags=(times + (relaxed.moments[list(dag.start_of)] - relaxed.ends)[:, None])[:, :, None],
        slack=relaxed.moments[dag.waits[:, 0]] - relaxed.ends[dag.waits[:, 1]] - dag.wait_delays[:, None],
        wait_flow=wait_flow,
        has_flow=wait_flow.any(axis=1).tolist(),
        unlimited=unlimited,
        limits=_latest_lags(table, guides[unlimited:], relaxed.ends[:, unlimited:]),
        biased=np.array(biased, dtype=np.int64),
        late=np.array([1 + guides[number].haste for number in biased]),
        early=np.array([1 - guides[number].patience for number in biased]),
        first_lags=-relaxed.moments[list(dag.sources)],
        unit=unit,
        flow=flow,
        starts=relaxed.moments[list(dag.start_of)],
        ends=relaxed.ends,
    )


def _candidates(beam: _Beam, terms: _Terms, step: Step, kind: int) -> tuple[Floats, Floats]:
    """Try each option of a node with each partial assignment.

    Returns:
        Lags of its end, and certain losses so far, shape (options, assignments, guides).
    """
    start = beam.open_lags[step.start]
    lag = start + terms.lags[step.node]
    losses = beam.losses + terms.values[step.node]
    if beam.lanes is not None:
        extra = beam.lanes.extra(step.node, kind, terms.menu[step.node], terms.starts[step.node] + start)
        if extra is not None:
            time, cost = extra
            lag += time
            losses += terms.unit * cost + terms.flow[step.node] * time
    return lag, losses


def _extend(beam: _Beam, terms: _Terms, step: Step, lag: Floats, losses: Floats) -> list[Floats]:
    """Add to the candidates' `losses` what their waits lose; returns the lags that they open."""
    if len(terms.limits[step.node]):
        losses[..., terms.unlimited :][lag[..., terms.unlimited :] > terms.limits[step.node]] = np.inf
    opened = []
    for arrival in step.arrivals:
        own_lag = begin = lag - terms.slack[arrival.wait]
        other_lags = [(wait, beam.open_lags[row] - terms.slack[wait]) for row, wait in arrival.others]
        for _, other_lag in other_lags:
            begin = np.maximum(begin, other_lag)
        if other_lags and terms.has_flow[arrival.wait]:
            losses += terms.wait_flow[arrival.wait] * (begin - own_lag)
        for wait, other_lag in other_lags:
            if terms.has_flow[wait]:
                losses += terms.wait_flow[wait] * (begin - other_lag)
        opened.append(begin)
    if step.stays_open:
        opened.append(lag)
    for row in step.closed:
        beam.open_lags[row] = _NOWHERE
    return opened


def _prune(
    beam: _Beam, terms: _Terms, step: Step, losses: Floats, opened: Sequence[Floats], width: int
) -> tuple[Integers, Integers]:
    """Keep the candidates of least certain and expected loss; `beam` changes in place.

    Returns:
        Which partial assignment each extends, and which candidate it is, as indices into flat arrays.
    """
    num_guides, num_parents = beam.losses.shape[1], beam.losses.size
    num_candidates = losses.size // num_guides
    if num_candidates > width:
        latest = np.maximum.reduce(beam.open_lags)
        for lag in opened:
            latest = np.maximum(latest, lag)
        if len(terms.biased):
            some = latest[..., terms.biased]
            latest[..., terms.biased] = np.maximum(terms.late * some, terms.early * some)
        score = (losses + latest).reshape(num_candidates, num_guides)
        kept = score.argpartition(width - 1, axis=0)[:width] * num_guides + np.arange(num_guides)
    else:
        kept = np.arange(losses.size).reshape(num_candidates, num_guides)
    entries = kept // num_parents
    parents = kept - entries * num_parents
    beam.open_lags = beam.open_lags.reshape(len(beam.open_lags), -1).take(parents, axis=1)
    for row, lag in zip(step.opened, opened, strict=True):
        beam.open_lags[row] = lag.ravel()[kept]
    beam.losses = losses.ravel()[kept]
    beam.trail.append((parents.ravel(), entries.ravel()))
    return parents, kept


def _trace_back(beam: _Beam, terms: _Terms, table: OptionTable, order: Sequence[int]) -> Assignments:
    """The best assignment for each guide, from its last node to its first."""
    lag = beam.open_lags.max(axis=0)
    best = (beam.losses + lag + _OFF_TIME * np.abs(lag)).argmin(axis=0)
    guide_of = np.arange(len(best))
    column = best * len(best) + guide_of
    assignments = np.empty((table.dag.num_nodes, len(best)), dtype=np.int64)
    for node, (parents, entries) in zip(reversed(order), reversed(beam.trail), strict=True):
        assignments[node] = terms.menu[node, entries[column], guide_of]
        column = parents[column]
    if np.isfinite(beam.losses[best, guide_of]).all():
        return assignments
    # Where no option keeps to a deadline, one that does not exist may have been taken.
    num_options = np.isfinite(table.times).sum(axis=1)[table.kind_of, None]
    return np.asarray(np.minimum(assignments, num_options - 1))


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
