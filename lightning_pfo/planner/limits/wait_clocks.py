"""Long waits get a low clock of their own where the blocking power depends on the clock.

::

              wait begins                                             wait is over
    request        | wait clock ..................... | next clock ...... |
    clock     ~~~~~~~~~~~|____________________________________|~~~~~~~~~~~~~~~
                   |lat- |            held            |lat-   |  spare    |
                   |ency |                            |ency   |           |

The next clock is asked for early enough to have landed, with time to spare, so an iteration takes as long as before,
whatever clocks its waits pass at. A wait gets a clock where that saves more than 2 % of the power, and where the clock
is held for twice the time to spare at least.
"""

from __future__ import annotations

from collections.abc import Sequence

from lightning_pfo.core.frequency_plan import WaitClock
from lightning_pfo.planner.pipeline.timeline import Timeline
from lightning_pfo.planner.profile.blocking_power import BlockingPower

SPARE_S = 0.01
"""A wait may end sooner than predicted, by some milliseconds; its instruction must not find a low clock then."""

_WORTHWHILE = 0.98
"""Differences of power below 2 % are more likely noise of the profile."""


def choose_wait_clocks(
    timeline: Timeline,
    blocking: Sequence[BlockingPower],
    *,
    switch_latency_s: float = 0.0,
    least_dwell_s: float = 0.0,
) -> tuple[WaitClock, ...]:
    """Choose clocks for the waits of an iteration.

    Args:
        timeline: The iteration, without clocks of waits.
        blocking: Blocking power of each rank.
        switch_latency_s: Time from a request until the clock changes.
        least_dwell_s: Least time between two requests of a rank within the iteration.
    """
    chosen = []
    first = 0
    for rank, (order, power) in enumerate(zip(timeline.schedule.orders, blocking, strict=True)):
        clocks = timeline.clocks_mhz[first : first + len(order)]
        first += len(order)
        clock = power.least_clock_mhz
        if clock is None:
            continue
        requested_s, requested = 0.0, clocks[0]
        waits = timeline.waits_of(rank)
        for position, (begin, end) in enumerate(waits):
            is_last = position == len(order)
            following = clocks[0] if is_last else clocks[position]
            spare = 0.0 if is_last else switch_latency_s + SPARE_S
            hold = end - begin - spare
            if (
                power.at(clock) <= _WORTHWHILE * power.at(following)
                and hold >= max(least_dwell_s, switch_latency_s + 2 * SPARE_S)
                and (position == 0 or begin - requested_s >= least_dwell_s)
                and (is_last or _until_change_s(clocks, position, waits) - (begin + hold) >= least_dwell_s)
            ):
                chosen.append(WaitClock(rank, position, clock, hold))
                requested_s, requested = begin + hold, following
            elif following != requested:
                requested_s, requested = begin, following
    return tuple(chosen)


def _until_change_s(clocks: Sequence[int], position: int, waits: Sequence[tuple[float, float]]) -> float:
    """When the clock of an instruction is left for another one."""
    later = (number for number in range(position + 1, len(clocks)) if clocks[number] != clocks[position])
    return waits[next(later, len(clocks))][0]
