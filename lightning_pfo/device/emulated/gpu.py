"""A GPU that is only modelled, in virtual time or in the host's, for machines that have none.

An instruction takes its modelled time: virtual time passes at once, the host's occupies the caller for so long. The
counter integrates power over that time::

    state     waiting |      computing       | waiting |   computing
    caller            begin_work  finish_work          begin_work ...
                      | real work |  sleep   |
    clock     ~~~~~~~~~~~~1410~~~~~|_____1050________  (a request lands after its latency, also in mid-instruction)
"""

from __future__ import annotations

import logging
import math
import queue
import random
from collections import deque
from itertools import pairwise
from threading import Lock

from lightning_pfo.core.errors import ConfigurationError, DeviceError
from lightning_pfo.device.config import GpuConfig
from lightning_pfo.device.emulated.physics import GpuPhysics
from lightning_pfo.device.emulated.time import EmulationTime, RealTime, VirtualTime
from lightning_pfo.device.gpu import check_clock_supported

_WAITING_STATES = ("blocked", "idle")
_DONE_S = 1e-9  # what is left of an instruction after rounding
_FEW_OVERRUNS = 0.1  # of all instructions: a busy machine delays some

logger = logging.getLogger(__name__)


class EmulatedGpu:
    """A live model of a GPU, with all methods of `Gpu`.

    One thread computes (`begin_work`, `finish_work`, `set_waiting`); any thread may lock clocks or read. Locking and
    reading clocks take no lock of ours, so that a signal handler which waits for the thread that sets clocks cannot
    deadlock with the computing thread that it has interrupted.

    Attributes:
        physics: The model: time and power at each clock.
        time_source: Where its moments come from.
        num_instructions: Instructions that took modelled time.
        num_overruns: Those whose real computation took longer.
    """

    is_emulated = True

    def __init__(self, config: GpuConfig, *, index: int = 0, time_source: EmulationTime | None = None) -> None:
        """Start at the top clock, idle, with an energy counter of zero.

        Args:
            config: The model's parameters; `config.kind` is ignored.
            index: Index of this GPU on its node: selects its noise and whether it is the straggler.
            time_source: Where time comes from; None: as `config.time` says.
        """
        self.config = config
        self.index = index
        self.physics = GpuPhysics(config)
        self.num_instructions = self.num_overruns = 0
        if time_source is None:
            time_source = VirtualTime() if config.time == "virtual" else RealTime()
        self.time_source: EmulationTime = time_source
        self._random = random.Random(f"{config.seed}:{index}")
        self._duration_factor = config.time_scale * (config.straggler_factor if index == config.straggler_index else 1)
        rise_s = config.clock_latency_s if config.clock_rise_latency_s is None else config.clock_rise_latency_s
        self._latency_s, self._rise_latency_s = config.clock_latency_s * config.time_scale, rise_s * config.time_scale
        self._tick_s = config.counter_tick_s * config.time_scale
        self._lag_s = config.counter_lag_s * config.time_scale
        self._window_s = config.counter_window_s * config.time_scale
        self._ramp_s = config.power_ramp_s * config.time_scale

        self._requests: deque[tuple[float, int]] = deque()  # (when it lands, clock), in order
        self._wake_ups: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._is_locked = False
        self._requested_mhz = config.top_clock_mhz

        self._lock = Lock()  # guards everything below
        self._landed_mhz = config.top_clock_mhz
        self._state = "idle"
        self._waiting_state = "idle"
        self._start_s = self._time_s = self.time_source.now_s()
        self._energy_j = 0.0
        self._drawn_w = config.idle_power_w  # behind the load, where power ramps
        self._idle_c = self._temperature_c = config.ambient_c + config.heating_c_per_w * config.idle_power_w
        self._passed: deque[tuple[float, float]] = deque([(self._start_s, 0.0)])  # moments and energies until then, J
        self._worked_s: dict[int, float] = {}  # since begin_work, by clock

    @property
    def name(self) -> str:
        """The model's name, and that it is emulated."""
        kind = "emulated, virtual time" if self.config.time == "virtual" else "emulated"
        return f"{self.config.model} ({kind})"

    @property
    def driver_version(self) -> str:
        """There is no driver."""
        return ""

    def supported_clocks_mhz(self) -> tuple[int, ...]:
        """Graphics clocks that can be locked, highest first."""
        return self.physics.supported_clocks_mhz

    def claim_clocks(self) -> None:
        """Nothing to do: no other process can reach this GPU, and it ends with its process."""

    def lock_graphics_clock(self, clock_mhz: int) -> None:
        """Request a clock; it lands after `config.clock_latency_s`.

        Raises:
            DeviceError: If the clock is not supported.
        """
        check_clock_supported(clock_mhz, self.supported_clocks_mhz(), self.name)
        self._is_locked = True
        self._request(clock_mhz)

    def restore(self) -> None:
        """Go back to the top clock, where an unlocked GPU computes; does nothing if no clock was locked."""
        if self._is_locked:
            self._is_locked = False
            self._request(self.config.top_clock_mhz)

    def _request(self, clock_mhz: int) -> None:
        latency_s = self._rise_latency_s if clock_mhz > self._requested_mhz else self._latency_s
        lands_s = max([self.time_source.now_s() + latency_s, *(lands_s for lands_s, _ in self._requests.copy())])
        self._requested_mhz = clock_mhz
        self._requests.append((lands_s, clock_mhz))
        if self._state == "computing":  # read after the append: finish_work sees the request or is woken
            self._wake_ups.put(None)

    def total_energy_mj(self) -> float:
        """Energy since the start, mJ; whole ones as of the last counter tick if `config.counter_tick_s` is set."""
        with self._lock:
            now_s = self.time_source.now_s()
            self._advance(now_s)
            return int(self._counted_j(now_s) * 1000) if self._tick_s else self._energy_j * 1000

    def power_mw(self) -> int:
        """Power drawn now, mW."""
        with self._lock:
            self._advance(self.time_source.now_s())
            return int((self._drawn_w if self._ramp_s else self._power_w()) * 1000)

    def graphics_clock_mhz(self) -> int:
        """The clock now, MHz; below the locked one where the power cap (while computing) or throttling holds it."""
        landed_mhz = self._landed_now_mhz()
        if self._state == "computing":
            return round(self.physics.effective_clock_mhz(landed_mhz))
        return min(landed_mhz, self.config.throttle_clock_mhz or landed_mhz)

    def clock_limits(self) -> frozenset[str]:
        """`power_cap` while it holds the clock of computing down, `thermal` while throttling does."""
        landed_mhz = self._landed_now_mhz()
        throttle_mhz = self.config.throttle_clock_mhz or math.inf
        if self._state == "computing" and self.physics.capped_clock_mhz < min(landed_mhz, throttle_mhz):
            return frozenset({"power_cap"})
        return frozenset({"thermal"} if throttle_mhz < landed_mhz else ())

    def _landed_now_mhz(self) -> int:
        """The requested clock that has landed last, without landing it."""
        requests, now_s = self._requests.copy(), self.time_source.now_s()
        landed = [clock_mhz for lands_s, clock_mhz in requests if lands_s <= now_s]
        return landed[-1] if landed else self._landed_mhz

    def temperature_c(self) -> float | None:
        """Temperature now, degrees Celsius."""
        with self._lock:
            self._advance(self.time_source.now_s())
            return self._temperature_c

    @property
    def energy_is_continuous(self) -> bool:
        """Whether the counter has no ticks."""
        return not self._tick_s

    def close(self) -> None:
        """Restore the clock; warn if the machine was often too slow for the model."""
        self.restore()
        if self.num_overruns > _FEW_OVERRUNS * self.num_instructions:
            logger.warning(
                "GPU %d, %s: %d of %d instructions really took longer than on the GPU that is modelled, so its times "
                "and energies are too large. Use a larger gpu.forward_s, a smaller model, or a machine less busy.",
                self.index,
                self.name,
                self.num_overruns,
                self.num_instructions,
            )

    def set_waiting(self, state: str) -> None:
        """Say what the GPU does when it does not compute, from now on.

        Args:
            state: `blocked` (waiting for P2P) or `idle`.

        Raises:
            ConfigurationError: If it is neither.
        """
        if state not in _WAITING_STATES:
            raise ConfigurationError(f"An emulated GPU waits {' or '.join(_WAITING_STATES)}; got {state!r}.")
        with self._lock:
            self._advance(self.time_source.now_s())
            self._waiting_state = state
            if self._state != "computing":
                self._state = state

    def begin_work(self) -> None:
        """An instruction starts now.

        Raises:
            DeviceError: If one is running already.
        """
        with self._lock:
            if self._state == "computing":
                raise DeviceError("begin_work() starts one instruction at a time; call finish_work(...) before it.")
            self._advance(self.time_source.now_s())
            self._worked_s.clear()
            self._state = "computing"

    def finish_work(self, compute_s: float, memory_s: float) -> None:
        """Block until the instruction begun by `begin_work` is over, then wait as `set_waiting` said.

        Progress follows the clock since `begin_work`, including clocks that land while this call sleeps. If the real
        time is longer than the modelled one, the call returns at once and counts an overrun.

        Args:
            compute_s: Its time at the top clock that scales with the clock.
            memory_s: Its time that does not.

        Raises:
            DeviceError: If no instruction is running.
        """
        noise = max(0.1, 1 + self.config.noise * self._random.gauss(0, 1)) if self.config.noise else 1.0
        compute_s, memory_s = (part * self._duration_factor * noise for part in (compute_s, memory_s))
        has_waited = False
        while True:
            with self._lock:
                if self._state != "computing":
                    raise DeviceError("finish_work() ends an instruction; call begin_work() at its beginning.")
                now_s = self.time_source.now_s()
                self._advance(now_s)
                wait_s = self._remaining_s(now_s, compute_s, memory_s)
                if wait_s <= 0:
                    self._state = self._waiting_state
                    if compute_s + memory_s > 0:
                        self.num_instructions += 1
                        self.num_overruns += not has_waited
                    return
            has_waited = True
            self.time_source.wait(self._wake_ups, wait_s)

    def _remaining_s(self, now_s: float, compute_s: float, memory_s: float) -> float:
        """Time until the running instruction is over, given all clock requests made so far."""
        if compute_s + memory_s <= 0:
            return 0.0
        left = 1.0 - sum(
            worked_s / self.physics.time_s(clock_mhz, compute_s, memory_s)
            for clock_mhz, worked_s in self._worked_s.items()
        )
        clock_mhz, from_s = self._landed_mhz, now_s
        for lands_s, next_mhz in self._requests.copy():
            duration_s = self.physics.time_s(clock_mhz, compute_s, memory_s)
            lands_s = max(lands_s, from_s)
            if left * duration_s <= lands_s - from_s:
                break
            left -= (lands_s - from_s) / duration_s
            clock_mhz, from_s = next_mhz, lands_s
        end_s = from_s + left * self.physics.time_s(clock_mhz, compute_s, memory_s)
        return end_s - now_s if end_s - now_s > _DONE_S else 0.0

    def _power_w(self) -> float:
        leakage_w = self.config.static_power_w * self.config.leakage_per_c * (self._temperature_c - self._idle_c)
        if self._state == "computing":
            return self.physics.computing_power_w(self._landed_mhz) + leakage_w
        if self._state == "blocked":
            return self.physics.blocked_power_w(self._landed_mhz) + leakage_w
        return self.config.idle_power_w + leakage_w

    def _advance(self, now_s: float) -> None:
        """Integrate energy and progress until now, landing clock requests on the way. Call with the lock held."""
        while self._requests and self._requests[0][0] <= now_s:
            lands_s, clock_mhz = self._requests.popleft()
            self._integrate(lands_s)
            self._landed_mhz = clock_mhz
        self._integrate(now_s)

    def _integrate(self, until_s: float) -> None:
        """Integrate at the present power until a time (in the past: not at all)."""
        if until_s <= self._time_s:
            return
        passed_s = until_s - self._time_s
        power_w = self._power_w()
        self._energy_j += power_w * passed_s
        if self._ramp_s:
            gone = -math.expm1(-passed_s / self._ramp_s)
            self._energy_j += (self._drawn_w - power_w) * self._ramp_s * gone
            self._drawn_w += gone * (power_w - self._drawn_w)
        self._temperature_c += self._share_heated(passed_s) * (
            self.config.ambient_c + self.config.heating_c_per_w * power_w - self._temperature_c
        )
        if self._tick_s:
            self._passed.append((until_s, self._energy_j))
            self._forget_before(until_s - self._lag_s - self._tick_s - self._window_s)
        if self._state == "computing":
            self._worked_s[self._landed_mhz] = self._worked_s.get(self._landed_mhz, 0.0) + passed_s
        self._time_s = until_s

    def _share_heated(self, passed_s: float) -> float:
        """Share of the way to its last temperature that the GPU goes in this time."""
        return -math.expm1(-passed_s / (self.config.heating_s * self.config.time_scale))

    def _counted_j(self, now_s: float) -> float:
        """Energy at the last tick that the counter shows by now."""
        tick_s = self._start_s + math.floor((now_s - self._lag_s - self._start_s) / self._tick_s) * self._tick_s
        if self._window_s:
            return self._mean_j(tick_s - self._window_s, tick_s)
        return self._used_until(tick_s)[1]

    def _mean_j(self, from_s: float, until_s: float) -> float:
        """Mean over some time of the energy used until then: what the mean power of that time adds up to."""
        edges = [self._used_until(from_s), *(one for one in self._passed if from_s < one[0] < until_s)]
        edges.append(self._used_until(until_s))
        areas = (
            (late_s - early_s) * (early_j + late_j) / 2 for (early_s, early_j), (late_s, late_j) in pairwise(edges)
        )
        return math.fsum(areas) / (until_s - from_s)

    def _used_until(self, moment_s: float) -> tuple[float, float]:
        """A moment, and the energy until then."""
        later = next((number for number, one in enumerate(self._passed) if one[0] > moment_s), 0)
        if not later:  # before everything, or at its end
            is_early = moment_s < self._passed[0][0]
            return moment_s, (self._passed[0] if is_early else self._passed[-1])[1]
        (from_s, from_j), (until_s, until_j) = self._passed[later - 1], self._passed[later]
        return moment_s, from_j + (until_j - from_j) * (moment_s - from_s) / (until_s - from_s)

    def _forget_before(self, moment_s: float) -> None:
        while len(self._passed) > 1 and self._passed[1][0] <= moment_s:
            self._passed.popleft()
