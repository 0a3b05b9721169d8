"""Plans for clocks that land late, by the search that made the plans without latency (`search.beam`).

Every guide asks for one time. Clocks that land late make most iterations a little longer than the search aims at, as it
knows of one late clock at a time; so each plan is played exactly, and where a time must be kept to, it is searched once
more around the aim that was seen to lead there.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lightning_pfo.planner.limits.limited_pipeline import LimitedPipeline
from lightning_pfo.planner.network.arrays import Integers
from lightning_pfo.planner.network.assignments import OptionTable
from lightning_pfo.planner.network.options import OptionSet
from lightning_pfo.planner.pipeline.timeline import Timeline
from lightning_pfo.planner.relaxation.linear_programme import RelaxedSolution
from lightning_pfo.planner.search.beam import order_of_time, search_beam
from lightning_pfo.planner.search.guide import Guide
from lightning_pfo.planner.search.late_settings import LateSettings

_WIDTH, _OPTIONS_PER_NODE = 12, 8
_ROWS_AT_ONCE = 1_000_000
"""Nodes times partial assignments searched in one go: what memory is used."""

_LOOSE, _STRICT = (0.1, 0.0, 0.0), (0.1, 1.0, 0.3)
"""Being late costs nothing but what is lost, or more; see `search.effort`."""

_AROUND = (-0.02, -0.01, -0.006, -0.004, -0.0025, -0.0015, -0.0008, -0.0004, 0.0, 0.0004, 0.0008)
"""Where a time must be kept to, what is aimed at besides."""


class LateSearch:
    """Searches for clocks that land late.

    Args:
        pipeline: What is planned for.
        table: The options of each instruction.
        relaxed: Solutions of the relaxation, at least one.
    """

    def __init__(self, pipeline: LimitedPipeline, table: OptionTable, relaxed: Sequence[RelaxedSolution]) -> None:
        self._pipeline, self._table, self._relaxed = pipeline, table, relaxed
        self._late = _late_settings(pipeline, table)
        self._order = order_of_time(table, relaxed[0])
        self._aims_s: Sequence[float] = ()
        self._reached_s: Sequence[float] = ()
        self._options: list[OptionSet] = [table.kinds[kind] for kind in table.kind_of]

    def near(self, times_s: Sequence[float]) -> list[Timeline]:
        """An iteration for each of these times: about as long, mostly somewhat longer."""
        found = self._found([Guide(time, time, *_LOOSE) for time in times_s])
        self._aims_s, self._reached_s = times_s, [one.iteration_time_s for one in found]
        return found

    @property
    def late_s(self) -> float:
        """By how much the fastest iteration that was found by `near` is longer than the fastest that was wanted."""
        return min(self._reached_s) - min(self._aims_s)

    def around(self, deadline_s: float) -> list[Timeline]:
        """Iterations that are to end by a deadline, and mostly do; after `near`."""
        order = np.argsort(self._reached_s)
        seen_s = np.array([self._reached_s, self._aims_s])[:, order]
        aim = min(float(np.interp(deadline_s, seen_s[0], seen_s[1])), deadline_s)
        aims = [aim * (1 + share) for share in _AROUND]
        return self._found([Guide(one, one, *weights, deadline_s) for one in aims for weights in (_LOOSE, _STRICT)])

    def _found(self, guides: Sequence[Guide]) -> list[Timeline]:
        """An iteration for each guide."""
        played: dict[bytes, Timeline] = {}
        found: list[Timeline] = []
        at_once = max(_ROWS_AT_ONCE // (_WIDTH * self._table.dag.num_nodes), 1)
        for first in range(0, len(guides), at_once):
            some = guides[first : first + at_once]
            size = _WIDTH, _OPTIONS_PER_NODE
            for one in search_beam(self._table, self._relaxed, some, self._order, *size, self._late).T:
                key = one.tobytes()
                if key not in played:
                    played[key] = self._played(one)
                found.append(played[key])
        return found

    def _played(self, assignment: Integers) -> Timeline:
        clocks = [options.knobs[k] for options, k in zip(self._options, assignment.tolist(), strict=True)]
        return self._pipeline.play(self._pipeline.schedule.by_rank(clocks))


def _late_settings(pipeline: LimitedPipeline, table: OptionTable) -> LateSettings:
    """Clocks as settings, ranks as lanes; costs are effective energies, as those of the options are."""
    simulator = pipeline.simulator
    profile, latency = simulator.profile, simulator.latency
    rank_of = [rank for rank, _ in pipeline.schedule.places]
    clocks = sorted({clock for options in table.kinds for clock in options.knobs}, reverse=True)
    number = {clock: setting for setting, clock in enumerate(clocks)}
    setting_of = np.zeros(table.times.shape, dtype=np.int64)
    times, costs = np.empty((2, len(table.kinds), len(clocks)))
    for kind, options in enumerate(table.kinds):
        node = int(np.argmax(table.kind_of == kind))
        inst = pipeline.schedule.instructions[node]
        setting_of[kind, : len(options.knobs)] = [number[clock] for clock in options.knobs]
        points = np.array([profile.of(inst.stage, inst.type).near(clock) for clock in clocks])
        times[kind] = points[:, 0]
        costs[kind] = points[:, 1] - simulator.blocking[rank_of[node]].least_w * points[:, 0]
    latencies = (
        np.array([[latency.of(old, new) for new in clocks] for old in clocks])
        if latency.pairs_s
        else np.array(latency.usual_s)
    )
    return LateSettings(
        rank_of, pipeline.schedule.num_ranks, setting_of, times, costs, latencies, pipeline.change_cost_j
    )
