"""The outer envelope of a pipeline (`core.envpipe`), and the critical path that stays in it where one does.

While the last stage never waits, the envelope is the critical path, and whatever lies inside may be slowed until it
would touch it (EnvPipe, USENIX ATC 2023).
"""

from __future__ import annotations

from collections.abc import Sequence

from lightning_pfo.core.envpipe import is_outer
from lightning_pfo.core.schedules.schedule import PipelineSchedule
from lightning_pfo.planner.network.dag import ActivityNetwork

_SAME_TIME = 1e-9
"""Relative to the iteration time."""


def outer_envelope(schedule: PipelineSchedule) -> list[bool]:
    """Whether each instruction is part of it, aligned with `schedule.instructions`."""
    size = schedule.num_stages, schedule.num_microbatches
    return [is_outer(inst, *size) for inst in schedule.instructions]


def critical_path(network: ActivityNetwork, durations: Sequence[float], preferred: Sequence[bool]) -> list[int]:
    """A longest path, last to first; of equals one that keeps to the preferred nodes as long as it can.

    Args:
        network: The precedences.
        durations: Duration of each node in seconds.
        preferred: Whether to prefer each node.
    """
    finish = network.finish_times(durations)
    end = max(finish)
    tolerance = _SAME_TIME * end
    node = max(range(network.num_nodes), key=lambda node: (finish[node] >= end - tolerance, preferred[node]))
    path = [node]
    while network.incoming[node]:
        start = finish[node] - durations[node]
        # Where nothing is tight for rounding, the latest is.
        node = max(
            network.incoming[node],
            key=lambda edge: (
                finish[edge[0]] + edge[1] >= start - tolerance,
                preferred[edge[0]],
                finish[edge[0]] + edge[1],
            ),
        )[0]
        path.append(node)
    return path
