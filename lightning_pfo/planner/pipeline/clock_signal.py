"""The clock of one GPU over an iteration, where a requested clock lands late.

::

    request        1410          1050           1290
                    |              |              |
    clock     ~~~~~~~~~~1410~~~~~~~~~~~1050~~~~~~~~~~~1290~~~
                    |-->|          |-->|          |-->|           switch latency

Requesting delays nothing: the GPU goes on at the clock that it has. Requests land in order, each after the latency of
its pair of clocks. An instruction that begins before its clock has
landed runs at the old one until then; the share of its work done at a clock is the time it spends there over the time
the whole of it would take, and it uses that share of the energy measured at that clock. Time and energy of an
instruction are therefore a mixture of measured points, which the relaxation covers: its bounds hold with latency too.
(At a clock at which it was not measured an instruction is taken to lie on the line between the neighbouring ones.)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from lightning_pfo.planner.profile.switch_latency import SwitchLatency


class ClockSignal:
    """The clock of a GPU; time goes forward from call to call.

    Args:
        clock_mhz: Clock at time 0.
        latency: Time from a request until the clock changes.
    """

    def __init__(self, clock_mhz: int, latency: SwitchLatency) -> None:
        self._clock_mhz = self._requested_mhz = clock_mhz
        self._latency = latency
        self._landings: deque[tuple[float, int]] = deque()
        self.requests: list[tuple[float, int]] = [(0.0, clock_mhz)]
        """When (s) which clock (MHz) was asked for, without repetitions."""

    def request(self, time_s: float, clock_mhz: int) -> None:
        """Ask for a clock; asking for the one asked for last does nothing."""
        if clock_mhz != self._requested_mhz:
            lands_s = time_s + self._latency.of(self._requested_mhz, clock_mhz)
            if self._landings:
                lands_s = max(lands_s, self._landings[-1][0])
            self._requested_mhz = clock_mhz
            self.requests.append((time_s, clock_mhz))
            self._landings.append((lands_s, clock_mhz))

    def block(self, begin_s: float, end_s: float, power_at: Callable[[int], float]) -> float:
        """Wait for a neighbour; `power_at` gives the power (W) at a clock in MHz.

        Returns:
            Energy of waiting from `begin_s` to `end_s` in joules.
        """
        energy_j = 0.0
        if self._landings:
            self._land_until(begin_s)
        while self._landings and self._landings[0][0] < end_s:
            energy_j += power_at(self._clock_mhz) * (self._landings[0][0] - begin_s)
            begin_s = self._landings[0][0]
            self._land_until(begin_s)
        return energy_j + power_at(self._clock_mhz) * (end_s - begin_s)

    def compute(self, begin_s: float, cost_at: Callable[[int], tuple[float, float]]) -> tuple[float, float]:
        """Execute an instruction; `cost_at` gives its whole time (s) and energy (J) at a clock in MHz.

        Returns:
            Its duration in seconds and its energy in joules.
        """
        if self._landings:
            self._land_until(begin_s)
        whole_s, whole_j = cost_at(self._clock_mhz)
        if not self._landings or self._landings[0][0] >= begin_s + whole_s:
            return whole_s, whole_j
        now_s, left, energy_j = begin_s, 1.0, 0.0
        while self._landings and self._landings[0][0] < now_s + left * whole_s:
            share = (self._landings[0][0] - now_s) / whole_s
            energy_j += share * whole_j
            left = max(left - share, 0.0)
            now_s = self._landings[0][0]
            self._land_until(now_s)
            whole_s, whole_j = cost_at(self._clock_mhz)
        return now_s + left * whole_s - begin_s, energy_j + left * whole_j

    def _land_until(self, time_s: float) -> None:
        while self._landings and self._landings[0][0] <= time_s:
            self._clock_mhz = self._landings.popleft()[1]
