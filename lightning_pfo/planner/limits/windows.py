r"""When the instructions of a rank may run so that the other ranks need not move.

::

    other ranks     ...--| F3 |          | B3 |--...
                              \ release        ^ due
    this rank                  [.... F3 ....] /
                               [......... B2 ..........]

The windows come from one schedule of the whole pipeline, between the earliest and the latest that meets the deadline,
so that whatever a rank does within its windows, the iteration takes no longer. Ranks that hand nothing to each other
have windows that hold for all of them together: in 1F1B ranks 0, 8, 16 ...
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from lightning_pfo.core.schedules.schedule import PipelineSchedule
from lightning_pfo.planner.limits.limited_pipeline import EQUAL_TIMES
from lightning_pfo.planner.limits.rank_programme import RankProgramme
from lightning_pfo.planner.network.dag import ActivityNetwork
from lightning_pfo.planner.pipeline.timeline import Timeline

_GROUPS = 8


def independent_ranks(schedule: PipelineSchedule) -> list[list[int]]:
    """Groups of ranks such that no rank hands anything to another of its group: at most `_GROUPS` in a long pipeline.

    Fewer groups would do (two in 1F1B), but slack that a rank leaves is used by those whose turn comes later.
    """
    neighbours: list[set[int]] = [{rank} for rank in range(schedule.num_ranks)]
    for before, after in schedule.handovers().items():
        one, other = schedule.rank_of(before.stage), schedule.rank_of(after.stage)
        neighbours[one].add(other)
        neighbours[other].add(one)
    groups: list[list[int]] = []
    for rank, near in enumerate(neighbours):
        turn = rank % _GROUPS
        possible = [group for group in groups[turn:] + groups[:turn] if not near.intersection(group)]
        if possible and len(groups) >= _GROUPS:
            possible[0].append(rank)
        else:
            groups.append([rank])
    return groups


def schedule_between(dag: ActivityNetwork, timeline: Timeline, deadline_s: float, share: float) -> list[float]:
    """Starts (s) of all instructions, at `share` of the way from the earliest to the latest by the deadline."""
    latest_s = dag.latest_starts(timeline.durations_s, deadline_s)
    return [early + share * (late - early) for early, late in zip(timeline.starts_s, latest_s, strict=True)]


def time_windows(
    dag: ActivityNetwork,
    programme: RankProgramme,
    span: slice,
    starts_s: Sequence[float],
    durations_s: Sequence[float],
    deadline_s: float,
) -> tuple[list[float], list[float]]:
    """Earliest start and latest end (s) of each instruction of a rank, the others being where they are.

    Args:
        dag: The precedences.
        programme: What the rank runs.
        span: Where the rank's instructions are among all.
        starts_s: Start of each instruction.
        durations_s: Duration of each instruction.
        deadline_s: End of the iteration.
    """
    numbers = range(span.start, span.stop)
    release = [
        max([starts_s[j] + durations_s[j] + delay for j, delay in dag.incoming[i] if j not in numbers], default=0.0)
        for i in numbers
    ]
    tolerance = EQUAL_TIMES * deadline_s
    due = [
        min([starts_s[j] - delay for j, delay in dag.outgoing[i] if j not in numbers], default=deadline_s) + tolerance
        for i in numbers
    ]
    fastest = programme.times.min(axis=1, where=programme.allowed, initial=math.inf)
    for i in range(len(due) - 2, -1, -1):
        due[i] = min(due[i], due[i + 1] - float(fastest[programme.kinds[i + 1]]))
    return release, due
