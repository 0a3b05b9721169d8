r"""Rounding by beam search, guided by the duals of the relaxation.

For any choice of options and its earliest schedule, let phi_i be the dual flow through node i and f_e that along
precedence e. Weak duality holds term by term: the choice costs more than the tangent of the relaxation by exactly ::

    loss = sum_i [c_i + phi_i t_i - min over options (c_i + phi_i t_i)]   an option off the supporting line
         + sum_e f_e slack_e                                              a valuable wait

Both are at least zero and known as soon as a node is scheduled. So nodes are scheduled in order of time, a set of
partial choices is kept, and after each node those of least loss survive. Waits are lost where paths meet; what
threatens at the next meeting is estimated from how unequally the open paths lag behind the relaxation.

The iteration time is whatever comes out, near that of the relaxation, faster or slower; a deadline removes partial
choices from which even the fastest options cannot keep to it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lightning_pfo.planner.hull import OptionSet
from lightning_pfo.planner.instruction_dag import InstructionDag
from lightning_pfo.planner.linear_programme import RelaxedSolution

_EQUAL_TIMES = 1e-9
_WIDTH = 100
_OPTIONS_PER_NODE = 8
_PENDING_WEIGHT = 0.2
"""How much of the lag between open paths is expected to be lost."""


def search_beam(
    dag: InstructionDag, options: Sequence[OptionSet], relaxed: RelaxedSolution, deadline: float = math.inf
) -> list[int]:
    """Choose an option for every node with little loss against the tangent of the relaxation.

    Args:
        dag: The precedences.
        options: Options of each node.
        relaxed: The relaxation to stay near.
        deadline: Time in seconds to keep to; missed where every partial choice of the beam has become too late.

    Returns:
        Index into `options[node].times` for each node.
    """
    position = np.empty(dag.num_nodes, dtype=np.int64)
    position[list(dag.order)] = np.arange(dag.num_nodes)
    noise = 1e-7 * relaxed.time
    order = np.lexsort((position, np.round(relaxed.starts / noise))).tolist()
    flow_of_edge = dict(zip(map(tuple, dag.edges.tolist()), relaxed.edge_flow.tolist(), strict=True))
    menus = _menus(options, relaxed.flow)
    fastest = [opts.times[0] for opts in options]
    limits = np.array(dag.latest_starts(fastest, deadline * (1 + _EQUAL_TIMES))) + fastest
    beam = _Beam(dag, relaxed, limits)
    trail = []
    for node in order:
        ranked, times, excess = menus[options[node], float(relaxed.flow[node])]
        before = dag.predecessors[node]
        parents, picks = beam.extend(node, before, [flow_of_edge[b, node] for b in before], times, excess)
        trail.append((node, parents, ranked[picks]))
    choice, row = [0] * dag.num_nodes, beam.best(relaxed.sink_flow)
    for node, parents, chosen in reversed(trail):
        choice[node] = int(chosen[row])
        row = parents[row]
    return choice


Menu = tuple[npt.NDArray[np.int64], npt.NDArray[np.float64], npt.NDArray[np.float64]]


def _menus(options: Sequence[OptionSet], flow: npt.NDArray[np.float64]) -> dict[tuple[OptionSet, float], Menu]:
    """For each kind of node and flow: the options of least loss, their times and their losses."""
    menus: dict[tuple[OptionSet, float], Menu] = {}
    for opts, worth in zip(options, flow.tolist(), strict=True):
        if (opts, worth) not in menus:
            value = np.array(opts.costs) + worth * np.array(opts.times)
            ranked = np.argsort(value, kind="stable")[:_OPTIONS_PER_NODE]
            menus[opts, worth] = ranked, np.array(opts.times)[ranked], value[ranked] - value[ranked[0]]
    return menus


@dataclass
class _Column:
    """An open node: its column of finish times, its end in the relaxation, and what leaves it to nodes to come."""

    index: int
    relaxed_end: float
    outflow: float
    successors_left: int


class _Beam:
    """The surviving partial choices: a row each, with a column of finish times per node that others still wait for."""

    def __init__(self, dag: InstructionDag, relaxed: RelaxedSolution, limits: npt.NDArray[np.float64]) -> None:
        self._dag, self._flow, self._limits = dag, relaxed.flow, limits
        self._ends = relaxed.starts + relaxed.durations
        self._finish = np.zeros((1, 1))
        self._loss = np.zeros(1)
        self._open: dict[int, _Column] = {}
        self._free: list[int] = [0]

    def extend(
        self,
        node: int,
        before: Sequence[int],
        flows: Sequence[float],
        times: npt.NDArray[np.float64],
        excess: npt.NDArray[np.float64],
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Schedule `node` with every option in every row and keep the best rows.

        Returns:
            For each new row, the row it comes from and the option it takes.
        """
        if before:
            arrivals = self._finish[:, [self._open[b].index for b in before]]
            starts = arrivals.max(axis=1)
            loss = self._loss + starts * sum(flows) - arrivals @ np.array(flows)
        else:
            starts, loss = np.zeros(len(self._loss)), self._loss
        for b, flow in zip(before, flows, strict=True):
            self._leave(b, flow)
        candidates = np.add.outer(loss, excess).ravel()
        finish = np.add.outer(starts, times).ravel()
        candidates[finish > self._limits[node]] = np.inf
        if len(candidates) > _WIDTH:
            pending = self._pending(finish - self._ends[node], float(self._flow[node]), len(times))
            kept = np.argpartition(candidates + _PENDING_WEIGHT * pending, _WIDTH)[:_WIDTH]
        else:
            kept = np.arange(len(candidates))
        parents, picks = np.divmod(kept, len(times))
        self._loss = candidates[kept]
        self._finish = self._finish[parents]
        column = self._enter(node)
        self._finish[:, column] = finish[kept]
        return parents, picks

    def best(self, sink_flow: npt.NDArray[np.float64]) -> int:
        """The row of least loss, once every node is scheduled."""
        ends = self._finish[:, [self._open[sink].index for sink in self._dag.sinks]]
        return int(np.argmin(self._loss + ends.max(axis=1) * sink_flow.sum() - ends @ sink_flow))

    def _pending(self, lag: npt.NDArray[np.float64], flow: float, num_options: int) -> npt.NDArray[np.float64]:
        """What would be lost if all open paths met now, the new node lagging by `lag` seconds."""
        columns = [column for column in self._open.values() if column.outflow > 0]
        if not columns:
            return np.zeros(len(lag))
        outflows = np.array([column.outflow for column in columns])
        lags = self._finish[:, [column.index for column in columns]] - [column.relaxed_end for column in columns]
        latest = np.maximum(np.repeat(lags.max(axis=1), num_options), lag)
        weighted = np.repeat(lags @ outflows, num_options) + flow * lag
        return np.asarray(latest * (outflows.sum() + flow) - weighted, dtype=np.float64)

    def _leave(self, node: int, flow: float) -> None:
        column = self._open[node]
        column.outflow -= flow
        column.successors_left -= 1
        if column.successors_left == 0:
            self._free.append(self._open.pop(node).index)

    def _enter(self, node: int) -> int:
        if not self._free:
            self._free.append(self._finish.shape[1])
            self._finish = np.hstack([self._finish, np.zeros((len(self._finish), 1))])
        successors = len(self._dag.successors[node])
        self._open[node] = _Column(self._free.pop(), float(self._ends[node]), float(self._flow[node]), successors)
        return self._open[node].index
