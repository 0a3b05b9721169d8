r"""The relaxed time-cost tradeoff as a linear programme with the iteration time as parameter.

Every activity i may take any duration on the lower convex hull of its options. Activities with the same predecessors
and delays may as well start together, at one *event*; so with the time s_e of each event, the iteration time T, and one
segment variable x_ik per hull segment k (length w_ik, slope g_ik < 0)::

    minimise    constant + sum_ik g_ik x_ik
    subject to  s_f - s_e - sum_k x_ik >= t_i + d_if    for each activity i from its event e to an event f after it
                T   - s_e - sum_k x_ik >= t_i           for each sink i
                0 <= x_ik <= w_ik,  s >= 0

where t_i is the fastest option of i and d_if the delay between it and f. Hull slopes increase, so segments fill in
order without being told to (Kelley 1961; Fulkerson 1961). The optimum LP(T) is convex and piecewise linear in T; the
reduced cost of T is its slope, and since every assignment of options is feasible here, each tangent
LP(T) + slope (T' - T) is a lower bound for every assignment of iteration time T', but for the solver's tolerances;
`bound` makes a proof of it. The duals of the rows form a flow of value -slope from the sources to the sinks (Phillips
and Dessouky 1977). In the steady state of 1F1B without delays events halve the number of
rows: `F` of a stage and `B` of the next both wait for the same two activities.

Only a column bound changes from one T to the next, so the previous basis stays dual feasible and the dual simplex
continues from it.

References:
    J. E. Kelley, Critical-path planning and scheduling: mathematical basis, Operations Research 9(3), 1961.
    D. R. Fulkerson, A network flow computation for project cost curves, Management Science 7(2), 1961.
    S. Phillips and M. I. Dessouky, Solving the project time/cost tradeoff problem using the minimal cut concept,
    Management Science 24(4), 1977.
    Q. Huangfu and J. A. J. Hall, Parallelizing the dual revised simplex method, Math. Prog. Comp. 10, 2018 (HiGHS).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import highspy
import numpy as np

from lightning_pfo.core.errors import PlanError
from lightning_pfo.planner.network.arrays import Floats, Integers
from lightning_pfo.planner.network.dag import ActivityNetwork
from lightning_pfo.planner.network.options import OptionSet

_SHORTEST_SEGMENT = 1e-6
"""Hull segments shorter than this part of a typical time are not told apart from a step."""

_MOST_SEGMENTS = 48
"""Of a hull; what the simplex method costs grows with them, and those of a finer one hardly differ from neighbours."""


@dataclass(frozen=True, eq=False)
class RelaxedSolution:
    """An optimum of the relaxation.

    Attributes:
        time: Iteration time T in seconds.
        cost: LP(T) in joules.
        slope: Derivative of LP at T in J/s (a subgradient at a corner), at most 0.
        starts: Start time of each activity in seconds, shape (n,).
        durations: Duration of each activity in seconds, shape (n,).
        edge_flow: Duals of the precedences in J/s, aligned with `network.edges`: what a second of slack there costs.
        sink_flow: Duals of the ends in J/s, aligned with `network.sinks`.
        flow: Flow through each activity in J/s, shape (n,): what a second of its duration costs.
        required: Duals of what was required further (`RelaxedTradeoff.require`) in J/s.
    """

    time: float
    cost: float
    slope: float
    starts: Floats
    durations: Floats
    edge_flow: Floats
    sink_flow: Floats
    flow: Floats
    required: Floats

    def tangent_at(self, time: float) -> float:
        """The tangent at iteration time `time`, in joules: a lower bound, but for the solver's tolerances."""
        return self.cost + self.slope * (time - self.time)


class RelaxedTradeoff:
    """The parametric linear programme of one activity network; keeps its basis from one solve to the next.

    Where there are several optima, or several flows, which one is returned depends on what was solved before.

    Args:
        network: The precedences.
        options: Options of each activity; activities of one kind should share one object.

    Attributes:
        iterations: Of the simplex method, so far.
    """

    def __init__(self, network: ActivityNetwork, options: Sequence[OptionSet]) -> None:
        self.iterations = 0
        n, kinds = network.num_nodes, tuple(dict.fromkeys(options))
        number = {opts: i for i, opts in enumerate(kinds)}
        kind_of = np.array([number[opts] for opts in options], dtype=np.int64)
        fastest_of, slowest_of = np.array([(opts.times[0], opts.times[-1]) for opts in kinds]).reshape(-1, 2).T
        self._fastest = fastest_of[kind_of]
        # Solver tolerances are absolute (1e-7), so times and costs are brought to the order of one.
        self._time_unit = float(slowest_of[kind_of].mean()) or 1.0
        hulls = [_relaxed_hull(opts, _SHORTEST_SEGMENT * self._time_unit) for opts in kinds]
        self._constant = float(np.array([costs[0] for _, costs in hulls])[kind_of].sum())
        segments_of, lengths, slopes = _segments(hulls, kind_of)
        self._cost_unit = float(np.abs(slopes).max(initial=0.0) or 1.0) * self._time_unit
        self._num_nodes = n
        self._start_of = np.array(network.start_of, dtype=np.int64)
        self._time_column = num_events = len(network.events)
        self._owner = np.repeat(np.arange(n), segments_of)

        programme = highspy.HighsLp()
        programme.num_col_ = num_events + 1 + len(lengths)
        programme.col_cost_ = np.concatenate([np.zeros(num_events + 1), slopes * self._time_unit / self._cost_unit])
        programme.col_lower_ = np.zeros(programme.num_col_)
        programme.col_upper_ = np.concatenate([np.full(num_events + 1, highspy.kHighsInf), lengths / self._time_unit])
        self._add_rows(programme, network, segments_of)
        self._num_required = 0
        self._required_starts: list[tuple[int, int, float]] = []  # row, node, weight
        self._highs = _dual_simplex()
        self._highs.passModel(programme)
        self._highs.setBasis(_slowest_basis(network, slowest_of[kind_of].tolist(), len(lengths)))

    def _add_rows(self, programme: Any, network: ActivityNetwork, segments_of: Integers) -> None:
        """A row per event and activity that it waits for, and one per sink, whose head is the column of T.

        In each the head has the coefficient 1, the event at which the tail starts and the segments of the tail -1.
        """
        num_events = self._time_column
        self._tails = np.array([*network.waits[:, 1], *network.sinks], dtype=np.int64)
        heads = np.append(network.waits[:, 0], [num_events] * len(network.sinks))
        self._num_waits, self._row_of_edge = len(network.waits), network.wait_of_edge
        self._after = network.edges[:, 1]
        first_segment = num_events + 1 + np.cumsum(segments_of) - segments_of
        sizes = 2 + segments_of[self._tails]
        begins = np.concatenate([[0], np.cumsum(sizes)])
        columns = np.arange(begins[-1]) + np.repeat(first_segment[self._tails] - 2 - begins[:-1], sizes)
        columns[begins[:-1]], columns[begins[:-1] + 1] = heads, self._start_of[self._tails]
        values = np.full(len(columns), -1.0)
        values[begins[:-1]] = 1.0
        programme.num_row_ = len(heads)
        delays = np.append(network.wait_delays, np.zeros(len(network.sinks)))
        programme.row_lower_ = (self._fastest[self._tails] + delays) / self._time_unit
        programme.row_upper_ = np.full(len(heads), highspy.kHighsInf)
        programme.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
        programme.a_matrix_.start_ = begins
        programme.a_matrix_.index_ = columns
        programme.a_matrix_.value_ = values

    def solve(self, time: float) -> RelaxedSolution:
        """Optimum for iteration time `time` in seconds, at least the longest path of the fastest options.

        Raises:
            PlanError: If the time is shorter than that.
        """
        # The fastest time itself, computed by another summation order, must not come out infeasible.
        scaled = time / self._time_unit * (1 + 1e-12)
        self._highs.changeColCost(self._time_column, 0.0)
        self._highs.changeColBounds(self._time_column, scaled, scaled)
        return self._run(time)

    def solve_with_rate(self, rate: float) -> RelaxedSolution:
        """Optimum over all iteration times when every second costs `rate` joules more.

        The returned cost excludes these, as for `solve`.
        """
        # All segments together cost no more per second: beyond that the fastest time is the optimum.
        rate = min(rate, (len(self._owner) + 1) * self._cost_unit / self._time_unit)
        self._highs.changeColCost(self._time_column, rate * self._time_unit / self._cost_unit)
        self._highs.changeColBounds(self._time_column, 0.0, highspy.kHighsInf)
        return self._run(float("nan"), rate)

    def require(self, starts: Mapping[int, float], durations: Mapping[int, float], least: float = 0.0) -> None:
        """Add a constraint: a weighted sum of starts and durations of activities must be at least so many seconds.

        From then on the optimum bounds only what satisfies it as well, and the duals of the precedences no longer
        make a flow.

        Args:
            starts: Weights of start times by activity.
            durations: Weights of durations by activity.
            least: The least value of the sum in seconds.
        """
        at_event: dict[int, float] = defaultdict(float)
        for node, weight in starts.items():
            at_event[int(self._start_of[node])] += weight
            self._required_starts.append((self._num_required, node, weight))
        self._num_required += 1
        columns, values, constant = list(at_event), list(at_event.values()), 0.0
        for node, weight in durations.items():
            first, end = np.searchsorted(self._owner, [node, node + 1]) + self._time_column + 1
            columns += range(first, end)
            values += [weight] * (end - first)
            constant += weight * float(self._fastest[node])
        lowest = (least - constant) / self._time_unit
        self._highs.addRow(lowest, highspy.kHighsInf, len(columns), np.array(columns, np.int32), np.array(values))

    def _run(self, time: float, rate: float = 0.0) -> RelaxedSolution:
        self._highs.run()
        status = self._highs.getModelStatus()
        if status != highspy.HighsModelStatus.kOptimal:
            raise PlanError(
                f"No plan takes {time:.6g} s ({self._highs.modelStatusToString(status)}). "
                "Ask for an iteration time not shorter than that of the fastest options."
            )
        self.iterations += int(self._highs.getInfo().simplex_iteration_count)
        solution = self._highs.getSolution()
        values = np.fromiter(solution.col_value, np.float64)  # faster than np.array from a list
        n = self._num_nodes
        segments = values[self._time_column + 1 :] * self._time_unit
        if time != time:  # the programme chose it
            time = float(values[self._time_column]) * self._time_unit
        duals_per_second = self._cost_unit / self._time_unit
        duals = np.maximum(np.array(solution.row_dual), 0.0) * duals_per_second
        row_flow = duals[: len(self._tails)]
        flow = np.asarray(np.bincount(self._tails, row_flow, minlength=n), dtype=np.float64)
        # What flows into an event is divided as it flows on through the nodes that start there.
        onwards = flow
        if self._required_starts:
            rows, nodes, weights = (np.array(column) for column in zip(*self._required_starts, strict=True))
            required = np.bincount(nodes, weights * duals[len(self._tails) + rows], minlength=n)
            onwards = np.maximum(flow - required, 0.0)
        out_of_event = np.bincount(self._start_of, onwards, minlength=self._time_column)
        share = onwards / np.maximum(out_of_event[self._start_of], np.finfo(float).tiny)
        return RelaxedSolution(
            time=time,
            cost=self._constant + self._highs.getObjectiveValue() * self._cost_unit - rate * time,
            slope=-float(row_flow[self._num_waits :].sum()),
            starts=values[self._start_of] * self._time_unit,
            durations=self._fastest + np.bincount(self._owner, segments, minlength=n),
            edge_flow=row_flow[self._row_of_edge] * share[self._after],
            sink_flow=row_flow[self._num_waits :],
            flow=flow,
            required=duals[len(self._tails) :],
        )


def _segments(hulls: Sequence[tuple[Floats, Floats]], kind_of: Integers) -> tuple[Integers, Floats, Floats]:
    """Segments of the hulls of all activities: their number for each, then the length (s) and slope (J/s) of each."""
    num_segments = np.array([len(times) - 1 for times, _ in hulls])
    is_segment = np.arange(num_segments.max(initial=0)) < num_segments[:, None]
    padded = np.zeros((2, *is_segment.shape))
    if is_segment.any():
        lengths, falls = (np.concatenate([np.diff(line[i]) for line in hulls]) for i in (0, 1))
        padded[:, is_segment] = lengths, falls / lengths
    lengths, slopes = padded[:, kind_of][:, is_segment[kind_of]]
    return num_segments[kind_of], lengths, slopes


def _dual_simplex() -> Any:
    highs: Any = highspy.Highs()  # type: ignore[no-untyped-call]
    highs.setOptionValue("output_flag", False)
    highs.setOptionValue("presolve", "off")  # it would throw the basis away
    highs.setOptionValue("simplex_strategy", 1)  # serial dual simplex
    highs.setOptionValue("simplex_scale_strategy", 0)  # the matrix is of ones
    highs.setOptionValue("simplex_price_strategy", 1)  # by rows, which are short
    highs.setOptionValue("simplex_dual_edge_weight_strategy", 1)  # Devex: cheap to start anew
    return highs


def _slowest_basis(network: ActivityNetwork, slowest: Sequence[float], num_segments: int) -> Any:
    """The basis of the slowest options, every event as early as possible: where the simplex method starts.

    Of the rows into an event the one on its longest path is tight and determines when it is.
    """
    status = highspy.HighsBasisStatus
    basic, lower = status.kBasic, status.kLower
    finish = network.finish_times(slowest)
    starts, rows = [], []
    for awaited in (*network.awaited, tuple((sink, 0.0) for sink in network.sinks)):
        starts.append(basic if awaited else lower)
        tight = max(awaited, key=lambda wait: finish[wait[0]] + wait[1], default=None)
        rows += [lower if wait == tight else basic for wait in awaited]
    basis = highspy.HighsBasis()
    basis.col_status = [*starts, *[status.kUpper] * num_segments]
    basis.row_status = rows
    basis.valid = True
    return basis


def _relaxed_hull(options: OptionSet, shortest: float) -> tuple[Floats, Floats]:
    """Times and costs of the corners of the hull, fast to slow, none nearer than `shortest` to the one before.

    Where two are, the slower one takes the time of the faster one: the relaxation gets a little looser, while slopes
    stay within what a solver can compute with. Of more than `_MOST_SEGMENTS` + 1 corners some are left out, which makes
    it a little tighter than options on the hull are: its flows prove what they prove all the same (`bound`).
    """
    times, costs, _ = options.hull_line
    if not (np.diff(times) >= shortest).all():
        corners: list[tuple[float, float]] = []
        for time, cost in options.hull_points:
            if corners and time - corners[-1][0] < shortest:
                corners[-1] = (corners[-1][0], cost)
            else:
                corners.append((time, cost))
        times, costs = np.array(corners).T
    if len(times) > _MOST_SEGMENTS + 1:
        kept = np.linspace(0, len(times) - 1, _MOST_SEGMENTS + 1).round().astype(np.int64)
        times, costs = times[kept], costs[kept]
    return times, costs
