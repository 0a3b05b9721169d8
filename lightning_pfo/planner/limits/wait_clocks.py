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
from lightning_pfo.planner.pipeline.timeline import Simulator, Timeline
from lightning_pfo.planner.profile.blocking_power import BlockingPower
from lightning_pfo.planner.profile.switch_latency import SwitchLatency

SPARE_S = 0.01
"""A wait may end sooner than predicted, by some milliseconds; its instruction must not find a low clock then."""

_AT_ONCE = SwitchLatency()
_WORTHWHILE = 0.98
"""Differences of power below 2 % are more likely noise of the profile."""


def play_with_wait_clocks(
    simulator: Simulator,
    clocks_mhz: Sequence[Sequence[int]],
    *,
    least_dwell_s: float = 0.0,
) -> Timeline:
    """Lay out one iteration with clocks for its long waits; without them where they would save nothing.

    Args:
        simulator: Plays iterations.
        clocks_mhz: Clock of each instruction, one row per rank.
        least_dwell_s: Least time between two requests of a rank within the iteration.
    """
    without = simulator.play(clocks_mhz)
    chosen = choose_wait_clocks(
        without, simulator.blocking, switch_latency=simulator.latency, least_dwell_s=least_dwell_s
    )
    if not chosen:
        return without
    return min(without, simulator.play(clocks_mhz, chosen), key=lambda timeline: timeline.iteration_energy_j)


def choose_wait_clocks(
    timeline: Timeline,
    blocking: Sequence[BlockingPower],
    *,
    switch_latency: SwitchLatency = _AT_ONCE,
    least_dwell_s: float = 0.0,
) -> tuple[WaitClock, ...]:
    """Choose clocks for the waits of an iteration.

    Args:
        timeline: The iteration, without clocks of waits.
        blocking: Blocking power of each rank.
        switch_latency: Time from a request until the clock changes.
        least_dwell_s: Least time between two requests of a rank within the iteration.
    """
    chosen = []
    for rank, power in enumerate(blocking):
        clocks = timeline.clocks_mhz[timeline.schedule.span(rank)]
        clock = power.least_clock_mhz
        if clock is None:
            continue
        requested_s, requested = 0.0, clocks[0]
        waits = timeline.waits_of(rank)
        left_s = _when_left(clocks, waits)
        for position, (begin, end) in enumerate(waits):
            is_last = position == len(clocks)
            following = clocks[0] if is_last else clocks[position]
            before = clocks[position - 1] if position else clocks[0]
            falls_s, rises_s = switch_latency.of(before, clock), switch_latency.of(clock, following)
            spare = 0.0 if is_last else rises_s + SPARE_S
            hold = end - begin - spare
            if (
                power.at(clock) <= _WORTHWHILE * power.at(following)
                and hold >= max(least_dwell_s, falls_s + 2 * SPARE_S)
                and (position == 0 or begin - requested_s >= least_dwell_s)
                and (is_last or left_s[position] - (begin + hold) >= least_dwell_s)
            ):
                chosen.append(WaitClock(rank, position, clock, hold))
                requested_s, requested = begin + hold, following
            elif following != requested:
                requested_s, requested = begin, following
    return tuple(chosen)


def _when_left(clocks_mhz: Sequence[int], waits: Sequence[tuple[float, float]]) -> list[float]:
    """When (s) the clock of each instruction is left for another one, or the rank has done all of them."""
    left_s = [waits[-1][0]] * len(clocks_mhz)
    for position in range(len(clocks_mhz) - 2, -1, -1):
        changes = clocks_mhz[position + 1] != clocks_mhz[position]
        left_s[position] = waits[position + 1][0] if changes else left_s[position + 1]
    return left_s
