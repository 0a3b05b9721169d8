"""From the clocks of an unlimited plan to clocks within the limits, mostly faster ones.

Clocks that are kept for less than the least dwell are merged with a neighbour, at the faster clock of the two::

    asked for      |     |  |          |
    clocks         1200  900 1410      1050          dwell:  |------|
    merged         1410                1050

Where an instruction of the critical path begins at a slower clock, because its own lands late, the one before it gets
that clock already.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from lightning_pfo.planner.limits.limited_pipeline import EQUAL_TIMES, LimitedPipeline, Rows
from lightning_pfo.planner.limits.rank_programme import RankProgramme
from lightning_pfo.planner.pipeline.timeline import Timeline

_RAISES = 50


def start_from(pipeline: LimitedPipeline, rows: Rows, deadline_s: float) -> Timeline | None:
    """Play clocks that keep to the limits, and to the deadline as far as faster clocks achieve that.

    Args:
        pipeline: What is planned for.
        rows: The clocks to start from, one row per rank.
        deadline_s: When the iteration is to end; it may take longer.

    Returns:
        None where a rank has to change clocks too early, as its instructions have no clock in common.
    """
    timeline = _with_dwells(pipeline, rows)
    for _ in range(_RAISES):
        if timeline is None or timeline.iteration_time_s <= deadline_s * (1 + EQUAL_TIMES):
            break
        raised = _raised(pipeline, timeline)
        if raised == timeline.clocks_by_rank:
            break
        timeline = _with_dwells(pipeline, raised)
    return timeline


def merge_clocks(
    programme: RankProgramme, row: Sequence[int], asked_s: Sequence[float], least_dwell_s: float
) -> tuple[int, ...]:
    """Merge stretches of one clock that are too short with a neighbour, at the faster clock of the two.

    Args:
        programme: What the rank runs.
        row: Its clocks.
        asked_s: When each instruction's clock is asked for.
        least_dwell_s: Least time between two requests.
    """
    groups = [list(numbers) for _, numbers in groupby(range(len(row)), key=row.__getitem__)]
    ahead = deque(_Stretch(g[0], g[-1] + 1, row[g[0]], {programme.kinds[i] for i in g}) for g in groups)
    kept: list[_Stretch] = []
    while ahead:
        stretch = ahead.popleft()
        if kept and kept[-1].clock_mhz == stretch.clock_mhz:
            ahead.appendleft(kept.pop().joined(stretch, stretch.clock_mhz))
        elif ahead and ahead[0].clock_mhz == stretch.clock_mhz:
            ahead.appendleft(stretch.joined(ahead.popleft(), stretch.clock_mhz))
        elif not ahead or asked_s[ahead[0].begin] - (asked_s[stretch.begin] if kept else 0.0) >= least_dwell_s:
            kept.append(stretch)
        else:
            other = min([*kept[-1:], ahead[0]], key=lambda near: abs(near.clock_mhz - stretch.clock_mhz))
            clock = shared_clock(programme, stretch.kinds | other.kinds, max(stretch.clock_mhz, other.clock_mhz))
            if clock is None:
                kept.append(stretch)
            elif other is ahead[0]:
                ahead.appendleft(stretch.joined(ahead.popleft(), clock))
            else:
                ahead.appendleft(kept.pop().joined(stretch, clock))
    return tuple(stretch.clock_mhz for stretch in kept for _ in range(stretch.begin, stretch.end))


def shared_clock(programme: RankProgramme, kinds: set[int], clock_mhz: int) -> int | None:
    """The lowest clock, not below `clock_mhz`, at which all kinds were measured; the highest if all are below."""
    measured = np.flatnonzero(programme.allowed[sorted(kinds)].all(axis=0))
    common = [programme.clocks_mhz[i] for i in measured]
    return min([clock for clock in common if clock >= clock_mhz] or common[:1], default=None)


@dataclass(frozen=True)
class _Stretch:
    """Instructions of a rank, from `begin` to `end`, at one clock; `kinds` are theirs."""

    begin: int
    end: int
    clock_mhz: int
    kinds: set[int]

    def joined(self, after: _Stretch, clock_mhz: int) -> _Stretch:
        return _Stretch(self.begin, after.end, clock_mhz, self.kinds | after.kinds)


def _with_dwells(pipeline: LimitedPipeline, rows: Rows) -> Timeline | None:
    """Merge clocks until all are kept for the least dwell; merging makes instructions shorter, and so dwells."""
    while True:
        timeline = pipeline.play(rows)
        if pipeline.keeps_dwell(timeline):
            return timeline
        merged = tuple(
            merge_clocks(programme, row, [begin_s for begin_s, _ in timeline.waits_of(rank)], pipeline.least_dwell_s)
            for rank, (programme, row) in enumerate(zip(pipeline.programmes, rows, strict=True))
        )
        if merged == rows:
            return None
        rows = merged


def _raised(pipeline: LimitedPipeline, timeline: Timeline) -> Rows:
    """The clocks, those before a critical instruction that begins too slowly raised to its own."""
    rows = [list(row) for row in timeline.clocks_by_rank]
    for node in timeline.critical_path:
        rank, position = timeline.schedule.places[node]
        row, programme = rows[rank], pipeline.programmes[rank]
        if position and row[position - 1] < row[position]:
            own_s = pipeline.simulator.time_s(node, timeline.clocks_mhz[node])
            if timeline.durations_s[node] > own_s * (1 + EQUAL_TIMES):
                clock = shared_clock(programme, {programme.kinds[position - 1]}, row[position])
                row[position - 1] = row[position - 1] if clock is None else clock
    return tuple(map(tuple, rows))
