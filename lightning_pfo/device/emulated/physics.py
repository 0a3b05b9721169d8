"""How time and power of the emulated GPU depend on its clock.

With f the clock and f_ref the fastest clock that the power cap allows::

    t(f) = compute_s * f_ref / f + memory_s                 memory does not follow the graphics clock
    P(f) = static + dynamic * f / f_top * (V(f) / V(f_top))^2
    V(f) = 1 up to the knee, then rising linearly to 1 + rise at f_top

Dynamic power is C f V^2 as in any CMOS circuit. Energy t(f) P(f) therefore has a valley: at low clocks the static power
is paid for longer, above the knee the voltage makes every cycle dearer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from lightning_pfo.device.config import GpuConfig


@dataclass(frozen=True)
class GpuPhysics:
    """The model of one GPU; see the module's formulas.

    Attributes:
        config: Its parameters.
    """

    config: GpuConfig

    @cached_property
    def supported_clocks_mhz(self) -> tuple[int, ...]:
        """Clocks from the top down in steps; fractional ones rounded down, as drivers list them."""
        config = self.config
        count = int((config.top_clock_mhz - config.min_clock_mhz) / config.clock_step_mhz + 1e-9) + 1
        return tuple(math.floor(config.top_clock_mhz - i * config.clock_step_mhz + 1e-9) for i in range(count))

    @cached_property
    def capped_clock_mhz(self) -> float:
        """The fastest clock at which computing stays within the power limit (bisection; power rises with clock)."""
        low, high = 0.0, float(self.config.top_clock_mhz)
        if self._uncapped_power_w(high) <= self.config.power_limit_w:
            return high
        for _ in range(60):
            middle = (low + high) / 2
            if self._uncapped_power_w(middle) <= self.config.power_limit_w:
                low = middle
            else:
                high = middle
        return low

    def effective_clock_mhz(self, clock_mhz: float) -> float:
        """The clock at which the GPU computes when locked at `clock_mhz`: lower under the power cap or throttling."""
        throttle = self.config.throttle_clock_mhz or math.inf
        return min(clock_mhz, self.capped_clock_mhz, throttle)

    def time_s(self, clock_mhz: float, compute_s: float, memory_s: float) -> float:
        """Time of an instruction that takes `compute_s + memory_s` at the fastest clock the power cap allows."""
        return compute_s * self.capped_clock_mhz / self.effective_clock_mhz(clock_mhz) + memory_s

    def computing_power_w(self, clock_mhz: float) -> float:
        """Power while computing."""
        return self._uncapped_power_w(self.effective_clock_mhz(clock_mhz))

    def blocked_power_w(self, clock_mhz: float) -> float:
        """Power while waiting for P2P: communication kernels spin on few SMs, so it follows the clock only weakly."""
        dynamic_w = self.computing_power_w(clock_mhz) - self.config.static_power_w
        return self.config.idle_power_w + self.config.blocked_activity * dynamic_w

    def _uncapped_power_w(self, clock_mhz: float) -> float:
        config = self.config
        voltage = self._voltage(clock_mhz) / self._voltage(config.top_clock_mhz)
        return config.static_power_w + config.dynamic_power_w * clock_mhz / config.top_clock_mhz * voltage**2

    def _voltage(self, clock_mhz: float) -> float:
        above_knee = max(0.0, clock_mhz - self.config.voltage_knee_mhz)
        span = self.config.top_clock_mhz - self.config.voltage_knee_mhz
        return 1 + self.config.voltage_rise * above_knee / span if span > 0 else 1.0
