"""Watch a GPU's energy counter, clock and limits beside the training, mostly asleep: on a thread, or in virtual time.

::

    counter   |            100 ms            |                              |
    polls     ..                           ...|                          ....|      every 2 ms, around a tick only
    state        .    .    .    .    .    .     .    .    .    .    .    .          every 20 ms

A tick is known to half the time between the poll that missed it and the poll that saw it; where calls take long, or
others keep the driver busy, that is more than usual, and its neighbours tell it more exactly. Where there is no counter
(GPUs older than Volta), or it does not advance, power is read every 10 ms and integrated.
"""

from __future__ import annotations

import contextlib
import logging
import math
import statistics
from collections import Counter, deque
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

from lightning_pfo.core.errors import DeviceError, NotSupportedError
from lightning_pfo.device.energy.calibration import known_calibration
from lightning_pfo.device.energy.trace import EnergyTrace, snap_to_period
from lightning_pfo.device.gpu import Gpu
from lightning_pfo.device.time import Process, Task, time_of

logger = logging.getLogger(__name__)

_POLL_S = 0.002
_STATE_S = 0.02
_POWER_S = 0.01
_SILENT_S = 1.0  # without a tick: a counter that never advances, as under some hypervisors, or has stopped
_SILENT_TICKS = 10  # of one that ticks more rarely
_LONGEST_CONTINUED = 2.0  # ticks: after that the counter has stopped, or nobody has looked
_FEW = 20
_DENSE_S, _THINNED_S = 0.008, 0.02
_KEPT = 200_000  # readings; the oldest are forgotten


@dataclass(frozen=True)
class GpuState:
    """The state of a GPU at one moment.

    Attributes:
        time_s: When, by the GPU's time.
        clock_mhz: Its graphics clock.
        limits: What holds the clock below the locked one: of `power_cap`, `thermal`, `hw_slowdown`.
        temperature_c: Its temperature, degrees Celsius; nan where it does not tell.
        power_w: The power that it tells, W.
    """

    time_s: float
    clock_mhz: int
    limits: frozenset[str]
    temperature_c: float = math.nan
    power_w: float = math.nan


@dataclass(frozen=True)
class StateWithin:
    """What was seen of a GPU in some intervals.

    Attributes:
        clock_mhz: Mean clock; nan if nothing was seen.
        limits: Limits seen in a tenth of the time or more.
        temperature_c: Mean temperature, degrees Celsius; nan if it was not told.
        power_w: Mean of the powers that the GPU told, W; nan likewise.
    """

    clock_mhz: float
    limits: frozenset[str]
    temperature_c: float
    power_w: float


class _Reading(NamedTuple):
    """What the counter showed from a moment on (s, J), and how exactly that is known (s)."""

    time_s: float
    energy_j: float
    resolution_s: float


class EnergySampler:
    """Samples one GPU between `start` and `stop`.

    Attributes:
        error: What ended the sampling early; None while all is well.
    """

    def __init__(self, gpu: Gpu, *, with_energy: bool = True, with_state: bool = True) -> None:
        """Sample nothing yet.

        Args:
            gpu: The GPU.
            with_energy: Read the energy counter.
            with_state: Read clock and limits.
        """
        self._gpu = gpu
        self._with_energy = with_energy
        self._with_state = with_state
        self.error: DeviceError | None = None
        self._has_counter = True
        self._readings: deque[_Reading] = deque(maxlen=_KEPT)
        self._states: deque[GpuState] = deque(maxlen=_KEPT)
        self._time = time_of(gpu)
        self._is_stopped = False
        self._task: Task | None = None

    def start(self) -> None:
        """Start sampling; does nothing if it runs already."""
        if self._task is None:
            self._task = self._time.spawn(self._work(), "pfo-energy-sampler")

    def stop(self) -> None:
        """Stop sampling. May be called twice."""
        self._is_stopped = True
        if self._task is not None:
            self._task.wake()
            self._task.join(5)

    def trace(self, from_s: float) -> EnergyTrace:
        """Readings since a time; possibly none."""
        readings = _thinned([reading for reading in self._readings.copy() if reading.time_s >= from_s])
        columns = zip(*readings, strict=True) if readings else ((), (), ())
        times_s, energies_j, resolutions_s = (tuple(column) for column in columns)
        if not self._has_counter:
            return EnergyTrace(times_s, energies_j, _POWER_S / 10)
        trace = snap_to_period(times_s, energies_j, resolutions_s)
        return replace(trace, calibration=known_calibration(self._gpu))

    @property
    def tick_s(self) -> float:
        """How often the counter has advanced lately, s; 0 where that is not known."""
        moments_s = [reading.time_s for reading in list(self._readings.copy())[-_FEW:]] if self._has_counter else []
        return statistics.median(b - a for a, b in pairwise(moments_s)) if len(moments_s) > 2 else 0.0

    def energy_now_j(self) -> float:
        """The last reading, continued at the power before it; the counter itself before the first two ticks."""
        if len(self._readings) < 2:
            return self._gpu.total_energy_mj() / 1000 if self._has_counter else 0.0
        # in this order, which a tick in between does no harm
        (before_s, before_j, _), (last_s, last_j, _) = self._readings[-2], self._readings[-1]
        period_s = last_s - before_s
        since_s = min(self._time.now_s() - last_s, _LONGEST_CONTINUED * period_s)
        return last_j + (last_j - before_j) * since_s / period_s

    def states(self, from_s: float) -> list[GpuState]:
        """States since a time."""
        return [state for state in self._states.copy() if state.time_s >= from_s]

    def wait_for_reading_after(self, time_s: float, timeout_s: float) -> bool:
        """Wait until the counter has advanced once more; returns whether it has."""
        deadline_s = self._time.now_s() + timeout_s
        while not (self._readings and self._readings[-1].time_s >= time_s):
            if self.error is not None or self._time.now_s() >= deadline_s:
                return False
            self._time.sleep(_POLL_S)
        return True

    def _work(self) -> Process[None]:
        try:
            if not self._with_energy:
                yield from self._watch_state()
                return
            try:
                stuck_at_j = yield from self._watch_counter()
            except NotSupportedError:
                yield from self._integrate_power(0.0)
            else:
                if stuck_at_j is not None:
                    yield from self._integrate_power(stuck_at_j)
        except DeviceError as error:
            self.error = error
            logger.warning("Energy of %s is not measured any more. %s", self._gpu.name, error)

    def _goes_on_after(self, duration_s: float) -> Generator[float, None, bool]:
        yield duration_s
        return not self._is_stopped

    def _watch_state(self) -> Process[None]:
        while (yield from self._goes_on_after(_STATE_S)):
            self._note_state()

    def _watch_counter(self) -> Process[float | None]:
        """Note ticks until stopped; or, where none comes any more, return the energy from which on to go, J."""
        wake_ups = _WakeUps()
        last_mj, last_poll_s = self._gpu.total_energy_mj(), self._time.now_s()
        tick_s = last_poll_s
        while (yield from self._goes_on_after(wake_ups.sleep_s(self._time.now_s()))):
            before_s = self._time.now_s()
            energy_mj = self._gpu.total_energy_mj()
            after_s = self._time.now_s()
            now_s = (before_s + after_s) / 2
            if energy_mj != last_mj:
                _check_rise(self._gpu, last_mj, energy_mj)
                gap_s = now_s - last_poll_s
                self._readings.append(_Reading(now_s - gap_s / 2, energy_mj / 1000, max(gap_s / 2, _POLL_S)))
                wake_ups.note_tick(now_s, is_sharp=gap_s <= 2 * (_POLL_S + after_s - before_s))
                last_mj, tick_s = energy_mj, now_s
            elif (silent_s := now_s - tick_s) >= _SILENT_S and silent_s >= _SILENT_TICKS * self.tick_s:
                logger.warning(
                    "The energy counter of %s has not advanced in %.2g s: its power is integrated from now on, which "
                    "is less exact.",
                    self._gpu.name,
                    silent_s,
                )
                # what was used since the last tick, about; before the first one nobody has asked for it
                return last_mj / 1000 + (silent_s * self._gpu.power_mw() / 1000 if self._readings else 0.0)
            last_poll_s = now_s
            self._note_state_if_due(now_s)
        return None

    def _integrate_power(self, energy_j: float) -> Process[None]:
        """Go on from an energy (J) by the power that is read."""
        self._has_counter = False
        last_s, last_w = self._time.now_s(), self._gpu.power_mw() / 1000
        self._readings.append(_Reading(last_s, energy_j, _POWER_S / 10))
        while (yield from self._goes_on_after(_POWER_S)):
            now_s, now_w = self._time.now_s(), self._gpu.power_mw() / 1000
            energy_j += (now_s - last_s) * (last_w + now_w) / 2
            self._readings.append(_Reading(now_s, energy_j, _POWER_S / 10))
            last_s, last_w = now_s, now_w
            self._note_state_if_due(now_s)

    def _note_state_if_due(self, now_s: float) -> None:
        if self._with_state and (not self._states or now_s - self._states[-1].time_s >= _STATE_S):
            self._note_state()

    def _note_state(self) -> None:
        gpu, temperature_c = self._gpu, self._gpu.temperature_c()
        power_w = math.nan
        with contextlib.suppress(NotSupportedError):
            power_w = gpu.power_mw() / 1000
        self._states.append(
            GpuState(
                self._time.now_s(),
                gpu.graphics_clock_mhz(),
                gpu.clock_limits(),
                math.nan if temperature_c is None else temperature_c,
                power_w,
            )
        )


def _thinned(readings: Sequence[_Reading]) -> Sequence[_Reading]:
    """Every so many, where a counter advances at nearly every poll: more of them tell no more, and take time to fit."""
    if len(readings) < _FEW:
        return readings
    step_s = statistics.median(after.time_s - before.time_s for before, after in pairwise(readings))
    return readings[:: math.ceil(_THINNED_S / step_s)] if step_s < _DENSE_S else readings


class _WakeUps:
    """Says how long to sleep: long after a tick, briefly around the next one."""

    def __init__(self) -> None:
        self._period_s = 0.0  # the shortest distance of ticks seen: never sleep across one
        self._tick_s: float | None = None

    def note_tick(self, time_s: float, is_sharp: bool) -> None:
        """The counter has advanced."""
        if not is_sharp:  # overslept
            self._period_s *= 0.8
        elif self._tick_s is not None:
            distance_s = time_s - self._tick_s
            self._period_s = min(self._period_s or distance_s, distance_s)
        self._tick_s = time_s if is_sharp else None

    def sleep_s(self, now_s: float) -> float:
        """How long to sleep from now on."""
        if self._tick_s is None:
            return _POLL_S
        until_next_s = self._tick_s + self._period_s - now_s - 3 * _POLL_S
        return min(_STATE_S, until_next_s) if until_next_s > _POLL_S else _POLL_S


def _check_rise(gpu: Gpu, before_mj: float, now_mj: float) -> None:
    """The counter has 64 bits and never wraps; what it counted is lost when the GPU is reset.

    Raises:
        DeviceError: If it went back.
    """
    if now_mj < before_mj:
        raise DeviceError(
            f"An energy counter only rises; that of {gpu.name} went from {before_mj} to {now_mj} mJ, as after a reset "
            "of the GPU. Measure again."
        )


def state_within(states: Sequence[GpuState], intervals: Sequence[tuple[float, float]]) -> StateWithin:
    """Say at which clock the GPU ran in some intervals, what held it back, and how warm it was.

    Args:
        states: States, by time.
        intervals: Intervals (begin, end) in s, by time, not overlapping.
    """
    inside: list[GpuState] = []
    remaining = iter(intervals)
    begin_s, end_s = next(remaining, (math.inf, math.inf))
    for state in states:
        while state.time_s > end_s:
            begin_s, end_s = next(remaining, (math.inf, math.inf))
        if state.time_s >= begin_s:
            inside.append(state)
    counts = Counter(limit for state in inside for limit in state.limits)
    return StateWithin(
        _mean([state.clock_mhz for state in inside]),
        frozenset(limit for limit, count in counts.items() if count >= len(inside) / 10),
        _mean([state.temperature_c for state in inside]),
        _mean([state.power_w for state in inside]),
    )


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else math.nan
